"""A device that computes on CPU and tells of everything that a GPU would have to wait for.

Runs in a process of its own, whose torch then has the device for good. Triton's kernels are interpreted on it.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

NAME = "told"
# What a GPU's tensors are read for: numbers for the host, and results whose size depends on them.
_READS = {
    "_local_scalar_dense", "is_nonzero", "item", "equal", "allclose", "nonzero", "masked_select", "unique", "_unique2",
    "unique_dim", "unique_consecutive", "repeat_interleave", "bincount",
}  # fmt: skip


@dataclass
class Told:
    """What happened.

    Attributes:
        waits: operations for which the host waits until the device has come to them, with the lines that call them.
        sent: copies to the device that nobody waits for, in bytes.
        launched: operations that compute something on the device.
    """

    waits: list[str] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    launched: list[str] = field(default_factory=list)


class OnDevice(torch.Tensor):
    """A tensor of the device, whose numbers are those of `on_cpu`."""

    on_cpu: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> OnDevice:
        own = torch.Tensor._make_wrapper_subclass(
            cls,
            tensor.shape,
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            device=f"{NAME}:0",
        )
        own.on_cpu = tensor
        return own

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


_told = Told()


@contextmanager
def told() -> Iterator[Told]:
    """What happens on the device meanwhile."""
    global _told
    before, _told = _told, Told()
    try:
        yield _told
    finally:
        _told = before


def to_cpu(value: Any) -> Any:
    """Tensors of the device as what they hold, without being told of."""
    return tree_map(lambda each: each.on_cpu if isinstance(each, OnDevice) else each, value)


def to_device(tensor: torch.Tensor) -> OnDevice:
    """A copy, without being told of."""
    return OnDevice(tensor.clone())


def set_up() -> None:
    """Makes the device known to torch, and Triton's interpreter run on it."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
    from triton.runtime.interpreter import InterpretedFunction

    _setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")
    globals()["_library"] = library  # it ends with the object
    run = InterpretedFunction.run

    def run_on_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        _told.launched.append(self.__name__)
        if any(isinstance(each, torch.Tensor) and not isinstance(each, OnDevice) for each in args):
            _wait("a kernel is given memory of the host")
        return run(self, *to_cpu(args), **kwargs)

    InterpretedFunction.run = run_on_cpu


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func.overloadpacket.__name__
    flat, _ = tree_flatten((args, kwargs))
    tensors = [each for each in flat if isinstance(each, torch.Tensor)]
    own = [each for each in tensors if isinstance(each, OnDevice)]
    others = [each for each in tensors if not isinstance(each, OnDevice) and each.dim()]
    leaves = own and str(kwargs.get("device", NAME)).partition(":")[0] != NAME
    if name == "copy_":
        _copy(args, bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False)))
    elif leaves or name in _READS:
        _wait(name)
    elif name in ("index", "index_put", "index_put_") and any(
        each.dtype in (torch.bool, torch.uint8) for each in own[1:]
    ):
        _wait(f"{name} by a mask")
    elif own and others:
        _wait(f"{name} of tensors here and there")
    elif not _is_view(func) and not name.startswith(("empty", "new_empty")):
        _told.launched.append(name)
    args, kwargs = to_cpu((args, kwargs))
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    out = func(*args, **kwargs)
    if leaves:
        return out
    return tree_map(lambda each: OnDevice(each) if isinstance(each, torch.Tensor) else each, out)


def _copy(args: Any, non_blocking: bool) -> None:
    target, source = args[:2]
    if isinstance(target, OnDevice) and not isinstance(source, OnDevice):
        if non_blocking or not source.dim():
            _told.sent.append(source.nbytes)
        else:
            _wait("a copy to the device")
    elif not isinstance(target, OnDevice):
        _wait("a copy to the host")
    else:
        _told.launched.append("copy_")


def _is_view(func: Any) -> bool:
    return any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.arguments)


def _wait(what: str) -> None:
    lines = [f"{line.filename.rpartition('/')[2]}:{line.lineno}" for line in traceback.extract_stack()[:-2]]
    callers = [line for line in lines if not line.startswith(("device_on_cpu", "_pytree", "_ops"))]
    _told.waits.append(f"{what} at {', '.join(callers[-3:])}")
