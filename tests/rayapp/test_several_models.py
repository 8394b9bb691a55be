"""Several models in one application: each with its own deployment, settings and fate."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.conftest import wait_limit
from tests.models import SMOL_VOCAB, build_tiny, ref, save
from tests.rayapp.conftest import App, tiny_model
from tests.serving import wait_until

pytestmark = pytest.mark.slow  # a quick one is in tests/cluster/test_serve_run.py

TOKENS = 24
PROMPTS = [f"{number}: once upon a time" for number in range(8)]


@pytest.fixture(scope="module")
def other() -> PreTrainedModel:
    """TINY with other weights and half the context."""
    return build_tiny(SMOL_VOCAB, 2048, seed=1)


@pytest.fixture(scope="module")
def two(
    deploy: Callable[..., App],
    tiny_http_path: Path,
    other: PreTrainedModel,
    smol_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[App]:
    folder = save(other, tmp_path_factory.mktemp("models") / "other", smol_path)
    engine = {"page_size": 32, "num_blocks": 100, "max_batch_tokens": 64, "max_requests_per_batch": 4}
    models = [
        tiny_model(tiny_http_path, num_gpus=None, num_cpus=0.2),
        tiny_model(folder, num_gpus=None, num_cpus=0.2) | {"name": "other", "engine": engine},
    ]
    app = deploy("two-models", models=models)
    yield app
    serve.delete(app.name, _blocking=False)


def ask(app: App, model: str, prompt: str, tokens: int = TOKENS) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    return httpx.post(f"{app.url}/v1/completions", json=body, timeout=wait_limit(60))


def states(app: App) -> tuple[int, dict[str, str]]:
    answer = httpx.get(f"{app.url}/health", timeout=wait_limit(10))
    return answer.status_code, {name: one["state"] for name, one in answer.json()["models"].items()}


def facts(app: App, model: str) -> dict[str, Any]:
    (one,) = app.engines(model).broadcast("facts").results(timeout_s=wait_limit(30))
    return dict(one)


def test_models_are_served_side_by_side_and_one_that_breaks_leaves_the_other_alone(
    two: App, tiny_http: PreTrainedModel, other: PreTrainedModel, smol_tokenizer: PreTrainedTokenizerFast
) -> None:
    def text(model: PreTrainedModel, prompt: str) -> str:
        return smol_tokenizer.decode(ref(model, smol_tokenizer(prompt)["input_ids"], TOKENS), skip_special_tokens=True)

    expected = {
        name: [text(model, prompt) for prompt in PROMPTS] for name, model in (("tiny", tiny_http), ("other", other))
    }
    assert expected["tiny"] != expected["other"]

    def right(name: str) -> bool:
        answers = list(pool.map(lambda prompt: ask(two, name, prompt), PROMPTS))
        assert {one.status_code for one in answers} == {200}, [one.text for one in answers if one.status_code != 200]
        got = [one.json()["choices"][0]["text"] for one in answers]
        return [one.rstrip("\ufffd") for one in got] == [one.rstrip("\ufffd") for one in expected[name]]

    with ThreadPoolExecutor(20) as pool, ThreadPoolExecutor(2) as callers:
        assert list(callers.map(right, ["tiny", "other"])) == [True, True]
        assert ask(two, "third", "x").status_code == 404
        assert ask(two, "other", "x", 3000).json()["usage"]["total_tokens"] == 2048
        settings = [(facts(two, name)["kv_tokens"], facts(two, name)["max_requests"]) for name in ("tiny", "other")]
        assert settings == [(1024 * 16, 32), (100 * 32, 4)]

        assert states(two) == (200, {"tiny": "ready", "other": "ready"})
        os.kill(facts(two, "other")["engine"]["pid"], signal.SIGKILL)
        moved = callers.submit(right, "other")  # held until it has an engine again
        wait_until(lambda: states(two) == (503, {"tiny": "ready", "other": "unavailable"}), 10, every=0.02)
        assert right("tiny")
        assert moved.result(wait_limit(120))
    wait_until(lambda: states(two)[0] == 200, 60)


def test_a_model_that_cannot_start_is_named_and_others_serve(deploy: Callable[..., App], tiny_http_path: Path) -> None:
    """It is asleep until somebody asks for it, who is told; it says why in the log of its replicas."""
    broken: dict[str, Any] = {"name": "broken", "device": "cuda", "autoscaling": {"min_replicas": 0, "max_replicas": 1}}
    models = [
        tiny_model(tiny_http_path, num_gpus=None, num_cpus=0.2),
        tiny_model(tiny_http_path, num_gpus=0, num_cpus=0.2) | broken,
    ]
    app = deploy("half-broken", models=models, router={"migration_timeout_s": 5})
    assert states(app) == (200, {"tiny": "ready", "broken": "asleep"})
    started = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, app, "broken", "x")
        while not asked.done():
            assert ask(app, "tiny", "x").status_code == 200
        answer = asked.result()
    print(f"told after {time.monotonic() - started:.1f} s: {answer.text}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert states(app) == (503, {"tiny": "ready", "broken": "unavailable"})
    assert ask(app, "tiny", "x").status_code == 200
    serve.delete(app.name, _blocking=False)
