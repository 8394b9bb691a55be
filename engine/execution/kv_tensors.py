"""The memory of the paged KV cache: one K and one V tensor a layer, head-major blocks.

Made once when an engine is built; written and read by the ops alone. Which block belongs to whom is not known here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class KVTensors:
    """K and V of the layers of one group, each [num_blocks + 1, num_kv_heads, page_size, head_dim].

    Groups share the tensors: a block belongs to one group at a time, which uses as many tensors as it has layers.

    Block 0 is the null block: it is read where a table is padded and never written, so it stays zero.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

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
) -> KVTensors:
    """Reserves `num_tensors` zeroed K and V tensors of `num_blocks` usable blocks and the null block.

    On CPU memory is taken from the system page by page as it is written to.

    Raises:
        MemoryError, torch.OutOfMemoryError: the device cannot give that much.
    """
    shape = (num_blocks + 1, num_kv_heads, page_size, head_dim)
    tensors = [_zeros(shape, dtype, torch.device(device)) for _ in range(2 * num_tensors)]
    return KVTensors(tensors[:num_tensors], tensors[num_tensors:])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes the zeros itself; numpy asks the system for zeroed memory, which costs nothing until used.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
