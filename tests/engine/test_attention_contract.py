"""Every attention that steps can run in, against one computation in float64: pages, heads, windows, mixed steps.

In the dtypes that GPUs compute in. The flash kernels are fakes (`fake_flash.py`); what is tested of them is how they
are called, on caches whose unused memory is NaN. `test_ops_attention.py` has more of those that need no fake.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from engine.cache.groups import LayerGroup
from engine.execution.kv_tensors import KVTensors
from engine.execution.staging import check_alike
from engine.ops.cpu.cpu_ops import CpuOps
from engine.ops.eager_ops import EagerOps
from engine.ops.flash.kernels import FlashAttention2, FlashAttention3, FlashKernel, TorchVarlen
from engine.ops.flash.ops import FlashOps
from engine.ops.torch_ops import TorchOps
from tests.engine import fake_flash
from tests.engine.tables import packed_rows
from tests.engine.test_ops_attention import Sequences

LIMITS = {torch.float16: 8e-3, torch.bfloat16: 3e-2}  # of the error of numbers around 1, the result's rounding included


@dataclass(frozen=True)
class Backend:
    """One kind of ops, and what it can do."""

    make: Callable[[KVTensors, list[LayerGroup]], Any]
    pages: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    features: tuple[str, ...] = ("softcap", "sinks")


def flash(kernel: FlashKernel, pages: tuple[int, ...], *features: str) -> Backend:
    return Backend(lambda kv, groups: FlashOps(kernel, kv, groups), pages, features=features)


SINKS = FlashAttention3(fake_flash.flash_attn_interface(lacks=()), "flash-attn-3", "FlashAttention 3")
BACKENDS = {
    "torch": Backend(TorchOps, (16, 256)),
    "eager": Backend(EagerOps, (16, 256)),
    "cpu": Backend(CpuOps, (16, 256), (torch.bfloat16,)),
    "flash-attn": flash(FlashAttention2(fake_flash.flash_attn(), "flash-attn", "FlashAttention 2"), (256,), "softcap"),
    "flash-attn-3": flash(SINKS, (7, 16, 128, 256), "softcap", "sinks"),
    "varlen_attn": flash(TorchVarlen(fake_flash.torch_varlen(), "torch", "varlen_attn"), (512,)),
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]


def check(errors: dict[int, float], dtype: torch.dtype) -> None:
    assert errors
    for sequence, error in errors.items():
        assert error < LIMITS[dtype], f"sequence {sequence} is off by {error} in {dtype}"  # NaN fails too


def test_contexts_that_end_at_the_borders_of_pages(backend: Backend) -> None:
    """Mixed steps, and steps of one-token rows alone; rows without a context among them."""
    cases = [(page, backend.dtypes[0]) for page in backend.pages] + [(backend.pages[0], backend.dtypes[-1])]
    for page, dtype in cases:
        sequences = Sequences(backend.make, page, 2, 1, dim=16, dtype=dtype)
        sequences.add(1, page - 1, page, page + 1, 2 * page - 1, 2 * page, 0, 0, 0, page - 2, 3)
        singles = [(row, 1) for row in range(6)]
        check(sequences.step([*singles, (6, page), (7, page + 1), (8, 3), (9, 2)]), dtype)
        check(sequences.step([*singles, (6, 1), (7, page - 1), (8, page), (9, page + 2)]), dtype)
        check(sequences.step([(row, 1) for row in range(10)]), dtype)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (7, 1), (8, 1)])
def test_heads_and_head_sizes(backend: Backend, heads: int, kv_heads: int, dim: int) -> None:
    sequences = Sequences(backend.make, backend.pages[0], heads, kv_heads, dim, backend.dtypes[0])
    sequences.add(40, 7, 0, 20)
    check(sequences.step([(0, 1), (1, 1), (2, 19), (3, 18)]), backend.dtypes[0])
    check(sequences.step([(row, 1) for row in range(4)]), backend.dtypes[0])


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 127, 128, 129, 255, 256, 257])
def test_windows_one_token_around_tiles_and_pages(backend: Backend, window: int) -> None:
    for page in {backend.pages[0], backend.pages[-1]}:
        lengths = [max(0, window + d) for d in (-1, 0, 1)] + [max(0, page + window + d) for d in (-1, 0, 1)]
        sequences = Sequences(backend.make, page, 2, 1, 16, backend.dtypes[0], window)
        sequences.add(*lengths, 0, 5)
        for count in (1, window, window + 1):
            rows = [(row, 1) for row in range(len(lengths))]
            check(sequences.step([*rows, (len(lengths), count), (len(lengths) + 1, 2)]), backend.dtypes[0])
        assert not sequences.kv.keys[0][0].any() and not sequences.kv.values[0][0].any()


@pytest.mark.parametrize("feature", ["softcap", "sinks"])
@pytest.mark.parametrize("window", [None, 20])
def test_softcap_and_sinks(backend: Backend, feature: str, window: int | None) -> None:
    """Those that do not compute it say so, and name what to set."""
    sinks = torch.tensor([-3.0, 0.5, 4.0, float("-inf")], dtype=torch.bfloat16)
    rule: dict[str, Any] = {"softcap": {"softcap": 3.0}, "sinks": {"sinks": sinks}}[feature]
    sequences = Sequences(backend.make, backend.pages[0], dtype=backend.dtypes[0], window=window, **rule)
    if feature not in backend.features:
        with pytest.raises(NotImplementedError, match=f"{feature}.*auto_switch_to_flash=False"):
            sequences.add(1)
        return
    sequences.add(100, 17, 16, 1, 0, 40)
    for scaling in (None, 1.0):
        steps = [(0, 1), (1, 1), (2, 1), (3, 1), (4, 30), (5, 9)], [(row, 1) for row in range(6)]
        for step in steps:
            errors = sequences.step(step, scaling)
            check(errors, backend.dtypes[0])


def test_reused_blocks_carry_nothing_over(backend: Backend) -> None:
    """A sequence of NaN hurts itself alone, and nobody who gets its blocks later."""
    dtype = backend.dtypes[0]
    sequences = Sequences(backend.make, backend.pages[0], dtype=dtype)
    sequences.add(30, 5, 0)
    key, value = sequences.random_kv(44)
    key[:, 4:], value[:, 4:] = float("nan"), float("nan")
    errors = sequences.step([(0, 1), (1, 3), (2, 40)], kv=(key, value))
    assert np.isnan(errors.pop(2))
    check(errors, dtype)
    sequences.drop(2)
    sequences.add(0, 0)
    for _ in range(3):
        check(sequences.step([(0, 1), (1, 17), (3, 1), (4, 18)]), dtype)


def test_a_row_reads_what_another_row_of_its_step_writes(backend: Backend) -> None:
    """Also where both have one token: the last one of a block, and the first one behind it."""
    page, dtype = backend.pages[0], backend.dtypes[0]
    sequences = Sequences(backend.make, page, dtype=dtype)
    sequences.add(page - 1, 0)
    key, value = sequences.random_kv(2)  # of the longest context first, which is sequence 1
    sequences.tables[1] = sequences.tables[0][:1]
    sequences.keys[1] = torch.cat((sequences.keys[0], key[:, 1:]), dim=1)
    sequences.values[1] = torch.cat((sequences.values[0], value[:, 1:]), dim=1)
    check(sequences.step([(0, 1), (1, 1)], kv=(key, value)), dtype)


# Plans of fixed shapes, which flash kernels have


FLASH = [name for name, backend in BACKENDS.items() if "flash" in name or name == "varlen_attn"]


class Cache:
    """A cache of two groups, one with a window, and rows with the same random contexts whatever plans them."""

    def __init__(self, backend: Backend, rows: list[tuple[int, int]]) -> None:
        """Rows of (start, count), those of one token first."""
        self.page = backend.pages[-1]
        self.groups = [LayerGroup((0,)), LayerGroup((1,), 20)]
        self.sequences = Sequences(backend.make, self.page, dtype=torch.float16)
        self.ops = backend.make(self.sequences.kv, self.groups)
        generator = torch.Generator().manual_seed(1)
        starts, counts = np.array([start for start, _ in rows]), np.array([count for _, count in rows])
        tables: list[list[list[int]]] = [[], []]
        for group, window in enumerate((None, 20)):
            for start, count in rows:
                table = [self.sequences.free.pop(0) for _ in range(-(-(start + count) // self.page))]
                for tensor in (self.sequences.kv.keys[0], self.sequences.kv.values[0]):
                    for block in table[: -(-start // self.page)]:
                        tensor[block] = torch.randn(tensor.shape[1:], generator=generator)
                behind = 0 if window is None else max(0, start - window + 1) // self.page
                tables[group].append([0] * behind + table[behind:])
        self.rows = packed_rows(starts, counts, counts.cumsum() - counts, tables, int((counts == 1).sum()))

    def run(self, plan: Any, tokens: int) -> list[torch.Tensor]:
        """Both layers' attention; the first tokens are the same whatever `tokens` is."""
        outs = []
        for layer in (0, 1):
            generator = torch.Generator().manual_seed(layer)
            made = [torch.randn(64, heads, 16, generator=generator)[:tokens].half() for heads in (4, 2, 2)]
            query, key, value = made[0], made[1].transpose(0, 1), made[2].transpose(0, 1)
            self.ops.write_kv(layer, key, value, plan)
            outs.append(self.ops.attend(layer, query, key, value, plan, None))
        return outs


