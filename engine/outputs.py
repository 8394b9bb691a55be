"""What leaves the core: `StepOutput` from the runner, `GenerationOutput` to callers.

Snapshots never change: the lists they look into only grow, and each snapshot remembers their lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import FinishReason, Request, RequestStatus, TokenLogprobs

FINISHED = int(RequestStatus.FINISHED)  # from here on a status is terminal


@dataclass(slots=True)
class StepOutput:
    """One step's sampled tokens, in the order of `ScheduledBatch.sampled`.

    Attributes:
        token_ids: one token per sampled row.
        logprobs: log-probability of each, where its request asks for them; None when none does.
        errors: rows (indices into token_ids) whose scores cannot be sampled, with the reason.
        top_logprobs: the most likely tokens at each, (id, log-probability), most likely first; None when no row asks.
        prompt_logprobs: by row of the batch, for the prompt tokens at positions starts[row] + 1 and on.
    """

    token_ids: list[int]
    logprobs: list[float] | None = None
    errors: dict[int, str] = field(default_factory=dict)
    top_logprobs: list[list[tuple[int, float]]] | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


class GenerationOutput:
    """The state of one request at one moment.

    Attributes:
        request_id, status, finish_reason, error: as of this moment; error is None unless FAILED.
        created_time: `time.perf_counter()` at submission, seconds.
        lifespan: (first scheduled, ended), same clock; -1.0 where not reached.
        timestamps: per generated token when asked for, else None.
        cached_tokens: prompt tokens that the prefix cache answered.
    """

    __slots__ = ("_num_tokens", "_others", "_request", "request_id", "status")

    def __init__(self, request: Request) -> None:
        self._request = request
        self.request_id = request.request_id
        self.status = request.status
        self._num_tokens = len(request.token_ids)
        params = request.params
        # Counted apart: a request that was resumed has none of these for the tokens that were generated elsewhere.
        self._others = (0, 0, 0)
        if params.logprobs or params.prompt_logprobs is not None or request.record_timestamps:
            self._others = len(request.logprobs), len(request.prompt_logprobs), len(request.timestamps)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._request.finish_reason if self.is_finished() else None

    @property
    def error(self) -> str | None:
        return self._request.error if self.is_finished() else None

    @property
    def created_time(self) -> float:
        return self._request.created_time

    @property
    def lifespan(self) -> tuple[float, float]:
        return self._request.first_scheduled_time, self._request.finished_time if self.is_finished() else -1.0

    @property
    def cached_tokens(self) -> int:
        return self._request.cached_tokens or 0

    @property
    def prompt_ids(self) -> list[int]:
        return self._request.prompt_ids

    @property
    def generated_tokens(self) -> list[int]:
        """Every token generated so far, the ending EOS included."""
        return self._request.token_ids[self.num_prompt_tokens : self._num_tokens]

    @property
    def num_prompt_tokens(self) -> int:
        return self._request.num_prompt_tokens

    @property
    def num_generated_tokens(self) -> int:
        return self._num_tokens - self._request.num_prompt_tokens

    @property
    def logprobs(self) -> list[float]:
        """One per generated token when asked for, else empty. Tokens given as `output_ids` have none."""
        return self._request.logprobs[: self._others[0]]

    @property
    def top_logprobs(self) -> list[list[tuple[int, float]]]:
        """With each of `logprobs` the most likely tokens, (id, log-probability), ties by id; empty when not asked for.

        Tokens that cannot be chosen are left out, so a list may be shorter than asked.
        """
        return self._request.top_logprobs[: self._others[0]]

    def logprobs_since(self, count: int) -> list[TokenLogprobs]:
        """Those of the generated tokens after the first `count`, given as `output_ids` or not; costs only what it
        returns. Empty when not asked for.

        Raises:
            ValueError: some of them are of tokens that were given, which have none.
        """
        made = self._others[0]
        if not made:
            return []
        start = count - (self.num_generated_tokens - made)
        if start < 0:
            raise ValueError(f"the first {self.num_generated_tokens - made} tokens were given and have no logprobs")
        values, tops = self._request.logprobs[start:made], self._request.top_logprobs[start:made]
        return [TokenLogprobs(value, top) for value, top in zip(values, tops or [[]] * len(values), strict=True)]

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None]:
        """One per prompt token, None for the first, when asked for, else empty. Shorter while, or if it ended while,
        the prompt was being computed."""
        if self._request.params.prompt_logprobs is None:
            return []
        return [None, *self._request.prompt_logprobs[: self._others[1]]]

    @property
    def timestamps(self) -> list[float] | None:
        return self._request.timestamps[: self._others[2]] if self._request.record_timestamps else None

    def tokens_since(self, count: int) -> list[int]:
        """Generated tokens after the first `count`; costs only what it returns."""
        return self._request.token_ids[self.num_prompt_tokens + count : self._num_tokens]

    def is_finished(self) -> bool:
        """True once the request has ended, however it ended."""
        return self.status >= FINISHED

    def __repr__(self) -> str:
        return (
            f"GenerationOutput({self.request_id!r}, {self.status.name}, {self.num_generated_tokens} tokens"
            + (f", {self.finish_reason}" if self.finish_reason else "")
            + (f", error={self.error!r}" if self.error else "")
            + ")"
        )
