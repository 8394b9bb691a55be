"""A worker of the GPU check whose stages go wrong in every way; run by test_gpu_check.py in processes of their own."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

from engine.gpu_check import stages
from engine.gpu_check.stages import Progress, Report, SkipStage, Stage, run_stages

NAMES = ("good", "raises", "dies", "half", "hangs", "skips", "loses the device", "last")


def _good(progress: Progress) -> None:
    progress.add("row", value=1.0)


def _raises(progress: Progress) -> None:
    progress.add("before", value=2)
    raise ArithmeticError("on purpose")


def _dies(progress: Progress) -> None:
    progress.add("before", value=3)
    os.kill(os.getpid(), signal.SIGSEGV)


def _half(progress: Progress) -> None:
    for case in ("bad", "fine"):
        with progress.case(case):
            if case == "bad":
                raise ValueError("one case")
            progress.add(case, value=4)
    assert not progress.has_time("long", 1e6)


def _hangs(progress: Progress) -> None:
    time.sleep(600)


def _skips(progress: Progress) -> None:
    raise SkipStage("not here")


RUNS = dict(zip(NAMES, (_good, _raises, _dies, _half, _hangs, _skips, _good, _good), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    stages._GRACE = 0.2
    report = Report(options.path)
    report.data["starts"] = report.data.get("starts", 0) + 1
    todo = [Stage(name, 0.1 if name == "hangs" else 30.0, run) for name, run in RUNS.items()]
    return run_stages(todo, report, options.seconds, lambda: list(report.stages)[-1] != "loses the device")


if __name__ == "__main__":
    raise SystemExit(main())
