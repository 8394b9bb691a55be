"""Two orders of work on one device: that of the steps, and that of copies which go on beside them.

Used by `HostKV`. Within an order everything runs as it was launched; between the two only marks say what waits for
what. Knows nothing of what is launched.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class Lanes(Protocol):
    """The two orders of a device. `beside` chooses that of the copies."""

    def copying(self) -> AbstractContextManager[Any]:
        """What is launched inside belongs to the copies; all else belongs to the steps."""
        ...

    def mark(self, *, beside: bool) -> Any:
        """What has been launched so far in one order."""
        ...

    def wait(self, mark: Any, *, beside: bool) -> None:
        """What is launched from now on in one order runs after what a mark stands for. Nobody waits on the host."""
        ...


class OneLane:
    """Of a device that does one thing after another, as it is told."""

    def copying(self) -> AbstractContextManager[Any]:
        """See `Lanes.copying`."""
        return nullcontext()

    def mark(self, *, beside: bool) -> None:
        """See `Lanes.mark`."""

    def wait(self, mark: Any, *, beside: bool) -> None:
        """See `Lanes.wait`."""


class CudaLanes:
    """The stream that is current when a method is called, and one more."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside = torch.cuda.Stream(device)

    def copying(self) -> AbstractContextManager[Any]:
        """See `Lanes.copying`."""
        return torch.cuda.stream(self._beside)

    def mark(self, *, beside: bool) -> torch.cuda.Event:
        """See `Lanes.mark`."""
        event = torch.cuda.Event()
        event.record(self._stream(beside))
        return event

    def wait(self, mark: torch.cuda.Event, *, beside: bool) -> None:
        """See `Lanes.wait`."""
        self._stream(beside).wait_event(mark)

    def _stream(self, beside: bool) -> torch.cuda.Stream:
        return self._beside if beside else torch.cuda.current_stream(self._device)


def lanes_of(device: torch.device) -> Lanes:
    """Those of a device."""
    return CudaLanes(device) if device.type == "cuda" else OneLane()
