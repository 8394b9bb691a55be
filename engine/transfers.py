"""What copies between host and device need so that nobody waits for them, by the type of the device.

Used by whoever sends to a device or receives from it. Knows nothing of what is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Event(Protocol):
    """Of a stream of the device."""

    def record(self) -> None:
        """It happens when all that was launched before has run."""

    def synchronize(self) -> None:
        """Waits until it has happened; at once where it was never recorded."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """Of a device that copies by itself, later than it is told to.

    Attributes:
        host_memory: shape and dtype -> memory of the host, not initialised, that the device reads and writes by itself.
        make_event: an event of the stream that is current when it is recorded.
    """

    host_memory: Callable[[Sequence[int], torch.dtype], torch.Tensor]
    make_event: Callable[[], Event]

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host, which is there once an event has happened that is recorded after this."""
        return self.host_memory(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)


def _pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)


BY_DEVICE_TYPE = {"cuda": Transfers(_pinned, lambda: torch.cuda.Event())}


def transfers_of(device: torch.device) -> Transfers | None:
    """Those of a device; None: a copy is done when it returns."""
    return BY_DEVICE_TYPE.get(device.type)
