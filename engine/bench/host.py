"""What this machine is and how busy it is: processor, instruction sets, versions, processor time used.

Called by the measurements and the report. Reads /proc where there is one; elsewhere what is not known is 0 or empty.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import UTC, datetime
from pathlib import Path

# What decides how fast matrices of the dtypes at hand are multiplied, in Linux's words.
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_bf16", "amx_int8", "bf16", "sve", "i8mm")
_PROC = Path("/proc")


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe(command: str) -> dict[str, object]:
    """Hardware, versions, command line and time of a run, ready for JSON."""
    model, flags = _processor((_PROC / "cpuinfo").read_text() if (_PROC / "cpuinfo").exists() else "")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "cpu": model or platform.processor() or platform.machine(),
        "cores": cores(),
        "flags": flags,
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "system": platform.platform(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        "versions": {"python": platform.python_version(), **_versions("torch", "transformers", "numpy")},
    }


def _processor(cpuinfo: str) -> tuple[str, list[str]]:
    """Model name, with family and model where the name says little, and those of `_FLAGS` that it has."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    name = fields.get("model name", "")
    if name and "cpu family" in fields:
        name += f" (family {fields['cpu family']}, model {fields.get('model', '?')})"
    have = set((fields.get("flags") or fields.get("features") or "").split())
    return name, [flag for flag in _FLAGS if flag in have]


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def busy_seconds() -> float:
    """Processor seconds that all cores have not been idle since boot, those taken by other machines included."""
    try:
        fields = (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    ticks = [int(field) for field in fields[:8]]  # user nice system idle iowait irq softirq steal
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def group_seconds(group: int) -> float:
    """Processor seconds of the processes of a group that live, and of those they have waited for."""
    total = 0
    for stat in _PROC.glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # the name before it may hold anything
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[2]) == group:
            total += sum(map(int, fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")
