"""Numbers of the host on their way to the device: several arrays in one copy, which nobody waits for.

Used by the sampler. Knows nothing of what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.transfers import transfers_of

# From int64 [n] to a tensor of the same numbers on the device, for all that is launched from now on. The array may be
# changed as soon as the call returns, the tensor's memory may serve the next step.
ToDevice = Callable[[npt.NDArray[np.int64]], torch.Tensor]

_WORD = 8  # bytes; every array begins at a multiple


def send(arrays: Sequence[npt.NDArray[Any]], device: torch.device, copy: ToDevice | None = None) -> list[torch.Tensor]:
    """The arrays as tensors on the device, without waiting for it; on CPU they share the arrays' memory.

    Args:
        arrays: of one dimension, of numbers of 4 or 8 bytes.
        copy: makes the one copy there is; None makes one that belongs to the tensors alone.
    """
    if device.type == "cpu" and copy is None:
        return [torch.from_numpy(array) for array in arrays]
    sizes = [-(-array.nbytes // _WORD) for array in arrays]
    ends = np.cumsum(sizes).tolist()
    if not sum(sizes):
        return [torch.empty(0, dtype=_dtype(array), device=device) for array in arrays]
    words = np.zeros(ends[-1], np.int64)
    for array, size, end in zip(arrays, sizes, ends, strict=True):
        words[end - size : end].view(array.dtype)[: len(array)] = array
    sent = _copied(words, device) if copy is None else copy(words)
    parts = [sent[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return [part.view(_dtype(array))[: len(array)] for part, array in zip(parts, arrays, strict=True)]


def _copied(words: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(words)
    if (transfers := transfers_of(device)) is not None:  # from other memory a copy waits for what runs on the device
        tensor = transfers.host_memory(tensor.shape, tensor.dtype).copy_(tensor)
    return tensor.to(device, non_blocking=True)


def _dtype(array: npt.NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(array[:0]).dtype
