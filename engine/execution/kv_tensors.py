"""The memory of the paged KV cache on the device, head-major blocks, and of the blocks that the host keeps.

Made once when an engine is built. The device's is written and read by the ops, the host's by the model runner between
steps. Which block belongs to whom is not known here.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.cache.host_tier import BlockCopies
from engine.execution.lanes import Lanes, lanes_of
from engine.execution.lazy_memory import lazy_zeros
from engine.sampling.sending import send
from engine.sizing import GIB, STAGINGS, staging_blocks
from engine.transfers import transfers_of

_PINNED_CHUNK = 1 << 30


@dataclass(frozen=True, slots=True)
class KVTensors:
    """K and V of the layers of one group, each [num_blocks_allocated, num_kv_heads, page_size, head_dim].

    Groups share the tensors: a block belongs to one group at a time, which uses as many tensors as it has layers.

    Block 0 is the null block: it is read where a table is padded and never written, so it stays zero. With a trash
    block, the last one, padding has a place to write to.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def num_blocks_allocated(self) -> int:
        """Usable blocks, the null block, and the trash block if there is one."""
        return self.keys[0].shape[0]

    @property
    def page_size(self) -> int:
        return self.keys[0].shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.keys[0].shape[1]

    @property
    def head_dim(self) -> int:
        return self.keys[0].shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys[0].dtype

    @property
    def device(self) -> torch.device:
        return self.keys[0].device


def allocate(
    num_tensors: int,
    num_blocks: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    trash: bool = False,
) -> KVTensors:
    """Reserves `num_tensors` zeroed K and V tensors of `num_blocks` usable blocks, the null block and, with `trash`,
    the trash block.

    On CPU memory is taken from the system page by page as it is written to.

    Raises:
        MemoryError, torch.OutOfMemoryError: the device cannot give that much.
    """
    shape = (1 + num_blocks + trash, num_kv_heads, page_size, head_dim)
    tensors = [_zeros(shape, dtype, torch.device(device)) for _ in range(2 * num_tensors)]
    return KVTensors(tensors[:num_tensors], tensors[num_tensors:])


class HostKV:
    """Blocks that left the device: each has a slot on the host, in which it lies in one piece.

    A block's pages lie apart on the device: there they are gathered, or spread, by one launch a tensor for all blocks
    of a portion. Over the bus goes one copy a block, beside the steps: what a step overwrites has been gathered before
    it runs, and is on its way to the host while it runs. What comes from the host is waited for.

    Args:
        kv: the device's blocks.
        num_slots: blocks that the host keeps, at least 1.
        lanes: orders of the device's work; None: its own.

    Where the device copies by itself the memory is pinned and taken at once; else it is taken from the system as it is
    written to.

    Raises:
        MemoryError, torch.OutOfMemoryError: host or device cannot give that much.
    """

    def __init__(self, kv: KVTensors, num_slots: int, lanes: Lanes | None = None) -> None:
        self._device = [*kv.keys, *kv.values]
        self._lanes = lanes or lanes_of(kv.device)
        block = (len(self._device), *kv.keys[0].shape[1:])
        self._per_chunk, self._chunks = _host_chunks(block, num_slots, kv)
        self._portion = staging_blocks(kv.num_blocks_allocated, num_slots)
        shape = (self._portion, *block)
        places = [torch.empty(shape, dtype=kv.dtype, device=kv.device) for _ in range(STAGINGS)]
        made = self._lanes.mark(beside=False)  # in whose order their memory may have been used before
        self._stagings = deque(_Staging(place, made) for place in places)

    def run(self, copies: BlockCopies) -> None:
        """Copies blocks to their slots, then slots to their blocks; nothing may be written twice in one direction.

        Launched in the order of the steps, between two of them.
        """
        for first in range(0, len(copies.to_host), self._portion):
            self._store(copies.to_host[first : first + self._portion])
        for first in range(0, len(copies.from_host), self._portion):
            self._load(copies.from_host[first : first + self._portion])

    def _store(self, pairs: list[tuple[int, int]]) -> None:
        """(block, slot) of a portion."""
        staging = self._next_staging(beside=False)
        blocks = self._index([block for block, _ in pairs])
        for number, tensor in enumerate(self._device):
            torch.index_select(tensor, 0, blocks, out=staging.blocks[: len(pairs), number])
        self._lanes.wait(self._lanes.mark(beside=False), beside=True)
        with self._lanes.copying():
            for place, (_, slot) in enumerate(pairs):
                self._slot(slot).copy_(staging.blocks[place], non_blocking=True)
        staging.last_use = self._lanes.mark(beside=True)

    def _load(self, pairs: list[tuple[int, int]]) -> None:
        """(slot, block) of a portion."""
        staging = self._next_staging(beside=True)
        with self._lanes.copying():
            for place, (slot, _) in enumerate(pairs):
                staging.blocks[place].copy_(self._slot(slot), non_blocking=True)
        self._lanes.wait(self._lanes.mark(beside=True), beside=False)
        blocks = self._index([block for _, block in pairs])
        for number, tensor in enumerate(self._device):
            tensor.index_copy_(0, blocks, staging.blocks[: len(pairs), number])
        staging.last_use = self._lanes.mark(beside=False)

    def _next_staging(self, *, beside: bool) -> _Staging:
        """The one that has been unused the longest, free for what is launched in one order from now on."""
        staging = self._stagings[0]
        self._stagings.rotate(-1)
        self._lanes.wait(staging.last_use, beside=beside)
        return staging

    def _slot(self, slot: int) -> torch.Tensor:
        return self._chunks[slot // self._per_chunk][slot % self._per_chunk]

    def _index(self, numbers: list[int]) -> torch.Tensor:
        return send([np.array(numbers, dtype=np.int64)], self._device[0].device)[0]


@dataclass(slots=True)
class _Staging:
    """Room on the device for a portion of blocks, each in one piece, and the mark of its last use."""

    blocks: torch.Tensor
    last_use: Any


def _host_chunks(block: tuple[int, ...], num_slots: int, kv: KVTensors) -> tuple[int, list[torch.Tensor]]:
    """Slots a chunk, and chunks of slots: several with pinned memory, of which torch takes powers of two only."""
    if (transfers := transfers_of(kv.device)) is None:
        return num_slots, [_zeros((num_slots, *block), kv.dtype, torch.device("cpu"))]
    block_bytes = math.prod(block) * kv.dtype.itemsize
    per_chunk = max(1, _PINNED_CHUNK // block_bytes)
    sizes = [min(per_chunk, num_slots - first) for first in range(0, num_slots, per_chunk)]
    try:
        return per_chunk, [transfers.host_memory((size, *block), kv.dtype) for size in sizes]
    except RuntimeError as error:
        raise MemoryError(
            f"the host does not give {num_slots * block_bytes / GIB:.2f} GiB of pinned memory to keep blocks in: lower "
            f"cpu_offload_space ({error})"
        ) from error


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(lazy_zeros(math.prod(shape) * dtype.itemsize)).view(dtype).view(shape)
