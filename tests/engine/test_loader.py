"""What loading does beside loading: garbage collection, the library that is built meanwhile."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.model import loader
from engine.model.loader import load_model
from tests.conftest import wait_limit

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tiny: PreTrainedModel, tmp_path: Path) -> Path:
    tiny.save_pretrained(tmp_path)
    return tmp_path


def test_weights_as_saved_and_nothing_to_train(folder: Path, tiny: PreTrainedModel) -> None:
    model = load_model(folder)
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
    for name, parameter in tiny.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=0, atol=0, check_stride=False)


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_as_before(folder: Path, enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        load_model(folder)
        assert gc.isenabled() is enabled
        (folder / "model.safetensors").unlink()
        with pytest.raises(OSError):
            load_model(folder)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_no_model_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.prebuild, "start", lambda: pytest.fail("nothing to build for"))
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_model(tmp_path)


def test_library_is_built_meanwhile_for_the_cpu_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(loader.prebuild, "start", lambda: begun.append(True))
    load_model(folder, device="meta")
    assert not begun
    load_model(folder, device=torch.device("cpu"))
    assert begun


def test_weights_of_the_checkpoints_dtype_take_memory_when_they_are_read(tmp_path: Path) -> None:
    """Not two copies, nor even one: the file is mapped."""
    code = """
import sys, resource
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from engine.model.loader import load_model
sizes = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8, vocab_size=8192)
LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=8, dtype="float32")).save_pretrained(sys.argv[1])
load_model(sys.argv[1])
peak = lambda name: next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(name)) * 1024
Path("/proc/self/clear_refs").write_text("5")
before = peak("VmRSS")
model = load_model(sys.argv[1])
weights = sum(parameter.nbytes for parameter in model.parameters())
print((peak("VmHWM") - before) / weights)
"""
    run = [sys.executable, "-c", code, str(tmp_path)]
    child = subprocess.run(run, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=wait_limit(120), check=True)
    assert float(child.stdout.split()[-1]) < 0.5
