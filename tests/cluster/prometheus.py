"""Prometheus' programs for tests: those on the PATH, or those that `make prometheus` has unpacked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNPACKED = ROOT / ".venv" / "prometheus" / "usr" / "bin"


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`; skips the test where there is none."""
    found = shutil.which(name) or shutil.which(name, path=str(UNPACKED))
    if found is None:
        pytest.skip(f"{name} is not installed here: `make prometheus` unpacks Debian's, without root")
    return found
