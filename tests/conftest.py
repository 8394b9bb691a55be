"""Fixtures and settings that every test shares. Loads no torch before a test asks for a model."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.work_units import WorkUnits, check

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

settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, database=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI", "").lower() in ("1", "true") else "dev")


def wait_limit(seconds: float) -> float:
    """The longest a test waits before it calls something hung. Never a measure of speed."""
    return seconds * float(os.environ.get("TEST_TIME_SCALE", "1"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> WorkUnits:
    return WorkUnits(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    check(item)  # while items are collected pytest-xdist would break off without a word on why


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in on_gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="module")
def loggers_as_they_were() -> Iterator[None]:
    """Applications set up the loggers of their processes; some tests run them in this one."""
    loggers = [logging.getLogger(name) for name in ("engine", "rayapp")]
    before = [(logger.level, list(logger.handlers), logger.propagate) for logger in loggers]
    yield
    for logger, (level, handlers, propagate) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers
        logger.propagate = propagate


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
    """One `serve run` for every test that looks from outside: SMOL as `smol`, two replicas of TINY as `tiny`, and
    `chain`, which dictates its text. tests/cluster ends it."""
    from tests.models import CHAIN_NEWLINES, CHAIN_THERE, build_chain, save
    from tests.serving import ServeRun, model_args

    folder = tmp_path_factory.mktemp("served")
    chain = build_chain([CHAIN_THERE, 11527, CHAIN_NEWLINES, 198, 253, 216, 28, 2], eos_token_id=2)
    models = [
        model_args("smol", smol_path),
        model_args("tiny", tiny_http_path, num_replicas=2, num_threads=1),
        model_args("chain", save(chain, folder / "chain", smol_path)),
    ]
    with ServeRun(folder, models) as run:
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
