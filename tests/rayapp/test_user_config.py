"""Limits and defaults change while the application runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
from ray import serve

from rayapp.app import build
from tests.conftest import wait_limit
from tests.rayapp.conftest import App, tiny_model
from tests.serving import wait_until


def test_limits_change_without_a_restart(deploy: Callable[..., App], tiny_http_path: Path) -> None:
    name, models = "limits", [tiny_model(tiny_http_path)]
    app = deploy(name, models=models)
    router = serve.get_app_handle(name).options(method_name="facts")
    pid = router.remote().result()["pid"]
    body = {"model": "tiny", "prompt": "one two three four five six", "max_tokens": 2}

    def status() -> int:
        return httpx.post(f"{app.url}/v1/completions", json=body, timeout=wait_limit(30)).status_code

    assert status() == 200
    try:
        serve.run(build({"models": models, "requests": {"max_prompt_tokens": 2}}), name=name, route_prefix=f"/{name}")
        wait_until(lambda: status() == 400)
        serve.run(build({"models": models}), name=name, route_prefix=f"/{name}")
        wait_until(lambda: status() == 200)
        assert router.remote().result()["pid"] == pid
    finally:
        serve.delete(name)
