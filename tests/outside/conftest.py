"""Programs of others against a server here. Each has an environment of its own, whose Python a variable names."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.rayapp.local_server import local_server, small


@pytest.fixture(scope="session")
def smol_url(smol_path: Path) -> Iterator[str]:
    """SMOL in float32 as `smol`, without Ray."""
    engine = {"page_size": 16, "num_blocks": 1024, "max_batch_tokens": 256}
    with local_server(small("smol", smol_path, num_threads=2, engine=engine)) as url:
        yield url


def python_of(variable: str, install: str) -> Path:
    """The interpreter that an environment variable names; the test is skipped without."""
    if variable not in os.environ:
        pytest.skip(f"{variable} is not set: the Python of an environment with {install}")
    return Path(os.environ[variable])


def run(command: Sequence[str | Path], folder: Path, timeout: float) -> str:
    """What a program prints, which must end well."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    env |= {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "datasets"),
        "OPENAI_API_KEY": "unused",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env=env, timeout=timeout, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout
