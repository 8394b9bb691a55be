"""What /health says of a model, by what its replicas say."""

from __future__ import annotations

from typing import Any

import pytest

from rayapp.router import summary

WORKS: dict[str, Any] = {"error": None, "running": 2, "waiting": 1}
STUCK: dict[str, Any] = {"error": "no step ended for 9 s", "running": 1, "waiting": 0}


@pytest.mark.parametrize(
    ("report", "held", "on_demand", "state"),
    [
        ([WORKS], 0, False, "ready"),
        ([WORKS, STUCK], 3, True, "ready"),
        ([], 0, False, "unavailable"),  # loading, or gone
        ([STUCK], 0, False, "unavailable"),
        ([], 0, True, "asleep"),
        ([], 3, True, "starting"),
        ([STUCK], 3, True, "unavailable"),  # there is a replica, and it cannot serve
    ],
)
def test_state(report: list[dict[str, Any]], held: int, on_demand: bool, state: str) -> None:
    assert summary(report, held=held, on_demand=on_demand)["state"] == state


def test_counts_are_those_of_engines_that_work() -> None:
    assert summary([WORKS, STUCK, WORKS], held=5, on_demand=False) == {
        "state": "ready",
        "replicas": 2,
        "running": 4,
        "waiting": 2,
        "held": 5,
        "errors": ["no step ended for 9 s"],
    }
