"""What the distribution ships and says."""

from __future__ import annotations

import tomllib
from pathlib import Path

import engine

ROOT = Path(__file__).resolve().parents[1]


def test_the_version_is_said_once_and_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == engine.__version__


def test_sources_that_are_compiled_on_first_use_are_shipped() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    shipped = {path for pattern in data["engine"] for path in (ROOT / "engine").glob(pattern)}
    assert shipped == {*(ROOT / "engine").rglob("*.cpp"), *(ROOT / "engine").rglob("*.h")}
