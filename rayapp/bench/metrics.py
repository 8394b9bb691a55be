"""Outcomes to figures, under the names that `vllm bench serve` writes into its result files.

Called by `serve.py`; `report.py` prints what comes out. Times in are seconds, times out milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rayapp.bench.client import Outcome

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def figures(
    outcomes: Sequence[Outcome],
    duration_s: float,
    *,
    percentiles: Sequence[float] = (99,),
    metrics: Sequence[str] = tuple(METRICS),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """All figures of one run. Means and percentiles of nothing are 0.

    Args:
        percentiles, metrics: which to compute for which of METRICS.
        goodput: the most milliseconds of some of GOODPUT_METRICS that a good request may take.
    """
    good = [outcome for outcome in outcomes if outcome.error is None]
    tokens_in = sum(outcome.prompt_tokens for outcome in good)
    tokens_out = sum(outcome.completion_tokens for outcome in good)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "total_cached_tokens": sum(outcome.cached_tokens for outcome in good),
        "request_throughput": len(good) / duration_s,
        "request_goodput": sum(_meets(one, goodput) for one in good) / duration_s if goodput else None,
        "output_throughput": tokens_out / duration_s,
        "total_token_throughput": (tokens_in + tokens_out) / duration_s,
        "max_output_tokens_per_s": _peak_tokens(good),
        "max_concurrent_requests": _peak_requests(outcomes),
        "answers_without_usage": sum(not outcome.has_usage for outcome in good),
        "error_counts": dict(Counter(outcome.error for outcome in outcomes if outcome.error is not None)),
    }
    for name in metrics:
        result |= _spread(name, _values(name, good), percentiles)
    return result


def details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """What --save-detailed adds: one entry for each request."""
    return {
        "input_lens": [one.prompt_tokens for one in outcomes],
        "output_lens": [one.completion_tokens for one in outcomes],
        "ttfts": [one.ttft for one in outcomes],
        "itls": [_gaps(one) for one in outcomes],
        "latencies": [one.latency for one in outcomes],
        "start_times": [one.start for one in outcomes],
        "queue_times": [one.start - one.arrived for one in outcomes],
        "generated_texts": [one.text for one in outcomes],
        "errors": [one.error or "" for one in outcomes],
    }


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """ "ttft:200" and the like to milliseconds.

    Raises:
        ValueError: another form, name or a limit below 0.
    """
    limits = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            raise ValueError(f"--goodput {pair!r} is not NAME:MILLISECONDS") from None
        if name not in GOODPUT_METRICS or not limits[name] >= 0:
            raise ValueError(f"--goodput {pair!r}: the names are {', '.join(GOODPUT_METRICS)}, limits at least 0")
    return limits


def _values(name: str, outcomes: Sequence[Outcome]) -> list[float]:
    if name == "ttft":
        return [one.ttft for one in outcomes]
    if name == "tpot":
        return [one.tpot for one in outcomes if one.tpot is not None]
    if name == "itl":
        return [gap for one in outcomes for gap in _gaps(one)]
    return [one.latency for one in outcomes]


def _gaps(outcome: Outcome) -> list[float]:
    return [float(gap) for gap in np.diff(outcome.arrivals)]


def _spread(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    ms = 1e3 * np.asarray(values if len(values) else [0.0])
    return {
        f"mean_{name}_ms": float(ms.mean()),
        f"median_{name}_ms": float(np.median(ms)),
        f"std_{name}_ms": float(ms.std()),
    } | {f"p{percentile:g}_{name}_ms": float(np.percentile(ms, percentile)) for percentile in percentiles}


def _meets(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    times = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
    return all(1e3 * times[name] <= limit for name, limit in limits.items())


def _peak_tokens(outcomes: Sequence[Outcome]) -> float:
    """The most tokens that came within one second, counted in whole seconds from the first request on. The tokens of
    an answer are spread evenly over the pieces they came in."""
    if not outcomes:
        return 0.0
    start = min(one.start for one in outcomes)
    tokens: dict[int, float] = {}
    for one in outcomes:
        times = one.arrivals or [one.end]
        for when in times:
            second = int(when - start)
            tokens[second] = tokens.get(second, 0.0) + one.completion_tokens / len(times)
    return max(tokens.values())


def _peak_requests(outcomes: Sequence[Outcome]) -> int:
    """The most requests that were under way at one moment."""
    changes = sorted([(one.start, 1) for one in outcomes] + [(one.end, -1) for one in outcomes])
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most
