"""The table of Convoy's metrics: names, kinds, units and buckets, from which dashboards, rules and README are made.

Ray's exporter puts `ray_` before each name and `_total` behind a counter's; the tags that Serve adds (application,
deployment, replica) come on top of those named here. Loads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Upper bounds in seconds. A token takes milliseconds to a second, the wait for the first one up to minutes.
TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
OVERHEAD_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: as it is given to Ray.
        unit: of its values; "" for plain counts.
        tags: labels that the application sets itself.
        buckets: upper bounds, for histograms.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    unit: str
    help: str
    tags: tuple[str, ...] = ("model",)
    buckets: tuple[float, ...] = ()

    def exported(self) -> tuple[str, ...]:
        """Names of its time series as Ray's exporter shows them."""
        name = f"ray_{self.name}"
        if self.kind == "counter":
            return (f"{name}_total",)
        if self.kind == "histogram":
            return (f"{name}_bucket", f"{name}_sum", f"{name}_count")
        return (name,)


def _seconds(name: str, help: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(name, "histogram", "seconds", help, buckets=buckets)


METRICS = (
    Metric("convoy_running_requests", "gauge", "", "requests in the running batch of an engine"),
    Metric("convoy_waiting_requests", "gauge", "", "requests that an engine has taken in and not begun"),
    Metric("convoy_kv_usage", "gauge", "share, 0 to 1", "blocks of the KV cache that requests hold"),
    Metric("convoy_prompt_tokens", "counter", "tokens", "prompt tokens of the requests that were taken in"),
    Metric("convoy_generation_tokens", "counter", "tokens", "tokens generated"),
    Metric("convoy_prefix_hit_tokens", "counter", "tokens", "prompt tokens found in the prefix cache"),
    Metric("convoy_preemptions", "counter", "", "requests put back to waiting because the cache was full"),
    Metric("convoy_migrations", "counter", "", "requests resumed on another replica"),
    Metric("convoy_requests", "counter", "", "requests that ended, by finish reason", tags=("model", "reason")),
    Metric(
        "convoy_routing_decisions", "counter", "",
        "requests by the way their replica was chosen: home, spilled (home was full) or fallback (by load alone)",
        tags=("decision",),
    ),
    _seconds("convoy_time_to_first_token_s", "from arrival at the Router to the first token there", REQUEST_BUCKETS),
    _seconds("convoy_inter_token_s", "between two tokens of one request, in the engine", TOKEN_BUCKETS),
    _seconds("convoy_queue_time_s", "from arrival at the engine to its first step", REQUEST_BUCKETS),
    _seconds("convoy_prefill_time_s", "from the first step to the first token", REQUEST_BUCKETS),
    _seconds("convoy_decode_time_s", "from the first token to the last", REQUEST_BUCKETS),
    _seconds("convoy_request_time_s", "from arrival at the Router to the end there", REQUEST_BUCKETS),
    _seconds("convoy_serve_overhead_s", "of the time to the first token, what was not the engine's", OVERHEAD_BUCKETS),
)  # fmt: skip


def exported_names() -> frozenset[str]:
    """Every time series name that Convoy exports."""
    return frozenset(name for metric in METRICS for name in metric.exported())


def markdown_table() -> str:
    """METRICS as the table of README."""
    lines = ["| Metric | Kind | Unit | Tags | What it counts |", "|---|---|---|---|---|"]
    for metric in METRICS:
        name = metric.exported()[0].removesuffix("_bucket")
        tags = ", ".join(metric.tags)
        lines.append(f"| `{name}` | {metric.kind} | {metric.unit or '-'} | {tags} | {metric.help} |")
    return "\n".join(lines)
