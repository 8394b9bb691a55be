"""The engine thread: takes submissions and cancellations, steps the core, publishes, and ends in order.

Owned by the manager. Whatever happens here, every request that was let in gets its terminal result.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from engine.core import EngineCore
from engine.delivery import Delivery, ResultHandler
from engine.distributed.coordinator import Alone, Coordinator, Turn
from engine.outputs import GenerationOutput
from engine.request import Request

logger = logging.getLogger(__name__)


class _Stop(enum.IntEnum):
    """How the loop was asked to end; it only grows."""

    NO = 0
    WHEN_DONE = 1
    NOW = 2


class EngineLoop:
    """One session of the engine: what is submitted before `start` waits for it, then a thread serves until its end."""

    def __init__(self, delivery: Delivery, coordinator: Coordinator | None = None) -> None:
        self._core: EngineCore
        self._delivery = delivery
        self._coordinator = coordinator or Alone()
        self._changed = threading.Condition()
        self._inbox: deque[Request | str] = deque()  # a request to add, or an id to cancel
        self._live: set[str] = set()
        self._stop = _Stop.NO
        self._ended = False
        # A daemon, so that a forgotten stop() cannot hold the interpreter's exit.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.fatal_error: BaseException | None = None
        self.last_step_time = time.monotonic()

    def start(self, core: EngineCore) -> None:
        self._core = core
        self._delivery.begin()
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    @property
    def was_started(self) -> bool:
        return self._thread.ident is not None

    @property
    def is_stopping(self) -> bool:
        return self._stop is not _Stop.NO

    @property
    def in_engine_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def submit(self, requests: Sequence[Request], handler: ResultHandler | None = None) -> None:
        """Let requests in, all or none.

        Raises:
            ValueError: an id is in use by a live request.
            RuntimeError: the engine failed; the message names the cause.
        """
        with self._changed:
            if self._ended:
                raise RuntimeError(f"the engine is not running: {describe_error(self.fatal_error) or 'it was stopped'}")
            ids = [request.request_id for request in requests]
            if taken := self._live.intersection(ids):
                raise ValueError(
                    f"request id {min(taken)!r} is in use by a live request; ids must differ until it ends"
                )
            self._expect(ids, handler)
            self._inbox.extend(requests)
            self._changed.notify()

    def cancel(self, request_id: str) -> None:
        """End this request soon; no effect on an id that is not live."""
        with self._changed:
            if request_id in self._live:
                self._inbox.append(request_id)
                self._changed.notify()

    def stop(self, *, now: bool) -> None:
        """Ask the thread to end: at once, or when everything let in is done."""
        with self._changed:
            self._stop = max(self._stop, _Stop.NOW if now else _Stop.WHEN_DONE)
            self._changed.notify()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread's end, at most `timeout` seconds; True when it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._take_inbox():
                self._publish(self._core.step())
                self.last_step_time = time.monotonic()
        except BaseException as error:  # the thread's last words: callers must learn why
            self.fatal_error = error
            logger.critical("the engine failed: %s", describe_error(error), exc_info=error)
        finally:
            self._wind_up()
            if self.fatal_error is not None:
                self._coordinator.leave(self.fatal_error)

    def _take_inbox(self) -> bool:
        """Wait for work and let in what has come. False when the loop shall end."""
        with self._changed:
            while not (self._inbox or self._core.has_work or self._stop):
                self._changed.wait(self._coordinator.heartbeat_s)
                self.last_step_time = time.monotonic()
                if self._coordinator.heartbeat_s is not None:
                    break
            asked = Turn(list(self._inbox), self._stop, checksum=self._core.checksum)
        turn = self._coordinator.agree(asked)
        with self._changed:
            for _ in asked.items:
                self._inbox.popleft()  # only now: what fails before is told its end like the rest
            self._stop = max(self._stop, _Stop(turn.stop))
            if not self._coordinator.is_driver:
                self._expect([item.request_id for item in turn.items if isinstance(item, Request)])
        for item in turn.items:
            if isinstance(item, Request):
                self._core.add(item)
            elif (output := self._core.cancel(item)) is not None:
                self._publish([output])
        return not (turn.stop == _Stop.NOW or (turn.stop == _Stop.WHEN_DONE and not self._core.has_work))

    def _expect(self, ids: list[str], handler: ResultHandler | None = None) -> None:
        for request_id in ids:
            self._delivery.open(request_id, handler)
        self._live.update(ids)

    def _publish(self, outputs: list[GenerationOutput]) -> None:
        ended = [output.request_id for output in outputs if output.is_finished()]
        if ended:
            with self._changed:
                self._live.difference_update(ended)
        self._delivery.publish(outputs)

    def _wind_up(self) -> None:
        """Fail whatever is left, so that nobody waits for ever."""
        with self._changed:
            self._ended = True
            late = [item for item in self._inbox if isinstance(item, Request)]
            self._inbox.clear()
        cause = describe_error(self.fatal_error)
        message = f"RuntimeError: the engine failed: {cause}" if cause else "RuntimeError: the engine was stopped"
        self._publish(self._core.fail_all(late, message))
        self._delivery.end()


def describe_error(error: BaseException | None) -> str:
    """An error and the error that caused it, in one line; empty for None."""
    if error is None:
        return ""
    text = f"{type(error).__name__}: {error}"
    return f"{text} (caused by {describe_error(error.__cause__)})" if error.__cause__ else text
