"""The ops of torch and of CPU against a plain float64 computation, on caches whose unused memory is NaN."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.cache.groups import LayerGroup
from engine.execution.kv_tensors import KVTensors, allocate
from engine.ops.cpu.cpu_ops import CpuOps
from engine.ops.eager_ops import EagerOps
from engine.ops.flash.fused import FlashTritonOps
from engine.ops.flash.ops import FlashOps
from engine.ops.interface import Ops
from engine.ops.torch_ops import TorchOps
from tests.engine.kv_layout import spoil
from tests.engine.tables import packed_rows

NUM_BLOCKS = 400
MakeOps = Callable[[KVTensors, list[LayerGroup]], Ops]


@pytest.fixture(params=[TorchOps, EagerOps, CpuOps])
def make_ops(request: pytest.FixtureRequest) -> MakeOps:
    return request.param


class Sequences:
    """Sequences that grow in one cache, every one with its own random K/V, and what attention must give for them.

    With a window, what a sequence no longer sees is NaN: blocks behind it are taken away, to be used again, and so are
    the tokens behind it in its first block, which flash kernels alone may not find there.
    """

    def __init__(
        self,
        make_ops: MakeOps,
        page: int,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 16,
        dtype: torch.dtype = torch.float32,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = device
        self.window, self.softcap, self.sinks = window, softcap, sinks
        self.heads, self.kv_heads, self.dim, self.page, self.dtype = heads, kv_heads, dim, page, dtype
        self.kv: KVTensors = allocate(1, NUM_BLOCKS, kv_heads, page, dim, dtype, device)
        for tensor in (*self.kv.keys, *self.kv.values):
            tensor[1:] = float("nan")
        self.ops = make_ops(self.kv, [LayerGroup((0,), window)])
        self.generator = torch.Generator().manual_seed(0)
        order = torch.randperm(NUM_BLOCKS, generator=self.generator) + 1
        self.free: list[int] = order.tolist()
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.tables: list[list[int]] = []

    def add(self, *lengths: int) -> None:
        for length in lengths:
            if length:
                self.step([(self.new(), length)])
            else:
                self.new()

    def new(self) -> int:
        self.keys.append(torch.empty(self.kv_heads, 0, self.dim, dtype=self.dtype, device=self.device))
        self.values.append(self.keys[-1])
        self.tables.append([])
        return len(self.tables) - 1

    def drop(self, sequence: int) -> None:
        """Returns the blocks, to be taken next, with whatever they hold."""
        self.free = self.tables[sequence] + self.free
        self.tables[sequence] = []

    def forget(self, sequence: int) -> None:
        """Spoils what the next token of a sequence does not see."""
        if self.window is None:
            return
        first = max(0, self.keys[sequence].shape[1] - self.window + 1)
        table = self.tables[sequence]
        packed = isinstance(self.ops, CpuOps)
        for index, block in enumerate(table[: first // self.page + 1]):
            is_seen = index == first // self.page
            if (
                block
                and first > index * self.page
                and not (is_seen and isinstance(self.ops, FlashOps | FlashTritonOps))
            ):
                spoiled = slice(0, first - index * self.page)
                spoil(self.kv.keys[0], self.kv.values[0], block, spoiled, packed=packed)
        behind = table[: first // self.page]
        self.free += [block for block in behind if block]
        table[: len(behind)] = [0] * len(behind)

    def random(self, heads: int, tokens: int) -> torch.Tensor:
        """[heads, tokens, dim], laid out as a model's projections are."""
        drawn = torch.randn(tokens, heads, self.dim, generator=self.generator)
        return drawn.to(self.device, self.dtype).transpose(0, 1)

    def random_kv(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.random(self.kv_heads, tokens), self.random(self.kv_heads, tokens)

    def step(
        self,
        growth: list[tuple[int, int]],
        scaling: float | None = None,
        kv: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> dict[int, float]:
        """Appends tokens to sequences in one step; returns each one's largest error.

        `kv` are the new K and V in packed order, random by default.
        """
        growth = sorted(growth, key=lambda row: (row[1] != 1, -self.keys[row[0]].shape[1] * (row[1] == 1)))
        starts = [self.keys[sequence].shape[1] for sequence, _ in growth]
        counts = [count for _, count in growth]
        for (sequence, count), start in zip(growth, starts, strict=True):
            self.forget(sequence)
            table = self.tables[sequence]
            while len(table) * self.page < start + count:
                table.append(self.free.pop(0))
        rows = packed_rows(
            starts=np.array(starts),
            counts=np.array(counts),
            offsets=np.cumsum(counts) - counts,
            block_tables=[[self.tables[sequence] for sequence, _ in growth]],
            num_single=counts.count(1),
        )
        query = self.random(self.heads, sum(counts)).transpose(0, 1)
        key, value = kv or self.random_kv(sum(counts))
        with torch.inference_mode():
            plan = self.ops.plan(rows)
            self.ops.write_kv(0, key, value, plan)
            out = self.ops.attend(0, query, key, value, plan, scaling, self.softcap, self.sinks)
        errors = {}
        for (sequence, count), offset in zip(growth, rows.offsets.tolist(), strict=True):
            span = slice(offset, offset + count)
            self.keys[sequence] = torch.cat((self.keys[sequence], key[:, span]), dim=1)
            self.values[sequence] = torch.cat((self.values[sequence], value[:, span]), dim=1)
            expected = self.expected(sequence, query[span], scaling)
            errors[sequence] = (out[span].double() - expected).abs().max().item()
        return errors

    def expected(self, sequence: int, query: torch.Tensor, scaling: float | None) -> torch.Tensor:
        """[tokens, heads, dim] in float64, for queries at the sequence's last positions."""
        group = self.heads // self.kv_heads
        key, value = (x[sequence].double().repeat_interleave(group, dim=0) for x in (self.keys, self.values))
        scores = query.double().transpose(0, 1) @ key.transpose(1, 2) * (scaling or 1 / math.sqrt(self.dim))
        if self.softcap is not None:
            scores = self.softcap * (scores / self.softcap).tanh()
        length, tokens = key.shape[1], query.shape[0]
        distance = torch.arange(length - tokens, length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (self.window or length))
        scores = scores.masked_fill(hidden.to(self.device), float("-inf"))
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.double()[:, None, None].expand(-1, tokens, 1)), dim=-1)
        weights = scores.softmax(-1)[:, :, :length]
        return (weights @ value).transpose(0, 1)


