"""Processor time of this process and all that it has started, by what each is for. Used by `split.py`.

Reads /proc; where there is none, nothing is known.
"""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")
# Part of a process's command line -> its name in the report; the first that fits. Ray's actors say their class there.
NAMES = {
    "EngineActor": "actor",
    "ServeReplica:bench:Router": "router",
    "ServeReplica:bench:EngineReplica": "replica",
    "ProxyActor": "proxy",
    "rayapp.bench.engine_child": "engine",
}
OTHER = "ray"  # raylet, object store, controller and the like
OWN = "client"


def descendants_cpu() -> dict[str, float]:
    """Seconds so far by name; of processes that still run."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for stat in PROC.glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # the name before it may hold anything
        except OSError:
            continue  # it has ended meanwhile
        pid = int(stat.parent.name)
        parents[pid] = int(fields[1])
        seconds[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    total: dict[str, float] = {}
    for pid, used in seconds.items():
        if pid == os.getpid():
            total[OWN] = total.get(OWN, 0.0) + used
        elif _descends(pid, parents):
            name = _name(pid)
            total[name] = total.get(name, 0.0) + used
    return total


def _descends(pid: int, parents: dict[int, int]) -> bool:
    own = os.getpid()
    while pid in parents:
        pid = parents[pid]
        if pid == own:
            return True
    return False


def _name(pid: int) -> str:
    try:
        command = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return OTHER
    return next((name for part, name in NAMES.items() if part in command), OTHER)
