"""Open-loop load: conversations arrive when they are planned to, however slow the server is.

`arrival_times` plans, `run_load` does it; called by `serve.py`. A turn of a conversation waits for the answer before.
Knows nothing of HTTP but the `Send` it is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayapp.bench.client import Outcome
from rayapp.bench.datasets import Conversation
from rayapp.bench.watch import ClientWatch, Strain

NOT_SENT = "not sent: an earlier turn of its conversation failed"

Send = Callable[[Any, int], Awaitable[Outcome]]
"""Prompt (text, ids or messages) and limit of tokens to what came of it."""


def arrival_times(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Seconds from the start at which each of `count` requests arrives.

    The gaps are gamma distributed (burstiness 1: exponential, a Poisson process; inf: all equal), scaled so that the
    last one arrives at count / rate, as `vllm bench serve` does.

    Args:
        rate: requests a second; inf is all at once.

    Raises:
        ValueError: rate or burstiness is not positive.
    """
    if not (rate > 0 and burstiness > 0):
        raise ValueError("--request-rate and --burstiness must be positive")
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.ones(count) if math.isinf(burstiness) else rng.gamma(burstiness, 1 / (rate * burstiness), count)
    times = np.cumsum(gaps)
    return [float(when) for when in times * (count / rate / times[-1])]


@dataclass(frozen=True)
class Run:
    """Outcomes in the order of the conversations and their turns.

    Attributes:
        start: `time.perf_counter()` of the first arrival's plan.
        duration_s: until the last answer had ended.
        strain: how busy the client was.
    """

    outcomes: list[Outcome]
    start: float
    duration_s: float
    strain: Strain


async def run_load(
    conversations: Sequence[Conversation],
    send: Send,
    times: Sequence[float],
    *,
    chat: bool = False,
    max_concurrency: int | None = None,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> Run:
    """Sends every turn of every conversation.

    Args:
        times: when each conversation begins, seconds from now, ascending.
        chat: prompts are sent as messages, with the turns and answers before.
        max_concurrency: requests that are under way at once; others wait in the client.
        on_outcome: called at the end of each request.
    """
    limit: Any = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    tasks = []
    async with ClientWatch() as watch:
        start = time.perf_counter()
        for conversation, when in zip(conversations, times, strict=True):
            planned = start + when
            if (wait := planned - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            watch.late(time.perf_counter() - planned)
            tasks.append(asyncio.create_task(_converse(conversation, send, planned, limit, chat, on_outcome)))
        outcomes = [outcome for answers in await asyncio.gather(*tasks) for outcome in answers]
        duration = time.perf_counter() - start
    return Run(outcomes, start, duration, watch.strain(paced=bool(times) and times[-1] > 0))


async def _converse(
    conversation: Conversation,
    send: Send,
    planned: float,
    limit: Any,
    chat: bool,
    on_outcome: Callable[[Outcome], None],
) -> list[Outcome]:
    history = _History(chat)
    outcomes: list[Outcome] = []
    for turn in conversation:
        if outcomes and outcomes[-1].error is not None:
            now = time.perf_counter()
            outcome = Outcome(planned, now, now, end=now, error=NOT_SENT)
        else:
            arrived = time.perf_counter()
            async with limit:
                outcome = await send(history.ask(turn.prompt), turn.output_tokens)
            outcome.planned, outcome.arrived = planned, arrived
            history.answer(outcome.text)
        outcomes.append(outcome)
        on_outcome(outcome)
        planned = outcome.end
    return outcomes


class _History:
    """All that was said, as the endpoint takes it: messages, or one text that grows."""

    def __init__(self, chat: bool) -> None:
        self._chat = chat
        self._messages: list[dict[str, str]] = []
        self._text: Any = None

    def ask(self, prompt: Any) -> Any:
        if self._chat:
            self._messages.append({"role": "user", "content": prompt})
            return list(self._messages)
        self._text = prompt if self._text is None else self._text + prompt
        return self._text

    def answer(self, text: str) -> None:
        if self._chat:
            self._messages.append({"role": "assistant", "content": text})
        elif isinstance(self._text, str):
            self._text += text
