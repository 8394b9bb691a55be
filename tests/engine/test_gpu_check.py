"""The GPU check on CPU: floors by hand-computed numbers, stages that go wrong, and all stages with tiny models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.execution.kv_tensors import KVTensors
from engine.gpu_check import __main__ as command
from engine.gpu_check import attention, models, parity, products
from engine.gpu_check.backends import Backend
from engine.gpu_check.device import Bench
from engine.gpu_check.floors import Limits, ModelCosts, busy, share
from engine.gpu_check.goals import figures, table
from engine.gpu_check.peer import needed, together
from engine.gpu_check.stages import Progress, Report
from engine.gpu_check.supervise import supervise
from engine.ops.torch_ops import TorchOps
from tests.conftest import wait_limit
from tests.engine import gpu_check_worker as worker

ROOT = Path(__file__).resolve().parents[2]
H200 = Limits(bandwidth=4.3e12, gemm=790e12)
LLAMA = ModelCosts(weights=7_504_924_672, head=525_336_576, kv_bytes=131_072, query_numbers=131_072)
QWEN = ModelCosts(weights=596_049_920, head=155_582_464, kv_bytes=114_688, query_numbers=57_344)


# Floors


@pytest.mark.parametrize(("name", "expected"), [("llama-8b", LLAMA), ("qwen3-0.6b", QWEN)])
def test_costs_are_counted_from_the_model(name: str, expected: ModelCosts) -> None:
    """Llama: 32 layers of 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096, 4096, and 128256 * 4096.
    Qwen3: 28 of 2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128, 1024, and 151936 * 1024."""
    assert models.costs_of(models.build(name, "meta")) == expected


@pytest.mark.parametrize(
    ("costs", "rows", "context", "milliseconds"),
    [
        (LLAMA, 1, 1024, 3.522),  # 15.01 GB and 0.134 GB at 4.3 TB/s
        (LLAMA, 256, 1024, 12.855),  # 3842 GFLOP at 790 TFLOP/s take longer than the weights; and 34.4 GB
        (QWEN, 32, 1024, 1.151),
        (QWEN, 256, 1024, 7.378),
    ],
)
def test_floor_of_a_step(costs: ModelCosts, rows: int, context: int, milliseconds: float) -> None:
    seconds = costs.decode_seconds(H200, rows, context)
    assert seconds is not None and 1e3 * seconds == pytest.approx(milliseconds, abs=6e-4)


def test_floor_of_a_prompt() -> None:
    """114.35 TFLOP of products, 1e-3 of them for the last token's logits, and 17.59 of attention at 790 TFLOP/s."""
    seconds = LLAMA.prefill_seconds(H200, 8192)
    assert seconds is not None and 1e3 * seconds == pytest.approx(167.02, abs=0.01)


def test_without_rates_there_are_no_floors() -> None:
    assert LLAMA.decode_seconds(Limits(gemm=1.0), 1, 1) is None and LLAMA.prefill_seconds(Limits(1.0), 1) is None
    assert LLAMA.decode_seconds(Limits(4.3e12), 1, 0) == LLAMA.weights * 2 / 4.3e12
    assert share(None, 1.0) is None and share(0.5, 2.0) == 0.25


def test_floor_of_a_product() -> None:
    """Of 4096 * 6144 weights in bfloat16 and the vectors of each row: 50.3 MB, or at batch 256 12.9 GFLOP."""
    (name, (outputs, inputs)), *_ = products.shapes(models.config_of("llama-8b"))
    assert (name, outputs, inputs) == ("qkv", 6144, 4096)
    one, many = (products.floor_seconds(H200, batch, outputs, inputs) for batch in (1, 256))
    assert one is not None and 1e6 * one == pytest.approx(11.71, abs=0.01)
    assert many is not None and 1e6 * many == pytest.approx(16.31, abs=0.01)


def test_products_have_all_weights_that_a_step_reads() -> None:
    """But for the norms'."""
    for name, costs in (("llama-8b", LLAMA), ("qwen3-0.6b", QWEN)):
        config = models.config_of(name)
        *layer, logits = (rows * columns for _, (rows, columns) in products.shapes(config))
        norms = costs.weights - sum(layer) * config.num_hidden_layers - logits
        assert 0 < norms < 1e-3 * costs.weights


def test_bytes_of_attention() -> None:
    case = next(case for case in attention.CASES if (case.rows, case.context) == (256, 1024) and case.heads == 32)
    assert case.tokens == 262_144 and case.read_bytes(torch.bfloat16) == 262_144 * 2 * 8 * 128 * 2 == 1 << 30


def test_a_large_case_is_left_out_after_slow_small_ones() -> None:
    assert needed(1, {}) == needed(32, {1: 0.1}) == 10
    assert needed(256, {1: 0.2, 32: 8.0}) == 64


