"""Closed-loop load on anything that generates: so many requests under way at once, the next when one ends.

What `split.py` measures each layer with, and `engine_child.py` the engine alone, so that all do the same work.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """One request's times, in seconds from its submission, and its tokens. No first token where none was seen."""

    first_s: float | None
    last_s: float
    tokens: int


Ask = Callable[[list[int], int], Awaitable[Answer]]
"""Prompt ids and the number of tokens to generate, greedily and past any end of sequence."""


@dataclass(frozen=True)
class Turn:
    """One layer's answers to all prompts.

    Attributes:
        seconds: from the first submission to the last token.
        first_ms: median time to the first token; None for a layer that does not stream.
        token_ms: median time for each further token of a request.
    """

    seconds: float
    tokens: int
    first_ms: float | None
    token_ms: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


async def closed_loop(ask: Ask, prompts: Sequence[list[int]], new_tokens: int, concurrency: int) -> Turn:
    """Asks for all prompts.

    Raises:
        RuntimeError: an answer has not the number of tokens asked for.
    """
    waiting = iter(prompts)
    answers: list[Answer] = []

    async def caller() -> None:
        for prompt in waiting:
            answers.append(await ask(prompt, new_tokens))

    start = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(min(concurrency, len(prompts)))))
    seconds = time.perf_counter() - start
    if wrong := [answer.tokens for answer in answers if answer.tokens != new_tokens]:
        raise RuntimeError(f"{len(wrong)} of {len(prompts)} answers have {wrong[0]} tokens instead of {new_tokens}")
    firsts = [answer.first_s for answer in answers if answer.first_s is not None]
    rests = [
        (answer.last_s - answer.first_s) / (new_tokens - 1)
        for answer in answers
        if answer.first_s is not None and new_tokens > 1
    ]
    return Turn(seconds, sum(answer.tokens for answer in answers), _median_ms(firsts), _median_ms(rests))


def _median_ms(values: Sequence[float]) -> float | None:
    return 1e3 * statistics.median(values) if values else None
