"""Compiles the kernels that launchers would start on an H100 or H200, where there is none, and reads what they use.

Runs in a child process (`compiled` of triton_processes.py), where nothing is launched: Triton is told of a device that
is not there.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True)
class Used:
    """What one kernel takes: registers a thread, bytes that it spills, bytes of shared memory a program."""

    name: str
    registers: int
    spilled: int
    shared: int


def compile_launched(launch: Callable[[], Any]) -> list[Used]:
    """The kernels that `launch` would start, in their order."""
    with _absent_device() as kernels:
        launch()
    return [_used(kernel) for kernel in kernels]


def count_variants(launch: Callable[[], Any]) -> dict[str, int]:
    """How many kernels of each name `launch` would have compiled."""
    with _absent_device() as kernels:
        launch()
    found: dict[str, set[str]] = {}
    for kernel in kernels:
        found.setdefault(kernel.metadata.name, set()).add(kernel.metadata.hash)
    return {name: len(hashes) for name, hashes in found.items()}


def count_late(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[int, set[str]]:
    """How many kernels `first` would have compiled, and which of `second` are not among them."""
    with _absent_device() as kernels:
        first()
        known = {kernel.metadata.hash for kernel in kernels}
        kernels.clear()
        second()
    return len(known), {kernel.metadata.name for kernel in kernels if kernel.metadata.hash not in known}


class _AbsentDevice:
    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _absent_device() -> Iterator[list[Any]]:
    kernels: list[Any] = []
    run = JITFunction.run

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    driver.set_active(_AbsentDevice())
    JITFunction.run = record
    try:
        yield kernels
    finally:
        JITFunction.run = run


def _used(kernel: Any) -> Used:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (numbers,) = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    registers, stack, local = map(int, numbers)
    return Used(kernel.metadata.name, registers, stack + local, kernel.metadata.shared)