def test_attention_is_timed_without_its_launches_where_it_can_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class Graph:
        def replay(self) -> None:
            calls.extend([0] * 5)

    class Graphs:
        def __init__(self, device: torch.device) -> None:
            self.fails = device.type == "meta"

        def capture(self, run: Any) -> Graph:
            run()
            if self.fails:
                raise RuntimeError("capture")
            return Graph()

    monkeypatch.setattr(attention, "CudaGraphs", Graphs)
    times = [5.0, 2.0, 3.0]
    monkeypatch.setattr(Bench, "best_seconds", lambda self, call: [call(), times.pop(0)][1])
    here, elsewhere = Bench(torch.device("cpu"), True), Bench(torch.device("meta"), True)
    assert attention.call_seconds(here, lambda: calls.append(1), True) == (1.0, "recorded")
    assert calls == [1] * 5 + [0] * 5
    assert attention.call_seconds(here, lambda: calls.append(1), False) == (2.0, "directly")
    seconds, launched = attention.call_seconds(elsewhere, lambda: calls.append(1), True)
    assert seconds == 3.0 and "capture" in launched and calls[-1] == 1


def test_time_that_kernels_cover() -> None:
    assert busy([]) == 0
    spans = [(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.0, 2.0), (6.0, 7.0), (7.5, 8.0)]
    assert busy(spans) == 5.5
    assert busy(spans, joined=1.0) == 6 and busy(spans, joined=2.0) == 8


def test_steps_in_which_all_requests_decode() -> None:
    assert together([[1, 2, 4, 8, 16], [3, 4, 8]]) == [1, 4]
    with pytest.raises(RuntimeError, match="never decode all together"):
        together([[1, 2], [3, 4]])


def test_goals() -> None:
    stages = {
        "steps llama-8b": {
            "rows": [
                {"case": "batch 1", "batch": 1, "step_ms": 4.4, "share": 0.8, "gap": 0.04, "main": True},
                {"case": "batch 32", "batch": 32, "step_ms": 5.81, "share": 0.77, "gap": None, "main": True},
                {"case": "batch 32, neither", "batch": 32, "step_ms": 1.0, "share": 0.5, "gap": None, "main": False},
                {"case": "prefill 8192", "prefill_ms": 300.0, "share": 0.66},
                {"case": "batch 256", "skipped": "no time"},
            ]
        },
        "transformers llama-8b": {"rows": [{"case": "batch 1", "batch": 1, "step_ms": 8.0, "share": 0.4}]},
        "attention": {
            "rows": [
                {"case": "a", "tokens": 1 << 18, "share": 0.7, "fast": True},
                {"case": "b", "tokens": 1 << 17, "share": 0.7, "fast": True},
                {"case": "c", "tokens": 1 << 18, "share": 0.1, "fast": False},
            ]
        },
        "probe": {"rows": [], "status": "failed"},
    }
    found = figures(stages)
    verdicts = {figure.name: figure.verdict(judged=True) for figure in found}
    assert verdicts == {
        "llama-8b step, batch 1": "met",
        "llama-8b device waits, batch 1": "missed",
        "llama-8b step, batch 32": "missed",
        "llama-8b step, batch 32, neither": "",
        "llama-8b prefill 8192": "met",
        "llama-8b transformers' step, batch 1": "",
        "llama-8b faster than transformers, batch 1": "missed",
        "attention, a": "missed",
        "attention, b": "",
        "attention, c": "",
    }
    assert {figure.verdict(judged=False) for figure in found} == {"", "not judged"}
    lines = table(found, judged=True).splitlines()
    assert len(lines) == 1 + len(found) and lines[1].split()[-3:] == ["<=", "4.4", "met"] and "80.0%" in lines[1]


# Stages


