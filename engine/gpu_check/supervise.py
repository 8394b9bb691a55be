"""Starts the process that runs the stages, and again where it was lost: by a crash, a hang or a device in error.

Called by the command line. After an illegal memory access nothing runs on a device in the same process. Loads no torch.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from engine.gpu_check.stages import Report

_OVER = 15.0  # seconds beyond its time after which a worker is ended
_MOST_TRACE = 20_000


def supervise(command: Sequence[str], path: Path, seconds: float, names: Sequence[str]) -> Report:
    """Runs `command` with `--seconds` left until the report has all the stages `names`, or their time is over.

    Each start settles one stage at least: one that its process did not survive is marked as such.
    """
    end = time.monotonic() + seconds
    while True:
        known = len(Report(path).stages)
        status = _start([*command, "--seconds", f"{end - time.monotonic():.1f}"], end - time.monotonic() + _OVER)
        report = Report(path)
        for entry in report.stages.values():
            if entry["status"] == "running":
                entry.update(status="lost", error=f"its process ended with status {status}", traceback=_trace(report))
        if len(report.stages) == known or time.monotonic() > end:
            why = f"no process came to it; the last one ended with status {status}"
            for name in names:
                report.stages.setdefault(name, {"status": "lost", "error": why, "rows": []})
        report.write()
        if all(name in report.stages for name in names):
            report.traces.unlink(missing_ok=True)
            return report
        print(f"-- the process ended with status {status}; another one goes on", flush=True)


def _start(command: Sequence[str], seconds: float) -> int:
    try:
        return subprocess.run(command, check=False, timeout=max(seconds, 1)).returncode
    except subprocess.TimeoutExpired:  # it was killed
        return -9


def _trace(report: Report) -> str:
    return report.traces.read_text()[:_MOST_TRACE] if report.traces.exists() else ""