@pytest.mark.parametrize("name", FLASH)
def test_padded_decode_plans_give_the_numbers_of_plain_ones(name: str) -> None:
    rows = [(1000, 1), (511, 1), (512, 1), (3, 1), (0, 1)]
    plain, fixed = Cache(BACKENDS[name], rows), Cache(BACKENDS[name], rows)
    expected = plain.run(plain.ops.plan(plain.rows), 5)
    for size, blocks in ((5, 4), (8, 6)):
        out = fixed.run(fixed.ops.plan_decode(fixed.rows, size, blocks), size)
        for a, b in zip(out, expected, strict=True):
            torch.testing.assert_close(a[:5], b, rtol=1e-3, atol=1e-3)
            assert a.isfinite().all()
    for tensor in (fixed.sequences.kv.keys[0], fixed.sequences.kv.values[0]):
        assert not tensor[0].any()


def test_padded_mixed_plans_give_the_numbers_of_plain_ones() -> None:
    """Of FlashAttention 3, whose call does not depend on how many tokens a row has."""
    rows = [(1000, 1), (511, 1), (3, 1), (0, 20), (500, 13)]
    plain, fixed = Cache(BACKENDS["flash-attn-3"], rows), Cache(BACKENDS["flash-attn-3"], rows)
    expected = plain.run(plain.ops.plan(plain.rows), 36)
    out = fixed.run(fixed.ops.plan_mixed(fixed.rows, 36, 4096, 9, 1100), 36)
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    static = fixed.ops.plan_mixed(fixed.rows, 36, 4096, 9, 1100)
    other = Cache(BACKENDS["flash-attn-3"], [(0, 36)])
    check_alike(static, other.ops.plan_mixed(other.rows, 36, 4096, 9, 1100))  # shapes and constants


@pytest.mark.parametrize("name", FLASH)
def test_which_steps_have_plans_of_fixed_shapes(name: str) -> None:
    cache = Cache(BACKENDS[name], [(3, 1), (4, 2)])
    assert cache.ops.supports_graphs == (name == "flash-attn-3", True)
    with pytest.raises(ValueError, match="4 rows of one token fit this plan, not 2 of which 1 have one"):
        cache.ops.plan_decode(cache.rows, 4, 4)
    longer = Cache(BACKENDS[name], [(3 * cache.page, 1)])
    with pytest.raises(ValueError, match="a row of 4 blocks does not fit a plan of 3"):
        longer.ops.plan_decode(longer.rows, 1, 3)
