"""The engine step: schedule, launch, sample, update; and what happens when a step fails.

Runs in the engine thread alone and is entered by the loop. Knows the scheduler, the cache and the runner by
their interfaces; knows nothing of threads, callers or devices.
"""

from __future__ import annotations

import logging
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from engine.outputs import GenerationOutput, StepOutput
from engine.request import FinishReason, Request, RequestStatus
from engine.scheduling.batch import ScheduledBatch
from engine.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Runs the model on scheduled batches. Any method may raise what the model raises."""

    def launch(self, batch: ScheduledBatch, previous: Any = None) -> Any:
        """Start a step; its tokens are not known yet. Tokens that `previous` is still sampling are fed to it."""

    def sample(self, pending: Any) -> None:
        """Choose the tokens of what `launch` returned; its `result()` then gives them as a StepOutput."""

    def probe(self) -> None:
        """Run the model on one token of its own, touching no request's cache."""

    def warmup(self) -> None:
        """Run the model once, so that the first step meets no set-up cost."""

    def check_weights(self) -> None:
        """Raise RuntimeError where what was put in the place of weights cannot count. Changes nothing."""

    def refresh_weights(self) -> None:
        """Make what was written into the weights since the last call count; no step runs meanwhile."""


class EngineUnhealthy(RuntimeError):
    """The model fails even on a token of the engine's own; no request is to blame."""


@dataclass(slots=True)
class _Flight:
    """A step whose results have not been taken."""

    batch: ScheduledBatch
    pending: Any = None


