"""The command line of the check. See `--help`; `--small` shows on CPU that every stage runs, and no speed.

The process that is started here only watches: the stages run in another one, started with `--worker`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from engine.gpu_check.goals import figures, table
from engine.gpu_check.stages import Report, Stage, run_stages
from engine.gpu_check.supervise import supervise

NAMES = (
    "probe",
    "parity",
    "attention",
    "steps qwen3-0.6b",
    "steps llama-8b",
    "transformers qwen3-0.6b",
    "transformers llama-8b",
    "products",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 where every stage was done or skipped, 1 where one failed, 2 for wrong usage."""
    options = _parser().parse_args(argv)
    if options.worker:
        return _work(options)
    with tempfile.TemporaryDirectory() as folder:
        if options.seconds <= 0:
            print(f"error: --seconds {options.seconds:g}: it must be positive", file=sys.stderr)
            return 2
        path = options.json or Path(folder, "gpu_check.json")
        if not path.absolute().parent.is_dir():
            print(f"error: --json {path}: there is no such folder", file=sys.stderr)
            return 2
        path.unlink(missing_ok=True)
        report = Report(path)
        report.data["command"] = shlex.join(["python", "-m", "engine.gpu_check", *(argv or sys.argv[1:])])
        report.data["small"] = options.small
        report.write()
        command = [sys.executable, "-u", "-m", "engine.gpu_check", "--worker", "--json", str(path)]
        command += ["--small"] * options.small + ["--stages", *options.stages]
        begin = time.monotonic()
        report = supervise(command, path, options.seconds, options.stages)
        found = figures(report.stages)
        report.data["seconds"] = round(time.monotonic() - begin, 1)
        report.data["summary"] = [figure.as_dict(not options.small) for figure in found]
        report.write()
    if options.small:
        print("\nTiny models of the kinds that are named: these figures say nothing of their speed.")
    print("\n" + table(found, not options.small))
    print("\n" + _states(report))
    return int(any(stage["status"] in ("failed", "lost") for stage in report.stages.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.gpu_check", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything, as soon as it is known")
    parser.add_argument("--small", action="store_true", help="tiny sizes, on CPU where there is no CUDA device")
    parser.add_argument("--seconds", type=float, default=460.0, help="for all stages together (%(default)s)")
    parser.add_argument(
        "--stages", nargs="+", choices=NAMES, default=list(NAMES), metavar="STAGE", help=", ".join(map(repr, NAMES))
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def _work(options: argparse.Namespace) -> int:
    """Runs the stages in this process."""
    begin = time.monotonic()
    import torch

    report = Report(options.json)
    if not options.small and not torch.cuda.is_available():
        for name in options.stages:
            reason = "there is no CUDA device; --small runs the stages on CPU"
            report.stages.setdefault(name, {"status": "skipped", "reason": reason, "rows": []})
        report.write()
        return 0
    from engine.gpu_check import attention, device, parity, peer, products, steps
    from engine.gpu_check.floors import Limits

    bench = device.Bench(torch.device("cuda" if torch.cuda.is_available() else "cpu"), options.small)
    if options.small:
        torch.set_num_threads(1)  # more cost time where sizes are tiny
    rows = {row["case"]: row for row in report.stages.get("probe", {}).get("rows", ())}  # of an earlier process
    bench.limits = Limits(rows.get("copy", {}).get("bytes_per_s"), rows.get("matrix product", {}).get("flop_per_s"))
    stages = [
        Stage("probe", 30, partial(device.probe, bench)),
        Stage("parity", 75, partial(parity.parity, bench)),
        Stage("attention", 45, partial(attention.attention, bench)),
        Stage("steps qwen3-0.6b", 90, partial(steps.steps, bench, name="qwen3-0.6b", variants=True)),
        Stage("steps llama-8b", 100, partial(steps.steps, bench, name="llama-8b", variants=False)),
        Stage("transformers qwen3-0.6b", 60, partial(peer.peer, bench, name="qwen3-0.6b")),
        Stage("transformers llama-8b", 60, partial(peer.peer, bench, name="llama-8b")),
        Stage("products", 20, partial(products.products, bench)),
    ]
    chosen = [stage for stage in stages if stage.name in options.stages]
    return run_stages(chosen, report, options.seconds - (time.monotonic() - begin), bench.free)


def _states(report: Report) -> str:
    lines = []
    for name, stage in report.stages.items():
        why = stage.get("reason") or stage.get("error") or ""
        if not why and stage.get("failed_cases"):
            why = f"{stage['failed_cases']} cases raised"
        lines.append(f"{name}: {stage['status']}{f', {why}' if why else ''}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
