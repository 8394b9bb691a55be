"""Launches of the Triton kernels with the shapes of known models, for compilation ahead of time.

Runs in the `compiled` process: nothing is computed, only types and shapes of the tensors matter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engine.ops.triton.plan import GroupPlan, Planner
from tests.engine.tables import packed_rows
from tests.engine.triton_ahead import Used, compile_launched, count_late, count_variants


def attention(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    page: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    with_sinks: bool = False,
) -> list[Used]:
    """What the kernels of a mixed step use."""
    from engine.ops.triton.decode import decode
    from engine.ops.triton.prefill import prefill
    from engine.ops.triton.tile import ScoreRule

    plan = make_plan(page, window)
    query = torch.zeros(32, heads, dim, dtype=dtype)
    cache = torch.zeros(60, kv_heads, page, dim, dtype=dtype)
    sinks = torch.zeros(heads, dtype=dtype) if with_sinks else None
    rule = ScoreRule.of(dim, None, softcap)

    def launch() -> None:
        for kernel in (decode, prefill):
            kernel(query, cache, cache, plan, query, window=window, rule=rule, sinks=sinks)

    return compile_launched(launch)


def others(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, width: int, vocab: int) -> list[Used]:
    """What norms, gates, rotation, the cache write, clearing of blocks and sampling of a model use."""
    from engine.ops.triton.clear import BlockClearer
    from engine.ops.triton.gate import gated
    from engine.ops.triton.norms import add_norm, rms_norm
    from engine.ops.triton.rotary import rotate_and_write
    from engine.ops.triton.sampling import choose_in_vocabulary_order, choose_most_likely, find_best
    from engine.ops.triton.write import write
    from engine.sampling.scores import Scores, Workspace

    plan = make_plan(16, None)
    cache = torch.zeros(60, kv_heads, 16, dim, dtype=dtype), torch.zeros(60, kv_heads, 16, dim, dtype=dtype)
    projected = torch.zeros(32, (heads + 2 * kv_heads) * dim, dtype=dtype)
    query, key, value = projected.split((heads * dim, kv_heads * dim, kv_heads * dim), dim=1)
    x, weight, table = torch.zeros(32, width, dtype=dtype), torch.zeros(width), torch.zeros(700, 2, dim // 2)
    norms = torch.zeros(dim), torch.zeros(dim)
    logits = torch.zeros(2, vocab, dtype=dtype)
    scores = Scores(logits, Workspace(), torch.tensor([0, 1]), torch.zeros(2), torch.ones(2))
    numbers = torch.ones(3, 2, dtype=torch.float64)

    def launch() -> None:
        rms_norm(x, weight, 1e-6)
        add_norm(x, x, weight, 1e-6, weight)
        gated(x, x, "silu")
        rotate_and_write(query, key, value, torch.arange(32), table, cache, plan, norms, 1e-6)
        write(*(part.unflatten(1, (kv_heads, dim)).transpose(0, 1) for part in (key, value)), *cache, plan)
        BlockClearer(cache)(torch.zeros(9, dtype=torch.int32)[4:])
        find_best(logits)
        choose_in_vocabulary_order(scores, *numbers[1:])
        choose_most_likely(scores, torch.tensor([50, 20]), 50, *numbers)
        choose_most_likely(scores, None, 0, *numbers)

    return compile_launched(launch)


def variants(sizes: list[int]) -> dict[str, int]:
    """Kernels of each name that steps of so many rows need: half of them of one token, the others of several."""
    from engine.ops.triton.decode import decode
    from engine.ops.triton.norms import add_norm
    from engine.ops.triton.prefill import prefill
    from engine.ops.triton.rotary import rotate_and_write
    from engine.ops.triton.sampling import choose_in_vocabulary_order, choose_most_likely, find_best
    from engine.ops.triton.tile import ScoreRule
    from engine.sampling.scores import Scores, Workspace

    cache = torch.zeros(60, 2, 16, 32), torch.zeros(60, 2, 16, 32)
    table, planner = torch.zeros(700, 2, 16), Planner(16)

    def step(size: int) -> None:
        counts = np.array([1] * (size - size // 2) + [3] * (size // 2))
        starts, tokens = np.arange(size) * 7, int(counts.sum())
        rows = packed_rows(starts, counts, np.cumsum(counts) - counts, [[[1] * 20] * size], size - size // 2)
        assert rows.block_tables is not None
        plan = planner.exact(rows, rows.block_tables[0], None)
        projected = (torch.zeros(tokens, width) for width in (128, 64, 64))
        positions = torch.zeros(2 * tokens, dtype=torch.int64)[tokens:]
        query, keys, values = rotate_and_write(*projected, positions, table, cache, plan)
        for kernel in (decode, prefill):
            kernel(query, keys, values, plan, query, window=None, rule=ScoreRule.of(32, None, None))
        add_norm(torch.zeros(tokens, 64), torch.zeros(tokens, 64), torch.zeros(64), 1e-6)
        numbers = torch.ones(3, size, dtype=torch.float64)
        logits, lines = torch.zeros(size, 90), torch.arange(2 * size)[size:]
        scores = Scores(logits, Workspace(), lines, torch.zeros(size), torch.ones(size))
        find_best(logits)
        choose_in_vocabulary_order(scores, *numbers[1:])
        choose_most_likely(scores, torch.full((size,), 5), 5, *numbers)

    return count_variants(lambda: [step(size) for size in sizes])


def sampling_after_warm_up(dtype: torch.dtype, fields: list[dict[str, Any]]) -> tuple[int, set[str]]:
    """Kernels that a sampler compiles when it is warmed up, and those that rows of these parameters then lack."""
    from engine.ops.triton import sampling
    from engine.sampling.sampler import Sampler
    from tests.engine.test_sampling import request

    sampler = Sampler(5000, sampling)

    def steps() -> None:
        for count in (1, 2, 16, 33):
            for each in fields:
                requests = [request(**each) for _ in range(count)]
                sampler(torch.zeros(count, 5000, dtype=dtype), sampler.plan(requests))

    return count_late(lambda: sampler.warm_up(torch.device("cpu"), dtype), steps)


def make_plan(page: int, window: int | None) -> GroupPlan:
    """Two rows of one token and one of thirty."""
    tables = [[[1] * (700 // page + 1)] * 3]
    rows = packed_rows(np.array([600, 20, 5]), np.array([1, 1, 30]), np.array([0, 1, 2]), tables, 2)
    assert rows.block_tables is not None
    return Planner(page).exact(rows, rows.block_tables[0], window)
