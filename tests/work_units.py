"""Which tests pytest-xdist runs in one process, in their order: those of a file, and all that need Ray.

A host has one Ray of the tests at a time, which all of them share, and files share models and references. Called by
conftest.py. The controller of pytest-xdist sees names of tests alone, so files are told by their paths here; marks
(`xdist_group`) would need names that pytest 9.2 lets nobody change.
"""

from __future__ import annotations

import fnmatch

import pytest
from xdist.scheduler import LoadScopeScheduling

RAY_FIXTURES = {"served", "serve_session"}
RAY_FILES = (
    "tests/cluster/*",
    "tests/conformance/*",
    "tests/cases/test_http_cases.py",
    "tests/rayapp/test_batch.py",
    "tests/rayapp/test_bench_layers.py",
    "tests/rayapp/test_cluster.py",
    "tests/rayapp/test_instruments.py",
    "tests/rayapp/test_replica_loss.py",
    "tests/rayapp/test_routing_live.py",
    "tests/rayapp/test_scaling_live.py",
    "tests/rayapp/test_serve_app.py",
    "tests/rayapp/test_several_models.py",
    "tests/rayapp/test_soak.py",
    "tests/rayapp/test_tensor_parallel_serving.py",
    "tests/rayapp/test_user_config.py",
)


class WorkUnits(LoadScopeScheduling):
    """Gives each process one unit after another."""

    def _split_scope(self, nodeid: str) -> str:
        return work_unit(nodeid)


def work_unit(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    return "ray" if any(fnmatch.fnmatchcase(file, pattern) for pattern in RAY_FILES) else file


def check(item: pytest.Item) -> None:
    """Fails a test that would start a Ray beside the others'."""
    if RAY_FIXTURES & set(getattr(item, "fixturenames", ())) and work_unit(item.nodeid) != "ray":
        pytest.fail(f"{item.nodeid} needs Ray: add its file to RAY_FILES in tests/work_units.py", pytrace=False)
