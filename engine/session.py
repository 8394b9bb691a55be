"""The life of an engine: built on first use, started, paused, stopped, started again, destroyed.

A base class of `ContinuousBatchingManager`. The engine is kept between sessions, so that `stop` and `start` need no
reload; each session has a thread of its own. Knows nothing of requests.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from engine import persistent
from engine.build import build_core
from engine.core import EngineCore
from engine.delivery import Delivery
from engine.distributed.coordinator import Coordinator
from engine.execution.threads import compute_threads, release_openmp_threads
from engine.intake import check_timeout
from engine.loop import EngineLoop, describe_error
from engine.out_of_memory import saying_what_to_lower
from engine.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

MOST_OUTPUT = 1024  # tokens that a request counts for in `tokens_left`, whatever its limit


class Sessions:
    """`start`, `stop`, `pause`, `destroy` and what they say of themselves.

    Args:
        model: never modified; its weights are shared.
        settings: of the engine.
        coordinator: agrees on every turn with other processes that run the same model.

    The engine thread computes with as many threads as torch would use in the thread that made the manager, at that
    time (`torch.set_num_threads`).
    """

    def __init__(self, model: PreTrainedModel, settings: Settings, coordinator: Coordinator) -> None:
        self.settings = settings
        self._model: PreTrainedModel | None = model
        self._coordinator = coordinator
        self._num_threads = compute_threads()
        self._delivery = Delivery()
        self._core: EngineCore | None = None
        self._loop = self._new_loop()
        self._lock = threading.RLock()
        self._warmed_up = False
        weakref.finalize(self, coordinator.close)

    def start(self) -> None:
        """Start the engine thread; no effect beyond a warning when it runs. Waits for a session that is stopping.

        What was cached in sessions before is forgotten: the weights may have changed.

        Raises:
            RuntimeError: the manager was destroyed, or a thread is still in a pause of the session before.
        """
        with self._lock:
            if self.is_running() and not self._loop.is_stopping:
                logger.warning("the manager is already running; start() has no effect")
                return
            self.join()
            if self._loop.is_held:
                raise RuntimeError("a thread is still in pause() of the session before: leave it before start()")
            core = self._build()
            core.new_epoch()
            if self._loop.was_started:
                self._loop = self._new_loop()
            if self.settings.device_type == "cpu":
                release_openmp_threads()
            self._loop.start(core, owner=self, num_threads=self._num_threads)

    def warmup(self) -> None:
        """Build the engine and run the model once, so that the first request meets no set-up cost.

        No effect on an engine that has been warmed up, or that runs.

        Raises:
            MemoryError: there is not enough; the text says what to lower.
        """
        with self._lock:
            core = self._build()
            if not self._warmed_up and not self.is_running():
                with saying_what_to_lower():
                    core.runner.warmup()
                self._warmed_up = True

    def is_running(self) -> bool:
        """True while the engine thread lives."""
        return self._loop.is_running

    @property
    def num_threads(self) -> int:
        """Compute threads of the engine, in the engine thread's own words once it runs."""
        return self._loop.num_threads or self._num_threads

    @property
    def fatal_error(self) -> BaseException | None:
        """What ended the engine thread; None while it is well."""
        return self._loop.fatal_error

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """End the session: finish what was submitted, or with `hard_stop` fail it with a RuntimeError text.

        Results that were not taken stay available. From now on submissions are refused until `start`.

        Args:
            block: wait for the thread to end.
            timeout: seconds to wait at most, then a warning is logged; None waits as long as it takes.
            keep_for_next_session: the model keeps this manager, and the next session on it (`generate_batch`, ...)
                uses it again.
            hard_stop: do not finish the pending requests.

        Raises:
            RuntimeError: the calling thread is inside `pause()`, so that the engine thread cannot end.
        """
        if not self._loop.was_started:
            logger.warning("the manager was never started; stop() has no effect")
            return
        check_timeout("timeout", timeout)
        self._loop.refuse_inside_pause("stop")
        asked = time.monotonic()
        self._loop.stop(now=hard_stop)
        if keep_for_next_session and self._model is not None:
            persistent.keep(self._model, self)
        if block:
            self.join(asked, timeout)

    def join(self, stop_trigger_time: float | None = None, timeout: float | None = None) -> None:
        """Wait for the engine thread to end; log a warning if it has not after `timeout` seconds.

        Args:
            stop_trigger_time: `time.monotonic()` when stopping was asked, for the warning's text; None is now.
        """
        if not self._loop.was_started or self._loop.in_engine_thread:
            return
        check_timeout("timeout", timeout)
        self._loop.refuse_inside_pause("join")
        asked = time.monotonic() if stop_trigger_time is None else stop_trigger_time
        if not self._loop.join(timeout):
            logger.warning("the engine thread still runs %.1f s after it was asked to stop", time.monotonic() - asked)

    def destroy(self) -> None:
        """Stop if running, then release the cache and the model for good; `start` raises from now on."""
        if self.is_running():
            self.stop(block=True)
        with self._lock:
            if self._model is not None:
                persistent.release(self._model, self)
            self._core = None
            self._model = None
            self._coordinator.close()

    @contextmanager
    def pause(self, keep_cache: bool = False) -> Iterator[None]:
        """Hold the engine between two steps, so that the block may use the model, or write into its weights.

        The block begins once no step is in flight. Requests are kept, and new ones let in; all go on when the block
        ends, or the last of several that hold the engine at the same time. Then everything is computed with the weights
        of that moment: nothing cached before is used, and requests that run go on behind the tokens that they have.
        Waiting for results inside is waiting for ever.

        Args:
            keep_cache: the weights stay as they are, so that what is cached stays valid.

        Raises:
            RuntimeError: no engine thread runs, or it ended before it could pause; the cause is chained to it. At the
                end of the block: what was put in the place of weights does not fit, by which the engine then fails.
        """
        with self._loop.pause(keep_cache):
            yield
            if not keep_cache and self._core is not None:
                self._core.runner.check_weights()

    def stats(self) -> dict[str, int | float]:
        """Counts of this moment: requests, cache blocks and how often what they cached was forgotten, steps,
        preemptions, seconds since the last step ended."""
        core = self._core
        if core is None:
            return {"running": 0, "waiting": 0, "steps": 0}
        cache = core.scheduler.cache
        return {
            "running": core.scheduler.num_running,
            "waiting": core.scheduler.num_waiting,
            "epoch": core.epoch,
            "kv_used_blocks": cache.num_used_blocks,
            "kv_total_blocks": cache.num_blocks,
            "steps": core.steps,
            "preemptions": core.scheduler.num_preemptions,
            "paused": self._loop.is_parked,
            "idle_s": 0.0 if self._loop.is_parked else time.monotonic() - self._loop.last_step_time,
        }

    def load(self) -> dict[str, int]:
        """The fields of `engine.scheduling.scheduler.Load`; unlike `stats` it looks at every request."""
        return {} if self._core is None else self._core.scheduler.load(MOST_OUTPUT)._asdict()

    def _new_loop(self) -> EngineLoop:
        return EngineLoop(self._delivery, self._coordinator, self.settings.max_queue_size)

    def _build(self) -> EngineCore:
        if self._core is None:
            if self._model is None:
                raise RuntimeError("the manager was destroyed; make a new one")
            model = self._model
            self._core = self._coordinator.together(lambda: build_core(model, self.settings))
        return self._core

    def _refuses(self) -> bool:
        """True, with a warning, when the session is over."""
        if self._model is None:
            raise RuntimeError("the manager was destroyed; make a new one")
        if self._loop.fatal_error is not None:
            raise RuntimeError(f"the engine failed and takes no requests: {describe_error(self._loop.fatal_error)}")
        if self._loop.is_stopping:
            logger.warning("the manager is stopped or stopping: the request is refused; call start() for a new session")
            return True
        return False
