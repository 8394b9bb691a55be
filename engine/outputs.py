"""What leaves the core: `StepOutput` from the runner, `GenerationOutput` to callers.

Snapshots never change: the token list they look into only grows, and each remembers its own length.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import FinishReason, Request, RequestStatus


@dataclass(slots=True)
class StepOutput:
    """One step's sampled tokens, in the order of `ScheduledBatch.sampled`.

    Attributes:
        token_ids: one token per sampled row.
        logprobs: log-probability of each under the processed scores; None when no row asked.
        errors: rows (indices into token_ids) whose scores cannot be sampled, with the reason.
    """

    token_ids: list[int]
    logprobs: list[float] | None = None
    errors: dict[int, str] = field(default_factory=dict)


class GenerationOutput:
    """The state of one request at one moment.

    Attributes:
        request_id, status, finish_reason, error: as of this moment; error is None unless FAILED.
        created_time: `time.perf_counter()` at submission, seconds.
        lifespan: (first scheduled, ended), same clock; -1.0 where not reached.
        timestamps: per generated token when asked for, else None.
        cached_tokens: prompt tokens that the prefix cache answered.
    """

    __slots__ = (
        "_logprobs",
        "_num_prompt",
        "_num_tokens",
        "_timestamps",
        "_token_ids",
        "cached_tokens",
        "created_time",
        "error",
        "finish_reason",
        "lifespan",
        "request_id",
        "status",
    )  # fmt: skip

    def __init__(self, request: Request) -> None:
        self.request_id = request.request_id
        self.status = request.status
        self.finish_reason: FinishReason | None = request.finish_reason
        self.error = request.error
        self.created_time = request.created_time
        self.lifespan = (request.first_scheduled_time, request.finished_time)
        self.cached_tokens = request.cached_tokens or 0
        self._token_ids = request.token_ids
        self._num_prompt = request.num_prompt_tokens
        self._num_tokens = len(request.token_ids)
        self._logprobs = request.logprobs if request.params.logprobs else None
        self._timestamps = request.timestamps if request.record_timestamps else None

    @property
    def prompt_ids(self) -> list[int]:
        return self._token_ids[: self._num_prompt]

    @property
    def generated_tokens(self) -> list[int]:
        """Every token generated so far, the ending EOS included."""
        return self._token_ids[self._num_prompt : self._num_tokens]

    @property
    def num_prompt_tokens(self) -> int:
        return self._num_prompt

    @property
    def num_generated_tokens(self) -> int:
        return self._num_tokens - self._num_prompt

    @property
    def logprobs(self) -> list[float]:
        """One per generated token when asked for, else empty."""
        return self._logprobs[: self.num_generated_tokens] if self._logprobs is not None else []

    @property
    def timestamps(self) -> list[float] | None:
        return None if self._timestamps is None else self._timestamps[: self.num_generated_tokens]

    def tokens_since(self, count: int) -> list[int]:
        """Generated tokens after the first `count`; costs only what it returns."""
        return self._token_ids[self._num_prompt + count : self._num_tokens]

    def is_finished(self) -> bool:
        """True once the request has ended, however it ended."""
        return self.status >= RequestStatus.FINISHED

    def __repr__(self) -> str:
        return (
            f"GenerationOutput({self.request_id!r}, {self.status.name}, {self.num_generated_tokens} tokens"
            + (f", {self.finish_reason}" if self.finish_reason else "")
            + (f", error={self.error!r}" if self.error else "")
            + ")"
        )
