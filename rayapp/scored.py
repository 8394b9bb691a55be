"""`ScoredToken`: a token id that carries its log-probability from the engine actor to the API.

Wherever token ids are cut, joined, counted or sent again, the scores go with them. Made by the engine actor, read by
the API's shapes; to everyone between them it is an int.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.outputs import GenerationOutput


class ScoredToken(int):
    """A token id.

    Attributes:
        logprob: natural logarithm of its probability; None for the first token of a prompt.
        top: the most likely tokens at its place, (id, log-probability), most likely first.
    """

    logprob: float | None
    top: list[tuple[int, float]]

    def __new__(cls, token_id: int, logprob: float | None, top: list[tuple[int, float]]) -> ScoredToken:
        token = super().__new__(cls, token_id)
        token.logprob, token.top = logprob, top
        return token

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (int(self), self.logprob, self.top)


def tokens_since(output: GenerationOutput, count: int) -> list[int]:
    """The generated tokens after the first `count`, scored where their request asks for it."""
    tokens, scores = output.tokens_since(count), output.logprobs_since(count)
    return [ScoredToken(token, *score) for token, score in zip(tokens, scores, strict=True)] if scores else tokens


def scored_prompt(output: GenerationOutput) -> list[int] | None:
    """The prompt's tokens with their scores; None where they were not asked for or are not all there."""
    scores = output.prompt_logprobs
    if len(scores) < output.num_prompt_tokens:
        return None
    pairs = zip(output.prompt_ids, scores, strict=True)
    return [ScoredToken(token, *(score or (None, []))) for token, score in pairs]
