"""A request: what was asked, what has been generated, and how far its KV cache reaches.

Owned by the core; the scheduler advances `computed`, the core appends tokens. Knows nothing of torch,
blocks or threads.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from engine.sampling.params import SamplingParams

if TYPE_CHECKING:
    from engine.sampling.history import History


class RequestStatus(enum.IntEnum):
    """Where a request stands. The first five values equal those of transformers' enum of the same name."""

    PENDING = 0
    PREFILLING = 1
    DECODING = 2
    FINISHED = 3
    FAILED = 4
    CANCELLED = 5

    @property
    def is_terminal(self) -> bool:
        return self >= RequestStatus.FINISHED


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"  # an EOS or stop token was generated
    LENGTH = "length"  # a token limit, the context or the cache was reached
    CANCELLED = "cancelled"
    ERROR = "error"
    TIMEOUT = "timeout"  # its deadline passed


class TokenLogprobs(NamedTuple):
    """Log-probability of one token at its place, and the most likely ones there as (id, log-probability)."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True, eq=False)
class Request:
    """One sequence of tokens being generated.

    The whole state is `prompt_ids` + `output_ids` + `computed`: preemption sets `computed` to 0 and nothing
    else, so an undisturbed, a preempted and a migrated request are the same thing to every other part.

    Attributes:
        token_ids: prompt and generated tokens in one list that only grows.
        num_prompt_tokens: where the prompt ends in `token_ids`.
        computed: tokens whose K/V is, or is being, written by a scheduled step.
        arrival: position in the order of arrival, unique in one engine.
        priority: lower runs first and is preempted last.
        deadline: `time.perf_counter()`, in the process that took the request, at which it must have ended.
        salt: isolates the prefix cache between models, weight epochs and tenants.
        unknown: tokens that launched steps are still sampling: they have no id yet. At most 1 a step in flight.
        skipped_steps: steps in a row that gave it nothing while it ran.
        calm_until: the scheduler's. Above `computed` it says that just one token is to be computed, and that until so
            many are, a step gives it the next one without looking at anything else.
        table_line: of the block tables while it runs.
        cached_tokens: prompt tokens found in the prefix cache at first admission; None before that.
        logprobs, top_logprobs: of each token generated here, as far as `params` asks for them.
        prompt_logprobs: of the prompt's tokens from the second on, as far as they are known.
        history: what the sampler keeps of the tokens; follows from `params` and `token_ids`.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    arrival: int = 0
    priority: int = 0
    deadline: float = math.inf
    salt: bytes = b""
    streaming: bool = False
    record_timestamps: bool = False
    computed: int = 0
    unknown: int = 0
    skipped_steps: int = 0
    calm_until: int = 0
    table_line: int = -1
    status: RequestStatus = RequestStatus.PENDING
    finish_reason: FinishReason | None = None
    error: str | None = None
    cached_tokens: int | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    history: History | None = field(default=None, repr=False)
    timestamps: list[float] = field(default_factory=list)
    created_time: float = field(default_factory=time.perf_counter)
    first_scheduled_time: float = -1.0
    finished_time: float = -1.0

    @property
    def num_tokens(self) -> int:
        """Prompt, generated, and what is being sampled."""
        return len(self.token_ids) + self.unknown

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens whose ids are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Log-probabilities of the prompt are wanted and not complete: it must be computed, not looked up."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def add_prompt_logprobs(self, start: int, values: Sequence[TokenLogprobs]) -> None:
        """Store those of the prompt tokens at positions `start`, `start + 1`, ...; known ones stay as they are.

        Raises:
            ValueError: there is a gap before `start`, or they reach beyond the prompt.
        """
        if not values:
            return
        known = 1 + len(self.prompt_logprobs)  # the first token has none
        if not 1 <= start <= known or start + len(values) > self.num_prompt_tokens:
            raise ValueError(
                f"{len(values)} prompt log-probabilities from position {start} on; expected them from {known} on and "
                f"up to {self.num_prompt_tokens - 1}"
            )
        self.prompt_logprobs.extend(values[known - start :])

    @property
    def remaining(self) -> int:
        """Tokens whose K/V no scheduled step covers yet; 1 means the request decodes."""
        return self.num_tokens - self.computed

    @property
    def prompt_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]
