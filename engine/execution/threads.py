"""Compute threads on CPU: what the engine thread needs of the threads around it.

Called when a manager is made, when a session starts, and by the engine thread itself. Knows nothing of models or
requests. Loads torch when it is called.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_PAUSE_SOFT = 1  # omp_pause_soft of OpenMP 5.0: give up threads, keep settings


def compute_threads() -> int:
    """Threads that torch computes with when it is called from this thread."""
    import torch

    return torch.get_num_threads()


def use_compute_threads(count: int) -> None:
    """Have torch, and what asks it, compute with `count` threads when called from this thread.

    The number belongs to each thread. A new one begins with what any thread has asked for last, which need not be what
    the engine was made with. MKL's number is one for the process, so it is left alone where nothing would change.
    """
    import torch

    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def release_openmp_threads() -> None:
    """End the idle OpenMP workers of the calling thread; its next parallel region makes new ones.

    GNU's OpenMP counts the workers of all threads, and stops spinning at barriers once there are more of them than
    cores. The workers that loading and warming up have left in the caller then slow every operation of the engine
    thread down, by 1.7 times on two cores. No effect with another OpenMP, or inside a parallel region.
    """
    path = _gnu_openmp()
    if path is not None:
        getattr(ctypes.CDLL(path), "omp_pause_resource_all", lambda kind: 0)(_PAUSE_SOFT)


def _gnu_openmp() -> str | None:
    """The library as this process has loaded it: torch's wheels bring their own."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    return next((line.split()[-1] for line in maps.splitlines() if "libgomp" in line), None)
