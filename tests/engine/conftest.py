"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine import device_on_cpu
from tests.engine.triton_processes import Run, child


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Run]:
    """Runs functions where Triton's kernels are interpreted."""
    with child({"TRITON_INTERPRET": "1"}) as run:
        yield run


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs functions where Triton's kernels are compiled, and none of them is known from an earlier run."""
    with child({"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}) as run:
        yield run


@pytest.fixture(scope="session")
def on_device() -> Iterator[Run]:
    """Runs functions where there is the device of device_on_cpu.py, with Triton's kernels interpreted on it."""
    with child({"TRITON_INTERPRET": "1"}) as run:
        run(device_on_cpu.set_up)
        yield run
