"""`ContinuousBatchingManager`: what callers hold. Names requests and hands them to the engine thread.

Builds the engine (shadow model, cache, scheduler, runner) on first use and keeps it between sessions, so that
`stop` and `start` need no reload. Knows nothing of what happens inside a step.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engine.cache.kv_cache import KVCache
from engine.config import ContinuousBatchingConfig, WorkloadHints
from engine.core import EngineCore
from engine.delivery import Delivery, ResultHandler
from engine.execution.threads import release_openmp_threads
from engine.intake import Intake, refused_output
from engine.loop import EngineLoop, describe_error
from engine.outputs import GenerationOutput
from engine.sampling.resolve import merge_generation_config
from engine.scheduling.scheduler import Scheduler
from engine.settings import Settings, resolve

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedModel

    from engine.execution.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_ABANDON_JOIN_S = 10.0  # a step in flight may finish; longer would hold the interpreter's exit


class ContinuousBatchingManager:
    """Continuous batching of one model, driven by a background thread.

    Args:
        model: any decoder-only causal language model of transformers. It is never modified; its weights are shared.
        generation_config: defaults for every request, over the model's own.
        config: see `ContinuousBatchingConfig`.
        workload_hints: what is known of the requests to come; sizes defaults.

    Raises:
        ValueError, NotImplementedError: a setting is out of range, or the model or a setting is not supported.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig | None = None,
        config: ContinuousBatchingConfig | None = None,
        workload_hints: WorkloadHints | None = None,
    ) -> None:
        from engine.model.shadow import model_facts

        self._model: PreTrainedModel | None = model
        self.generation_config = merge_generation_config(model, generation_config)
        config = config or ContinuousBatchingConfig()
        self.settings: Settings = resolve(config, model_facts(model), workload_hints or WorkloadHints())
        self._intake = Intake(self.settings, self.generation_config)
        self._delivery = Delivery()
        self._core: EngineCore | None = None
        self._loop = EngineLoop(self._delivery)
        self._lock = threading.RLock()
        self._names = itertools.count()

    # Life

    def start(self) -> None:
        """Start the engine thread; no effect beyond a warning when it runs. Waits for a session that is stopping.

        Raises:
            RuntimeError: the manager was destroyed.
        """
        with self._lock:
            if self.is_running() and not self._loop.is_stopping:
                logger.warning("the manager is already running; start() has no effect")
                return
            self.join()
            core = self._build()
            core.scheduler.cache.reset()  # the weights may have changed since the last session
            core.runner.refresh_weights()
            if self._loop.was_started:
                self._loop = EngineLoop(self._delivery)
            # A manager that is dropped, or alive at the interpreter's exit, takes its thread with it.
            weakref.finalize(self, _abandon, self._loop)
            if self.settings.device_type == "cpu":
                release_openmp_threads()
            self._loop.start(core)

    def warmup(self) -> None:
        """Build the engine and run the model once, so that the first request meets no set-up cost."""
        with self._lock:
            self._build().runner.warmup()

    def is_running(self) -> bool:
        """True while the engine thread lives."""
        return self._loop.is_running

    @property
    def fatal_error(self) -> BaseException | None:
        """What ended the engine thread; None while it is well."""
        return self._loop.fatal_error

    def stop(self, block: bool = True, timeout: float | None = None, hard_stop: bool = False) -> None:
        """End the session: finish what was submitted, or with `hard_stop` fail it with a RuntimeError text.

        Results that were not taken stay available. From now on submissions are refused until `start`.

        Args:
            block: wait for the thread to end.
            timeout: seconds to wait at most, then a warning is logged; None waits as long as it takes.
            hard_stop: do not finish the pending requests.
        """
        if not self._loop.was_started:
            logger.warning("the manager was never started; stop() has no effect")
            return
        asked = time.monotonic()
        self._loop.stop(now=hard_stop)
        if block:
            self.join(asked, timeout)

    def join(self, stop_trigger_time: float | None = None, timeout: float | None = None) -> None:
        """Wait for the engine thread to end; log a warning if it has not after `timeout` seconds.

        Args:
            stop_trigger_time: `time.monotonic()` when stopping was asked, for the warning's text; None is now.
        """
        if not self._loop.was_started or self._loop.in_engine_thread:
            return
        asked = time.monotonic() if stop_trigger_time is None else stop_trigger_time
        if not self._loop.join(timeout):
            logger.warning("the engine thread still runs %.1f s after it was asked to stop", time.monotonic() - asked)

    def destroy(self) -> None:
        """Stop if running, then release the cache and the model for good; `start` raises from now on."""
        if self.is_running():
            self.stop(block=True)
        with self._lock:
            self._core = None
            self._model = None

    # Submitting

    def add_request(
        self,
        input_ids: Sequence[int] | torch.Tensor,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | Sequence[int] | None = None,
        *,
        output_ids: Sequence[int] = (),
        priority: int = 0,
        cache_salt: str | None = None,
        result_handler: ResultHandler | None = None,
        **sampling: Any,
    ) -> str | None:
        """Submit one request.

        Args:
            input_ids: prompt token ids, a sequence or a 1-D integer tensor.
            request_id: a name that no live request has; None makes one.
            max_new_tokens: limit of generated tokens; None takes the generation config's limit, or the context's.
            streaming: one output a token instead of one at the end.
            record_timestamps: note the time of each token in the outputs.
            eos_token_id: id or ids that end the request; negative turns it off; None takes the generation config's.
            output_ids: tokens already generated elsewhere; generation goes on behind them.
            priority: lower runs first and is preempted last.
            cache_salt: only requests with the same salt share cached prefixes.
            result_handler: called with every output on the event loop that runs here, instead of any queue.
            **sampling: min_new_tokens, seed, stop_token_ids; with `per_request_processors` also do_sample,
                temperature, top_k, top_p, min_p.

        Returns:
            The request's id; None, with a logged warning, when the manager is stopping or stopped.

        Raises:
            ValueError: a value is out of range, the id is taken, or the request can never fit.
            TypeError: an unknown argument.
            RuntimeError: the engine failed; the message names the cause.
        """
        if self._refuses():
            return None
        sampling.update(max_new_tokens=max_new_tokens, eos_token_id=eos_token_id)
        with self._lock:
            request = self._intake.request(
                self._name() if request_id is None else request_id,
                input_ids,
                sampling,
                output_ids=output_ids,
                cache_salt=cache_salt,
                priority=priority,
                streaming=streaming,
                record_timestamps=record_timestamps,
            )
            self._loop.submit([request], result_handler)
        return request.request_id

    def add_requests(
        self,
        inputs: Sequence[Sequence[int] | torch.Tensor],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | Sequence[int] | None = None,
        **sampling: Any,
    ) -> list[str] | None:
        """Submit many requests at once: all, or none when one is refused. Arguments as for `add_request`.

        With prefix sharing they are queued sorted by their tokens, so that equal prefixes meet in the cache.

        Returns:
            The ids in the order of `inputs`; None, with a logged warning, when the manager is stopping or stopped.
        """
        if self._refuses():
            return None
        sampling.update(max_new_tokens=max_new_tokens, eos_token_id=eos_token_id)
        with self._lock:
            requests = [
                self._intake.request(
                    self._name(), ids, sampling, streaming=streaming, record_timestamps=record_timestamps
                )
                for ids in inputs
            ]
            self._loop.submit(self._intake.in_queue_order(requests))
        return [request.request_id for request in requests]

    def add_valid_requests(
        self, inputs: Sequence[Sequence[int] | torch.Tensor], record_timestamps: bool = False, **arguments: Any
    ) -> dict[str, GenerationOutput | None]:
        """Submit those of many requests that can be served; arguments as for `add_requests`.

        Returns:
            One entry an input, in order: the id, and for a refused one its FAILED output.
        """
        refused: dict[str, GenerationOutput | None] = {}
        requests = []
        with self._lock:
            for ids in inputs:
                name = self._name()
                refused[name] = None
                try:
                    request = self._intake.request(name, ids, arguments, record_timestamps=record_timestamps)
                    requests.append(request)
                except ValueError as error:
                    refused[name] = refused_output(name, ids, error)
            self._loop.submit(self._intake.in_queue_order(requests))
        return refused

    def check_arguments(self, **arguments: Any) -> None:
        """Raise what `add_request` would raise for these sampling arguments, whatever the prompt."""
        self._intake.params(arguments)

    def cancel_request(self, request_id: str) -> None:
        """End a request; its one terminal output says CANCELLED. No effect if it is not live."""
        self._loop.cancel(request_id)

    # Results

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """Wait for the next output, of this request or of any.

        Args:
            timeout: seconds to wait at most; None waits until there is one, or the engine ends.

        Raises:
            KeyError: the id is unknown or its result was already delivered.
        """
        if request_id is not None:
            return self._delivery.take(request_id, timeout)
        return self._delivery.take_next(timeout)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Outputs as they come, until no request is outstanding; waits for the first request."""
        while (output := self._delivery.take_next(until_done=True)) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Outputs of one request, up to its terminal one. A streaming request gives one a token, each cumulative.

        Raises:
            KeyError: the id is unknown or its result was already delivered.
        """
        return self._delivery.iterate(request_id)

    def register_result_handler(self, request_id: str, callback: ResultHandler) -> None:
        """Have `callback` called with each output of a request, on the event loop that runs in this thread.

        Outputs that already wait are delivered first; the handler goes with the terminal output.

        Raises:
            KeyError: the id is unknown or its result was already delivered.
            RuntimeError: no event loop is running in this thread.
        """
        self._delivery.set_handler(request_id, callback)

    def stats(self) -> dict[str, int | float]:
        """Counts of this moment: requests, cache blocks, steps, seconds since the last step ended."""
        core = self._core
        if core is None:
            return {"running": 0, "waiting": 0, "steps": 0}
        cache = core.scheduler.cache
        return {
            "running": core.scheduler.num_running,
            "waiting": core.scheduler.num_waiting,
            "kv_used_blocks": cache.num_used_blocks,
            "kv_total_blocks": cache.num_blocks,
            "steps": core.steps,
            "idle_s": time.monotonic() - self._loop.last_step_time,
        }

    # Inside

    def _build(self) -> EngineCore:
        if self._core is None:
            if self._model is None:
                raise RuntimeError("the manager was destroyed; make a new one")
            cache = KVCache(
                self.settings.num_blocks,
                self.settings.page_size,
                self.settings.groups,
                self.settings.sharing,
                max_step_tokens=self.settings.max_batch_tokens,
                host_slots=self.settings.host_slots,
            )
            scheduler = Scheduler(
                cache,
                max_batch_tokens=self.settings.max_batch_tokens,
                max_requests=self.settings.max_requests,
                safety_margin=self.settings.safety_margin,
                policy=self.settings.scheduler_type,
            )
            self._core = EngineCore(
                scheduler, _make_runner(self._model, self.settings), overlap=self.settings.async_batching
            )
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

    def _name(self) -> str:
        return next(name for number in self._names if not self._delivery.knows(name := f"req_{number}"))


def _make_runner(model: PreTrainedModel, settings: Settings) -> ModelRunner:
    from engine.execution.model_runner import ModelRunner
    from engine.model.packed import pack_linears
    from engine.model.shadow import make_shadow
    from engine.sampling.sampler import Sampler

    return ModelRunner(pack_linears(make_shadow(model)), settings, Sampler(settings.vocab_size))


def _abandon(loop: EngineLoop) -> None:
    """End a session that nobody holds any more; the interpreter may be exiting."""
    loop.stop(now=True)
    if not loop.in_engine_thread:
        loop.join(_ABANDON_JOIN_S)
