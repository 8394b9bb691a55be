"""Fixtures and settings that every test shares. Loads no torch before a test asks for a model."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from tests.serving import ServeRun

# Before torch is loaded. Models are tiny here: a second thread gains nothing, and its spinning slows what runs beside.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ["HF_HUB_OFFLINE"] = "1"

# Shells start background jobs with SIGINT ignored, and these hand that on; some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

NEEDS_RAY = {"served", "serve_session"}

settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, database=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI", "").lower() in ("1", "true") else "dev")


def wait_limit(seconds: float) -> float:
    """The longest a test waits before it calls something hung. Never a measure of speed."""
    return seconds * float(os.environ.get("TEST_TIME_SCALE", "1"))


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.xdist_group(work_unit(item)))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in on_gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def work_unit(item: pytest.Item) -> str:
    """Tests of one unit run in one process, in order: all that need Ray, of which a host has one session, and otherwise
    those of a file, or of a part of it that its mark `unit` names, which share models and references."""
    if item.path.parent.name in ("cluster", "conformance") or NEEDS_RAY & set(getattr(item, "fixturenames", ())):
        return "ray"
    file = item.path.relative_to(item.config.rootpath).as_posix()
    part = item.get_closest_marker("unit")
    return f"{file}-{part.args[0]}" if part else file


@pytest.fixture(scope="session")
def smol_path() -> Path:
    """Folder of SmolLM2-135M-Instruct, converted on the first use in the user's cache."""
    from rayapp.models import BUNDLED_MODEL, resolve

    return resolve(BUNDLED_MODEL)


@pytest.fixture(scope="session")
def smol(smol_path: Path) -> PreTrainedModel:
    """SMOL in float32. Shared by all tests: leave it as it is."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smol_path, dtype=torch.float32)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def smol_tokenizer(smol_path: Path) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(smol_path)


@pytest.fixture(scope="session")
def tiny() -> PreTrainedModel:
    """TINY: vocabulary 512, context 256, float32. Shared by all tests: leave it as it is."""
    from tests.models import build_tiny

    return build_tiny()


@pytest.fixture(scope="session")
def served(smol_path: Path, tiny_http_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeRun]:
    """One `serve run` for every HTTP test: SMOL as `smol`, TINY as `tiny`, and two models that dictate their text."""
    from tests.models import build_chain, save
    from tests.serving import ServeRun, model_args

    folder = tmp_path_factory.mktemp("served")
    chains = {"chain-newlines": [504, 198, 253, 216, 28, 2], "chain-there": [504, 11527, 253, 2]}
    sources = {"smol": smol_path, "tiny": tiny_http_path}
    for name, walk in chains.items():
        sources[name] = save(build_chain(walk, eos_token_id=2), folder / name, smol_path)
    with ServeRun(folder, [model_args(name, source) for name, source in sources.items()]) as run:
        yield run


@pytest.fixture(scope="session")
def tiny_http() -> PreTrainedModel:
    """TINY as it is served: SmolLM2's vocabulary, context 4096. Shared by all tests: leave it as it is."""
    from tests.models import SMOL_VOCAB, build_tiny

    return build_tiny(SMOL_VOCAB, 4096)


@pytest.fixture(scope="session")
def tiny_http_path(tiny_http: PreTrainedModel, smol_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of `tiny_http` with SmolLM2's tokenizer and chat template."""
    from tests.models import save

    return save(tiny_http, tmp_path_factory.mktemp("models") / "tiny", smol_path)
