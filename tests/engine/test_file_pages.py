"""Weights that a checkpoint file holds: given back without a trace, and only where nothing can be lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model.file_pages import release_file_pages

SIZE = 4 << 20


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, torch.Tensor]:
    file = tmp_path / "model.safetensors"
    save_file({name: torch.randint(0, 256, (SIZE,), dtype=torch.uint8) for name in "ab"}, file)
    return load_file(file)


def resident(tensor: torch.Tensor) -> int:
    """Bytes in memory of the mapping that the tensor lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *fields = line.split()
        if not name.endswith(":"):
            low, high = (int(address, 16) for address in name.split("-"))
            inside = low <= tensor.data_ptr() < high
        elif inside and name == "Rss:":
            return int(fields[0]) * 1024
    raise AssertionError("the tensor lies in no mapping")


def test_given_back_and_read_again(tensors: dict[str, torch.Tensor]) -> None:
    sums = {name: int(tensor.sum()) for name, tensor in tensors.items()}
    assert resident(tensors["a"]) >= 2 * SIZE
    given = release_file_pages([tensors["a"]])
    assert SIZE - 8192 <= given <= SIZE
    assert SIZE <= resident(tensors["b"]) < SIZE + (1 << 20)
    assert {name: int(tensor.sum()) for name, tensor in tensors.items()} == sums


def test_what_was_written_is_not_lost(tensors: dict[str, torch.Tensor]) -> None:
    tensors["b"].fill_(7)
    assert release_file_pages(tensors.values()) == 0
    assert tensors["b"].unique().tolist() == [7]


def test_other_memory_is_left_alone() -> None:
    tensor = torch.full((SIZE,), 7, dtype=torch.uint8)
    assert release_file_pages([tensor, tensor[:10], torch.empty(0)]) == 0
    assert tensor.unique().tolist() == [7]
