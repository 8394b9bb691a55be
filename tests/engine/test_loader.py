"""Loading a model from a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.model.loader import load_model


@pytest.fixture
def folder(tiny: PreTrainedModel, tmp_path: Path) -> Path:
    tiny.save_pretrained(tmp_path)
    return tmp_path


def test_loads_the_checkpoints_own_dtype(tiny: PreTrainedModel, folder: Path) -> None:
    model = load_model(folder)
    assert model.dtype == torch.float32 and not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    state = tiny.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"])
def test_loads_in_another_dtype(folder: Path, dtype: torch.dtype | str) -> None:
    assert load_model(str(folder), dtype=dtype).dtype == torch.bfloat16


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        load_model(tmp_path / "missing")


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError):
        load_model(folder)
