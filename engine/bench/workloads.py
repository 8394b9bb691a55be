"""The workloads that every engine runs alike: what to generate from, how much, and nothing of how.

Six are seeded random token ids, which share no prefix with one another or with another seed unless the workload is
about that; two are English prompts of `engine.bench.prompts`. All are greedy, of fixed length, with EOS ignored.
Called by the measurements; knows no engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.bench import prompts

Encode = Callable[[Sequence[prompts.Message]], list[int]]


class Work(NamedTuple):
    """One request: prompt token ids, and exactly how many tokens to generate."""

    prompt: list[int]
    new_tokens: int


SYNTHETIC = {
    "single": "1 x (32 -> 128)",
    "decode": "64 x (32 -> 128)",
    "mixed": "64 x (32..512 -> 16..128)",
    "prefix": "4 heads of 512, 64 x (+32 -> 32)",
    "prefill": "4 x (2048 -> 1)",
    "long": "16 x (1500 -> 64)",
}
REAL = {
    "chat": "32 x (a question -> 128)",
    "summarise": "16 x (instructions + a report -> 96)",
}
DESCRIPTIONS = SYNTHETIC | REAL


def build(name: str, seed: int, vocab_size: int, encode: Encode | None = None) -> list[Work]:
    """The requests of a workload; the same for the same arguments, whatever the Python version.

    Args:
        name: a key of `DESCRIPTIONS`.
        seed: another one gives other prompts, so that no cache answers from an earlier repetition.
        vocab_size: synthetic ids lie in [100, vocab_size - 100).
        encode: chat messages to token ids, which the real workloads need.

    Raises:
        ValueError: the name is unknown, the vocabulary has 200 tokens or fewer, or `encode` is missing.
    """
    if name in REAL:
        if encode is None:
            raise ValueError(f"workload {name!r} is made of text: the model's tokenizer is needed")
        return _real(name, seed, encode)
    if name not in SYNTHETIC:
        raise ValueError(f"unknown workload {name!r}: these are {', '.join(DESCRIPTIONS)}")
    if vocab_size <= 200:
        raise ValueError(f"a vocabulary of {vocab_size} tokens is too small: more than 200 are needed")
    return _synthetic(name, random.Random(seed), vocab_size)


def _synthetic(name: str, rng: random.Random, vocab_size: int) -> list[Work]:
    # The order of the draws is part of the workload: a hash in the tests holds it.
    def ids(length: int) -> list[int]:
        return [rng.randrange(100, vocab_size - 100) for _ in range(length)]

    if name == "single":
        return [Work(ids(32), 128)]
    if name == "decode":
        return [Work(ids(32), 128) for _ in range(64)]
    if name == "mixed":
        return [Work(ids(rng.randint(32, 512)), rng.randint(16, 128)) for _ in range(64)]
    if name == "prefix":
        heads = [ids(512) for _ in range(4)]
        return [Work(heads[i % 4] + ids(32), 32) for i in range(64)]
    if name == "prefill":
        return [Work(ids(2048), 1) for _ in range(4)]
    return [Work(ids(1500), 64) for _ in range(16)]


def _real(name: str, seed: int, encode: Encode) -> list[Work]:
    if name == "chat":
        return [Work(encode(messages), 128) for messages in prompts.chats(seed, 32)]
    return [Work(encode(messages), 96) for messages in prompts.summaries(seed, 16)]


def shared_prompt(seed: int, length: int, vocab_size: int) -> list[int]:
    """A prompt of `length` random ids, to be sent twice: first cold, then as a prefix hit."""
    rng = random.Random(f"shared-{seed}-{length}")
    return [rng.randrange(100, vocab_size - 100) for _ in range(length)]
