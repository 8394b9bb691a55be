"""What is particular to the compiled CPU ops: bitwise independence, odd inputs, and the build of the library."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.cache.groups import LayerGroup
from engine.execution.kv_tensors import allocate
from engine.ops import make_ops
from engine.ops.cpu import build
from engine.ops.cpu.cpu_ops import CpuOps
from engine.ops.interface import PackedRows
from engine.ops.torch_ops import TorchOps
from tests.conftest import wait_limit
from tests.engine.tables import packed_rows

HEADS, KV_HEADS, DIM = 6, 2, 48
LENGTHS = [70, 33, 32, 31, 17, 16, 15, 2, 1]


def one_token_rows(lengths: list[int], tables: list[list[int]]) -> PackedRows:
    count = len(lengths)
    return packed_rows(np.array(lengths) - 1, np.ones(count, np.int64), np.arange(count), [tables], count)


def attend(
    rows: list[int],
    page: int,
    dtype: torch.dtype,
    query_dtype: torch.dtype | None = None,
    neighbours: float = 0.0,
    window: int | None = None,
    **rule: object,
) -> torch.Tensor:
    """Attention of those of the rows of `LENGTHS`, whose K, V and queries are the same in every call.

    All other tokens of the cache hold `neighbours`, and so do those that a row does not see.
    """
    kv = allocate(1, 100, KV_HEADS, page, DIM, dtype)
    ops = CpuOps(kv, [LayerGroup((0,), window)])
    query = torch.randn(len(LENGTHS), HEADS, DIM, generator=torch.Generator().manual_seed(1)).to(query_dtype or dtype)
    for tensor in (*kv.keys, *kv.values):
        tensor[1:] = neighbours
    free = list(range(1, 101))
    tables = []
    for row in rows:
        tables.append([free.pop(17 % len(free)) for _ in range(-(-LENGTHS[row] // page))])
        generator = torch.Generator().manual_seed(2 + row)
        for cache in (kv.keys[0], kv.values[0]):
            lines = torch.randn(LENGTHS[row], KV_HEADS, DIM, generator=generator).to(dtype)
            first = max(0, LENGTHS[row] - window) if window else 0
            for position, line in enumerate(lines[first:], first):
                cache[tables[-1][position // page], :, position % page] = line
        tables[-1][: first // page] = [0] * (first // page)
    plan = ops.plan(one_token_rows([LENGTHS[row] for row in rows], tables))
    unused = torch.empty(KV_HEADS, len(rows), DIM, dtype=dtype)
    return ops.attend(0, query[rows], unused, unused, plan, None, **rule)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 20, 32])
def test_a_row_depends_on_nothing_but_itself(dtype: torch.dtype, window: int | None) -> None:
    """Bit for bit the same alone, in any company, whatever the rest of the cache holds, at any page size."""
    rule = {"softcap": 3.0, "sinks": torch.linspace(-1, 1, HEADS)} if window == 20 else {}
    everything = attend(list(range(len(LENGTHS))), 16, dtype, window=window, **rule)
    assert everything.isfinite().all()
    for row in range(len(LENGTHS)):
        for page, neighbours in ((16, 0.0), (4, math.nan), (32, math.inf)):
            alone = attend([row], page, dtype, neighbours=neighbours, window=window, **rule)
            assert torch.equal(alone[0], everything[row])


def test_a_window_longer_than_every_row_changes_nothing() -> None:
    rows = list(range(len(LENGTHS)))
    assert torch.equal(attend(rows, 16, torch.float32, window=70), attend(rows, 16, torch.float32))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(threads: int) -> None:
    rows = list(range(len(LENGTHS)))
    expected = attend(rows, 16, torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(attend(rows, 16, torch.float32), expected)
    finally:
        torch.set_num_threads(before)


def test_a_query_of_another_dtype_than_the_cache() -> None:
    out = attend([0, 1], 16, torch.bfloat16, torch.float32)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, attend([0, 1], 16, torch.float32), atol=2e-2, rtol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_with_bad_scores_gives_nan_and_harms_no_other(bad: float) -> None:
    kv = allocate(1, 10, 1, 4, 16, torch.bfloat16)
    for tensor in (*kv.keys, *kv.values):
        tensor.fill_(1)
    kv.keys[0][1, 0, 1] = bad
    ops = CpuOps(kv)
    plan = ops.plan(one_token_rows([20, 8], [[2, 3, 1, 4, 5], [6, 7]]))
    unused = torch.empty(1, 2, 16, dtype=torch.bfloat16)
    out = ops.attend(0, torch.ones(2, 1, 16, dtype=torch.bfloat16), unused, unused, plan, None)
    assert out[0].isnan().all()
    assert (out[1] == 1).all()


def test_scores_far_apart() -> None:
    """Weights that underflow, and a peak that comes late, in float32 against float64."""
    kv = allocate(1, 20, 1, 16, 8, torch.float32)
    generator = torch.Generator().manual_seed(0)
    for cache in (kv.keys[0], kv.values[0]):
        cache[1:].copy_(torch.randn(cache[1:].shape, generator=generator))
    ramp = torch.linspace(-300, 300, 20 * 16)
    kv.keys[0][1:, 0, :, 0] = ramp.view(20, 16)
    query = torch.randn(2, 1, 8, generator=generator)
    query[:, :, 0] = torch.tensor([1.0, -1.0])[:, None]
    tables = [list(range(1, 21))] * 2
    ops = CpuOps(kv)
    unused = torch.empty(1, 2, 8)
    out = ops.attend(0, query, unused, unused, ops.plan(one_token_rows([310, 310], tables)), 1.0)
    keys, values = (x[0][1:, 0].reshape(-1, 8)[:310].double() for x in (kv.keys, kv.values))
    expected = (query[:, 0].double() @ keys.T).softmax(-1) @ values
    assert (out[:, 0].double() - expected).abs().max() < 5e-5  # a score of 300 is known to 3e-5


@pytest.mark.parametrize("softcap", [0.1, 1.0, 50.0])
def test_softcap_of_scores_of_any_size(softcap: float) -> None:
    """From scores that it leaves alone to scores that it makes equal; a softmax of two tokens shows them."""
    keys = torch.cat((torch.logspace(-6, 4, 200), -torch.logspace(-6, 4, 200)))
    kv = allocate(1, 400, 1, 4, 8, torch.float32)
    kv.keys[0][1:, 0, 1, 0] = keys  # token 0 has a score of 0
    kv.values[0][1:, 0, 1] = 1.0
    ops = CpuOps(kv)
    query = torch.zeros(400, 1, 8)
    query[:, :, 0] = 1.0
    unused = torch.empty(1, 400, 8)
    plan = ops.plan(one_token_rows([2] * 400, [[1 + i] for i in range(400)]))
    out = ops.attend(0, query, unused, unused, plan, 1.0, softcap)[:, 0, 0].double()
    expected = (softcap * (keys.double() / softcap).tanh()).sigmoid()
    error = (out - expected).abs() / expected
    assert error.max() < 5e-6 and error[keys.abs() < 5].max() < 4e-7


def test_sinks_take_their_share() -> None:
    """One token and a sink: the token's weight is known exactly."""
    kv = allocate(1, 4, 1, 4, 8, torch.float32)
    kv.values[0][1] = 1.0
    ops = CpuOps(kv)
    unused = torch.empty(1, 1, 8)
    sinks = torch.tensor([-200.0, -1.0, 0.0, 3.0, 200.0, math.inf, -math.inf, math.nan])
    out = ops.attend(0, torch.ones(1, 8, 8), unused, unused, ops.plan(one_token_rows([1], [[1]])), None, None, sinks)
    expected = torch.tensor([1.0, 1 / (1 + math.exp(-1)), 0.5, 1 / (1 + math.exp(3)), 0.0, math.nan, 1.0, math.nan])
    torch.testing.assert_close(out[0, :, 0], expected, equal_nan=True, rtol=1e-6, atol=1e-30)