def assert_close(errors: dict[int, float], limit: float = 2e-6) -> None:
    assert errors
    for sequence, error in errors.items():
        assert error < limit, f"sequence {sequence} is off by {error}"  # NaN fails too


@pytest.mark.parametrize("page", [4, 16, 64, 256])
def test_ragged_decode_and_chunks_in_one_step(make_ops: MakeOps, page: int) -> None:
    sequences = Sequences(make_ops, page)
    sequences.add(1, 3, 4, 5, 15, 16, 17, 63, 64, 65, 130, 0, 0, 31, 100)
    for _ in range(3):
        decodes = [(sequence, 1) for sequence in range(11)]
        assert_close(sequences.step([*decodes, (11, 20), (12, 16), (13, 7), (14, 33)]))


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 2), (9, 3), (5, 1), (6, 1), (7, 1), (8, 1), (9, 1)]
)
@pytest.mark.parametrize("dim", [8, 24, 33, 64, 80, 96, 128, 256])
def test_heads_and_head_sizes(make_ops: MakeOps, heads: int, kv_heads: int, dim: int) -> None:
    sequences = Sequences(make_ops, 16, heads, kv_heads, dim)
    sequences.add(40, 7, 0, 20)
    assert_close(sequences.step([(0, 1), (1, 1), (2, 19), (3, 18)]), 4e-6)


@pytest.mark.parametrize("scaling", [0.01, 1.0])
def test_scaling(make_ops: MakeOps, scaling: float) -> None:
    sequences = Sequences(make_ops, 16)
    sequences.add(40, 0, 20)
    assert_close(sequences.step([(0, 1), (1, 19), (2, 18)], scaling), 1e-5)


