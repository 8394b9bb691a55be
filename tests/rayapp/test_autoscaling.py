"""The scaling policy: properties of the pure function, and traces of load played through it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.autoscaling import (
    KV_USAGE,
    TOKENS_IN_FLIGHT,
    WAITING_PREFILL_TOKENS,
    ScalingPolicy,
    Targets,
    replicas_needed,
)

TARGETS = Targets(ongoing_requests=20, most_requests=40, tokens_in_flight=10_000, waiting_prefill_tokens=4_000)

counts = st.integers(0, 50)
requests = st.floats(0, 5_000)
reports = st.fixed_dictionaries(
    {
        TOKENS_IN_FLIGHT: st.lists(st.floats(0, 1e6), max_size=8),
        WAITING_PREFILL_TOKENS: st.lists(st.floats(0, 1e6), max_size=8),
        KV_USAGE: st.lists(st.floats(0, 1), max_size=8),
    }
)


@given(counts, requests, reports)
def test_never_below_what_streams_need(current, ongoing, reported) -> None:
    needed = replicas_needed(current, ongoing, 0, reported, TARGETS)
    assert needed * TARGETS.most_requests >= ongoing


@given(counts, requests, reports, st.floats(1, 3))
def test_more_load_never_means_fewer(current, ongoing, reported, factor) -> None:
    less = replicas_needed(current, ongoing, 0, reported, TARGETS)
    more = replicas_needed(
        current, ongoing * factor, 0, {name: [value * factor for value in values] for name, values in reported.items()},
        TARGETS,
    )  # fmt: skip
    assert more >= less


@given(counts, requests, reports)
def test_settles(current, ongoing, reported) -> None:
    """Under a load that stays the answer is the same after one change: nothing swings."""
    once = replicas_needed(current, ongoing, 0, reported, TARGETS)
    assert replicas_needed(once, ongoing, 0, reported, TARGETS) == once


@given(st.integers(1, 50), requests, reports)
def test_what_is_given_up_leaves_room(current, ongoing, reported) -> None:
    needed = replicas_needed(current, ongoing, 0, reported, TARGETS)
    if needed < current:
        left = needed * TARGETS.relief * (1 + 1e-9)
        assert ongoing <= left * TARGETS.ongoing_requests
        assert sum(reported[KV_USAGE]) <= left * TARGETS.kv_usage
        assert sum(reported[WAITING_PREFILL_TOKENS]) <= left * TARGETS.waiting_prefill_tokens
        assert sum(reported[TOKENS_IN_FLIGHT]) <= left * TARGETS.tokens_in_flight


@pytest.mark.parametrize(
    ("reported", "needed"),
    [
        ({}, 1),
        ({KV_USAGE: [0.9]}, 2),  # the cache is nearly full: preemption would be next
        ({WAITING_PREFILL_TOKENS: [9_000]}, 3),  # few requests with long prompts
        ({TOKENS_IN_FLIGHT: [25_000]}, 3),
    ],
)
def test_each_signal_counts_by_itself(reported: dict[str, list[float]], needed: int) -> None:
    assert replicas_needed(1, 3, 0, reported, TARGETS) == needed


def test_requests_that_no_replica_has_yet_count_as_the_others() -> None:
    reported = {TOKENS_IN_FLIGHT: [10_000.0]}
    assert replicas_needed(1, 10, 0, reported, TARGETS) == 1
    assert replicas_needed(1, 20, 10, reported, TARGETS) == 2
    assert replicas_needed(0, 60, 60, {}, TARGETS) == 3  # from zero: by their number alone


def test_a_day() -> None:
    """Up with the first look at a rush, all of it; down by steps as it ebbs; to nothing when nothing is left."""
    policy = ScalingPolicy(ongoing_requests=20, most_requests=40)
    current, seen = 1, []
    for ongoing in (5, 130, 130, 90, 60, 30, 10, 0):
        context = SimpleNamespace(
            target_num_replicas=current,
            total_num_requests=ongoing,
            total_queued_requests=0,
            aggregated_metrics={KV_USAGE: {f"replica-{n}": ongoing / 200 / current for n in range(current)}},
        )
        current, state = policy(context)
        seen.append(current)
        assert state == {}
        if not current:
            break
    assert seen == [1, 7, 7, 7, 5, 3, 1, 0]


def test_no_reports_yet() -> None:
    """Serve hands None where no replica has reported."""
    context = SimpleNamespace(
        target_num_replicas=1, total_num_requests=50, total_queued_requests=None, aggregated_metrics=None
    )
    assert ScalingPolicy(ongoing_requests=20, most_requests=40)(context) == (3, {})
