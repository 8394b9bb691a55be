"""Throughput of workloads, latency of one stream, a prefix cold and hit: each measurement gives rows for a report.

Engines take turns within a repetition (A B A B ...), every repetition has fresh prompts, and medians count. A row is a
dict of numbers that goes into JSON as it is. Knows workers and workloads, no engine.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from engine.bench.limits import Costs, Limits, needs
from engine.bench.workers import BenchError, Turn, Worker
from engine.bench.workloads import DESCRIPTIONS, Encode, Work, build, shared_prompt

Row = dict[str, Any]

OWN = "convoy"
PREFIX_LENGTHS = (512, 2048)
_CHECKED_REQUESTS = 4  # plain generate() is slow


@dataclass(frozen=True)
class Plan:
    """What all measurements of one call have in common.

    Attributes:
        reps: repetitions that the medians are taken of.
        seed: of the first repetition's prompts; the next ones count on.
        vocab_size: of the model.
        encode: chat messages to token ids; None leaves out the workloads of text.
    """

    reps: int
    seed: int
    vocab_size: int
    encode: Encode | None = None

    def work(self, workload: str, rep: int) -> list[Work]:
        return build(workload, self.seed + rep, self.vocab_size, self.encode)


def throughput(
    workers: Sequence[Worker],
    workloads: Iterable[str],
    plan: Plan,
    limits: tuple[Costs, Limits] | None = None,
    reference: Worker | None = None,
) -> list[Row]:
    """A row for each workload and engine.

    Args:
        limits: what the bounds are computed from.
        reference: greedy tokens are compared with its; meaningful in float32 only.
    """
    rows = []
    for workload in workloads:
        _say(f"{workload}: {DESCRIPTIONS[workload]}")
        turns: dict[str, list[Turn]] = {worker.name: [] for worker in workers}
        works = [plan.work(workload, rep) for rep in range(plan.reps)]
        for work in works:
            for worker in workers:
                turn = worker.run(work)
                turns[worker.name].append(turn)
                _say(f"  {worker.name} {turn.seconds:.2f} s, {turn.neighbours:.0%} of the machine used by others")
        group = [_throughput_row(workload, name, works, found) for name, found in turns.items()]
        _add_ratios(group, lambda row: row["seconds"]["median"])
        if limits is not None:
            _add_bounds(group, works, *limits)
        if reference is not None:
            _add_equal_tokens(group, works[-1], turns, reference)
        rows += group
    return rows


def latency(workers: Sequence[Worker], plan: Plan) -> list[Row]:
    """A row for each engine: one stream with nothing beside it, workload `single`."""
    _say("latency: one stream, 32 -> 128")
    turns: dict[str, list[Turn]] = {worker.name: [] for worker in workers}
    for rep in range(plan.reps):
        (work,) = plan.work("single", rep)
        for worker in workers:
            turns[worker.name].append(worker.stream(work))
    rows = [_latency_row(name, found) for name, found in turns.items()]
    _add_ratios(rows, lambda row: 1 / row["tokens_per_s"])
    return rows


def prefix(workers: Sequence[Worker], plan: Plan, lengths: Sequence[int] = PREFIX_LENGTHS) -> list[Row]:
    """A row for each length and engine: time to first token of a prompt, then of the same prompt once more."""
    rows = []
    for length in lengths:
        _say(f"prefix: a prompt of {length} tokens, twice")
        first: dict[str, list[tuple[float, float]]] = {worker.name: [] for worker in workers}
        for rep in range(plan.reps):
            work = Work(shared_prompt(plan.seed + rep, length, plan.vocab_size), 4)
            for worker in workers:
                cold, hit = worker.stream(work), worker.stream(work)
                first[worker.name].append((cold.times[0], hit.times[0]))
        group = [_prefix_row(length, name, pairs) for name, pairs in first.items()]
        _add_ratios(group, lambda row: row["hit_ms"])
        rows += group
    return rows


def _throughput_row(workload: str, name: str, works: list[list[Work]], turns: list[Turn]) -> Row:
    tokens_in = [sum(len(item.prompt) for item in work) for work in works]
    tokens_out = [sum(item.new_tokens for item in work) for work in works]
    seconds = [turn.seconds for turn in turns]
    out = [tokens / s for tokens, s in zip(tokens_out, seconds, strict=True)]
    total = [(a + b) / s for a, b, s in zip(tokens_in, tokens_out, seconds, strict=True)]
    return {
        "workload": workload,
        "engine": name,
        "seconds": _spread(seconds),
        "tokens_in": statistics.median(tokens_in),
        "tokens_out": statistics.median(tokens_out),
        "out_per_s": statistics.median(out),
        "total_per_s": statistics.median(total),
        "cpu_seconds": statistics.median(turn.cpu_seconds for turn in turns),
        "neighbours": max(turn.neighbours for turn in turns),
    }


def _latency_row(name: str, turns: list[Turn]) -> Row:
    gaps = [b - a for turn in turns for a, b in pairwise(turn.times)]
    percentiles = statistics.quantiles(gaps, n=100, method="inclusive")
    return {
        "engine": name,
        "first_token_ms": statistics.median(1e3 * turn.times[0] for turn in turns),
        "between_p50_ms": 1e3 * percentiles[49],
        "between_p99_ms": 1e3 * percentiles[98],
        "tokens_per_s": statistics.median(len(turn.times) / turn.seconds for turn in turns),
        "seconds": _spread([turn.seconds for turn in turns]),
        "neighbours": max(turn.neighbours for turn in turns),
    }


def _prefix_row(length: int, name: str, pairs: list[tuple[float, float]]) -> Row:
    cold, hit = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
    return {"tokens": length, "engine": name, "cold_ms": cold, "hit_ms": hit, "speedup": cold / hit}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def _add_ratios(rows: list[Row], cost: Any) -> None:
    """How many times faster our engine is than the best peer, in our row; None without a peer."""
    peers = [cost(row) for row in rows if row["engine"] != OWN]
    for row in rows:
        row["ratio"] = min(peers) / cost(row) if row["engine"] == OWN and peers else None


def _add_bounds(rows: list[Row], works: list[list[Work]], costs: Costs, limits: Limits) -> None:
    bounds = [limits.seconds(needs(work, costs)) for work in works]
    operations, reading = (statistics.median(side) for side in zip(*bounds, strict=True))
    for row in rows:
        row["bound_s"] = {"operations": operations, "bytes": reading}
        row["share"] = max(operations, reading) / row["seconds"]["median"]


def _add_equal_tokens(rows: list[Row], work: list[Work], turns: dict[str, list[Turn]], reference: Worker) -> None:
    some = work[:_CHECKED_REQUESTS]
    expected = reference.run(some).outputs
    for row in rows:
        found = turns[row["engine"]][-1].outputs[: len(some)]
        row["equal_tokens"] = equal_share(expected, found)


def equal_share(expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> float:
    """Share of positions with the same token; outputs of unequal length are a BenchError."""
    if [len(tokens) for tokens in expected] != [len(tokens) for tokens in found]:
        raise BenchError("outputs of different lengths cannot be compared")
    pairs = [pair for a, b in zip(expected, found, strict=True) for pair in zip(a, b, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else 1.0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
