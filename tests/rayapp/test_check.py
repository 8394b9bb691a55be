"""What `make serve` says of a configuration file before it starts anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yaml

from rayapp.check import problems
from tests.conftest import wait_limit

ROOT = Path(__file__).resolve().parents[2]


def test_the_shipped_configuration_is_right() -> None:
    assert problems(ROOT / "serve_config.yaml") == []


def test_a_typo_is_named_with_the_nearest_key_and_a_status(tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config["applications"][0]["args"]["models"][0]["engine"] = {"max_batch_tokns": 3}
    file = tmp_path / "typo.yaml"
    file.write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [sys.executable, "-m", "rayapp.check", str(file)],
        cwd=ROOT, capture_output=True, text=True, timeout=wait_limit(60),
    )  # fmt: skip
    assert done.returncode == 1
    assert "max_batch_tokns" in done.stderr
    assert "did you mean 'max_batch_tokens'" in done.stderr
    assert "Traceback" not in done.stderr


def test_files_that_are_not_there_or_not_yaml(tmp_path: Path) -> None:
    assert problems(tmp_path / "none.yaml")
    (tmp_path / "broken.yaml").write_text("a: [")
    assert problems(tmp_path / "broken.yaml")
