"""Decode plans of fixed shapes: the numbers of a plain plan, whatever pads the step, and shapes that never change."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from engine.cache.groups import LayerGroup
from engine.execution.kv_tensors import KVTensors, allocate
from engine.ops.cpu.cpu_ops import CpuOps
from engine.ops.eager_ops import EagerOps
from engine.ops.fixed_decode import FixedPlan
from engine.ops.interface import PackedRows
from engine.ops.torch_ops import TorchOps
from tests.engine.tables import packed_rows

PAGE, HEADS, KV_HEADS, DIM, BLOCKS = 4, 6, 2, 16, 60
TRASH = BLOCKS  # the last block
NUM_ROWS, MAX_BLOCKS = 8, 6


class Cache:
    """One layer whose rows have random contexts; all other memory is `rest`."""

    def __init__(
        self,
        ops_class: type[TorchOps],
        lengths: list[int],
        rest: float = math.nan,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.kv: KVTensors = allocate(1, BLOCKS, KV_HEADS, PAGE, DIM, dtype)
        self.ops = ops_class(self.kv)
        self.lengths = sorted(lengths, reverse=True)
        free = (torch.randperm(BLOCKS - 1, generator=generator) + 1).tolist()
        self.tables = [[free.pop() for _ in range(-(-length // PAGE))] for length in self.lengths]
        for tensor in (self.kv.keys[0], self.kv.values[0]):
            tensor[1:] = rest
            for length, table in zip(self.lengths, self.tables, strict=True):
                for position in range(length - 1):
                    line = torch.randn(KV_HEADS, DIM, generator=generator).to(dtype)
                    tensor[table[position // PAGE], :, position % PAGE] = line

    @property
    def rows(self) -> PackedRows:
        count = len(self.lengths)
        return packed_rows(np.array(self.lengths) - 1, np.ones(count, np.int64), np.arange(count), [self.tables], count)

    def run(self, plan: object, rows: int, **rule: object) -> torch.Tensor:
        """Writes and attends; the tokens of the first rows are the same in every call."""
        generator = torch.Generator().manual_seed(1)
        query, key, value = (
            torch.randn(NUM_ROWS, heads, DIM, generator=generator).to(self.kv.dtype)[:rows]
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        key, value = key.transpose(0, 1), value.transpose(0, 1)
        self.ops.write_kv(0, key, value, plan)  # type: ignore[arg-type]
        return self.ops.attend(0, query, key, value, plan, None, **rule)  # type: ignore[arg-type]


@pytest.mark.parametrize("ops_class", [TorchOps, EagerOps])
@pytest.mark.parametrize("lengths", [[1], [24, 1], [5, 4, 3], [24, 20, 13, 8, 7, 5, 4, 1]])
@pytest.mark.parametrize("special", [False, True])
def test_the_numbers_of_a_plain_plan(ops_class: type[TorchOps], lengths: list[int], special: bool) -> None:
    rule = {"softcap": 2.0, "sinks": torch.linspace(-1, 1, HEADS)} if special else {}
    plain, fixed = Cache(ops_class, lengths, 0.0), Cache(ops_class, lengths)
    expected = plain.run(plain.ops.plan(plain.rows), len(lengths), **rule)
    out = fixed.run(fixed.ops.plan_decode(fixed.rows, NUM_ROWS, MAX_BLOCKS), NUM_ROWS, **rule)
    torch.testing.assert_close(out[: len(lengths)], expected, rtol=1e-5, atol=1e-6)
    assert out.isfinite().all()


def test_padding_writes_to_the_trash_block_alone() -> None:
    cache = Cache(TorchOps, [9, 5])
    cache.run(cache.ops.plan_decode(cache.rows, NUM_ROWS, MAX_BLOCKS), NUM_ROWS)
    for tensor in (cache.kv.keys[0], cache.kv.values[0]):
        assert not tensor[0].any()
        assert not tensor[TRASH, :, 0].isnan().any()
        written = {block for table in cache.tables for block in table} | {0, TRASH}
        for block in set(range(BLOCKS + 1)) - written:
            assert tensor[block].isnan().all()


def test_bfloat16_cache_and_float32_queries() -> None:
    cache = Cache(TorchOps, [9, 5], dtype=torch.bfloat16)
    plan = cache.ops.plan_decode(cache.rows, NUM_ROWS, MAX_BLOCKS)
    exact = cache.run(plan, NUM_ROWS)
    query = torch.randn(NUM_ROWS, HEADS, DIM)
    out = cache.ops.attend(0, query, query, query, plan, None)
    assert exact.dtype == torch.bfloat16 and out.dtype == torch.float32 and out.isfinite().all()


def test_a_recorded_plan_serves_later_steps() -> None:
    """As a graph does it: one plan whose tensors stay where they are and take over each step's values."""
    static: FixedPlan | None = None
    for lengths in ([9, 5], [3], [24, 20, 13, 8, 7, 5, 4, 1], [16, 4]):
        cache, plain = Cache(TorchOps, lengths), Cache(TorchOps, lengths, 0.0)
        plan = cache.ops.plan_decode(cache.rows, NUM_ROWS, MAX_BLOCKS)
        if static is None:
            static = plan
        for field in dataclasses.fields(FixedPlan):
            old, new = getattr(static, field.name), getattr(plan, field.name)
            assert old.shape == new.shape and old.dtype == new.dtype
            old.copy_(new)
        out = cache.run(static, NUM_ROWS)[: len(lengths)]
        expected = plain.run(plain.ops.plan(plain.rows), len(lengths))
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_steps_of_both_kinds_follow_each_other() -> None:
    """A block that a fixed plan has begun is read by a plain one, and held NaN before."""
    generator = torch.Generator().manual_seed(0)
    kv = allocate(1, 8, KV_HEADS, PAGE, DIM, torch.float32)
    for tensor in (kv.keys[0], kv.values[0]):
        tensor[1:] = math.nan
    ops, tables, seen = TorchOps(kv), [[5, 2, 7]], []
    for start in range(12):
        rows = packed_rows(np.array([start]), np.array([1]), np.array([0]), [tables], 1)
        plan = ops.plan(rows) if start % 3 else ops.plan_decode(rows, 2, 3)
        tokens = 1 if start % 3 else 2
        query, key = (torch.randn(heads, tokens, DIM, generator=generator) for heads in (HEADS, KV_HEADS))
        ops.write_kv(0, key, key, plan)
        out = ops.attend(0, query.transpose(0, 1), key, key, plan, None)
        seen.append(key[:, :1])
        keys = torch.cat(seen, dim=1).repeat_interleave(HEADS // KV_HEADS, dim=0)
        expected = ((query[:, :1] @ keys.transpose(1, 2)) * DIM**-0.5).softmax(-1) @ keys
        torch.testing.assert_close(out[:1], expected.transpose(0, 1), rtol=1e-5, atol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    cache = Cache(TorchOps, [24, 9, 5])
    with pytest.raises(ValueError, match="2 rows of one token fit this plan, not 3"):
        cache.ops.plan_decode(cache.rows, 2, MAX_BLOCKS)
    with pytest.raises(ValueError, match="a row of 6 blocks does not fit a plan of 5"):
        cache.ops.plan_decode(cache.rows, NUM_ROWS, 5)
    longer = packed_rows(np.array([0]), np.array([2]), np.array([0]), [[[1]]], 0)
    with pytest.raises(ValueError, match="one token"):
        cache.ops.plan_decode(longer, NUM_ROWS, MAX_BLOCKS)


def test_which_ops_have_such_plans() -> None:
    kv = allocate(2, 4, 1, 4, 8, torch.float32)
    full, windowed = LayerGroup((0,)), LayerGroup((1,), 4)
    assert TorchOps(kv).supports_graphs == EagerOps(kv).supports_graphs == (False, True)
    assert CpuOps(kv).supports_graphs == (False, False)
    ops = TorchOps(kv, [full, windowed])
    assert ops.supports_graphs == (False, False)
    with pytest.raises(NotImplementedError, match="sliding window"):
        ops.plan_decode(packed_rows(*(np.zeros(0, np.int64),) * 3, [[], []], 0), 1, 1)
