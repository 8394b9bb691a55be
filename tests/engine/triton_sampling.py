"""What the tests of the Triton sampling kernels run in the interpreter's process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from engine.sampling import processors
from engine.sampling.processors import Choice
from engine.sampling.sampler import Sampler
from engine.sampling.scores import Scores, Workspace
from tests.engine.test_sampling import request


class Compared(NamedTuple):
    """What the kernels and the processors of engine/sampling chose, and the largest difference of their totals."""

    own: list[int]
    expected: list[int]
    kept: list[int]
    expected_kept: list[int]
    difference: float


def compare(
    vocab: int,
    top_k: int | None,
    top_p: float,
    min_p: float = 0.0,
    *,
    rows: int = 3,
    spread: float = 3.0,
    temperature: float = 1.0,
    ties: bool = False,
    uniform: Sequence[float] | None = None,
    device: torch.device | str = "cpu",
) -> Compared:
    """Random rows, among others and not in their order; `ties`: of whole numbers; `uniform`: of each row."""
    from engine.ops.triton.choose import choose_most_likely

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2 * rows, vocab, generator=generator) * spread
    logits = logits.round() if ties else logits
    logits[:, 3::7] = float("-inf")
    at = torch.randperm(2 * rows, generator=generator)[:rows]
    logits, at = logits.to(device), at.to(device)
    scores = Scores(logits, Workspace(), at, logits.amax(-1)[at], torch.full((rows,), temperature, device=device))
    draw = torch.rand(rows, generator=generator, dtype=torch.float64)
    if uniform is not None:
        draw = torch.tensor(uniform, dtype=torch.float64)
    numbers = (
        *(torch.full((rows,), each, dtype=torch.float64, device=device) for each in (top_p, min_p)),
        draw.to(device),
    )
    ks = None if top_k is None else torch.full((rows,), min(top_k, vocab), device=device)
    own = choose_most_likely(scores, ks, *numbers)
    expected: Choice
    if ks is None:
        expected = processors.choose_from_nucleus(scores, *numbers)
    else:
        choose = processors.choose_from_top_k if ks.max() <= 1024 else processors.choose_from_all_sorted
        expected = choose(scores, ks, *numbers)
    difference = (own.log_total - expected.log_total).abs().max().item()
    return Compared(
        own.tokens.tolist(), expected.tokens.tolist(), own.kept.tolist(), expected.kept.tolist(), difference
    )


def sampled_with_and_without() -> list[tuple[list[int], list[bool]]]:
    """Tokens and bad rows of a whole step of rows of every kind, by the kernels and by processors.py."""
    from engine.ops.triton.choose import choose_most_likely

    generator = torch.Generator().manual_seed(3)
    kinds: list[dict[str, Any]] = [
        {"do_sample": False},
        {"top_k": 5},
        {"top_k": 9, "top_p": 0.8, "temperature": 2.0},
        {"top_k": 0, "top_p": 0.7},
        {"top_k": 0, "min_p": 0.1},
        {"top_k": 5},
        {"top_k": 0, "top_p": 0.5},
    ]
    requests = [request(seed=row, **({"do_sample": True} | kind)) for row, kind in enumerate(kinds)]
    logits = torch.randn(len(kinds), 64, generator=generator) * 2
    logits[5, 7], logits[6, :] = float("nan"), float("-inf")
    results = []
    for sampler in (Sampler(64, choose_most_likely), Sampler(64)):
        sampled = sampler(logits.clone(), sampler.plan(requests))
        results.append((sampled.token_ids.tolist(), sampled.bad.tolist()))
    return results
