"""Rows to tables of plain text. Called by the command line; measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]


def _number(key: str, digits: int = 1) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        value: Any = row
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return "" if value is None else f"{value:,.{digits}f}"

    return text


def _percent(key: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(key) is None else f"{row[key]:.0%}"


def _word(key: str) -> Callable[[Row], str]:
    return lambda row: str(row[key])


_RATIO: Column = ("x best peer", _number("ratio", 2))
_OTHERS: Column = ("used by others", _percent("neighbours"))

COLUMNS: dict[str, list[Column]] = {
    "throughput": [
        ("workload", _word("workload")),
        ("engine", _word("engine")),
        ("min s", _number("seconds.min", 2)),
        ("median s", _number("seconds.median", 2)),
        ("max s", _number("seconds.max", 2)),
        ("cpu s", _number("cpu_seconds", 2)),
        ("out tok/s", _number("out_per_s")),
        ("all tok/s", _number("total_per_s")),
        _RATIO,
        ("bound: compute s", _number("bound_s.operations", 2)),
        ("memory s", _number("bound_s.bytes", 2)),
        ("reached", _percent("share")),
        _OTHERS,
        ("equal tokens", _percent("equal_tokens")),
    ],
    "latency": [
        ("engine", _word("engine")),
        ("first token ms", _number("first_token_ms")),
        ("between p50 ms", _number("between_p50_ms", 2)),
        ("p99 ms", _number("between_p99_ms", 2)),
        ("tok/s", _number("tokens_per_s")),
        _RATIO,
        _OTHERS,
    ],
    "prefix": [
        ("prompt", _word("tokens")),
        ("engine", _word("engine")),
        ("cold ms", _number("cold_ms")),
        ("hit ms", _number("hit_ms")),
        ("speedup", _number("speedup")),
        _RATIO,
    ],
}


def table(section: str, rows: Sequence[Row]) -> str:
    """The rows of a section, aligned; columns without a value are left out. Words are left-aligned."""
    columns = [(title, [cell(row) for row in rows]) for title, cell in COLUMNS[section]]
    columns = [(title, cells) for title, cells in columns if any(cells)]
    lines = []
    for i in range(-1, len(rows)):
        texts = []
        for title, cells in columns:
            width = max(map(len, (title, *cells)))
            text = title if i < 0 else cells[i]
            texts.append(text.ljust(width) if title in ("workload", "engine") else text.rjust(width))
        lines.append("  ".join(texts).rstrip())
    return "\n".join(lines)


def render(result: Mapping[str, Any]) -> str:
    """Everything that one call has measured, as text."""
    machine = result["host"]
    parts = [
        f"{machine['date']}  {machine['cpu']}, {machine['cores']} cores ({' '.join(machine['flags']) or 'no flags'}), "
        f"load {machine['load_average']:.1f}\n"
        f"{result['model']} in {result['dtype']}; "
        + ", ".join(f"{name} {version}" for name, version in result["engines"].items())
        + f"\n$ {machine['command']}"
    ]
    if limits := result.get("limits"):
        rates = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in limits["gemm"].items())
        parts.append(f"limits: GEMM {rates} GFLOP/s; reading {limits['bandwidth'] / 1e9:,.1f} GB/s")
    parts += [f"{section}\n{table(section, result[section])}" for section in COLUMNS if result.get(section)]
    return "\n\n".join(parts)
