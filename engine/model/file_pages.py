"""Gives back the memory of weights that a checkpoint file still holds, once the engine has a copy of its own.

`load_model` maps the file: weights of the checkpoint's dtype take memory as they are read, and keep it as long as any
tensor of the file lives. For whoever owns the model and has packed its weights.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

Range = tuple[int, int]  # addresses, the end not included


def release_file_pages(tensors: Iterable[torch.Tensor]) -> int:
    """Give back what the tensors take of unmodified file mappings; the bytes of the ranges given back.

    Their values stay: what is read again comes from the file. Tensors in other memory, and all in a mapping of which
    anything was written to, are left as they are. Nobody may write into the tensors meanwhile.
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    mappings = list(_clean_file_mappings())
    given = 0
    for tensor in tensors:
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        mapped = any(low <= start and end <= high for low, high in mappings)
        if advise is None or tensor.device.type != "cpu" or not tensor.is_contiguous() or start >= end or not mapped:
            continue
        if advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED) == 0:
            given += end - start
    return given


def _clean_file_mappings() -> Iterator[Range]:
    """Address ranges of mapped files without a page of this process's own; none where the system does not tell."""
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return
    mapping: Range | None = None
    for line in lines:
        name, *fields = line.split()
        if not name.endswith(":"):  # "start-end mode offset device inode path"
            low, high = (int(address, 16) for address in name.split("-"))
            mapping = (low, high) if len(fields) > 4 and fields[4].startswith("/") else None
        elif name == "Anonymous:" and mapping is not None and fields[0] == "0":
            yield mapping
