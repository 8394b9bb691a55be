"""Shapes of traffic for the routing simulator: conversations whose prompts are chains of block ids.

A block is 64 tokens and its id the hash of the prefix that it ends, as in a hint, so prompts share exactly the blocks
of their common prefix. Called by the simulator; knows nothing of replicas or policies.
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

BLOCK = 64
CONTEXT = 8192


class Turn(NamedTuple):
    """One request.

    Attributes:
        blocks: ids of the prompt's full blocks.
        answer: ids of the blocks that its answer completes.
        prompt, output: tokens.
        limit: of the output, as the caller states it.
        think_s: from the end of the answer before to this request.
    """

    blocks: list[int]
    answer: list[int]
    prompt: int
    output: int
    limit: int
    think_s: float


@dataclass(frozen=True)
class Workload:
    """A kind of traffic.

    Attributes:
        conversations: makes an endless stream of conversations for so many replicas.
        sharing: whether there is anything to hit.
        says: what it is, in one line.
    """

    name: str
    conversations: Callable[[int, random.Random], Iterator[list[Turn]]]
    sharing: bool
    says: str


class _Prefix:
    """A growing token sequence."""

    def __init__(self, rng: random.Random, blocks: list[int] | None = None, tokens: int = 0) -> None:
        self._rng = rng
        self.blocks = blocks if blocks is not None else []
        self.tokens = tokens

    def grow(self, tokens: int) -> _Prefix:
        self.tokens += tokens
        missing = self.tokens // BLOCK - len(self.blocks)
        if missing > 0:
            self.blocks = self.blocks + [self._rng.getrandbits(64) for _ in range(missing)]
        return self

    def fork(self) -> _Prefix:
        return _Prefix(self._rng, self.blocks, self.tokens)


def _length(rng: random.Random, mean: float, sigma: float, least: int, most: int) -> int:
    """A log-normal length in tokens."""
    return max(least, min(most, round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))


def _turn(rng: random.Random, prefix: _Prefix, output: int, think_s: float = 0.0) -> Turn:
    """The request that `prefix` is the prompt of. Grows it by the answer."""
    blocks, prompt = prefix.blocks, prefix.tokens
    prefix.grow(output)
    limit = min(1024, round(output * rng.uniform(1.0, 4.0)))
    return Turn(blocks, prefix.blocks[len(blocks) :], prompt, output, limit, think_s)


def _zipf(rng: random.Random, count: int, exponent: float) -> Callable[[], int]:
    """Draws of 0 ... count - 1, the first most often."""
    sums = list(itertools.accumulate((rank + 1) ** -exponent for rank in range(count)))
    return lambda: min(count - 1, bisect(sums, rng.random() * sums[-1]))


def _chat(replicas: int, rng: random.Random) -> Iterator[list[Turn]]:
    apps = [_Prefix(rng).grow(_length(rng, 400, 0.5, 100, 1500)) for _ in range(max(4, replicas // 4))]
    draw = _zipf(rng, len(apps), 1.0)
    while True:
        prefix = apps[draw()].fork()
        turns: list[Turn] = []
        while not turns or (rng.random() < 5 / 6 and prefix.tokens < CONTEXT - 2000):
            prefix.grow(_length(rng, 80, 0.9, 8, 1000))
            turns.append(_turn(rng, prefix, _length(rng, 200, 0.7, 8, 1000), rng.expovariate(1 / 3)))
        yield turns


def _shared(replicas: int, rng: random.Random) -> Iterator[list[Turn]]:
    prompts = [_Prefix(rng).grow(_length(rng, 1500, 0.6, 300, 4000)) for _ in range(8 * replicas)]
    draw = _zipf(rng, len(prompts), 1.1)
    while True:
        prefix = prompts[draw()].fork().grow(_length(rng, 150, 0.8, 8, 1000))
        yield [_turn(rng, prefix, _length(rng, 120, 0.7, 8, 600))]


def _rag(replicas: int, rng: random.Random) -> Iterator[list[Turn]]:
    system = _Prefix(rng).grow(200)
    documents = [system.fork().grow(_length(rng, 1800, 0.4, 600, 4000)) for _ in range(20 * replicas)]
    draw = _zipf(rng, len(documents), 0.9)
    while True:
        prefix = documents[draw()].fork().grow(_length(rng, 40, 0.5, 8, 200))
        yield [_turn(rng, prefix, _length(rng, 150, 0.7, 8, 600))]


def _unshared(replicas: int, rng: random.Random) -> Iterator[list[Turn]]:
    while True:
        prefix = _Prefix(rng).grow(_length(rng, 600, 0.8, 64, 4000))
        yield [_turn(rng, prefix, _length(rng, 200, 0.7, 8, 1000))]


WORKLOADS = {
    one.name: one
    for one in (
        Workload("chat", _chat, True, "conversations of 6 turns on average below one of n/4 system prompts (Zipf 1)"),
        Workload("system", _shared, True, "one question below one of 8n system prompts of 1500 tokens (Zipf 1.1)"),
        Workload("rag", _rag, True, "one question on one of 20n documents of 1800 tokens (Zipf 0.9)"),
        Workload("unshared", _unshared, False, "prompts of 600 tokens that have nothing in common"),
    )
}
