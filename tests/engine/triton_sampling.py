"""What the tests of the Triton sampling kernels run in the interpreter's process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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


class Drawn(NamedTuple):
    """What rows are drawn from: scores, and numbers float64 [n]."""

    scores: Scores
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor


def make_rows(
    vocab: int,
    top_p: float,
    min_p: float = 0.0,
    *,
    rows: int = 3,
    spread: float = 3.0,
    temperature: float = 1.0,
    ties: bool = False,
    uniform: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Drawn:
    """Random rows, among others and not in their order; `ties`: of whole numbers; `uniform`: of each row."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2 * rows, vocab, generator=generator) * spread
    logits = logits.round() if ties else logits
    logits[:, 3::7] = float("-inf")
    at = torch.randperm(2 * rows, generator=generator)[:rows]
    logits, at = logits.to(device, dtype), at.to(device)
    best = logits.amax(-1).float()[at]
    scores = Scores(logits, Workspace(), at, best, torch.full((rows,), temperature, device=device))
    draw = torch.rand(rows, generator=generator, dtype=torch.float64)
    if uniform is not None:
        draw = torch.tensor(uniform, dtype=torch.float64)
    numbers = (torch.full((rows,), each, dtype=torch.float64, device=device) for each in (top_p, min_p))
    return Drawn(scores, *numbers, draw.to(device))


def as_compared(own: Choice, expected: Choice) -> Compared:
    difference = (own.log_total - expected.log_total).abs().max().item()
    return Compared(
        own.tokens.tolist(), expected.tokens.tolist(), own.kept.tolist(), expected.kept.tolist(), difference
    )


def compare(vocab: int, top_k: int | None, top_p: float, min_p: float = 0.0, **options: Any) -> Compared:
    """Of the most likely tokens of `make_rows`."""
    from engine.ops.triton.sampling import choose_most_likely

    scores, *numbers = make_rows(vocab, top_p, min_p, **options)
    plain = replace(scores, logits=scores.logits.float())
    if top_k is None:
        own = choose_most_likely(scores, None, 0, *numbers)
        return as_compared(own, processors.choose_from_nucleus(plain, *numbers))
    top_k = min(top_k, vocab)
    ks = torch.full_like(numbers[0], top_k, dtype=torch.int64)
    choose = processors.choose_from_top_k if top_k <= 1024 else processors.choose_from_all_sorted
    return as_compared(choose_most_likely(scores, ks, top_k, *numbers), choose(plain, ks, *numbers))


def compare_in_vocabulary_order(vocab: int, min_p: float = 0.0, **options: Any) -> Compared:
    """Of all tokens of `make_rows`."""
    from engine.ops.triton.sampling import choose_in_vocabulary_order

    scores, _, *numbers = make_rows(vocab, 1.0, min_p, **options)
    own = choose_in_vocabulary_order(scores, *numbers)
    expected = processors.choose_in_vocabulary_order(replace(scores, logits=scores.logits.float()), *numbers)
    assert own.least is not None and expected.least is not None and torch.equal(own.least, expected.least)
    return as_compared(own, expected)


def drawn_alone_and_together(vocab: int, device: torch.device | str = "cpu") -> bool:
    """Whether each row draws the same, with the same total to the last bit, alone and beside others."""
    from engine.ops.triton.sampling import choose_in_vocabulary_order

    scores, _, *numbers = make_rows(vocab, 1.0, 0.01, rows=4, spread=1.0, device=device)
    together, same = choose_in_vocabulary_order(scores, *numbers), True
    for row in range(4):
        at = torch.tensor([row], device=device)
        alone = choose_in_vocabulary_order(scores.narrowed(at), *(each[at] for each in numbers))
        same &= all(torch.equal(one, all_[at]) for one, all_ in zip(alone, together, strict=True))
    return same


def best_differences(vocab: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> list[str]:
    """Where `find_best` and max() differ: among random rows, ties, infinities, NaN and zeros of both signs."""
    from engine.ops.triton.sampling import find_best

    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(0))
    last, nan, infinity = vocab - 1, float("nan"), float("inf")
    logits[1] = logits[1].round()
    logits[2] = 0.0
    logits[2, ::2] = -0.0
    logits[3, last], logits[4, last // 2], logits[5] = nan, infinity, -infinity
    logits[6] = -infinity
    logits[6, last] = -3.0
    logits[7, 0], logits[8, 0] = -nan, 90.0
    logits = logits.to(device, dtype)
    before = logits.clone()
    (tokens, bad), values = find_best(logits)
    expected, ids = logits.float().max(-1)
    wrong = ~expected.isfinite()
    pairs = {
        "bad": (bad.bool(), wrong),
        "tokens": (tokens, ids.masked_fill(wrong, 0)),
        "values": (values[~wrong], expected[~wrong]),
        "values of bad rows": (values.isfinite(), ~wrong),
        "logits": (logits.nan_to_num(), before.nan_to_num()),
    }
    return [name for name, (own, theirs) in pairs.items() if not torch.equal(own, theirs)]


def tokens_of_bad_rows(vocab: int, device: torch.device | str = "cpu") -> list[int]:
    """What is drawn from rows of NaN, of infinity and of nothing; memory that nobody writes to holds large numbers."""
    from engine.ops.triton import sampling

    scores, *numbers = make_rows(vocab, 0.9, 0.1, rows=4, device=device)
    logits = scores.logits
    logits[0], logits[1, vocab // 2], logits[2, vocab // 3] = float("-inf"), float("nan"), float("inf")
    logits[3] = float("nan")
    scores.rows, ks = torch.arange(4, device=device), torch.full((4,), 3, device=device)
    torch.use_deterministic_algorithms(True)  # fills it
    try:
        scores.best = sampling.find_best(logits)[1]
        choices = [
            sampling.choose_most_likely(scores, ks, 3, *numbers),
            sampling.choose_most_likely(scores, None, 0, *numbers),
            sampling.choose_in_vocabulary_order(scores, *numbers[1:]),
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    return [token for choice in choices for token in choice.tokens.tolist()]


KINDS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"top_k": 5},
    {"top_k": 9, "top_p": 0.8, "temperature": 2.0},
    {"top_k": 0, "top_p": 0.7},
    {"top_k": 0, "min_p": 0.1},
    {"top_k": 5},
    {"top_k": 0, "top_p": 0.5},
    {"top_k": 0, "temperature": 1.5},
]


def sampled_with_and_without(dtype: torch.dtype, **fields: Any) -> list[tuple[list[int], list[int]]]:
    """Tokens and bad rows of a whole step of rows of every kind, by the kernels and by processors.py."""
    from engine.ops.triton import sampling

    generator = torch.Generator().manual_seed(3)
    requests = [request(seed=row, **({"do_sample": True} | kind | fields)) for row, kind in enumerate(KINDS)]
    logits = torch.randn(len(KINDS), 64, generator=generator) * 2
    logits[5, 7], logits[6, :] = float("nan"), float("-inf")
    results = []
    for sampler in (Sampler(64, sampling), Sampler(64)):
        sampled = sampler(logits.to(dtype, copy=True), sampler.plan(requests))
        results.append((sampled.token_ids.tolist(), sampled.bad.tolist()))
    return results
