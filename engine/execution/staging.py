"""How what the host has computed for a step gets to the device: gathered in memory of the host, sent in one copy.

Used by the paths and by recorded steps, for inputs and plans. A step is dataclasses, lists and tuples with tensors of
the host in them; nothing here knows what they mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from engine.transfers import Event, transfers_of

T = TypeVar("T")

_ALIGNMENT = 16  # bytes; kernels load that much at once
_NUM_SLOTS = 2  # one is filled while the copy from the other one may still run
_LEAST_SLOT = 1 << 16


@dataclass(slots=True)
class _Slot:
    """Memory of the host that is read until `sent` has happened."""

    memory: torch.Tensor
    sent: Event | None = None


class Staging:
    """Sends steps to one device, in the order of its current stream, without waiting for it.

    Args:
        device: where steps go.
        make_event: makes the events that tell when memory may be written to again; None: the device's, if it has any.
    """

    def __init__(self, device: torch.device, make_event: Callable[[], Event] | None = None) -> None:
        self._device, self._transfers = device, transfers_of(device)
        if make_event is None and self._transfers is not None:
            make_event = self._transfers.make_event
        self._slots = [_Slot(self._host_memory(0), make_event and make_event()) for _ in range(_NUM_SLOTS)]
        self._turn = 0

    def send(self, step: T) -> tuple[T, torch.Tensor]:
        """The step with its tensors on the device, and the memory, uint8, in which they lie."""
        tensors = list(_tensors(step))
        ends = _ends(tensors)
        memory = torch.empty(ends[-1] if ends else 0, dtype=torch.uint8, device=self._device)
        self._fill(memory, tensors, ends)
        views = (
            memory[end - _padded(tensor) :][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, end in zip(tensors, ends, strict=True)
        )
        return _with_tensors(step, views), memory

    def send_again(self, sent: T, memory: torch.Tensor, step: T) -> None:
        """Writes another step where an earlier one was sent to.

        Args:
            sent, memory: what `send` returned.

        Raises:
            RuntimeError: the two differ in anything but what their tensors hold.
        """
        check_alike(sent, step)
        tensors = list(_tensors(step))
        self._fill(memory, tensors, _ends(tensors))

    def _fill(self, memory: torch.Tensor, tensors: list[torch.Tensor], ends: list[int]) -> None:
        if not memory.numel():
            return
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % _NUM_SLOTS
        if slot.sent is not None:
            slot.sent.synchronize()
        if slot.memory.numel() < ends[-1]:
            slot.memory = self._host_memory(max(_LEAST_SLOT, 2 * ends[-1]))
        host = slot.memory.numpy()
        for tensor, end in zip(tensors, ends, strict=True):
            begin = end - _padded(tensor)
            host[begin : begin + tensor.nbytes] = np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)
        memory.copy_(slot.memory[: ends[-1]], non_blocking=True)
        if slot.sent is not None:
            slot.sent.record()

    def _host_memory(self, size: int) -> torch.Tensor:
        with torch.inference_mode(False):
            if self._transfers is None or not size:
                return torch.empty(size, dtype=torch.uint8)
            return self._transfers.host_memory((size,), torch.uint8)


def to_device(step: T, device: torch.device) -> T:
    """The step with copies of its tensors on the device; itself on CPU. For callers without a `Staging`."""
    if device.type == "cpu":
        return step
    return _with_tensors(step, (tensor.to(device) for tensor in list(_tensors(step))))


def check_alike(recorded: Any, step: Any, name: str = "the step") -> None:
    """Raises RuntimeError where the two differ in anything but what their tensors hold."""
    if isinstance(recorded, torch.Tensor) and isinstance(step, torch.Tensor):
        if recorded.shape != step.shape or recorded.dtype != step.dtype:
            raise RuntimeError(
                f"{name} is {step.dtype} {list(step.shape)}, recorded was {recorded.dtype} {list(recorded.shape)}"
            )
    elif type(recorded) is not type(step):
        raise RuntimeError(f"{name} is a {type(step).__name__}, recorded was a {type(recorded).__name__}")
    elif dataclasses.is_dataclass(recorded):
        for field in dataclasses.fields(recorded):
            check_alike(getattr(recorded, field.name), getattr(step, field.name), f"{name}.{field.name}")
    elif isinstance(recorded, list | tuple):
        if len(recorded) != len(step):
            raise RuntimeError(f"{name} has {len(step)} entries, recorded were {len(recorded)}")
        for i, (old, new) in enumerate(zip(recorded, step, strict=True)):
            check_alike(old, new, f"{name}[{i}]")
    elif recorded != step:
        raise RuntimeError(f"{name} is {step!r}, recorded was {recorded!r}")


def _tensors(step: Any) -> Iterator[torch.Tensor]:
    """In the order in which `_with_tensors` replaces them."""
    if isinstance(step, torch.Tensor):
        yield step
    elif dataclasses.is_dataclass(step):
        for field in dataclasses.fields(step):
            yield from _tensors(getattr(step, field.name))
    elif isinstance(step, list | tuple):
        for part in step:
            yield from _tensors(part)


def _with_tensors(step: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """A copy of the step with these tensors in the places of its own."""
    if isinstance(step, torch.Tensor):
        return next(tensors)
    if dataclasses.is_dataclass(step) and not isinstance(step, type):
        changed = {field.name: _with_tensors(getattr(step, field.name), tensors) for field in dataclasses.fields(step)}
        return dataclasses.replace(step, **changed)
    if isinstance(step, list | tuple):
        return type(step)([_with_tensors(part, tensors) for part in step])
    return step


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _ends(tensors: list[torch.Tensor]) -> list[int]:
    """Where each tensor's place ends in memory that holds them all."""
    ends, end = [], 0
    for tensor in tensors:
        end += _padded(tensor)
        ends.append(end)
    return ends
