"""The compiled attention and cache write against float64, and bit for bit against themselves.

Every case runs with the library of this machine and with those for vectors of another size and for tile registers,
whose logic is the same as that of processors which are not at hand. All memory of the cache that a row does not see is
NaN or infinite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.groups import LayerGroup
from engine.execution.kv_tensors import allocate
from engine.ops.cpu import library
from engine.ops.cpu.build import load_library
from engine.ops.cpu.cpu_ops import CpuOps
from tests.engine.kv_layout import spoil
from tests.engine.tables import packed_rows

_CPU = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
OTHER_VECTORS = ("-mno-avx512f",) if "avx512f" in _CPU else ("-DLANES=16", "-Wno-psabi")
# What AMX computes, in portable code; and what a machine that has AMX computes without it. For bf16 alone.
TILES_TWIN = ("-DLANES=16", "-DBF16_DOT", "-DTILES_TWIN", "-Wno-psabi", "-O1")
BUILDS: dict[str, tuple[str, ...]] = {"native": (), "other-vectors": OTHER_VECTORS, "tiles-twin": TILES_TWIN}
if "amx_bf16" in _CPU:
    BUILDS["no-tiles"] = ("-DNO_TILES",)


@pytest.fixture(autouse=True, params=BUILDS.values(), ids=list(BUILDS), scope="module")
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """The library that ops made meanwhile use."""
    chosen = load_library(flags=request.param)
    chosen.run_tape.argtypes = library._library().run_tape.argtypes
    chosen.run_tape.restype = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_library", lambda: chosen)
        yield


@pytest.fixture(autouse=True)
def leave_out_what_another_build_has_run(request: pytest.FixtureRequest) -> None:
    params = request.node.callspec.params
    if params["kernels"] not in ((), OTHER_VECTORS) and params.get("dtype") == torch.float32:
        pytest.skip("tile registers change nothing in fp32")


@dataclass
class Model:
    """One attention layer and how it attends."""

    heads: int = 6
    kv_heads: int = 2
    dim: int = 48
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


@dataclass
class Rows:
    """Rows with random queries, K and V for all their tokens, which are run in steps of the test's choice."""

    model: Model
    lengths: Sequence[int]
    seed: int = 0
    queries: list[torch.Tensor] = field(init=False)
    keys: list[torch.Tensor] = field(init=False)
    values: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        model = self.model
        generator = torch.Generator().manual_seed(self.seed)

        def random(heads: int) -> list[torch.Tensor]:
            return [torch.randn(n, heads, model.dim, generator=generator).to(model.dtype) for n in self.lengths]

        self.queries, self.keys, self.values = random(model.heads), random(model.kv_heads), random(model.kv_heads)
        self.sinks = torch.randn(model.heads, generator=generator) if model.sinks else None

    def run(self, page: int, steps: Sequence[dict[int, int]], poison: float = math.nan) -> list[torch.Tensor]:
        """Runs so many tokens of each row, step after step; returns each row's [tokens, heads, dim] in float32."""
        model = self.model
        num_blocks = sum(-(-length // page) for length in self.lengths) + 1
        kv = allocate(1, num_blocks, model.kv_heads, page, model.dim, model.dtype)
        for tensor in (*kv.keys, *kv.values):
            tensor.fill_(poison)
        ops = CpuOps(kv, [LayerGroup((0,), model.window)])
        free = np.random.default_rng(self.seed).permutation(num_blocks) + 1
        tables: list[list[int]] = [[] for _ in self.lengths]
        blocks, done = iter(free.tolist()), [0] * len(self.lengths)
        outputs: list[list[torch.Tensor]] = [[] for _ in self.lengths]
        for step in steps:
            for row, count in step.items():
                while len(tables[row]) * page < done[row] + count:
                    tables[row].append(next(blocks))
                if model.window is not None:
                    first = max(0, done[row] - model.window + 1)
                    for index, block in enumerate(tables[row][: first // page + 1]):
                        if block and first > index * page:
                            hidden = slice(0, first - index * page)
                            spoil(kv.keys[0], kv.values[0], block, hidden, packed=True)
                            tables[row][index] = 0 if first >= (index + 1) * page else block
            starts = np.array([done[row] for row in step], np.int64)
            counts = np.array(list(step.values()), np.int64)
            packed = packed_rows(
                starts, counts, np.cumsum(counts) - counts, [[tables[row] for row in step]], int((counts == 1).sum())
            )
            new = {row: slice(done[row], done[row] + count) for row, count in step.items()}
            query, key, value = (
                torch.cat([torch.empty(0, heads, model.dim, dtype=model.dtype), *(part[row][new[row]] for row in step)])
                for part, heads in (
                    (self.queries, model.heads),
                    (self.keys, model.kv_heads),
                    (self.values, model.kv_heads),
                )
            )
            plan = ops.plan(packed)
            ops.write_kv(0, key.transpose(0, 1), value.transpose(0, 1), plan)
            out = ops.attend(0, query.float(), key, value, plan, None, model.softcap, self.sinks)
            for row, part in zip(step, out.split(counts.tolist()), strict=True):
                outputs[row].append(part)
                done[row] += step[row]
        return [torch.cat(parts) if parts else torch.empty(0, model.heads, model.dim) for parts in outputs]

    def at_once(self, page: int = 64) -> list[torch.Tensor]:
        return self.run(page, [dict(enumerate(self.lengths))])

    def expected(self, row: int, first: int = 0) -> torch.Tensor:
        """Float64 attention of the queries from `first` on."""
        model, length = self.model, self.lengths[row]
        group = model.heads // model.kv_heads
        key, value = (x[row].double().repeat_interleave(group, dim=1).transpose(0, 1) for x in (self.keys, self.values))
        scores = self.queries[row][first:].double().transpose(0, 1) @ key.transpose(1, 2) / math.sqrt(model.dim)
        if model.softcap is not None:
            scores = model.softcap * (scores / model.softcap).tanh()
        distance = torch.arange(first, length)[:, None] - torch.arange(length)
        scores = scores.masked_fill((distance < 0) | (distance >= (model.window or length)), -math.inf)
        if self.sinks is not None:
            sinks = self.sinks.double()[:, None, None].expand(-1, length - first, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        return (scores.softmax(-1)[:, :, :length] @ value).transpose(0, 1)

    def check(self, outputs: list[torch.Tensor]) -> None:
        rounds_weights = library._library().bf16_activation_bytes() == 2
        limit = 1e-2 if rounds_weights and self.model.dtype == torch.bfloat16 else 4e-6
        for row, out in enumerate(outputs):
            if self.lengths[row]:
                assert (out.double() - self.expected(row)).abs().max() < limit


def in_pieces(lengths: Sequence[int], sizes: Sequence[int]) -> list[dict[int, int]]:
    """Steps in which every row takes the next of `sizes`, beginning somewhere else in each row."""
    steps, left, turn = [], list(lengths), 0
    while any(left):
        step = {row: min(rest, sizes[(turn + row) % len(sizes)]) for row, rest in enumerate(left) if rest}
        steps.append(dict(sorted(step.items(), key=lambda item: item[1] != 1)))
        left = [rest - step.get(row, 0) for row, rest in enumerate(left)]
        turn += 1
    return steps


def assert_same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


DTYPES = [torch.float32, torch.bfloat16]
PAGES = [4, 8, 12, 16, 32, 64, 256]
AROUND = [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", PAGES)
def test_lengths_around_pages_and_tiles(page: int, dtype: torch.dtype) -> None:
    """Exact, and the same bits on every page size, for chunks that begin within pages and for single tokens."""
    rows = Rows(Model(dtype=dtype), AROUND)
    reference = rows.at_once()
    rows.check(reference)
    assert_same_bits(rows.run(page, in_pieces(AROUND, [7, 1, 30, 2, 64, 1])), reference)
    assert_same_bits(rows.run(page, in_pieces(AROUND, [1]), poison=math.inf), reference)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 40, 48, 64, 72, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16])
def test_head_sizes_and_groups(dim: int, group: int, dtype: torch.dtype) -> None:
    rows = Rows(Model(2 * group, 2, dim, dtype), [70, 5, 33])
    reference = rows.at_once()
    rows.check(reference)
    assert_same_bits(rows.run(16, in_pieces(rows.lengths, [31, 1, 1])), reference)


@pytest.mark.parametrize("dim", [2, 6, 8, 14, 33, 66])
def test_small_and_odd_head_sizes(dim: int) -> None:
    rows = Rows(Model(4, 2, dim), [40, 5])
    rows.check(rows.at_once(16))
    assert_same_bits(rows.run(5, in_pieces(rows.lengths, [9, 1])), rows.at_once(16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 63, 64, 65, 100, 1000])
@pytest.mark.parametrize("page", [12, 16])
def test_windows(window: int, page: int, dtype: torch.dtype) -> None:
    rows = Rows(Model(dtype=dtype, window=window), [210, 64, 65, 17, 1])
    reference = rows.at_once()
    rows.check(reference)
    assert_same_bits(rows.run(page, in_pieces(rows.lengths, [40, 1, 3, 65])), reference)


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_rows_in_any_pieces(data: st.DataObject, dtype: torch.dtype) -> None:
    draw = data.draw
    kv_heads, step = draw(st.integers(1, 3)), 2 if dtype == torch.bfloat16 else 1
    model = Model(
        heads=kv_heads * draw(st.integers(1, 9)),
        kv_heads=kv_heads,
        dim=step * draw(st.integers(1, 80)),
        dtype=dtype,
        window=draw(st.none() | st.integers(1, 150)),
        softcap=draw(st.sampled_from([None, 2.0, 30.0])),
        sinks=draw(st.booleans()),
    )
    rows = Rows(model, draw(st.lists(st.integers(0, 200), min_size=1, max_size=5)), draw(st.integers(0, 9)))
    reference = rows.at_once(16)
    rows.check(reference)
    pieces = in_pieces(rows.lengths, draw(st.lists(st.integers(1, 90), min_size=1, max_size=5)))
    page = step * draw(st.integers(1, 40))
    assert_same_bits(rows.run(page, pieces, draw(st.sampled_from([math.nan, math.inf]))), reference)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_depends_on_nothing_but_itself(dtype: torch.dtype) -> None:
    """Alone, and among long and short neighbours, in any order."""
    lengths = [130, 1, 64, 33, 17]
    rows = Rows(Model(dtype=dtype, softcap=20.0, sinks=True), lengths)
    everything = rows.at_once()
    for row, length in enumerate(lengths):
        assert_same_bits([rows.run(16, [{row: length}])[row]], [everything[row]])
    assert_same_bits(rows.run(16, [{4: 17, 2: 64, 0: 130, 3: 33, 1: 1}]), everything)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(threads: int) -> None:
    rows = Rows(Model(9, 3, 64, torch.bfloat16), [300, 100, 65, 1])
    before = torch.get_num_threads()
    reference = rows.at_once()
    torch.set_num_threads(threads)
    try:
        assert_same_bits(rows.run(16, in_pieces(rows.lengths, [90, 1, 20])), reference)
    finally:
        torch.set_num_threads(before)


def test_a_query_sees_nothing_of_its_own_chunk_that_comes_later() -> None:
    """A token whose K and V are NaN or infinite spoils the queries from it on, and none before."""
    for bad in (math.nan, math.inf):
        for position in (0, 1, 20, 63, 64, 99):
            rows = Rows(Model(dtype=torch.bfloat16), [100])
            clean = rows.at_once()[0]
            rows.values[0][position] = bad
            rows.keys[0][position] = bad
            spoiled = rows.at_once()[0]
            assert_same_bits([spoiled[:position]], [clean[:position]])
            assert not spoiled[position:].isfinite().any()


def test_a_window_leaves_a_bad_token_behind() -> None:
    rows = Rows(Model(window=30), [100])
    clean = rows.at_once()[0]
    rows.keys[0][20] = rows.values[0][20] = math.nan
    spoiled = rows.at_once()[0]
    assert_same_bits([spoiled[:20], spoiled[50:]], [clean[:20], clean[50:]])
    assert spoiled[20:50].isnan().all()


def test_a_huge_row() -> None:
    rows = Rows(Model(1, 1, 32, torch.bfloat16), [20_000, 3])
    long, short = rows.run(32, [{0: 19_950, 1: 2}, {0: 49}, {0: 1, 1: 1}])
    assert (long[19_940:].double() - rows.expected(0, 19_940)).abs().max() < 1e-4
    assert (short.double() - rows.expected(1)).abs().max() < 1e-2


@pytest.mark.parametrize(
    "lengths", [[], [0], [0, 0, 3, 0], [0, 0, 3], [2, 0], [0, 2, 3, 0, 0]]
)  # as many tokens as rows
def test_empty_rows_and_batches(lengths: list[int]) -> None:
    rows = Rows(Model(), lengths)
    rows.check(rows.at_once())


@pytest.mark.parametrize("counts", [[1], [9], [1, 70, 1, 4]])
def test_rows_without_a_cache(counts: list[int]) -> None:
    """As with one, bit for bit; again and again, in blocks that held others before."""
    rows = Rows(Model(dtype=torch.bfloat16), counts)
    kv = allocate(2, 1, 2, 16, 48, torch.bfloat16)
    ops = CpuOps(kv, [LayerGroup((0,)), LayerGroup((1,), 1000)])
    starts, offsets = np.zeros(len(counts), np.int64), np.cumsum(counts) - counts
    query, key, value = (torch.cat(parts) for parts in (rows.queries, rows.keys, rows.values))
    for layer in (0, 1, 0):
        plan = ops.plan(packed_rows(starts, np.array(counts), offsets, None, 0))
        ops.write_kv(layer, key.transpose(0, 1), value.transpose(0, 1), plan)
        out = ops.attend(layer, query.float(), key, value, plan, None)
        assert_same_bits(list(out.split(counts)), rows.at_once())
    assert not any(tensor.any() for tensor in (*kv.keys, *kv.values))