@pytest.mark.parametrize("page", [4, 16, 256])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (9, 3, 64), (9, 1, 80), (5, 1, 256)])
def test_bfloat16(make_ops: MakeOps, page: int, heads: int, kv_heads: int, dim: int) -> None:
    sequences = Sequences(make_ops, page, heads, kv_heads, dim, torch.bfloat16)
    sequences.add(40, 7, 0, 20, 15, 16, 17)
    assert_close(sequences.step([(0, 1), (1, 1), (2, 19), (3, 18), (4, 1), (5, 1), (6, 1)]), 2e-2)


def test_long_contexts_in_many_query_chunks(make_ops: MakeOps) -> None:
    sequences = Sequences(make_ops, 64)
    sequences.add(1100, 20)
    assert_close(sequences.step([(0, 300), (1, 1)]))
    assert_close(sequences.step([(0, 700), (1, 600)]))
    assert_close(sequences.step([(0, 1), (1, 1)]))


@pytest.mark.parametrize("page", [4, 16])
def test_O18_block_borders(make_ops: MakeOps, page: int) -> None:
    for length in range(1, 3 * page + 2):
        sequences = Sequences(make_ops, page)
        sequences.add(length)
        for count in (1, 1, page - 1, page, page + 1, 1):
            assert_close(sequences.step([(0, count)]))


def test_rows_of_one_step_share_a_block_that_one_of_them_writes(make_ops: MakeOps) -> None:
    sequences = Sequences(make_ops, 16)
    sequences.add(0, 0)
    key, value = sequences.random_kv(35)
    # Sequence 1 finds the first block of sequence 0 in the cache in the very step that writes it.
    sequences.tables = [[sequences.free[0]], [sequences.free.pop(0)]]
    sequences.keys[1], sequences.values[1] = key[:, :16], value[:, :16]
    assert_close(sequences.step([(0, 30), (1, 5)], kv=(key, value)))


def test_reused_blocks_carry_nothing_over(make_ops: MakeOps) -> None:
    """A sequence of NaN hurts itself alone, and nobody who gets its blocks later."""
    sequences = Sequences(make_ops, 16)
    sequences.add(30, 5, 0)
    key, value = sequences.random_kv(44)
    key[:, 4:], value[:, 4:] = float("nan"), float("nan")
    errors = sequences.step([(0, 1), (1, 3), (2, 40)], kv=(key, value))
    assert math.isnan(errors.pop(2))
    assert_close(errors)
    blocks = set(sequences.tables[2])
    sequences.drop(2)
    sequences.add(0, 0)
    assert_close(sequences.step([(0, 1), (1, 17), (3, 1), (4, 18)]))
    assert blocks & {block for table in sequences.tables for block in table}
    for _ in range(20):
        assert_close(sequences.step([(0, 1), (1, 1), (3, 1), (4, 1)]))


def test_null_block_stays_zero(make_ops: MakeOps) -> None:
    sequences = Sequences(make_ops, 4)
    sequences.add(*range(30))
    sequences.step([(sequence, 1 + sequence % 3) for sequence in range(30)])
    assert not sequences.kv.keys[0][0].any() and not sequences.kv.values[0][0].any()


def test_without_a_cache_nothing_is_read_or_written(make_ops: MakeOps) -> None:
    sequences = Sequences(make_ops, 16)
    before = sequences.kv.keys[0].clone()
    query, key, value = (sequences.random(heads, 9) for heads in (4, 2, 2))
    rows = packed_rows(np.array([0, 0]), np.array([1, 8]), np.array([0, 1]), None, 0)
    plan = sequences.ops.plan(rows)
    sequences.ops.write_kv(0, key, value, plan)
    out = sequences.ops.attend(0, query.transpose(0, 1), key, value, plan, None)
    assert torch.equal(before.nan_to_num(), sequences.kv.keys[0].nan_to_num())
    sequences.new()
    sequences.keys[0], sequences.values[0] = key[:, 1:], value[:, 1:]
    assert (out[1:].double() - sequences.expected(0, query.transpose(0, 1)[1:], None)).abs().max() < 2e-6