def test_strided_inputs() -> None:
    """K, V and queries whose last dimension is not contiguous."""
    ops = CpuOps(kv := allocate(1, 10, 2, 4, 8, torch.float32))
    plan = ops.plan(one_token_rows([1, 1, 1], [[3], [4], [5]]))
    query, key, value = (torch.randn(8, heads, 3).transpose(0, 2) for heads in (4, 2, 2))
    key, value = key.transpose(0, 1), value.transpose(0, 1)
    ops.write_kv(0, key, value, plan)
    assert torch.equal(kv.keys[0][3:6, :, 0], key.transpose(0, 1))
    out = ops.attend(0, query, key, value, plan, None)
    assert torch.equal(out, value.transpose(0, 1).repeat_interleave(2, dim=1))  # one token: its own value


def test_the_process_has_one_openmp() -> None:
    build.load_library()
    maps = Path("/proc/self/maps")
    if not maps.exists() or "libgomp" not in maps.read_text():
        pytest.skip("no GNU OpenMP to be found")
    assert len({line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}) == 1


# The build


def fallback_log(caplog: pytest.LogCaptureFixture) -> str:
    """Asserts that the engine goes on in torch, and returns the one line that says so."""
    with caplog.at_level(logging.WARNING):
        assert type(make_ops(allocate(1, 4, 1, 4, 8, torch.bfloat16))) is TorchOps
    (record,) = caplog.records
    assert "sdpa, unchanged" in record.getMessage() and "slower" in record.getMessage()
    return record.getMessage()


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CONVOY_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C++ compiler" in fallback_log(caplog)


def test_a_compiler_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho out of order >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CONVOY_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "out of order" in fallback_log(caplog)
    assert not list((tmp_path / "ops").iterdir())


def test_a_cache_folder_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CONVOY_CACHE", str(tmp_path / "file"))
    assert "CONVOY_CACHE" in fallback_log(caplog)


def test_two_processes_that_build_at_once(tmp_path: Path) -> None:
    code = "from engine.ops.cpu import build; build.load_library().write_bf16; print(build.library_path())"
    env = {**os.environ, "CONVOY_CACHE": str(tmp_path)}
    builders = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    outputs = [builder.communicate(timeout=wait_limit(120))[0].strip() for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0]
    (library,) = (tmp_path / "ops").iterdir()
    assert outputs == [str(library)] * 2
    ctypes.CDLL(str(library))


def test_a_library_is_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CONVOY_CACHE", str(tmp_path))
    build.load_library()
    monkeypatch.setenv("PATH", str(tmp_path))  # without a compiler
    build.load_library()
