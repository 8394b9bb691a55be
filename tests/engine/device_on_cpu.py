"""A device that computes on CPU, as late as it may, and tells of everything that a GPU would have to wait for.

What is launched runs when the host waits for it, not before: memory that is overwritten too early gives wrong numbers.
Runs in a process of its own, whose torch then has the device for good. Triton's kernels are interpreted on it.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

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
        received: copies to the host that nobody waits for, in bytes.
        launched: operations that compute something on the device.
    """

    waits: list[str] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
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

    def new_tensor(self, data: Any) -> torch.Tensor:
        return torch.tensor(data, dtype=self.dtype).to(self.device)

    def data_ptr(self) -> int:
        return self.on_cpu.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.on_cpu.untyped_storage()


class Queue:
    """What was launched and has not run."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], Any]] = deque()
        self._done = 0
        self._recorded: list[Callable[[], Any]] | None = None

    def launch(self, run: Callable[[], Any]) -> None:
        if self._recorded is not None:
            self._recorded.append(run)
        else:
            self._waiting.append(run)

    @property
    def end(self) -> int:
        """How much has been launched ever."""
        return self._done + len(self._waiting)

    @property
    def done(self) -> int:
        """How much of it has run."""
        return self._done

    @torch.inference_mode()
    def run(self, end: int | None = None) -> None:
        """As much as was launched when `end` was that; None: all of it."""
        if self._recorded is not None:
            raise RuntimeError("what is recorded cannot be waited for")
        try:
            while self._waiting and (end is None or self._done < end):
                self._waiting.popleft()()
                self._done += 1
        except Exception:
            self._done += 1
            self.drop()
            raise

    def drop(self) -> None:
        """What has not run never will."""
        self._done = self.end
        self._waiting.clear()

    @contextmanager
    def recording(self) -> Iterator[list[Callable[[], Any]]]:
        """What is launched meanwhile does not run."""
        self._recorded = []
        try:
            yield self._recorded
        finally:
            self._recorded = None


class TwoLanes:
    """See `lanes.Lanes`. What is launched beside the steps runs when they wait for it."""

    @contextmanager
    def copying(self) -> Iterator[None]:
        global _current
        _current = beside_steps
        try:
            yield
        finally:
            _current = queue

    def mark(self, *, beside: bool) -> tuple[Queue, int]:
        lane = beside_steps if beside else queue
        return lane, lane.end

    def wait(self, mark: tuple[Queue, int], *, beside: bool) -> None:
        waiting, (lane, end) = beside_steps if beside else queue, mark
        if waiting is not lane:
            waiting.launch(lambda: lane.run(end))


class Event:
    """See `transfers.Event`."""

    def __init__(self) -> None:
        self._at = 0

    def record(self) -> None:
        self._at = queue.end

    def synchronize(self) -> None:
        if self._at > queue.done:
            _wait("an event")
            queue.run(self._at)


class Graphs:
    """A `GraphBackend`: what was launched is launched again, on the same memory and with the same numbers."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []

    def capture(self, run: Callable[[], None]) -> Graph:
        run()
        with queue.recording() as launches:
            run()
        self.graphs.append(Graph(launches))
        return self.graphs[-1]

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.graphs)


class Graph:
    """A recording."""

    def __init__(self, launches: list[Callable[[], Any]]) -> None:
        self._launches, self.replays = launches, 0

    def replay(self) -> None:
        _told.launched.append("graph")
        self.replays += 1
        for launch in self._launches:
            queue.launch(launch)


_told = Told()
queue = _current = Queue()
beside_steps = Queue()
_pinned: dict[int, torch.Tensor] = {}


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
    """Tensors of the device as what they hold once all has run, without being told of."""
    queue.run()
    return _on_cpu(value)


def _on_cpu(value: Any) -> Any:
    return tree_map(lambda each: each.on_cpu if isinstance(each, OnDevice) else each, value)


def to_device(tensor: torch.Tensor) -> OnDevice:
    """A copy, without being told of."""
    return OnDevice(tensor.clone())


def drop() -> None:
    """What was launched and has not run never will."""
    queue.drop()
    beside_steps.drop()


def pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory of the host that the device reads and writes by itself."""
    tensor = torch.zeros(tuple(shape), dtype=dtype)
    _pinned[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def set_up() -> None:
    """Makes the device known to torch and the engine, and Triton's interpreter run on it."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
    from triton.runtime.interpreter import InterpretedFunction

    from engine.transfers import BY_DEVICE_TYPE, Transfers

    _setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")
    globals()["_library"] = library  # it ends with the object
    BY_DEVICE_TYPE[NAME] = Transfers(pinned, Event)
    make_tensor, run = torch.tensor, InterpretedFunction.run

    def tensor(data: Any, *, device: Any = None, **others: Any) -> torch.Tensor:
        is_own = device is not None and torch.device(device).type == NAME
        return make_tensor(data, **others).to(device) if is_own else make_tensor(data, device=device, **others)

    torch.tensor = tensor  # which cannot make those of a device that is written in Python

    def run_on_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if tensors and not any(isinstance(each, OnDevice) for each in tensors):  # not of this device
            return run(self, *args, **kwargs)
        if not all(isinstance(each, OnDevice) for each in tensors):
            _wait("a kernel is given memory of the host")
        _told.launched.append(self.__name__)
        on_cpu = _on_cpu((args, kwargs))
        _current.launch(lambda: run(self, *on_cpu[0], **on_cpu[1]))

    InterpretedFunction.run = run_on_cpu


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return func.decompose(*args, **kwargs)  # in inference mode they come whole
    name = func.overloadpacket.__name__
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    own = [each for each in tensors if isinstance(each, OnDevice)]
    others = [each for each in tensors if not isinstance(each, OnDevice) and each.dim()]
    leaves = bool(own) and str(kwargs.get("device", NAME)).partition(":")[0] != NAME
    if name == "copy_":
        return _copy(*args, **kwargs)
    if leaves or name in _READS:
        _wait(name)
    elif name in ("index", "index_put", "index_put_") and any(
        each.dtype in (torch.bool, torch.uint8) for each in own[1:]
    ):
        _wait(f"{name} by a mask")
    elif own and others:
        _wait(f"{name} of tensors here and there")
    elif _is_view(func):
        with torch.inference_mode(own[0].is_inference()):  # what a view must be, too
            return _wrapped(func(*_on_cpu(args), **_on_cpu(kwargs)))
    elif name.startswith(("empty", "new_empty")):
        made = func(*_on_cpu(args), **_placed(_on_cpu(kwargs), "cpu"))
        return OnDevice(made.fill_(torch.nan) if made.is_floating_point() else made)  # whatever was there
    else:
        _told.launched.append(name)
        return _launch(func, args, kwargs)
    _current.run()
    out = func(*_on_cpu(args), **_placed(_on_cpu(kwargs), "cpu"))
    return out if leaves else _wrapped(out)


def _launch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs later; what it gives has its shapes now."""
    on_cpu, own, run_on_cpu = _on_cpu(args), _placed(_on_cpu(kwargs), "cpu"), _of_cpu(func)
    named = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    written = [
        named[each.name] for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write
    ]
    if written:
        _current.launch(lambda: run_on_cpu(*on_cpu, **own))
        if func.overloadpacket.__name__ == "arange":  # which is given memory without a size
            return _wrapped(func(*on_cpu, **own))
        return written[0] if len(written) == 1 else tuple(written)
    try:
        shapes = func(*tree_map(_meta, on_cpu), **_placed(tree_map(_meta, own), "meta"))
    except RuntimeError:  # some take fewer dtypes there
        shapes = run_on_cpu(*tree_map(_zeros, on_cpu), **tree_map(_zeros, own))
    out = tree_map(_like, shapes)

    def run() -> None:
        for target, each in zip(tree_leaves(out), tree_leaves(run_on_cpu(*on_cpu, **own)), strict=True):
            target.copy_(each)

    _current.launch(run)
    return _wrapped(out)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    is_here, from_here = (not isinstance(each, OnDevice) for each in (target, source))
    if from_here and not source.dim():
        source = source.clone()  # goes along as a number
        _told.sent.append(source.nbytes)
    elif from_here:
        non_blocking = non_blocking and _is_pinned(source)
        _told.sent.append(source.nbytes) if non_blocking else _wait("a copy to the device")
    elif not is_here:
        _told.launched.append("copy_")
    elif non_blocking and _is_pinned(target):
        _told.received.append(target.nbytes)
    else:
        _wait("a copy to the host")
        non_blocking = False
    to, of = _on_cpu((target, source))
    _current.launch(lambda: to.copy_(of))
    if (is_here or from_here) and not non_blocking and source.dim():
        _current.run()
    return target


def _of_cpu(func: Any) -> Callable[..., Any]:
    """What computes it on CPU, which counts floating numbers alone."""
    if func is not torch.ops.aten.histc.default:
        return func  # type: ignore[no-any-return]
    return lambda numbers, *others, **named: func(numbers.float(), *others, **named).to(numbers.dtype)


def _is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _pinned


def _placed(kwargs: dict[str, Any], device: str) -> dict[str, Any]:
    return kwargs | {"device": torch.device(device)} if "device" in kwargs else kwargs


def _meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _zeros(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


def _like(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def _wrapped(value: Any) -> Any:
    return tree_map(lambda each: OnDevice(each) if isinstance(each, torch.Tensor) else each, value)


def _is_view(func: Any) -> bool:
    return any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.arguments)


def _wait(what: str) -> None:
    lines = [f"{line.filename.rpartition('/')[2]}:{line.lineno}" for line in traceback.extract_stack()[:-2]]
    callers = [line for line in lines if not line.startswith(("device_on_cpu", "_pytree", "_ops"))]
    _told.waits.append(f"{what} at {', '.join(callers[-3:])}")
