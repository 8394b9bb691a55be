"""Order of the tests that start a Ray of their own."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They come first: of two Rays on one host only the first has the agent that takes jobs (its port is fixed), and
    tests/rayapp keeps one running to the end of the session. First of all those that share the one `serve run`, of
    which the last ends it."""
    items.sort(key=turn)


def turn(item: pytest.Item) -> int:
    if "served" in getattr(item, "fixturenames", ()):
        return 1 if item.get_closest_marker("ends_server") else 0
    return 2 if item.path.parent.name == "cluster" else 3
