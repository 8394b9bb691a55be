"""`python -m rayapp.bench routing`: routing policies on simulated fleets, as rows, a table and a chart.

Runs `routing_sim` for every policy, workload and size asked for. Rows are JSON lines, so that a table can be made of
several runs; see `--help`. Loads neither torch nor the engine.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from engine.bench.chart import Bar, bar_chart
from rayapp.bench.routing_policies import POLICIES
from rayapp.bench.routing_sim import LOAD, Churn, Simulation
from rayapp.bench.routing_workloads import BLOCK, WORKLOADS
from rayapp.prefix_router import Call, Fleet, Memory, Traffic, choose

CHURN = "chat, churn"
COLOURS = {
    "convoy": "#2f81f7", "prefix tree": "#3fb950", "session ring": "#a371f7", "power of two": "#d29922",
    "round robin": "#8b949e",
}  # fmt: skip
KEYS = 4000


def simulate(policy: str, workload: str, replicas: int, routers: int, warm_up: int, measured: int, seed: int) -> dict:
    """One row: a policy on a workload, which may be CHURN."""
    churn: list[Churn] = []
    if workload == CHURN:
        some = max(1, replicas // 16)
        churn = [Churn(0.2, lost=some), Churn(0.4, reset=some), Churn(0.6, added=some)]
    result = Simulation(
        WORKLOADS[workload.split(",")[0]], POLICIES[policy], replicas=replicas, routers=routers, warm_up=warm_up,
        measured=measured, churn=churn, seed=seed,
    ).run()  # fmt: skip
    return {
        "policy": policy,
        "workload": workload,
        "replicas": replicas,
        "routers": routers,
        "requests": result.requests,
        "hit_rate": round(result.hit_rate, 4),
        "of_oracle": round(result.of_oracle, 4),
        "max_over_mean": round(result.imbalance, 4),
        "latency_s": round(result.latency_s, 3),
    }


def moved_keys(policy: str, replicas: int, change: int) -> float | None:
    """Share of keys whose home changes when so many replicas come (or go, if negative); None for those without."""
    if not hasattr(POLICIES[policy], "home"):
        return None
    names = [f"replica-{number}" for number in range(replicas + max(0, change))]
    rng = random.Random(0)
    before, after = POLICIES[policy](0), POLICIES[policy](0)
    before.update(names[:replicas])
    after.update(names[: replicas + change])
    keys = [rng.getrandbits(64) for _ in range(KEYS)]
    return sum(before.home(key) != after.home(key) for key in keys) / KEYS  # type: ignore[attr-defined]


def decision_us(replicas: int, prompt_tokens: int = 2048) -> float:
    """CPU time of one decision of Convoy's, for prompts not seen before, without the disturbance of other processes."""
    rng = random.Random(0)
    fleet, memory, traffic = Fleet(f"replica-{number}" for number in range(replicas)), Memory(), Traffic()
    calls = [Call([rng.getrandbits(64) for _ in range(prompt_tokens // BLOCK)], prompt_tokens) for _ in range(3000)]
    for call in calls[1000:]:
        choice = choose(call, fleet, memory, traffic, rng=rng)
        memory.record(call, choice.start, choice.first or "", fleet)
    best = math.inf
    for start in range(0, 1000, 20):
        started = time.thread_time()
        for call in calls[start : start + 20]:
            choose(call, fleet, memory, traffic, rng=rng)
        best = min(best, (time.thread_time() - started) / 20)
    return best * 1e6


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown: a line for each workload and size, a column for each policy."""
    policies = [policy for policy in POLICIES if any(row["policy"] == policy for row in rows)]
    lines = ["| workload | replicas | " + " | ".join(policies) + " |", "|---|---:|" + "---:|" * len(policies)]
    for workload, replicas in _groups(rows):
        cells = []
        for policy in policies:
            row = _find(rows, workload, replicas, policy)
            shared = row is not None and (workload == CHURN or WORKLOADS[workload].sharing)
            hits = f"{100 * row['of_oracle']:.0f} %, " if row is not None and shared else ""
            cells.append("" if row is None else f"{hits}{row['max_over_mean']:.2f}")
        lines.append(f"| {workload} | {replicas} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def chart(rows: Sequence[dict[str, Any]]) -> str:
    """Hit tokens against the oracle as SVG, the balance written behind; of the workloads that share."""
    groups: dict[str, list[Bar]] = {}
    for workload, replicas in _groups(rows):
        if workload == CHURN or WORKLOADS[workload].sharing:
            found = [row for policy in POLICIES if (row := _find(rows, workload, replicas, policy)) is not None]
            groups[f"{workload}, {replicas}"] = [
                Bar(row["policy"], row["of_oracle"], f"{100 * row['of_oracle']:.0f} % (x{row['max_over_mean']:.2f})")
                for row in found
            ]
    title = "Prompt tokens found cached, as a share of one replica with all the caches"
    caption = "Behind each bar also the busiest replica's computed tokens over the mean. Simulated."
    return bar_chart(groups, title, caption, COLOURS)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    args = _parser().parse_args(argv)
    rows: list[dict[str, Any]] = []
    for path in args.rows:
        rows += [json.loads(line) for line in path.read_text().splitlines()]
    if not args.rows:
        for replicas in args.replicas:
            for workload in args.workloads:
                for policy in args.policies:
                    rows.append(
                        simulate(policy, workload, replicas, args.routers, args.warm_up, args.measured, args.seed)
                    )
                    print(json.dumps(rows[-1]), file=args.output, flush=True)
    print(table(rows), file=sys.stderr if args.output is sys.stdout else sys.stdout)
    print(_figures(sorted({row["replicas"] for row in rows})), file=sys.stderr)
    if args.chart is not None:
        args.chart.write_text(chart(rows))
    return 0


def _figures(sizes: Iterable[int]) -> str:
    lines = []
    for replicas in sizes:
        lines.append(f"convoy, {replicas} replicas: {decision_us(replicas):.0f} µs of CPU a decision")
        for policy in POLICIES:
            come, gone = moved_keys(policy, replicas, 1), moved_keys(policy, replicas, -1)
            if come is not None and gone is not None:
                lines.append(
                    f"{policy}, {replicas} replicas: {100 * come:.2f} % of keys move when one comes (ideal "
                    f"{100 / (replicas + 1):.2f} %), {100 * gone:.2f} % when one goes (ideal {100 / replicas:.2f} %)"
                )
    return "\n".join(lines)


def _groups(rows: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    order = [*WORKLOADS, CHURN]
    return sorted({(row["workload"], row["replicas"]) for row in rows}, key=lambda one: (order.index(one[0]), one[1]))


def _find(rows: Sequence[dict[str, Any]], workload: str, replicas: int, policy: str) -> dict[str, Any] | None:
    key = policy, workload, replicas
    return next((row for row in rows if (row["policy"], row["workload"], row["replicas"]) == key), None)


def _parser() -> argparse.ArgumentParser:
    shapes = "; ".join(f"{one.name}: {one.says}" for one in WORKLOADS.values())
    parser = argparse.ArgumentParser(
        prog="python -m rayapp.bench routing",
        description="Simulates routing policies over replicas with finite prefix caches, as several processes that "
        f"see the load late apply them, at {LOAD:.0%} of the fleet's speed. {shapes}; {CHURN}: a sixteenth of the "
        "replicas goes, loses its caches and comes.",
    )
    names = [*WORKLOADS, CHURN]
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 16, 64], metavar="N")
    parser.add_argument("--workloads", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES), metavar="NAME")
    parser.add_argument("--routers", type=int, default=4, help="processes that choose, each on its own")
    parser.add_argument("--warm-up", type=int, default=200, help="requests a replica")
    parser.add_argument("--measured", type=int, default=400, help="requests a replica after that")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=Path, nargs="+", default=[], help="show these rows instead of simulating")
    parser.add_argument("--output", type=argparse.FileType("a"), default=sys.stdout, help="where rows are added")
    parser.add_argument("--chart", type=Path, help="write an SVG of hits and balance")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
