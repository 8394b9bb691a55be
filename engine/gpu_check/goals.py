"""What is aimed at on one H200 in bfloat16, and the table that says which goals were met.

Called when all stages are done, with what they have written. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Goal:
    """A bound of one figure."""

    bound: float
    at_most: bool

    def met(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.bound:g}"


# Milliseconds of a decode step at a context of about 1024, by model and batch.
STEP_MS = {
    ("qwen3-0.6b", 1): 0.85,
    ("qwen3-0.6b", 32): 1.9,
    ("qwen3-0.6b", 256): 9.5,
    ("llama-8b", 1): 4.4,
    ("llama-8b", 32): 5.8,
    ("llama-8b", 256): 17.0,
}
PREFILL_SHARE = Goal(0.65, at_most=False)
ATTENTION_SHARE = Goal(0.80, at_most=False)  # of the copy bandwidth, from `ATTENTION_TOKENS` on
ATTENTION_TOKENS = 256 * 1024  # batch * context
GAP = Goal(0.03, at_most=True)  # the part of a step in which the device waits
SPEEDUP = Goal(2.0, at_most=False)  # over transformers' own continuous batching


@dataclass(frozen=True)
class Figure:
    """One line of the table. `share`: of what the device can do."""

    name: str
    value: float
    unit: str
    share: float | None = None
    goal: Goal | None = None

    def as_dict(self, judged: bool) -> dict[str, Any]:
        goal = None if self.goal is None else str(self.goal)
        return {
            "figure": self.name,
            "value": self.value,
            "unit": self.unit,
            "share": self.share,
            "goal": goal,
            "verdict": self.verdict(judged),
        }

    def verdict(self, judged: bool) -> str:
        if self.goal is None:
            return ""
        if not judged:
            return "not judged"
        return "met" if self.goal.met(self.value) else "missed"


def figures(stages: Mapping[str, Any]) -> list[Figure]:
    """What the stages' rows say about goals, the most important first."""
    rows = {name: stage.get("rows", []) for name, stage in stages.items()}
    found = list(_steps(rows))
    found += _against_peer(rows)
    found += _attention(rows.get("attention", []))
    return found


def _steps(rows: Mapping[str, Sequence[Row]]) -> Iterator[Figure]:
    for stage, ours in rows.items():
        if not stage.startswith("steps "):
            continue
        model = stage.removeprefix("steps ")
        for row in ours:
            if "step_ms" in row:
                bound = STEP_MS.get((model, row["batch"])) if row.get("main") else None
                goal = None if bound is None else Goal(bound, at_most=True)
                yield Figure(f"{model} step, {row['case']}", row["step_ms"], "ms", row.get("share"), goal)
                if row.get("gap") is not None:
                    yield Figure(f"{model} device waits, {row['case']}", row["gap"], "of a step", None, GAP)
            elif row.get("prefill_ms") is not None and row.get("share") is not None:
                goal = PREFILL_SHARE if model == "llama-8b" else None
                yield Figure(f"{model} {row['case']}", row["share"], "of its floor", None, goal)


def _against_peer(rows: Mapping[str, Sequence[Row]]) -> Iterator[Figure]:
    for stage, theirs in rows.items():
        if not stage.startswith("transformers "):
            continue
        model = stage.removeprefix("transformers ")
        ours = {row["batch"]: row["step_ms"] for row in rows.get(f"steps {model}", ()) if row.get("main")}
        for row in theirs:
            if "step_ms" in row:
                name = f"{model} transformers' step, {row['case']}"
                yield Figure(name, row["step_ms"], "ms", row.get("share"))
                if row["batch"] in ours:
                    times = row["step_ms"] / ours[row["batch"]]
                    yield Figure(f"{model} faster than transformers, {row['case']}", times, "times", None, SPEEDUP)


def _attention(rows: Sequence[Row]) -> Iterator[Figure]:
    for row in rows:
        if row.get("share") is not None:
            goal = ATTENTION_SHARE if row["tokens"] >= ATTENTION_TOKENS and row["fast"] else None
            yield Figure(f"attention, {row['case']}", row["share"], "of copying", None, goal)


def table(found: Sequence[Figure], judged: bool) -> str:
    """The figures with their goals, aligned."""
    lines = [("figure", "value", "", "of its limit", "goal", "")]
    for figure in found:
        share = "" if figure.share is None else f"{figure.share:.1%}"
        goal = "" if figure.goal is None else str(figure.goal)
        lines.append((figure.name, f"{figure.value:.3g}", figure.unit, share, goal, figure.verdict(judged)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
