"""How many replicas a model needs: a pure function of what its replicas report, and its form for Ray Serve.

`ScalingPolicy` is called in Serve's controller, some ten times a second; Serve applies delays and bounds around it.
`replica.py` reports what it reads (`REPORTED`). Knows nothing of engines; loads neither torch nor rayapp's other files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# What `EngineReplica.record_autoscaling_stats` reports of one replica.
TOKENS_IN_FLIGHT = "tokens_in_flight"  # prompt and generated so far, of all its requests
WAITING_PREFILL_TOKENS = "waiting_prefill_tokens"  # not computed yet, of requests that no step has taken in
KV_USAGE = "kv_usage"  # share of the cache that running requests hold, 0 to 1
REPORTED = (TOKENS_IN_FLIGHT, WAITING_PREFILL_TOKENS, KV_USAGE)


@dataclass(frozen=True, slots=True)
class Targets:
    """How much one replica should have to do: with more of any of these than all replicas together should, one more
    is needed.

    Attributes:
        ongoing_requests: running and waiting, in replicas and before them.
        tokens_in_flight, waiting_prefill_tokens: tokens; None: not looked at.
        kv_usage: share of the cache, 0 to 1. Preemption begins a little below 1.
        most_requests: that a replica takes in at all: fewer replicas than hold what runs are never asked for.
        relief: replicas are given up only if those that stay would have at most this share of their targets to do.
    """

    ongoing_requests: float
    most_requests: int
    tokens_in_flight: float | None = None
    waiting_prefill_tokens: float | None = None
    kv_usage: float = 0.75
    relief: float = 0.7


def replicas_needed(
    current: int,
    ongoing_requests: float,
    queued_requests: float,
    reports: Mapping[str, Iterable[float]],
    targets: Targets,
) -> int:
    """Replicas that the load of this moment calls for. Up at once, down only where there is room to spare.

    Args:
        current: replicas aimed at now.
        ongoing_requests: in replicas and in front of them.
        queued_requests: those of them that no replica has taken in, and so are in no report; they count as much as
            the average of those that are.
        reports: of each name in REPORTED, the values of the replicas that report.
    """
    inside = ongoing_requests - queued_requests
    unseen = ongoing_requests / inside if inside > 0 else 1.0
    loads = [ongoing_requests / targets.ongoing_requests]
    for name, target in (
        (TOKENS_IN_FLIGHT, targets.tokens_in_flight),
        (WAITING_PREFILL_TOKENS, targets.waiting_prefill_tokens),
        (KV_USAGE, targets.kv_usage),
    ):
        if target is not None:
            loads.append(sum(reports.get(name, ())) * unseen / target)
    load = max(loads)
    floor = math.ceil(ongoing_requests / targets.most_requests)
    up = math.ceil(load)
    if up >= current:
        return max(up, floor)
    return max(min(current, math.ceil(load / targets.relief)), floor)


class ScalingPolicy:
    """`replicas_needed` as Serve calls it: `AutoscalingPolicy(policy_function=ScalingPolicy, policy_kwargs=...)`.

    Args:
        **targets: fields of `Targets`.
    """

    def __init__(self, **targets: Any) -> None:
        self._targets = Targets(**targets)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """
        Args:
            context: ray.serve.config.AutoscalingContext.

        Returns:
            Replicas, and state, of which this policy has none.
        """
        metrics = context.aggregated_metrics or {}
        reports = {name: list((metrics.get(name) or {}).values()) for name in REPORTED}
        needed = replicas_needed(
            context.target_num_replicas,
            context.total_num_requests,
            context.total_queued_requests or 0.0,
            reports,
            self._targets,
        )
        return needed, {}
