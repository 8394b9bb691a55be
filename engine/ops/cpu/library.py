"""The compiled library as Python sees it: what a kernel is given, and tapes of kernels.

The structures mirror `kernels.h`, field by field. Kernels' own arguments are mirrored by the modules that make their
ops. Knows addresses and sizes; nothing of layers or requests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

from engine.ops.cpu.build import load_library

Address = ctypes.c_void_p
Int = ctypes.c_int64
Float = ctypes.c_float


class GroupRows(ctypes.Structure):
    """`GroupRows` of kernels.h."""

    _fields_ = (
        ("rows", Int),
        ("starts", Address),
        ("counts", Address),
        ("offsets", Address),
        ("tables", Address),
        ("table_of", Address),
        ("width", Int),
        ("slots", Address),
        ("window", Int),
        ("keys", Address),
        ("values", Address),
    )


class Step(ctypes.Structure):
    """`Step` of kernels.h."""

    _fields_ = (
        ("tokens", Int),
        ("kept", Int),
        ("ids", Address),
        ("positions", Address),
        ("keep", Address),
        ("groups", ctypes.POINTER(GroupRows)),
    )


class Op(NamedTuple):
    """A kernel and its arguments.

    Attributes:
        kernel: its name in the library.
        arguments: the structure that it reads.
        owners: whatever owns the memory that the structure points into.
    """

    kernel: str
    arguments: ctypes.Structure
    owners: tuple[Any, ...] = ()


class _TapeOp(ctypes.Structure):
    _fields_ = (("kernel", Address), ("arguments", Address))


class Tape:
    """Ops that run one after another, each by all threads."""

    def __init__(self, ops: Iterable[Op]) -> None:
        self._ops = list(ops)
        library = _library()
        self._tape = (_TapeOp * len(self._ops))(
            *(
                _TapeOp(ctypes.cast(getattr(library, op.kernel), Address), ctypes.addressof(op.arguments))
                for op in self._ops
            )
        )
        self._run = library.run_tape

    def run(self, step: Step, threads: int) -> None:
        """Runs every op. Arguments and the step are read while it runs; the interpreter's lock is free meanwhile."""
        self._run(self._tape, len(self._ops), ctypes.byref(step), threads)


@cache
def _library() -> ctypes.CDLL:
    library = load_library()
    library.run_tape.argtypes = (Address, Int, ctypes.POINTER(Step), ctypes.c_int32)
    library.run_tape.restype = None
    return library
