"""What is particular to the compiled CPU ops: odd inputs, extreme scores, and the build of the library.

What their kernels compute is tested in test_cpu_attention.py.
"""

from __future__ import annotations

import ctypes
import logging
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.execution.kv_tensors import KVTensors, allocate
from engine.ops import make_ops
from engine.ops.cpu import build, library
from engine.ops.cpu.cpu_ops import CpuOps
from engine.ops.interface import PackedRows
from engine.ops.torch_ops import TorchOps
from tests.conftest import wait_limit
from tests.engine.kv_layout import pack_keys, pack_values, unpack_keys, unpack_values
from tests.engine.tables import packed_rows


def one_token_rows(lengths: list[int], tables: list[list[int]]) -> PackedRows:
    count = len(lengths)
    return packed_rows(np.array(lengths) - 1, np.ones(count, np.int64), np.arange(count), [tables], count)


def fill(kv: KVTensors, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Puts [blocks, kv_heads, page, dim] into the cache."""
    kv.keys[0].copy_(pack_keys(keys.to(kv.dtype)))
    kv.values[0].copy_(pack_values(values.to(kv.dtype)))


def test_a_query_of_another_dtype_than_the_cache() -> None:
    ops = CpuOps(kv := allocate(1, 4, 2, 16, 48, torch.bfloat16))
    fill(kv, torch.randn(5, 2, 16, 48), torch.randn(5, 2, 16, 48))
    plan = ops.plan(one_token_rows([40, 16], [[2, 3, 1], [4]]))
    query, unused = torch.randn(2, 6, 48), torch.empty(2, 2, 48)
    out = ops.attend(0, query, unused, unused, plan, None)
    assert out.dtype == torch.float32
    rounded = ops.attend(0, query.bfloat16(), unused, unused, plan, None)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(out, rounded.float(), atol=3e-2, rtol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_with_bad_scores_gives_nan_and_harms_no_other(bad: float) -> None:
    kv = allocate(1, 10, 1, 4, 16, torch.bfloat16)
    keys, values = torch.ones(11, 1, 4, 16), torch.ones(11, 1, 4, 16)
    keys[1, 0, 1] = bad
    fill(kv, keys, values)
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
    cached = torch.randn(2, 21, 1, 16, 8, generator=generator)
    cached[0, 1:, 0, :, 0] = torch.linspace(-300, 300, 20 * 16).view(20, 16)
    fill(kv, *cached)
    query = torch.randn(2, 1, 8, generator=generator)
    query[:, :, 0] = torch.tensor([1.0, -1.0])[:, None]
    tables = [list(range(1, 21))] * 2
    ops = CpuOps(kv)
    unused = torch.empty(1, 2, 8)
    out = ops.attend(0, query, unused, unused, ops.plan(one_token_rows([310, 310], tables)), 1.0)
    keys, values = (x[1:, 0].reshape(-1, 8)[:310].double() for x in cached)
    expected = (query[:, 0].double() @ keys.T).softmax(-1) @ values
    assert (out[:, 0].double() - expected).abs().max() < 1e-4  # a score of 300 is summed to 3e-5 a step


@pytest.mark.parametrize("softcap", [0.1, 1.0, 50.0])
def test_softcap_of_scores_of_any_size(softcap: float) -> None:
    """From scores that it leaves alone to scores that it makes equal; a softmax of two tokens shows them."""
    keys = torch.cat((torch.logspace(-6, 4, 200), -torch.logspace(-6, 4, 200)))
    kv = allocate(1, 400, 1, 4, 8, torch.float32)
    cached = torch.zeros(2, 401, 1, 4, 8)
    cached[0, 1:, 0, 1, 0] = keys  # token 0 has a score of 0
    cached[1, 1:, 0, 1] = 1.0
    fill(kv, *cached)
    ops = CpuOps(kv)
    query = torch.zeros(400, 1, 8)
    query[:, :, 0] = 1.0
    unused = torch.empty(1, 400, 8)
    plan = ops.plan(one_token_rows([2] * 400, [[1 + i] for i in range(400)]))
    out = ops.attend(0, query, unused, unused, plan, 1.0, softcap)[:, 0, 0].double()
    expected = (softcap * (keys.double() / softcap).tanh()).sigmoid()
    error = (out - expected).abs() / expected
    assert error.max() < 6e-6 and error[keys.abs() < 5].max() < 4e-7


def test_sinks_take_their_share() -> None:
    """One token and a sink: the token's weight is known exactly."""
    kv = allocate(1, 4, 1, 4, 8, torch.float32)
    fill(kv, torch.zeros(5, 1, 4, 8), torch.ones(5, 1, 4, 8))
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
    assert torch.equal(unpack_keys(kv.keys[0])[3:6, :, 0], key.transpose(0, 1))
    assert torch.equal(unpack_values(kv.values[0])[3:6, :, 0], value.transpose(0, 1))
    out = ops.attend(0, query, key, value, plan, None)
    assert torch.equal(out, value.transpose(0, 1).repeat_interleave(2, dim=1))  # one token: its own value


@pytest.mark.parametrize(("page", "dim"), [(4, 33), (5, 32)])
def test_sizes_that_cannot_be_paired_are_left_to_torch(page: int, dim: int) -> None:
    assert type(make_ops(allocate(1, 4, 1, page, dim, torch.bfloat16))) is TorchOps
    assert type(make_ops(allocate(1, 4, 1, page, dim, torch.float32))) is CpuOps


def test_a_plan_of_fixed_shapes_is_refused() -> None:
    ops = CpuOps(allocate(1, 4, 1, 4, 8, torch.float32))
    assert ops.supports_graphs == (False, False)
    with pytest.raises(NotImplementedError):
        ops.plan_decode(one_token_rows([3], [[1]]), 2, 2)


def test_the_process_has_one_openmp() -> None:
    build.load_library()
    maps = Path("/proc/self/maps")
    if not maps.exists() or "libgomp" not in maps.read_text():
        pytest.skip("no GNU OpenMP to be found")
    assert len({line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}) == 1


# The build


@pytest.fixture
def small_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A source that is compiled in a second takes the kernels' place."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "small.cpp").write_text(SMALL_SOURCE)
    monkeypatch.setattr(build, "FOLDER", folder)
    monkeypatch.setenv("CONVOY_CACHE", str(tmp_path / "cache"))
    return folder


SMALL_SOURCE = """
#include <regex>
extern "C" int run_tape(const char* text) { return std::regex_match(text, std::regex("a+")); }
"""


def load_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops made from now on load the library themselves."""
    monkeypatch.setattr(library, "_library", library._library.__wrapped__)


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
    load_anew(monkeypatch)
    assert "no C++ compiler" in fallback_log(caplog)


def test_a_compiler_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho out of order >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CONVOY_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    load_anew(monkeypatch)
    assert "out of order" in fallback_log(caplog)
    assert not list((tmp_path / "ops").iterdir())


def test_a_cache_folder_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CONVOY_CACHE", str(tmp_path / "file"))
    load_anew(monkeypatch)
    assert "CONVOY_CACHE" in fallback_log(caplog)


def test_two_processes_that_build_at_once(small_sources: Path, tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from engine.ops.cpu import build; build.FOLDER = pathlib.Path(sys.argv[1]);"
        "build.load_library().run_tape; print(build.library_path())"
    )
    command = [sys.executable, "-c", code, str(small_sources)]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [builder.communicate(timeout=wait_limit(120))[0].strip() for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0]
    (library,) = (tmp_path / "cache" / "ops").iterdir()
    assert outputs == [str(library)] * 2
    ctypes.CDLL(str(library))


@pytest.mark.usefixtures("small_sources")
def test_a_library_is_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build.load_library()
    monkeypatch.setenv("PATH", str(tmp_path))  # without a compiler
    build.load_library()


@pytest.mark.usefixtures("small_sources")
def test_a_damaged_library_is_built_again() -> None:
    path = build.library_path()
    path.parent.mkdir(parents=True)
    path.touch()
    assert build.load_library().run_tape
    assert path.stat().st_size > 10000
