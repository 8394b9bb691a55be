"""What a device would be asked to run: operations of torch but those that view or take memory, and Triton's kernels.

The latter are seen in the process of Triton's interpreter alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_EMPTY = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided")
_VIEWS = ("aten::detach", "aten::_unsafe_view", "aten::lift_fresh")


class _Seen(TorchDispatchMode):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if not func.is_view and name not in _EMPTY + _VIEWS:
            self._names.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def launched() -> Iterator[list[str]]:
    """The names of what is launched inside, in its order."""
    names: list[str] = []
    with kernels_told(lambda name, arguments: names.append(f"triton:{name}")), _Seen(names):
        yield names


@contextmanager
def kernels_told(tell: Callable[[str, Any], None]) -> Iterator[None]:
    """`tell` gets the name and the arguments of each Triton kernel that is launched inside."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        tell(self.fn.__name__, (args, kwargs))
        with _disable_current_modes():  # the interpreter works with tensors itself
            return run(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", told)
        yield
