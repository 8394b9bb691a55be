"""Zeroed main memory that the system hands out as it is written to, in huge pages where they waste little.

Called by `kv_tensors.py`, whose tensors lie in it. Knows nothing of blocks or of what is stored.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

HUGE_PAGE = 2 << 20
SMALL_BYTES = 8 << 20
"""So much at the start of each array lies in small pages. Writing to one byte of a huge page takes all of it, and a
cache has an array for K and one for V of each layer, each written to from its start on: behind 8 MiB, what is taken
and not yet used is a quarter of what is used at most."""


def lazy_zeros(num_bytes: int) -> np.ndarray:
    """uint8 [num_bytes], aligned to huge pages; nothing is taken until it is written to, page by page.

    Raises:
        MemoryError: the system refuses to promise that much.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # numpy asks the system for zeroed memory too
        return np.zeros(num_bytes, dtype=np.uint8)
    try:
        memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system does not give {num_bytes} bytes: {error}") from error
    array = np.frombuffer(memory, dtype=np.uint8)
    start = -array.ctypes.data % HUGE_PAGE
    if num_bytes > SMALL_BYTES:
        with contextlib.suppress(OSError):  # a system without huge pages has small ones
            memory.madvise(mmap.MADV_HUGEPAGE, start + SMALL_BYTES, num_bytes - SMALL_BYTES)
    return array[start : start + num_bytes]