# Windows


@pytest.mark.parametrize("page", [4, 16])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 15, 16, 17, 33])
def test_windows_around_page_borders(make_ops: MakeOps, page: int, window: int) -> None:
    around = sorted({max(0, length + d) for length in (0, page, window, window + page, 3 * page) for d in (-1, 0, 1)})
    sequences = Sequences(make_ops, page, window=window)
    sequences.add(*around)
    for counts in ([1, 1, 1], [window, page, 1], [window + 1, 1, page + 1], [1, 1, 1]):
        assert_close(sequences.step([(i, counts[i % 3]) for i in range(len(around))]))
    assert not sequences.kv.keys[0][0].any() and not sequences.kv.values[0][0].any()


@pytest.mark.parametrize("page", [4, 16, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
def test_windows_for_heads_and_head_sizes(make_ops: MakeOps, page: int, heads: int, kv_heads: int, dim: int) -> None:
    sequences = Sequences(make_ops, page, heads, kv_heads, dim, window=21)
    sequences.add(100, 41, 21, 20, 7, 0, 90)
    for count in (30, 1):
        assert_close(sequences.step([*((i, 1) for i in range(5)), (5, count), (6, count)]), 4e-6)


def test_a_prompt_of_many_windows_and_query_chunks(make_ops: MakeOps) -> None:
    sequences = Sequences(make_ops, 16, window=40)
    sequences.add(0, 700)
    assert_close(sequences.step([(0, 600), (1, 600)]))
    assert_close(sequences.step([(0, 1), (1, 1)]))


def test_a_window_longer_than_what_is_cached(make_ops: MakeOps) -> None:
    sequences = Sequences(make_ops, 16, window=3000)
    sequences.add(0, 50, 1100)
    assert_close(sequences.step([(0, 300), (1, 1), (2, 300)]))


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("softcap", [None, 2.0, 50.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_softcap_and_sinks(make_ops: MakeOps, window: int | None, softcap: float | None, with_sinks: bool) -> None:
    sinks = torch.tensor([-3.0, 0.5, 4.0, float("-inf")]) if with_sinks else None
    sequences = Sequences(make_ops, 16, dim=64, window=window, softcap=softcap, sinks=sinks)
    sequences.add(100, 17, 16, 1, 0, 40)
    for scaling in (None, 1.0):  # scores of about 1, and of about 8
        assert_close(sequences.step([(0, 1), (1, 1), (2, 1), (3, 1), (4, 30), (5, 9)], scaling), 1e-5)


@pytest.mark.parametrize("heads", [5, 8])
def test_softcap_and_sinks_in_bfloat16(make_ops: MakeOps, heads: int) -> None:
    sinks = torch.linspace(-2, 2, heads).bfloat16()
    sequences = Sequences(make_ops, 16, heads, 1, 80, torch.bfloat16, window=24, softcap=3.0, sinks=sinks)
    sequences.add(40, 7, 0, 20)
    assert_close(sequences.step([(0, 1), (1, 1), (2, 40), (3, 18)]), 2e-2)


def test_groups_share_the_tensors_and_have_tables_of_their_own(make_ops: MakeOps) -> None:
    """Layers 0 and 2 see all, layer 1 a window; each layer gives what it gives in a cache of its own."""
    groups = [LayerGroup((0, 2)), LayerGroup((1,), 5)]
    kv = allocate(2, 12, 2, 4, 16, torch.float32)
    ops = make_ops(kv, groups)
    assert [ops.window(layer) for layer in range(3)] == [None, 5, None]
    alone = [Sequences(make_ops, 4, window=ops.window(layer)) for layer in range(3)]
    for layer, sequences in enumerate(alone):
        sequences.generator.manual_seed(layer)
        sequences.add(0)
    full, windowed = [3, 9, 5, 7], [4, 8, 11, 2]
    start = 0
    for count in (9, 1, 1, 3):
        seen = max(0, start - 4) // 4
        tables = [[full], [[0] * seen + windowed[seen:]]]
        rows = packed_rows(np.array([start]), np.array([count]), np.array([0]), tables, int(count == 1))
        plan = ops.plan(rows)
        for layer, sequences in enumerate(alone):
            query, key, value = (sequences.random(heads, count) for heads in (4, 2, 2))
            ops.write_kv(layer, key, value, plan)
            out = ops.attend(layer, query.transpose(0, 1), key, value, plan, None)
            sequences.keys[0] = torch.cat((sequences.keys[0], key), dim=1)
            sequences.values[0] = torch.cat((sequences.values[0], value), dim=1)
            assert (out.double() - sequences.expected(0, query.transpose(0, 1), None)).abs().max() < 2e-6
        start += count
    used = {0, *full, *windowed}
    assert not any(tensor[block].any() for tensor in (*kv.keys, *kv.values) for block in {0, *range(13)} - used | {0})
    assert not kv.keys[1][windowed].any()


def test_a_token_without_a_block_is_refused(make_ops: MakeOps) -> None:
    ops = make_ops(allocate(1, 4, 2, 4, 16, torch.float32), [LayerGroup((0,), 4)])
    for table in ([[1]], [[1, 0]]):
        with pytest.raises(ValueError, match="does not cover"):
            ops.plan(packed_rows(np.array([4]), np.array([2]), np.array([0]), [table], 0))


# What is read


def test_with_a_window_the_length_of_the_context_costs_nothing() -> None:
    """Rows of one token and of several read the blocks from the window's start to their end, and no more."""
    starts, counts = np.array([100_000, 99_990, 50_000]), np.array([1, 1, 40])
    tables = [[0] * 6200 + list(range(1, 100)), [0] * 6200 + list(range(100, 200)), [0] * 3100 + list(range(200, 300))]
    rows = packed_rows(starts, counts, np.array([0, 1, 2]), [tables], 2)
    kv = allocate(1, 300, 2, 16, 8, torch.float32)
    groups = [LayerGroup((0,), 64)]
    (plan,) = TorchOps(kv, groups).plan(rows)
    assert sum(len(bucket.index) for bucket in plan.buckets) == 2 * 5 * 2
    assert plan.chunks[0].index is not None and len(plan.chunks[0].index) == 7 * 2


@pytest.mark.parametrize("seed", range(5))
def test_buckets_take_every_row_once_and_pad_little(seed: int) -> None:
    """What is gathered stays within a quarter of what is read plus a fixed slack a bucket, in small pieces."""
    generator = np.random.default_rng(seed)
    kv = allocate(1, 40000, 3, 16, 64, torch.bfloat16)
    ops = TorchOps(kv)
    ends = np.sort(generator.integers(1, 4000, 150))[::-1]
    tables = [list(range(1, 1 + -(-int(end) // 16))) for end in ends]
    (plan,) = ops.plan(packed_rows(ends - 1, np.ones(150, np.int64), np.arange(150), [tables], 150))
    assert [bucket.first for bucket in plan.buckets] == [0, *(bucket.last for bucket in plan.buckets[:-1])]
    assert plan.buckets[-1].last == 150
    for bucket in plan.buckets:
        rows = bucket.last - bucket.first
        gathered = rows * bucket.length // 16
        read = sum(len(table) for table in tables[bucket.first : bucket.last])
        assert len(bucket.index) == gathered * 3
        page_bytes = 16 * 3 * 64 * 2
        assert gathered <= 1.25 * read + (1 << 17) / page_bytes
        assert gathered * page_bytes <= 1 << 20 or rows == 1


def test_masks_begin_at_whole_addresses_but_on_cpu() -> None:
    """Kernels of GPUs read them 16 bytes at once, and refuse or fail in the middle of a matrix."""
    ops = TorchOps(allocate(1, 4, 2, 16, 8, torch.bfloat16))
    ops._device = torch.device("meta")
    for back in (0, 5, 1500):
        mask = ops._band(None, back, 3)
        assert mask.shape == (3, back + 3) and mask.storage_offset() == 0 and mask.is_contiguous()
