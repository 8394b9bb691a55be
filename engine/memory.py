"""How much memory this process can still take: of a CUDA device, or of the host within its control groups.

Called when settings are resolved, when a step is measured and when weights are packed. Allocates nothing; knows nothing
of models, and loads no torch where there is no CUDA device.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


class DeviceMemory(Protocol):
    """The memory of one device, as one process sees it. All in bytes."""

    def available(self) -> int:
        """What this process can still take."""
        ...

    def start(self) -> None:
        """Begins to watch what is taken."""
        ...

    def peak(self) -> int:
        """The most that was taken at once, beyond what was taken at `start`, since then or since the last call."""
        ...

    def release(self) -> None:
        """Gives back what is kept for later use."""
        ...


class CudaMemory:
    """`DeviceMemory` of a CUDA device.

    Args:
        device_index: None for the current device.
    """

    def __init__(self, device_index: int | None = None) -> None:
        self._index = device_index
        self._base = 0

    def available(self) -> int:
        """Free device memory, and what torch keeps for later use."""
        import torch

        free, _ = torch.cuda.mem_get_info(self._index)
        return free + torch.cuda.memory_reserved(self._index) - torch.cuda.memory_allocated(self._index)

    def start(self) -> None:
        """See `DeviceMemory.start`."""
        import torch

        self._base = torch.cuda.memory_allocated(self._index)
        torch.cuda.reset_peak_memory_stats(self._index)

    def peak(self) -> int:
        """See `DeviceMemory.peak`; of tensors, not of what the driver and libraries take beside them."""
        import torch

        peak = torch.cuda.max_memory_allocated(self._index)
        torch.cuda.reset_peak_memory_stats(self._index)
        return max(0, peak - self._base)

    def release(self) -> None:
        """See `DeviceMemory.release`."""
        import torch

        torch.cuda.empty_cache()


def device_memory(device_type: str, device_index: int | None = None) -> DeviceMemory | None:
    """The memory of a device that has its own; None where the host's serves."""
    return CudaMemory(device_index) if device_type == "cuda" else None


def available_memory(
    device_type: str = "cpu",
    device_index: int | None = None,
    *,
    meminfo: str = "/proc/meminfo",
    cgroup_root: str = "/sys/fs/cgroup",
    own_cgroup: str = "/proc/self/cgroup",
) -> int | None:
    """Bytes that this process can still take, or None where the system does not say.

    On CUDA: free device memory, and what torch keeps cached. Elsewhere: the least of the system's available memory
    and what each control group (v1 or v2) above this process leaves.
    """
    if device_type == "cuda":
        return CudaMemory(device_index).available()
    limits = [_system_available(Path(meminfo)), *_cgroup_rooms(Path(cgroup_root), Path(own_cgroup))]
    known = [limit for limit in limits if limit is not None]
    return max(0, min(known)) if known else None


def _system_available(meminfo: Path) -> int | None:
    """MemAvailable in bytes; physical pages that are free where there is no such file."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _cgroup_rooms(root: Path, own: Path) -> list[int]:
    """Bytes left under the limit of each control group that this process is in."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            base = root
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            base = root / "memory"
        else:
            continue
        group = base / path.strip("/")
        for folder in (group, *group.parents):  # a container may see its own group as the root
            room = _room(folder, *names)
            if room is not None:
                rooms.append(room)
            if folder == base:
                break
    return rooms


def _room(folder: Path, limit_name: str, used_name: str, reclaimable_name: str) -> int | None:
    """Limit minus use of one control group, page cache that can be dropped not counted; None without a limit."""
    try:
        limit = int((folder / limit_name).read_text())  # "max" is no number
        used = int((folder / used_name).read_text())
    except (OSError, ValueError):
        return None
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        used -= int(stat.get(reclaimable_name, 0))
    except (OSError, ValueError):
        pass
    return limit - used
