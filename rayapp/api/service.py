"""The border between HTTP and generation: what the API layer needs of the Router, and what crosses it.

`Service` is implemented by the Router deployment and called by the endpoints; the dataclasses are plain, so
that they can be sent between processes. Knows nothing of HTTP, Ray or the engine.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rayapp.api.settings import RequestSettings
from rayapp.text.template import ChatTemplate
from rayapp.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class SamplingFields:
    """Everything that shapes one generation but its prompt and stop strings; nothing is left open but the seed.

    `dataclasses.asdict` of it is what `rayapp.link.wire_request` takes.

    Attributes:
        max_new_tokens: >= 1, and prompt + max_new_tokens fits the context.
        min_new_tokens: 0 .. max_new_tokens; no ending token is sampled before.
        do_sample: False means the most likely token each time, whatever the fields below say.
        temperature: > 0 when do_sample.
        top_k: 0 is off.
        top_p: in (0, 1]; 1 is off.
        min_p: in [0, 1]; 0 is off.
        seed: int64, or None for a fresh one; shared by the n choices of a request, which `index` tells apart.
        ignore_eos: go on through the model's own ending tokens.
        stop_token_ids: further ending tokens.
        repetition_penalty: > 0; 1 is off.
        frequency_penalty, presence_penalty: in [-2, 2]; 0 is off.
        logit_bias: token id -> what is added to its logit.
        logprobs: chunks hold `rayapp.scored.ScoredToken`s, whose scores are the model's own.
        top_logprobs: with so many of the most likely tokens.
        prompt_logprobs: the first chunk holds the prompt as scored tokens, with so many; None is without.
        structure: what the text must be: {"kind", "value"}, see `rayapp.structured`.
        shown_ids: special tokens that show in the text.
        cache_salt: only requests with the same one share cached prefixes.
        priority: lower runs first.
        deadline: `time.monotonic()` of this process at which the generation must have ended; None is never.
        timeout: seconds that the request asked for, of which the deadline was made; for what it is told when they pass.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    do_sample: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    structure: Mapping[str, Any] | None = None
    shown_ids: tuple[int, ...] = ()
    cache_salt: str | None = None
    priority: int = 0
    deadline: float | None = None
    timeout: float | None = None


@dataclass(slots=True)
class Chunk:
    """What one generation has to say next.

    Attributes:
        text: new text, whole characters only; may be empty.
        token_ids: the new tokens but for one that ended the generation; need not line up with `text`.
        finish_reason: "stop" or "length" on the last chunk, None before.
        completion_tokens: generated so far, counted up to the token that completed a stop string.
        prompt_tokens, cached_tokens: final on the last chunk; prompt tokens answered by the prefix cache.
        prompt: the prompt as scored tokens, on one chunk, where its scores were asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None
    completion_tokens: int
    prompt_tokens: int
    cached_tokens: int
    prompt: list[int] | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that requests may name.

    Attributes:
        name: what `model` must say in a request.
        created: Unix time in seconds.
        context_length: the most tokens prompt and completion may have together.
        default_sampling: from the model's generation config, any of temperature, top_k, top_p, min_p; used
            where a request leaves them out.
        template: None when the model has no chat template; chat is then refused.
        tool_format: a key of `rayapp.text.tools.FORMATS`; None where the model can call no tools.
        reasons: its answers may begin with a `<think>` block.
    """

    name: str
    created: int
    tokenizer: Tokenizer
    template: ChatTemplate | None
    context_length: int
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    tool_format: str | None = None
    reasons: bool = False
    owned_by: str = "convoy"


class Service(Protocol):
    """What the endpoints call."""

    @property
    def models(self) -> Mapping[str, ServedModel]:
        """The served models by name, in the order of the configuration."""

    @property
    def settings(self) -> RequestSettings:
        """What requests may ask for at the moment."""

    def generate(
        self, model: str, prompt_ids: list[int], sampling: SamplingFields, stop: list[str], index: int
    ) -> AsyncGenerator[Chunk, None]:
        """One generation. The last chunk, and no other, has a finish reason.

        Args:
            model: a key of `models`.
            stop: non-empty strings; the text ends before the earliest match.
            index: 0-based number of this choice among the n of its prompt; gives it its own random stream.

        Raises:
            ApiError: while iterating: refused, overloaded, unavailable or failed.

        Closing the generator, or cancelling the task that iterates it, aborts the generation.
        """

    async def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether requests can be served now, and figures that say why."""

    async def metrics(self) -> bytes | None:
        """What the node's exporter says, in Prometheus' text format; None where there is none."""
