"""Figures as text, in the lines and widths of `vllm bench serve`. Called by `serve.py`; computes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rayapp.bench.metrics import METRICS

WIDTH = 50
SHORT_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}
MOST_REASONS = 10


def render(result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The whole report of a result (see `rayapp.bench.metrics.figures`), which may have the settings of the run too."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    lines += [_line(title, value) for title, value in _totals(result) if value is not None]
    for name in metrics:
        lines.append(f"{METRICS[name]:-^{WIDTH}}")
        lines.append(_line(f"Mean {SHORT_NAMES[name]} (ms):", result[f"mean_{name}_ms"]))
        lines.append(_line(f"Median {SHORT_NAMES[name]} (ms):", result[f"median_{name}_ms"]))
        for percentile in percentiles:
            title = f"P{percentile:g} {SHORT_NAMES[name]} (ms):"
            lines.append(_line(title, result[f"p{percentile:g}_{name}_ms"]))
    lines.append("=" * WIDTH)
    return "\n".join([*lines, *_remarks(result)])


def _totals(result: Mapping[str, Any]) -> list[tuple[str, Any]]:
    rate = result.get("request_rate")
    paced = isinstance(rate, int | float) and not math.isinf(rate)
    return [
        ("Successful requests:", result["completed"]),
        ("Failed requests:", result["failed"]),
        ("Maximum request concurrency:", result.get("max_concurrency")),
        ("Request rate configured (RPS):", float(rate) if paced else None),  # type: ignore[arg-type]
        ("Benchmark duration (s):", result["duration"]),
        ("Total input tokens:", result["total_input_tokens"]),
        ("Total cached input tokens:", result["total_cached_tokens"] or None),
        ("Total generated tokens:", result["total_output_tokens"]),
        ("Request throughput (req/s):", result["request_throughput"]),
        ("Request goodput (req/s):", result["request_goodput"]),
        ("Output token throughput (tok/s):", result["output_throughput"]),
        ("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", float(result["max_concurrent_requests"])),
        ("Total token throughput (tok/s):", result["total_token_throughput"]),
    ]


def _line(title: str, value: float) -> str:
    return f"{title:<40} {value:<10.2f}" if isinstance(value, float) else f"{title:<40} {value:<10}"


def _remarks(result: Mapping[str, Any]) -> list[str]:
    lines = [f"WARNING: {warning}" for warning in result.get("client_warnings", ())]
    if missing := result["answers_without_usage"]:
        lines.append(f"WARNING: {missing} answers came without usage; each of their pieces was counted as a token")
    reasons = sorted(result["error_counts"].items(), key=lambda pair: -pair[1])
    lines += [f"Failed {count} times: {reason}" for reason, count in reasons[:MOST_REASONS]]
    if rest := reasons[MOST_REASONS:]:
        lines.append(f"Failed {sum(count for _, count in rest)} times for {len(rest)} other reasons")
    return lines
