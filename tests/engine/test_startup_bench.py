"""The measurements of a start run and say what they should; how long things take is no test's business."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from engine.bench import startup


@pytest.fixture
def folder(tiny: PreTrainedModel, tmp_path: Path) -> str:
    tiny.save_pretrained(tmp_path)
    return str(tmp_path)


def test_time(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert startup.main(["time", folder, "--runs", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    seconds = [mark["wall_s"] for mark in report["marks"]]
    assert seconds == sorted(seconds) and report["marks"][-1]["name"] == "first token"
    assert report["compiler_cpu_s"] > 0.1  # the library was built anew
    lines = startup._table("time", report).splitlines()
    assert len(lines) == len(seconds) + 3


@pytest.mark.slow
def test_memory(folder: str, tiny: PreTrainedModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert startup.main(["memory", folder, "--requests", "3", "--tokens", "40", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    config = tiny.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * tiny.dtype.itemsize
    assert report["weights"] == sum(parameter.nbytes for parameter in tiny.parameters())
    assert report["touched_cache"] == 3 * 2 * 32 * token  # two pages each
    assert 0 <= report["peak_loading"] <= report["peak_serving"]
    assert "x (weights + touched cache)" in startup._table("memory", report)


def test_an_engine_that_owns_its_model_takes_a_quarter_more_at_most(
    smol_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Than its weights and what it uses of the cache: no second copy stays, nor the pages of the file."""
    assert startup.main(["memory", str(smol_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["peak_serving"] <= 1.25 * (report["weights"] + report["touched_cache"])
