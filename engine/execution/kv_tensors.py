"""The memory of the paged KV cache on the device, head-major blocks, and of the blocks that the host keeps.

Made once when an engine is built. The device's is written and read by the ops, the host's by the model runner between
steps. Which block belongs to whom is not known here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.cache.host_tier import BlockCopies
from engine.execution.lazy_memory import lazy_zeros


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
    """Blocks that left the device: for each of its tensors one on the host, with a slot a block.

    Args:
        kv: the device's blocks.
        num_slots: blocks that the host keeps, at least 1.

    With a CUDA device the memory is pinned and taken at once; else it is taken from the system as it is written to.

    Raises:
        MemoryError, RuntimeError: the host cannot give that much.
    """

    def __init__(self, kv: KVTensors, num_slots: int) -> None:
        self._device = [*kv.keys, *kv.values]
        self._host = [_host_zeros((num_slots, *tensor.shape[1:]), tensor) for tensor in self._device]

    def run(self, copies: BlockCopies) -> None:
        """Copies blocks to their slots, then slots to their blocks; nothing may be written twice in one direction."""
        if copies.to_host:
            _copy(self._device, self._host, copies.to_host)
        if copies.from_host:
            _copy(self._host, self._device, copies.from_host)


def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
    """target[b] = source[a] for every (a, b) of `pairs` in each pair of tensors."""
    if sources[0].device == targets[0].device:
        taken, given = torch.tensor(pairs, device=sources[0].device).T.contiguous()
        for source, target in zip(sources, targets, strict=True):
            target.index_copy_(0, given, source.index_select(0, taken))
        return
    for source, target in zip(sources, targets, strict=True):  # in the stream's order, without waiting
        for a, b in pairs:
            target[b].copy_(source[a], non_blocking=True)


def _host_zeros(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    if like.device.type == "cuda":
        return torch.zeros(shape, dtype=like.dtype, pin_memory=True)
    return _zeros(shape, like.dtype, torch.device("cpu"))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(lazy_zeros(math.prod(shape) * dtype.itemsize)).view(dtype).view(shape)
