"""Stages one after another, each on its own: what one raises, or how long it takes, is its own affair.

Called in the worker process by the command line. A stage that overruns its time ends the process, with every thread's
stack in a file; `supervise.py` then goes on with the stages that are left. Loads no torch.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOST = 3  # exit status of a worker whose device does not answer any more
_GRACE = 10.0  # seconds that a stage has to end by itself once its time is over
_LEAST = 2.0  # seconds that it makes sense to begin a stage with
_MOST_LOG_LINES = 100


class SkipStage(Exception):
    """A stage cannot run here; the text says why."""


class Report:
    """The JSON file: written whenever something is added, so that whatever ends the run leaves what there was.

    Attributes:
        data: what is in the file; `stages` by name in the order in which they began.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = {"stages": {}}
        if path.exists():
            self.data = json.loads(path.read_text())

    @property
    def stages(self) -> dict[str, Any]:
        stages: dict[str, Any] = self.data["stages"]
        return stages

    @property
    def traces(self) -> Path:
        """Where a process that is ended from outside leaves its stacks."""
        return self.path.with_name(self.path.name + ".trace")

    def write(self) -> None:
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps(self.data, indent=1, default=str) + "\n")
        os.replace(part, self.path)


class Progress:
    """What a stage is given: where its rows go and how much time it has."""

    def __init__(self, report: Report, entry: dict[str, Any], seconds: float) -> None:
        self._report, self._entry = report, entry
        self._end = time.monotonic() + seconds

    def add(self, case: str, **figures: Any) -> None:
        """One row of the report, and a line on the terminal."""
        self._entry["rows"].append({"case": case, **figures})
        self._report.write()
        print(f"   {case}: " + ", ".join(f"{key} {_short(value)}" for key, value in figures.items()), flush=True)

    def has_time(self, case: str, seconds: float = 0.0) -> bool:
        """Whether another `seconds` are left; where they are not, a row says that the case was left out."""
        left = self._end - time.monotonic()
        if left > seconds:
            return True
        self.add(case, skipped=f"{max(left, 0):.0f} s are left of the stage's time, {seconds:.0f} s are needed")
        return False

    @contextmanager
    def case(self, case: str) -> Iterator[None]:
        """What is raised within becomes a row, and the stage goes on. Its status is then failed."""
        try:
            yield
        except SkipStage as reason:
            self.add(case, skipped=str(reason))
        except Exception as error:
            self._entry["failed_cases"] = self._entry.get("failed_cases", 0) + 1
            self.add(case, error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())


@dataclass(frozen=True)
class Stage:
    """`seconds`: that it may take at most."""

    name: str
    seconds: float
    run: Callable[[Progress], None]


def run_stages(
    stages: Sequence[Stage], report: Report, seconds: float, after: Callable[[], bool] = lambda: True
) -> int:
    """Runs the stages that the report does not have yet.

    Args:
        seconds: for all of them together.
        after: called after each stage; whether the device still answers.

    Returns:
        An exit status: 0, or LOST where later stages need another process.
    """
    end = time.monotonic() + seconds
    with report.traces.open("w") as traces:
        faulthandler.enable(traces)
        try:
            for stage in stages:
                if stage.name in report.stages:
                    continue
                _run(stage, report, end - time.monotonic(), traces)
                if not after():
                    return LOST
        finally:
            faulthandler.disable()
    return 0


def _run(stage: Stage, report: Report, left: float, traces: Any) -> None:
    entry: dict[str, Any] = {"status": "running", "rows": []}
    report.stages[stage.name] = entry
    report.write()
    print(f"-- {stage.name}", flush=True)
    begin = time.monotonic()
    if left < _LEAST:
        entry.update(status="skipped", reason=f"{max(left, 0):.0f} s are left of the whole run's time")
    else:
        seconds = min(stage.seconds, left)
        faulthandler.dump_traceback_later(seconds + _GRACE, exit=True, file=traces)
        try:
            with _log_lines(entry):
                stage.run(Progress(report, entry, seconds))
            entry["status"] = "failed" if "failed_cases" in entry else "done"
        except SkipStage as reason:
            entry.update(status="skipped", reason=str(reason))
        except Exception as error:
            entry.update(status="failed", error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
        finally:
            faulthandler.cancel_dump_traceback_later()
    entry["seconds"] = round(time.monotonic() - begin, 2)
    report.write()
    why = entry.get("reason") or entry.get("error") or ""
    print(f"   {entry['status']} after {entry['seconds']:.1f} s{': ' if why else ''}{why}", flush=True)


@contextmanager
def _log_lines(entry: dict[str, Any]) -> Iterator[None]:
    """What the engine says while a stage runs: which kernels it took and why."""
    lines: list[str] = entry.setdefault("log", [])

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if len(lines) < _MOST_LOG_LINES:
                lines.append(record.getMessage())

    logger, collector = logging.getLogger("engine"), Collector(logging.INFO)
    level = logger.level
    logger.addHandler(collector)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(collector)
        logger.setLevel(level)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).partition("\n")[0][:160]