def test_whatever_a_stage_does_the_others_run(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    run = [sys.executable, "-m", "tests.engine.gpu_check_worker", str(path)]
    report = supervise(run, path, wait_limit(60), worker.NAMES)
    assert json.loads(path.read_text()) == report.data
    assert {name: stage["status"] for name, stage in report.stages.items()} == {
        "good": "done",
        "raises": "failed",
        "dies": "lost",
        "half": "failed",
        "hangs": "lost",
        "skips": "skipped",
        "loses the device": "done",
        "last": "done",
    }
    assert report.data["starts"] == 4
    raised, died, hung = (report.stages[name] for name in ("raises", "dies", "hangs"))
    assert "ArithmeticError: on purpose" in raised["traceback"] and raised["rows"] == [{"case": "before", "value": 2}]
    assert "_dies" in died["traceback"] and died["rows"] == [{"case": "before", "value": 3}]
    assert "_hangs" in hung["traceback"]
    bad, fine, long = report.stages["half"]["rows"]
    assert "one case" in bad["traceback"] and fine["value"] == 4 and "are needed" in long["skipped"]
    assert report.stages["skips"]["reason"] == "not here"


def test_a_worker_that_cannot_start_ends_the_run(tmp_path: Path) -> None:
    report = supervise([sys.executable, "-c", "raise SystemExit(5)"], tmp_path / "r.json", wait_limit(60), ["a", "b"])
    assert all(stage["status"] == "lost" and "status 5" in stage["error"] for stage in report.stages.values())


def test_without_time_stages_are_skipped(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "tests.engine.gpu_check_worker", str(tmp_path / "r.json")]
    report = supervise(run, tmp_path / "r.json", 1.0, worker.NAMES)
    assert set(report.stages) == set(worker.NAMES)
    assert "left of the whole run's time" in report.stages["last"]["reason"]


class _Wrong(TorchOps):
    def attend(self, *arguments: Any) -> torch.Tensor:
        out = super().attend(*arguments)
        out[-1] += 0.1
        return out


def test_wrong_attention_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(kv: KVTensors, groups: Any) -> TorchOps:
        return _Wrong(kv, groups)

    monkeypatch.setattr(parity, "backends", lambda device: ([Backend("wrong", make)], {"gone": "away"}))
    report, entry = Report(tmp_path / "r.json"), {"rows": []}
    parity.parity(Bench(torch.device("cpu"), small=True), Progress(report, entry, wait_limit(60)))
    gone, first, error, *_ = entry["rows"]
    assert gone["skipped"] == "away" and first["right"] is False and "off by 0.1" in error["error"]
    assert entry["failed_cases"] == len(parity.SMALL_SHAPES)


# The whole command


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("check") / "check.json"
    run = [sys.executable, "-m", "engine.gpu_check", "--small", "--json", str(path)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=wait_limit(200))
    report: dict[str, Any] = json.loads(path.read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    report["printed"] = done.stdout
    return report


def test_every_stage_runs_on_cpu(small: dict[str, Any]) -> None:
    assert list(small["stages"]) == list(command.NAMES)
    assert {stage["status"] for stage in small["stages"].values()} == {"done"}
    said = {reason for stage in small["stages"].values() for row in stage["rows"] for reason in _reasons(row)}
    assert any("CUDA graphs need a CUDA device" in reason for reason in said)
    assert any("the device's own time needs a CUDA device" in reason for reason in said)
    assert any("another way of running steps needs a CUDA device" in reason for reason in said)


def _reasons(row: dict[str, Any]) -> list[str]:
    return [value for key, value in row.items() if key.endswith("skipped")]


def test_shares_are_of_what_the_same_run_has_measured(small: dict[str, Any]) -> None:
    """Tiny: 2 layers of 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64 (Qwen3: + 2 * 16) numbers, 64, 512 * 64."""
    rates = {row["case"]: row for row in small["stages"]["probe"]["rows"]}
    bandwidth, gemm = rates["copy"]["bytes_per_s"], rates["matrix product"]["flop_per_s"]
    for name, weights in (("llama-8b", 106_816), ("qwen3-0.6b", 106_880)):
        rows = small["stages"][f"steps {name}"]["rows"]
        steps = [row for row in rows if "step_ms" in row]
        assert [row["batch"] for row in steps] == [1, 2, 4]
        assert [row["right"] for row in rows if row["case"] == "logits"] == [True]
        assert rows[0]["read_bytes"] == 2 * weights and rows[0]["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2
        for row in steps:
            reading, computing = 2 * weights / bandwidth, 2 * weights * row["batch"] / gemm
            floor = max(reading, computing) + row["batch"] * row["context"] * 256 / bandwidth
            assert row["share"] == pytest.approx(floor / (1e-3 * row["step_ms"]))
            assert 40 < row["context"] < 80
        for row in small["stages"][f"transformers {name}"]["rows"]:
            assert row["step_ms"] > 0 and row["share"] > 0
    for row in small["stages"]["attention"]["rows"]:
        if "ms" in row:
            assert row["share"] == pytest.approx(row["tokens"] * 2 * 2 * 16 * 2 / bandwidth / (1e-3 * row["ms"]))


def test_all_backends_of_the_device_are_right(small: dict[str, Any]) -> None:
    rows = [row for row in small["stages"]["parity"]["rows"] if "right" in row]
    assert all(row["right"] for row in rows)
    assert {row["case"].partition(",")[0] for row in rows} == {"cpu", "sdpa", "eager"}
    assert len(rows) == 3 * len(parity.SMALL_SHAPES)


def test_goals_are_printed_and_not_judged(small: dict[str, Any]) -> None:
    assert {line["verdict"] for line in small["summary"]} == {"", "not judged"}
    assert "llama-8b step, batch 1" in small["printed"] and "<= 4.4" in small["printed"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--stages", "probe"]) == 0
    assert "probe: skipped, there is no CUDA device; --small runs the stages on CPU" in capfd.readouterr().out
