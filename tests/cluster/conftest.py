"""Order of the tests that start a Ray of their own."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They come first: of two Rays on one host only the first has the agent that takes jobs (its port is fixed), and
    tests/rayapp keeps one running to the end of the session."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/cluster/"))
