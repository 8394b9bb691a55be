"""Limits and defaults change while the application runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from tests.conftest import wait_limit
from tests.rayapp.conftest import ServeSession, tiny_model
from tests.serving import wait_until

NAME = "limits"


def deploy(models: list[dict[str, Any]], user_config: dict[str, Any]) -> None:
    """As `serve deploy` does with a file; `serve.run` would make new replicas each time."""
    application = {
        "name": NAME,
        "route_prefix": f"/{NAME}",
        "import_path": "rayapp.app:build",
        "args": {"models": models},
        "deployments": [{"name": "Router", "user_config": user_config}],
    }
    client: Any = _get_global_client()
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))


def test_limits_change_without_a_restart(serve_session: ServeSession, tiny_http_path: Path) -> None:
    models = [tiny_model(tiny_http_path, num_gpus=None)]
    url = f"{serve_session.url}/{NAME}"
    body = {"model": "tiny", "prompt": "one two three four five six", "max_tokens": 2}

    def status() -> int:
        """0 while the proxy holds the request for an application that is not there yet."""
        try:
            return httpx.post(f"{url}/v1/completions", json=body, timeout=10).status_code
        except httpx.TimeoutException:
            return 0

    def pid() -> int:
        facts = serve.get_app_handle(NAME).options(method_name="facts").remote().result(timeout_s=wait_limit(30))
        return int(facts["pid"])

    def settings_error() -> str:
        return str(httpx.get(f"{url}/health", timeout=wait_limit(10)).json().get("settings_error"))

    try:
        deploy(models, {})
        wait_until(lambda: status() == 200, 60)
        before = pid()
        deploy(models, {"max_prompt_tokens": 2})
        wait_until(lambda: status() == 400)
        deploy(models, {"max_prompt_tokens": 2000})
        wait_until(lambda: status() == 200)
        deploy(models, {"max_prompt_tokans": 2})  # refused, and what was there stays
        wait_until(
            lambda: "did you mean 'max_prompt_tokens'" in httpx.get(f"{url}/health").json().get("settings_error", "")
        )
        assert status() == 200
        assert pid() == before
    finally:
        serve.delete(NAME)
