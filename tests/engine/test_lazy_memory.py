"""Memory of the cache: zero, writable, aligned, and taken only as it is written to."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.execution import kv_tensors, lazy_memory
from engine.execution.lazy_memory import HUGE_PAGE, SMALL_BYTES, lazy_zeros


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("size", [1, 4097, SMALL_BYTES, SMALL_BYTES + 1, SMALL_BYTES + 3 * HUGE_PAGE + 5])
def test_zero_and_writable_to_the_last_byte(size: int) -> None:
    array = lazy_zeros(size)
    assert array.shape == (size,) and not array.any() and array.ctypes.data % HUGE_PAGE == 0
    array[-1] = array[0] = 7
    assert int(array.astype(np.int64).sum()) == 7 * min(size, 2)


def test_without_huge_pages_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(lazy_memory.mmap, "MADV_HUGEPAGE")
    array = lazy_zeros(SMALL_BYTES + 5)
    assert array.shape == (SMALL_BYTES + 5,) and not array.any()


def test_more_than_there_is_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="does not give"):
        lazy_zeros(1 << 60)


def test_a_cache_takes_what_its_first_blocks_need() -> None:
    """Sixty tensors as of a model with thirty layers: a huge page at the start of each would take 120 MiB."""
    before = resident()
    kv = kv_tensors.allocate(30, 4000, 3, 32, 64, torch.bfloat16)
    for tensor in (*kv.keys, *kv.values):
        tensor[1:11] = 1
    used = 10 * 60 * 3 * 32 * 64 * 2
    assert resident() - before < 1.5 * used + (8 << 20)


def test_what_the_cache_takes_and_does_not_use_is_bounded() -> None:
    before = resident()
    kv = kv_tensors.allocate(2, 4000, 3, 32, 64, torch.bfloat16)
    blocks = SMALL_BYTES // (3 * 32 * 64 * 2) + 2  # just into the first huge page of each tensor
    for tensor in (*kv.keys, *kv.values):
        tensor[1 : 1 + blocks] = 1
    assert resident() - before < 1.25 * blocks * 4 * 3 * 32 * 64 * 2 + (2 << 20)
    assert not kv.keys[0][0].any()


def test_memory_goes_back_with_the_last_tensor() -> None:
    before = resident()
    kv = kv_tensors.allocate(2, 2000, 3, 32, 64, torch.bfloat16)
    for tensor in (*kv.keys, *kv.values):
        tensor.fill_(1)
    view = kv.keys[0][5]
    del kv, tensor
    assert view[0, 0, 0] == 1
    assert resident() - before < 30 << 20
