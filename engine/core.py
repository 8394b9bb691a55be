"""The engine step: schedule, launch, sample, update; and what happens when a step fails.

Runs in the engine thread alone and is entered by the loop. Knows the scheduler, the cache and the runner by
their interfaces; knows nothing of threads, callers or devices.
"""

from __future__ import annotations

import logging
import time
import zlib
from array import array
from typing import Any, Protocol

from engine.outputs import GenerationOutput, StepOutput
from engine.request import FinishReason, Request, RequestStatus
from engine.scheduling.batch import ScheduledBatch
from engine.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Runs the model on scheduled batches. Any method may raise what the model raises."""

    def launch(self, batch: ScheduledBatch) -> Any:
        """Start a step; its tokens are not known yet."""

    def sample(self, pending: Any) -> None:
        """Choose the tokens of what `launch` returned; its `result()` then gives them as a StepOutput."""

    def probe(self) -> None:
        """Run the model on one token of its own, touching no request's cache."""

    def warmup(self) -> None:
        """Run the model once, so that the first step meets no set-up cost."""

    def refresh_weights(self) -> None:
        """Make what was written into the weights since the last call count; no step runs meanwhile."""


class EngineUnhealthy(RuntimeError):
    """The model fails even on a token of the engine's own; no request is to blame."""


class EngineCore:
    """Everything between a request's arrival and its outputs, one step at a time."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.steps = 0
        self.checksum = 0  # of all tokens sampled and steps failed, in order; tensor parallel processes compare it

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def cancel(self, request_id: str) -> GenerationOutput | None:
        """End a live request now; None when the id is not live."""
        request = self.scheduler.cancel(request_id)
        return None if request is None else _ended(request, RequestStatus.CANCELLED, FinishReason.CANCELLED)

    def step(self) -> list[GenerationOutput]:
        """Run one step.

        Returns:
            Outputs to deliver: one a new token of a streaming request, one terminal for each that ended.

        Raises:
            EngineUnhealthy: steps keep failing whatever is in them.
        """
        batch = self.scheduler.schedule()
        outputs = [_ended(request, RequestStatus.FINISHED, FinishReason.LENGTH) for request in batch.outgrown]
        if not batch:
            return outputs
        self.steps += 1
        try:
            pending = self.runner.launch(batch)
            self.runner.sample(pending)
            result: StepOutput = pending.result()
        except Exception as error:
            self.checksum = zlib.crc32(b"failed", self.checksum)
            return outputs + self._recover(batch, error)
        self.scheduler.step_done(batch)
        return outputs + self._update(batch, result)

    def _update(self, batch: ScheduledBatch, result: StepOutput) -> list[GenerationOutput]:
        """Append the sampled tokens and end what is complete."""
        outputs = []
        self.checksum = zlib.crc32(array("q", result.token_ids), self.checksum)
        now = time.perf_counter()
        for i, row in enumerate(batch.sampled):
            request = batch.requests[row]
            if i in result.errors:
                outputs.append(self._fail(request, f"ValueError: {result.errors[i]}"))
                continue
            token = result.token_ids[i]
            request.token_ids.append(token)
            if result.logprobs is not None and request.params.logprobs:
                request.logprobs.append(result.logprobs[i])
            if request.record_timestamps:
                request.timestamps.append(now)
            if (reason := _finish_reason(request, token)) is not None:
                self.scheduler.finish(request)
                outputs.append(_ended(request, RequestStatus.FINISHED, reason))
            elif request.streaming:
                outputs.append(GenerationOutput(request))
        return outputs

    def _recover(self, batch: ScheduledBatch, error: Exception) -> list[GenerationOutput]:
        """A step raised: every request of it runs once more, alone; one that fails alone is to blame."""
        if not self.scheduler.is_suspect(batch.requests[0]):
            logger.warning("a step of %d requests failed, each runs alone now: %r", len(batch.requests), error)
            self.scheduler.on_step_failed(batch)
            return []
        (request,) = batch.requests
        try:
            self.runner.probe()
        except Exception as probe_error:
            raise EngineUnhealthy(
                f"steps keep failing, the last on a token of the engine's own with {probe_error!r}"
            ) from error
        logger.warning("request %r failed alone: %r", request.request_id, error)
        return [self._fail(request, f"{type(error).__name__}: {error}")]

    def fail_all(self, late: list[Request], message: str) -> list[GenerationOutput]:
        """End every live request, and those that came too late to be added, as FAILED."""
        outputs = [self._fail(request, message) for request in list(self.scheduler.live())]
        for request in late:
            request.error = message
            outputs.append(_ended(request, RequestStatus.FAILED, FinishReason.ERROR))
        return outputs

    def _fail(self, request: Request, message: str) -> GenerationOutput:
        self.scheduler.fail(request)
        request.error = message
        return _ended(request, RequestStatus.FAILED, FinishReason.ERROR)


def _finish_reason(request: Request, token: int) -> FinishReason | None:
    if token in request.params.ending_ids:
        return FinishReason.STOP
    if request.num_output_tokens >= request.params.max_new_tokens:
        return FinishReason.LENGTH
    return None


def _ended(request: Request, status: RequestStatus, reason: FinishReason) -> GenerationOutput:
    request.status = status
    request.finish_reason = reason
    request.finished_time = time.perf_counter()
    return GenerationOutput(request)
