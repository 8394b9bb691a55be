"""Compiled linear layers and embeddings against float64, for this machine and for the twin of another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from engine.ops.cpu import build, library, linear
from engine.ops.cpu.library import Op, Step, Tape
from engine.ops.cpu.linear import PackedWeight, activation_dtype, embed_op, linear_op

# What AVX512-BF16 and AMX compute, in portable code.
TWIN = "-DLANES=16 -DBF16_DOT -DNO_TILES -Wno-psabi -O1"
TILES_TWIN = "-DLANES=16 -DBF16_DOT -DTILES_TWIN -Wno-psabi -O1"
BUILDS = [os.environ["CONVOY_TEST_FLAGS"]] if "CONVOY_TEST_FLAGS" in os.environ else ["", TWIN, TILES_TWIN]

DTYPES = [torch.float32, torch.bfloat16]
WEIGHTS = [(dtype, quantize) for dtype in DTYPES for quantize in (False, True)]
ACTS = {
    None: lambda x: x,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@pytest.fixture(autouse=True, scope="module", params=BUILDS, ids=lambda flags: flags or "native")
def flags(request: pytest.FixtureRequest) -> Iterator[str]:
    def forget() -> None:
        library._library.cache_clear()
        linear._library.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_FLAGS", (*build._FLAGS, *request.param.split()))
        forget()
        yield request.param
    forget()


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(op: Op, rows: int, threads: int = 1, **step: Any) -> None:
    Tape([op]).run(Step(tokens=rows, **step), threads)


def product(weight: PackedWeight, x: Tensor, threads: int = 1) -> Tensor:
    out = torch.full((len(x), weight.out_features), -77.0)
    run(linear_op(weight, x, out), len(x), threads)
    return out


def rows_of(count: int, weight: PackedWeight, seed: int = 1) -> Tensor:
    return random(count, weight.in_features, seed=seed, dtype=activation_dtype(weight.dtype))


class Case(NamedTuple):
    rows: int
    outputs: int
    inputs: int
    weights: tuple[torch.dtype, bool] = (torch.bfloat16, False)
    bias: bool = False
    kept: bool = False
    add: bool = False
    act: str | None = None
    interleave: bool = False
    softcap: float | None = None
    narrow: bool = False


def check(case: Case, threads: int = 1) -> None:
    """One product, whose rows lie apart, whose surroundings are NaN, and which must write nothing but its result."""
    dtype, quantize = case.weights
    parts = [random(case.outputs, case.inputs, seed=i, dtype=dtype) for i in range(1 + case.interleave)]
    weight = PackedWeight([lambda part=part: part for part in parts], quantize, case.interleave)  # type: ignore[misc]
    activation = activation_dtype(dtype)
    around = torch.full((case.rows + 2, case.inputs + 5), torch.nan, dtype=activation)
    x = around[:, 2 : 2 + case.inputs]
    x[: case.rows] = rows_of(case.rows, weight)
    out_dtype = activation if case.narrow and not case.add else torch.float32
    whole = random(case.rows + 2, case.outputs + 5, seed=7).to(out_dtype)
    before, out = whole.clone(), whole[:, 3 : 3 + case.outputs]
    bias = random(weight.out_features, seed=9) if case.bias else None
    op = linear_op(weight, x, out, bias=bias, kept=case.kept, add=case.add, act=case.act, softcap=case.softcap)
    counts = {"tokens": case.rows + 1, "kept": case.rows} if case.kept else {"tokens": case.rows, "kept": 99}
    Tape([op]).run(Step(**counts), threads)

    x64, w64 = x[: case.rows].double(), weight.unpack().double()
    expected, size = x64 @ w64.T, x64.abs() @ w64.abs().T
    if bias is not None:
        expected, size = expected + bias, size + bias.abs()
    tolerance = size * 2**-23 * max(4.0, case.inputs**0.5)
    expected, slope = ACTS[case.act](expected[:, : case.outputs]), tolerance[:, : case.outputs] * 1.2 + 4e-7
    if case.interleave:
        gate, up = expected, (x64 @ w64.T + (0 if bias is None else bias))[:, case.outputs :]
        expected, slope = gate * up, slope * up.abs() + gate.abs() * tolerance[:, case.outputs :]
    if case.softcap:
        expected = case.softcap * torch.tanh(expected / case.softcap)
        slope += case.softcap * 4e-7
    if case.add:
        expected = expected + before[: case.rows, 3 : 3 + case.outputs]
    slope = slope + expected.abs() * (2**-8 if out_dtype == torch.bfloat16 else 1e-6)
    assert ((out[: case.rows].double() - expected).abs() <= slope).all()
    whole[: case.rows, 3 : 3 + case.outputs] = before[: case.rows, 3 : 3 + case.outputs]
    assert torch.equal(whole, before)


@settings(deadline=None, max_examples=80)
@given(
    st.builds(
        Case,
        rows=st.integers(0, 40),
        outputs=st.integers(1, 120),
        inputs=st.integers(1, 200),
        weights=st.sampled_from(WEIGHTS),
        bias=st.booleans(),
        kept=st.booleans(),
        add=st.booleans(),
        act=st.sampled_from(list(ACTS)),
        interleave=st.booleans(),
        softcap=st.sampled_from([None, 3.0]),
        narrow=st.booleans(),
    )
)
def test_products(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("shape", [(64, 576, 576), (300, 100, 1537), (1, 2000, 64), (2, 513, 1000), (33, 40, 5000)])
def test_products_of_many_blocks(shape: tuple[int, int, int], weights: tuple[torch.dtype, bool]) -> None:
    check(Case(*shape, weights=weights), threads=2)
    check(Case(*shape, weights=weights, interleave=True, act="silu", narrow=True))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("inputs", [1, 95, 1601])
def test_a_row_depends_on_nothing_but_itself(inputs: int, weights: tuple[torch.dtype, bool]) -> None:
    """Bit for bit the same alone, among any number of others, and whatever the number of threads."""
    table = random(333, inputs, dtype=weights[0])
    weight = PackedWeight([lambda: table], quantize=weights[1])
    x = rows_of(230, weight)
    everything = product(weight, x, threads=2)
    for count in (*range(1, 20), 33, 64, 97, 129, 199):
        for first in (0, 230 - count):
            part = product(weight, x[first : first + count], threads=1 + count % 3)
            assert torch.equal(part, everything[first : first + count])


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("rows", [4, 9, 50])
def test_odd_rows_disturb_no_others(rows: int, weights: tuple[torch.dtype, bool]) -> None:
    table = random(70, 95, dtype=weights[0])
    weight = PackedWeight([lambda: table], quantize=weights[1])
    x = rows_of(rows, weight)
    plain = product(weight, x)
    x[0], x[1], x[2] = torch.nan, torch.inf, 3e38
    out = product(weight, x)
    assert torch.equal(out[3:], plain[3:]) and out[0].isnan().all() and not out[1:3].isfinite().any()


@pytest.mark.parametrize("act", list(ACTS))
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_extremes_of_activations(act: str | None, softcap: float | None) -> None:
    one = torch.ones(1, 1)
    weight = PackedWeight([lambda: one])
    x = torch.cat((torch.linspace(-100, 100, 2001), torch.tensor([-3e38, -1e20, -1e-30, 0.0, 1e-30, 1e20, 3e38])))
    out = torch.empty(len(x), 1)
    run(linear_op(weight, x[:, None], out, act=act, softcap=softcap), len(x))
    expected = ACTS[act](x.double())
    if softcap:
        expected = softcap * torch.tanh(expected / softcap)
    torch.testing.assert_close(out[:, 0].double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_eight_bits_are_the_nearest(dtype: torch.dtype) -> None:
    table = random(50, 77, dtype=dtype) * torch.logspace(-3, 3, 50)[:, None].to(dtype)
    table[3] = 0
    weight = PackedWeight([lambda: table], quantize=True)
    scale = table.float().abs().amax(dim=1, keepdim=True) / 127
    assert ((weight.unpack() - table.float()).abs() <= scale * 0.5001).all()
    assert weight.nbytes < table.numel() * 2

    table[5, 7] = torch.nan
    assert weight.refresh()
    out = product(weight, rows_of(3, weight))
    assert out[:, 5].isnan().all() and out[:, :5].isfinite().all() and out[:, 6:].isfinite().all()


@torch.no_grad()
def test_changed_parts_count_after_a_refresh() -> None:
    layer = torch.nn.Linear(30, 20, dtype=torch.bfloat16)
    other = torch.nn.Linear(30, 5, dtype=torch.bfloat16)
    weight = PackedWeight([lambda: layer.weight, lambda: other.weight])

    def packed() -> bool:
        return torch.equal(weight.unpack(), torch.cat((layer.weight, other.weight)))

    assert packed() and not weight.refresh()
    layer.weight.neg_()
    assert not packed() and weight.refresh() and packed() and not weight.refresh()
    other.weight.data.mul_(2)
    assert weight.refresh() and packed()
    other.weight = torch.nn.Parameter(random(30, 5, dtype=torch.bfloat16).T)
    assert weight.refresh() and packed()
    other.weight = torch.nn.Parameter(random(6, 30, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="changed"):
        weight.refresh()


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("interleave", [False, True])
def test_embeddings_are_rows_of_the_table(weights: tuple[torch.dtype, bool], interleave: bool) -> None:
    tables = [random(61, 33, seed=i, dtype=weights[0]) for i in range(2)]
    weight = PackedWeight([lambda: tables[0], lambda: tables[1]], weights[1], interleave)
    table = weight.unpack()
    if not weights[1]:
        assert torch.equal(table, torch.cat(tables))
    ids = torch.tensor([0, 121, 61, 60, 7, 7])
    out = torch.full((7, 33), -77.0)
    run(embed_op(weight, out, scale=1.5), 6, threads=2, ids=ids.data_ptr())
    torch.testing.assert_close(out[:6], table[ids].float() * 1.5, rtol=3e-7, atol=0)
    assert (out[6] == -77).all()


def test_what_does_not_fit_is_refused() -> None:
    table, wide = random(4, 6), random(4, 7)
    for parts, options in [
        ([table, wide], {}),
        ([table, table.bfloat16()], {}),
        ([table.half()], {}),
        ([table[0]], {}),
        ([table[:0]], {}),
        ([table, random(5, 6)], {"interleave": True}),
        ([table], {"interleave": True}),
    ]:
        with pytest.raises(ValueError):
            PackedWeight([lambda part=part: part for part in parts], **options)  # type: ignore[misc]
    weight = PackedWeight([lambda: table])
    x, out = random(3, 6), torch.empty(3, 4)
    for changed in (
        {"x": wide[:3]},
        {"x": x.double()},
        {"x": random(6, 3).T},
        {"out": x},
        {"out": out.half()},
        {"bias": random(3)},
        {"bias": random(4).double()},
    ):
        with pytest.raises(ValueError):
            linear_op(weight, **{"x": x, "out": out, **changed})  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        embed_op(weight, out)
    with pytest.raises(ValueError):
        activation_dtype(torch.float16)


@pytest.mark.slow
def test_under_the_address_sanitizer(flags: str) -> None:
    """These tests, in a process whose memory is watched."""
    if "CONVOY_TEST_FLAGS" in os.environ:
        pytest.skip("this is that process")
    sanitizer = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    if "/" not in sanitizer.stdout:
        pytest.skip("there is no address sanitizer here")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", __file__],
        env={
            **os.environ,
            "CONVOY_TEST_FLAGS": f"{flags} -fsanitize=address -O1",
            "LD_PRELOAD": sanitizer.stdout.strip(),
            "ASAN_OPTIONS": "detect_leaks=0",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
