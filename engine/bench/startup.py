"""What a start costs: seconds from process start to the first token, part by part, and the peak of memory.

`python -m engine.bench.startup time|memory MODEL`, or `main` from the benchmark's command line. Each measurement is a
process of its own, which runs `startup_child.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

_MIB = 1 << 20


def main(argv: list[str] | None = None) -> int:
    """Measure, and print a table or JSON. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench startup", description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("time", "memory"))
    parser.add_argument("model", help="folder with config.json and safetensors weights")
    parser.add_argument("--dtype", default="auto", help="of weights and cache (default: the checkpoint's)")
    parser.add_argument("--runs", type=int, default=3, help="processes; the fastest counts (default: 3)")
    parser.add_argument("--built", action="store_true", help="time: with a library that was built before")
    parser.add_argument("--requests", type=int, default=16, help="memory: that run at the same time (default: 16)")
    parser.add_argument("--tokens", type=int, default=256, help="memory: of each request, half prompt (default: 256)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    report = _time(options) if options.what == "time" else _memory(options)
    print(json.dumps(report, indent=1) if options.json else _table(options.what, report))
    return 0


def _time(options: argparse.Namespace) -> dict[str, Any]:
    """The run with the earliest first token."""
    with tempfile.TemporaryDirectory() as folder:
        if options.built:
            _child({"what": "time", "model": options.model, "dtype": options.dtype}, cache=folder)
        runs = []
        for number in range(options.runs):
            cache = folder if options.built else os.path.join(folder, str(number))
            runs.append(_child({"what": "time", "model": options.model, "dtype": options.dtype}, cache=cache))
    return min(runs, key=lambda run: run["marks"][-1]["wall_s"])


def _memory(options: argparse.Namespace) -> dict[str, Any]:
    asked = {name: getattr(options, name) for name in ("what", "model", "dtype", "requests", "tokens")}
    return _child(asked, cache=None)


def _child(asked: dict[str, Any], cache: str | None) -> dict[str, Any]:
    """One process with `cache` as the folder of built libraries, or the user's own for None."""
    environment = os.environ | ({"CONVOY_CACHE": cache} if cache else {})
    command = [sys.executable, "-m", "engine.bench.startup_child", json.dumps(asked)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def _table(what: str, report: dict[str, Any]) -> str:
    if what == "time":
        lines = [f"{'':36}{'at s':>8}{'took s':>8}{'CPU s':>8}"]
        wall = cpu = 0.0
        for mark in report["marks"]:
            took, used = mark["wall_s"] - wall, mark["cpu_s"] - cpu
            wall, cpu = mark["wall_s"], mark["cpu_s"]
            lines.append(f"{mark['name']:36}{wall:8.2f}{took:8.2f}{used:8.2f}")
        lines.append(f"{'compiler, beside the imports':36}{'':16}{report['compiler_cpu_s']:8.2f}")
        lines.append(f"{'the weights alone, loaded once more':36}{'':8}{report['reload_s']:8.2f}")
        return "\n".join(lines)
    names = ("imports", "weights", "touched_cache", "peak_loading", "peak_serving")
    lines = [f"{name:16}{report[name] / _MIB:10.1f} MiB" for name in names]
    ratio = report["peak_serving"] / (report["weights"] + report["touched_cache"])
    lines.append(f"peaks are beyond the imports; serving takes {ratio:.2f} x (weights + touched cache)")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