class EngineCore:
    """Everything between a request's arrival and its outputs, one step at a time.

    Args:
        overlap: launch each step before the results of the one before are taken, so that the host's work is hidden
            behind the device's. Results come one step later; nothing else changes.
        free_memory: called with what a step raised, before anything else runs. Where memory ran out it frees what it
            can and says what to lower; else it returns an empty text.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        overlap: bool = False,
        free_memory: Callable[[Exception], str] = lambda error: "",
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.steps = 0
        self.epoch = 0  # counts how often what was cached was forgotten
        self._overlap = overlap
        self._free_memory = free_memory
        self._flights: deque[_Flight] = deque()  # oldest first; at most two, and outside `step` one
        self.checksum = 0  # of all tokens sampled and steps failed, in order; tensor parallel processes compare it

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._flights)

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def cancel(self, request_id: str) -> GenerationOutput | None:
        """End a live request now; None when the id is not live."""
        request = self.scheduler.cancel(request_id)
        return None if request is None else _ended(request, RequestStatus.CANCELLED, FinishReason.CANCELLED)

    def expire(self, request_id: str) -> GenerationOutput | None:
        """End a live request whose time is over; None when the id is not live."""
        request = self.scheduler.cancel(request_id)
        if request is None:
            return None
        request.error = (
            f"TimeoutError: the request did not end within its {request.deadline - request.created_time:g} s: "
            f"{request.num_output_tokens} tokens were generated, {request.params.max_new_tokens} is the limit"
        )
        return _ended(request, RequestStatus.FAILED, FinishReason.TIMEOUT)

    def step(self) -> list[GenerationOutput]:
        """Launch one step and take the results of this one, or with overlap of the one before.

        Returns:
            Outputs to deliver: one a new token of a streaming request, one terminal for each that ended.

        Raises:
            EngineUnhealthy: steps keep failing whatever is in them.
        """
        batch = self.scheduler.schedule()
        outputs = [self._outgrown(request) for request in batch.outgrown]
        try:
            launched = self._launch(batch) if batch else None
            outputs += self._land(keep=launched)
            if launched is not None:
                # Only now: what was generated before decides what may follow.
                self.runner.sample(launched.pending)
            if not self._overlap or self.scheduler.has_suspects:
                outputs += self._land()
        except Exception as error:
            outputs += self._recover(error)
        return outputs

    def settle(self) -> list[GenerationOutput]:
        """Take the results of every launched step; afterwards nothing runs on the device. Raises as `step`."""
        try:
            return self._land()
        except Exception as error:
            return self._recover(error)

    def new_epoch(self) -> None:
        """The weights have changed: nothing computed before counts any more. Only after `settle`."""
        self.epoch += 1
        self.scheduler.preempt_all()
        self.scheduler.cache.reset()
        self.runner.refresh_weights()

    def _launch(self, batch: ScheduledBatch) -> _Flight:
        previous = self._flights[-1].pending if self._flights else None
        flight = _Flight(batch)
        self._flights.append(flight)
        self.steps += 1
        flight.pending = self.runner.launch(batch, previous)
        return flight

    def _land(self, keep: _Flight | None = None) -> list[GenerationOutput]:
        """Take the results of the launched steps, oldest first, but for `keep`."""
        outputs: list[GenerationOutput] = []
        while self._flights and self._flights[0] is not keep:
            flight = self._flights[0]
            result: StepOutput = flight.pending.result()
            self._flights.popleft()
            outputs += self._update(flight.batch, result)
        return outputs

    def _update(self, batch: ScheduledBatch, result: StepOutput) -> list[GenerationOutput]:
        """Append the sampled tokens and end what is complete.

        Passed over are requests that have ended since, or became suspects and so start again from their known tokens.
        """
        outputs = []
        self.checksum = zlib.crc32(array("q", result.token_ids), self.checksum)
        now = time.perf_counter()
        errors, has_suspects = result.errors, self.scheduler.has_suspects
        for row, logprobs in result.prompt_logprobs.items():
            batch.requests[row].add_prompt_logprobs(batch.starts[row] + 1, logprobs)
        for i, (request, token) in enumerate(zip(batch.sampled_requests, result.token_ids, strict=True)):
            if not request.unknown:
                continue
            request.unknown -= 1
            if errors and i in errors:
                if self.scheduler.is_suspect(request):
                    outputs.append(self._fail(request, f"ValueError: {errors[i]}"))
                else:
                    self.scheduler.mistrust(request)
                continue
            if has_suspects:
                self.scheduler.clear(request)
            request.token_ids.append(token)
            params = request.params
            if result.logprobs is not None and params.logprobs:
                request.logprobs.append(result.logprobs[i])
                if params.top_logprobs:
                    request.top_logprobs.append([] if result.top_logprobs is None else result.top_logprobs[i])
            if request.record_timestamps:
                request.timestamps.append(now)
            if token in params.ending_ids:
                outputs.append(self._finish(request, FinishReason.STOP))
            elif len(request.token_ids) - request.num_prompt_tokens >= params.max_new_tokens:
                outputs.append(self._finish(request, FinishReason.LENGTH))
            elif request.streaming:
                outputs.append(GenerationOutput(request))
        return outputs

    def _recover(self, error: Exception) -> list[GenerationOutput]:
        """A step raised: every request in flight runs once more, alone; one that fails alone is to blame.

        Where memory ran out in a step that can be smaller, steps get smaller first.
        """
        self.checksum = zlib.crc32(b"failed", self.checksum)
        batches = [flight.batch for flight in self._flights]
        for flight in self._flights:  # `step` still has one
            flight.pending = None
        self._flights.clear()
        advice = self._free_memory(error)
        if not batches:
            raise error  # no step raised: the engine itself is at fault
        was_alone = self.scheduler.is_suspect(batches[0].requests[0])
        is_smaller = bool(advice) and self.scheduler.shrink_steps(max(batch.num_tokens for batch in batches))
        if is_smaller:
            logger.warning("steps have at most %d tokens from now on%s", self.scheduler.max_batch_tokens, advice)
        for batch in batches:
            self.scheduler.on_step_failed(batch)
        if is_smaller or not was_alone:
            count = len({request.request_id for batch in batches for request in batch.requests})
            logger.warning("a step failed, its %d requests run alone now: %r", count, error)
            return []
        (request,) = batches[0].requests
        try:
            self.runner.probe()
        except Exception as probe_error:
            raise EngineUnhealthy(
                f"steps keep failing, the last on a token of the engine's own with {probe_error!r}"
            ) from error
        logger.warning("request %r failed alone: %r", request.request_id, error)
        return [self._fail(request, f"{type(error).__name__}: {error}{advice}")]

    def _outgrown(self, request: Request) -> GenerationOutput:
        logger.warning(
            "request %r ends after %d generated tokens: the whole KV cache holds %d tokens; raise num_blocks",
            request.request_id,
            request.num_output_tokens,
            self.scheduler.cache.max_tokens,
        )
        return _ended(request, RequestStatus.FINISHED, FinishReason.LENGTH)

    def fail_all(self, late: list[Request], message: str) -> list[GenerationOutput]:
        """End every live request, and those that came too late to be added, as FAILED."""
        outputs = [self._fail(request, message) for request in list(self.scheduler.live())]
        for request in late:
            request.error = message
            outputs.append(_ended(request, RequestStatus.FAILED, FinishReason.ERROR))
        return outputs

    def _finish(self, request: Request, reason: FinishReason) -> GenerationOutput:
        self.scheduler.finish(request)
        return _ended(request, RequestStatus.FINISHED, reason)

    def _fail(self, request: Request, message: str) -> GenerationOutput:
        self.scheduler.fail(request)
        request.error = message
        return _ended(request, RequestStatus.FAILED, FinishReason.ERROR)


def _ended(request: Request, status: RequestStatus, reason: FinishReason) -> GenerationOutput:
    request.status = status
    request.finish_reason = reason
    request.finished_time = time.perf_counter()
    request.unknown = 0  # what is still being sampled is not wanted
    request.history = None  # outputs keep the request, and need none of it
    return GenerationOutput(request)
