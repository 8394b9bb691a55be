"""The engine thread: lets in what was submitted, keeps deadlines and pauses, steps the core, publishes, ends in order.

Owned by the manager, one a session. Whatever happens here, every request that was let in gets its terminal result.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine.core import EngineCore
from engine.deadlines import Deadlines, Expired
from engine.delivery import Delivery, Receiver
from engine.distributed.coordinator import Alone, Coordinator, Item, Turn
from engine.execution.threads import compute_threads, use_compute_threads
from engine.outputs import FINISHED, GenerationOutput
from engine.pausing import PauseGate
from engine.request import FinishReason, Request, RequestStatus
from engine.waiting_room import WaitingRoom

logger = logging.getLogger(__name__)

_ABANDON_JOIN_S = 10.0  # a step in flight may finish; longer would hold the interpreter's exit

Family = Sequence[Request]
"""What one submission asks for: the request itself, then its further sequences."""


class _Stop(enum.IntEnum):
    """How the loop was asked to end; it only grows."""

    NO = 0
    WHEN_DONE = 1
    NOW = 2


class EngineLoop:
    """One session of the engine: what is submitted before `start` waits for it, then a thread serves until its end.

    Args:
        delivery: where outputs go.
        coordinator: agrees on every turn with the loops of other processes.
        max_waiting: requests that may wait for their first step; 0 is no bound.

    Attributes:
        room: where submissions wait for places, if `max_waiting` bounds them.
        is_parked: this turn is no step but part of a pause.
        num_threads: compute threads of the engine thread, in its own words; None before it has told.
        fatal_error: what ended the thread; None while it is well.
        last_step_time: `time.monotonic()` when the last turn ended, or the last wait for one.
    """

    def __init__(self, delivery: Delivery, coordinator: Coordinator | None = None, max_waiting: int = 0) -> None:
        self._core: EngineCore
        self._delivery = delivery
        self._coordinator = coordinator or Alone()
        self._lock = threading.Lock()
        self._due = threading.Condition(self._lock)  # the engine thread waits here
        self._gate = PauseGate(self._lock, self._due.notify)
        self._inbox: list[Request | str] = []  # a request to add, or an id to cancel
        self._deadlines = Deadlines()
        self._arriving: list[Item] = []  # taken out of the inbox, and perhaps not yet in the core
        self._live: dict[str, str] = {}  # id -> id of the request that it is a sequence of, often itself
        self._families: dict[str, set[str]] = {}  # of requests with several sequences: those that are live
        self._stop = _Stop.NO
        self._agreed_stop = _Stop.NO
        self._must_forget = False
        self.is_parked = False
        self._ended = False
        # A daemon, so that a forgotten stop() cannot hold the interpreter's exit.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        # Not the thread's own word for it: an interrupted join() makes Python 3.11 call a living thread dead.
        self._done = threading.Event()
        self._process = os.getpid()
        self.room = WaitingRoom(max_waiting)
        self.num_threads: int | None = None
        self.fatal_error: BaseException | None = None
        self.last_step_time = time.monotonic()

    def start(self, core: EngineCore, owner: object, num_threads: int | None = None) -> None:
        """Serve. When `owner` is dropped, or alive at the interpreter's exit, the thread ends.

        Args:
            num_threads: how many threads the engine thread computes with; None leaves that to torch.
        """
        self._core = core
        self._asked_threads = num_threads
        self._delivery.begin()
        self._abandoning = weakref.finalize(owner, _abandon, self)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self.was_started and not self._done.is_set() and self._process == os.getpid()

    @property
    def was_started(self) -> bool:
        return self._thread.ident is not None

    @property
    def is_stopping(self) -> bool:
        return self._stop is not _Stop.NO

    @property
    def in_engine_thread(self) -> bool:
        return threading.current_thread() is self._thread

    @property
    def is_held(self) -> bool:
        """True while a thread is in a pause of this session, or waits for one."""
        return self._gate.is_held

    def submit(self, families: Sequence[Family], receiver: Receiver | None = None) -> bool:
        """Let requests in, all or none. False when the session takes no more.

        In a process that does not drive, the driver's requests of the same ids are what runs; here they get a receiver.

        Raises:
            ValueError: an id is in use by a live request, or other processes cannot be told of the request.
        """
        with self._lock:
            if self._ended or self._stop:
                return False
            if not self._coordinator.is_driver:
                for request in (request for family in families for request in family):
                    if not self._delivery.knows(request.request_id):
                        self._expect(request.request_id)
                    if receiver is not None:
                        self._delivery.attach(request.request_id, receiver)
                return True
            self._check(families)
            for family in families:
                root = family[0].request_id
                for request in family:
                    self._delivery.open(request.request_id, receiver)
                    self._live[request.request_id] = root
                    self._deadlines.add(request)
                if len(family) > 1:
                    self._families[root] = {request.request_id for request in family}
                self._inbox.extend(family)
            self._due.notify()
        return True

    def feed(
        self, families: Sequence[Family], receiver: Receiver | None = None, timeout: float | None = None
    ) -> Iterator[Family]:
        """`submit`, waiting for places where their number is bounded. Gives what was let in, and ends with the session.

        Without a bound all is let in at once, else one by one, each after `timeout` seconds at most.

        Raises:
            queue.Full: no place came free in time.
            ValueError: as `submit`.
        """
        if not self.room.limit:
            if self.submit(families, receiver):
                yield from families
            return
        for family in families:
            if not self.room.enter(len(family), timeout) or not self.submit_entered(family, receiver):
                return
            yield family

    def submit_all(
        self, families: Sequence[Family], receiver: Receiver | None = None, timeout: float | None = None
    ) -> bool:
        """`feed` all, or cancel what was let in before one that was not. False when the session takes no more."""
        entered: list[Family] = []
        try:
            for family in self.feed(families, receiver, timeout):
                entered.append(family)
        finally:
            if len(entered) < len(families):
                for family in entered:
                    self.cancel(family[0].request_id)
        return len(entered) == len(families)

    def submit_entered(self, family: Family, receiver: Receiver | None) -> bool:
        """`submit` one request whose places are taken."""
        try:
            return self.submit([family], receiver)
        except ValueError:
            self.room.give_back(len(family))
            raise

    def cancel(self, request_id: str) -> None:
        """End this request and its further sequences soon, or one of these.

        No effect on an id that is not live, or in a process that does not drive.
        """
        with self._lock:
            alone = [request_id] if request_id in self._live else []
            self._inbox.extend(self._families.get(request_id, alone))
            self._due.notify()

    def stop(self, *, now: bool) -> None:
        """Ask the thread to end: at once, or when everything let in is done."""
        with self._lock:
            self._stop = max(self._stop, _Stop.NOW if now else _Stop.WHEN_DONE)
            self._due.notify()
        self.room.close()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread's end, at most `timeout` seconds; True when it has ended."""
        if self.is_running:
            self._done.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        return not self.is_running

    def refuse_inside_pause(self, what: str) -> None:
        """Raise RuntimeError when the calling thread is in a pause, and would wait for itself."""
        if self.is_running and self._gate.is_held_here():
            raise RuntimeError(
                f"{what}() inside pause() would wait for ever: the engine thread is parked until the block ends"
            )

    def refuse_in_engine_thread(self, what: str) -> None:
        """Raise RuntimeError in the engine thread, which runs callers' constraints and would wait for itself."""
        if self.in_engine_thread:
            raise RuntimeError(f"{what}() in the engine thread would wait for ever: a constraint must not wait for it")

    @contextmanager
    def pause(self, keep_cache: bool) -> Iterator[None]:
        """While the block runs no step does. See `ContinuousBatchingManager.pause`."""
        self.refuse_in_engine_thread("pause")
        with self._lock:
            if self._ended or not self.is_running:
                raise RuntimeError("there is nothing to pause: no engine thread runs") from self.fatal_error
            try:
                holder = self._gate.enter(keep_cache)
            except RuntimeError as error:
                raise error from self.fatal_error
        try:
            yield
        finally:
            with self._lock:
                self._gate.leave(holder)

    # The engine thread

    def _run(self) -> None:
        try:
            if self._asked_threads is not None:
                use_compute_threads(self._asked_threads)
                self.num_threads = compute_threads()
            while self._take_turn():
                pass
        except BaseException as error:  # the thread's last words: callers must learn why
            self.fatal_error = error
            logger.critical("the engine failed: %s", describe_error(error), exc_info=error)
        finally:
            try:
                self._wind_up()
                del self._core  # a manager that was destroyed gives its memory back, and still holds its last session
                if self.fatal_error is not None:
                    self._coordinator.leave(self.fatal_error)
            finally:
                self._done.set()

    def _take_turn(self) -> bool:
        """Wait for something to do, agree on it and do it. False when the loop shall end."""
        own = self._next_turn()
        turn = self._coordinator.agree(own)
        self._let_in(turn.items)
        self._must_forget |= own.forget or turn.forget
        self.is_parked = turn.pausing
        if turn.pausing:
            self._publish(self._core.settle())
            with self._lock:
                self._gate.park()
        elif self._must_forget:
            self._must_forget = False
            self._core.new_epoch()
        with self._lock:
            self._agreed_stop = _Stop(turn.stop)
            self._stop = max(self._stop, self._agreed_stop)
        if turn.stop == _Stop.NOW or (turn.stop == _Stop.WHEN_DONE and not self._core.has_work):
            self._publish(self._core.settle())
            return False
        if self._core.has_work and not turn.pausing:
            self._publish(self._core.step())
        if self._stop:
            self.room.close()
        elif self.room.limit:
            taken_in = sum(isinstance(item, Request) for item in own.items)
            self.room.update(taken_in, self._core.scheduler.num_waiting)
        self.last_step_time = time.monotonic()
        return True

    def _next_turn(self) -> Turn:
        with self._lock:
            if not self._has_turn():
                limits = (self._coordinator.heartbeat_s, self._deadlines.seconds_left())
                self._due.wait_for(self._has_turn, min((each for each in limits if each is not None), default=None))
                self.last_step_time = time.monotonic()
            self._arriving = [*self._inbox, *self._deadlines.take_due()]
            self._inbox = []
            pausing, forget = self._gate.tell()
            return Turn(list(self._arriving), self._stop, pausing, forget, self._core.checksum)

    def _has_turn(self) -> bool:
        """Whether there is anything to do or to agree on. Where another process drives, it is the one that waits."""
        can_step = self._core.has_work and not self._gate.parked
        can_end = self._stop is not _Stop.NO and not self._core.has_work
        told_all = self._stop is self._agreed_stop and not self._gate.is_due
        return bool(self._inbox) or can_step or can_end or not told_all or not self._coordinator.is_driver

    def _let_in(self, items: Sequence[Item]) -> None:
        with self._lock:
            self._arriving = list(items)
            for item in items:
                if isinstance(item, Request) and item.request_id not in self._live:  # it comes from the driver
                    self._expect(item.request_id)
        outputs = []
        for item in items:
            if isinstance(item, Request):
                try:
                    self._core.add(item)
                except ValueError as error:
                    outputs.append(_failed(item, f"ValueError: {error}"))
                continue
            ended = self._core.expire(item.request_id) if isinstance(item, Expired) else self._core.cancel(item)
            if ended is not None:
                outputs.append(ended)
        self._arriving = []
        self._publish(outputs)

    def _publish(self, outputs: list[GenerationOutput]) -> None:
        if not outputs:
            return
        ended = [output.request_id for output in outputs if output.status >= FINISHED]
        if ended:
            with self._lock:
                for request_id in ended:
                    root = self._live.pop(request_id, request_id)
                    if (members := self._families.get(root)) is not None:
                        members.discard(request_id)
                        if not members:
                            del self._families[root]
        self._delivery.publish(outputs)

    def _wind_up(self) -> None:
        """Fail whatever is left, so that nobody waits for ever."""
        self.room.close()
        with self._lock:
            self._ended = True
            self.is_parked = False
            waiting = [item for item in self._arriving + self._inbox if isinstance(item, Request)]
            self._inbox.clear()
            self._gate.close()
        cause = describe_error(self.fatal_error)
        message = f"RuntimeError: the engine failed: {cause}" if cause else "RuntimeError: the engine was stopped"
        known = {id(request) for request in self._core.scheduler.live()}
        late = [request for request in waiting if id(request) not in known]
        try:
            self._publish(self._core.fail_all(late, message))
        finally:
            self._delivery.end()
            self._abandoning.detach()

    # With the lock held

    def _check(self, families: Sequence[Family]) -> None:
        for request in (request for family in families for request in family):
            if request.request_id in self._live or request.request_id in self._families:
                raise ValueError(
                    f"request id {request.request_id!r} is in use by a live request; ids must differ until it ends"
                )
            self._coordinator.check(request)

    def _expect(self, request_id: str) -> None:
        self._delivery.open(request_id)
        self._live[request_id] = request_id


def _abandon(loop: EngineLoop) -> None:
    """End a session that nobody holds any more; the interpreter may be exiting."""
    loop.stop(now=True)
    if not loop.in_engine_thread:
        loop.join(_ABANDON_JOIN_S)


def describe_error(error: BaseException | None) -> str:
    """An error and the error that caused it, in one line; empty for None."""
    if error is None:
        return ""
    text = f"{type(error).__name__}: {error}"
    return f"{text} (caused by {describe_error(error.__cause__)})" if error.__cause__ else text


def _failed(request: Request, message: str) -> GenerationOutput:
    request.status, request.finish_reason, request.error = RequestStatus.FAILED, FinishReason.ERROR, message
    request.finished_time = time.perf_counter()
    return GenerationOutput(request)
