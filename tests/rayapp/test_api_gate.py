"""Who may call the HTTP API and what it may ask for: keys, limits per key, browsers, the operator's limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from rayapp.api.auth import Keys
from rayapp.api.routes import build_api
from rayapp.api.service import Chunk
from rayapp.api.settings import ApiConfig, RequestSettings
from tests.conftest import wait_limit
from tests.rayapp.scripted import Call, ScriptedService, echo

CHAT = {"model": "smol", "messages": [{"role": "user", "content": "Say hi."}]}


@pytest.fixture
def keyed(monkeypatch: pytest.MonkeyPatch) -> ApiConfig:
    monkeypatch.setenv("TEST_KEYS", "alpha, beta")
    return ApiConfig(keys_env="TEST_KEYS")


def call(service: ScriptedService, config: ApiConfig, *requests: dict[str, Any]) -> list[httpx.Response]:
    """Send requests one after the other to one app."""

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(build_api(service, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [await client.request(**request) for request in requests]

    return asyncio.run(asyncio.wait_for(run(), wait_limit(30)))


def chat(key: str | None = None, scheme: str = "Bearer", **fields: Any) -> dict[str, Any]:
    headers = {} if key is None else {"Authorization": f"{scheme} {key}"}
    return {"method": "POST", "url": "/v1/chat/completions", "json": CHAT | fields, "headers": headers}


def test_without_keys_in_the_configuration_none_is_needed(service: ScriptedService) -> None:
    (answer,) = call(service, ApiConfig(), chat())
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (chat("alpha"), 200),
        (chat("beta", scheme="bearer"), 200),
        (chat(), 401),
        (chat("gamma"), 401),
        (chat("alph"), 401),
        (chat("alpha,"), 401),
        (chat(""), 401),
        (chat("alpha", scheme="Basic"), 401),
        ({"method": "GET", "url": "/v1/models"}, 401),
        ({"method": "GET", "url": "/nowhere"}, 401),
        ({"method": "GET", "url": "/health"}, 200),
        ({"method": "GET", "url": "/v1/models", "headers": {"Authorization": b"Bearer \xe4"}}, 401),
    ],
)  # fmt: skip
def test_keys(service: ScriptedService, keyed: ApiConfig, request_: dict[str, Any], status: int) -> None:
    (answer,) = call(service, keyed, request_)
    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert "alpha" not in answer.text
        assert not service.calls


def test_a_key_is_read_whole_from_a_file_that_may_change(service: ScriptedService, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nalpha  # Ann\n\nbeta\n")
    keys = Keys(ApiConfig(keys_file=file))
    assert keys.find("alpha") and keys.find("beta")
    assert not keys.find("Ann") and not keys.find("#") and not keys.find("")
    replacement = tmp_path / "new"
    replacement.write_text("gamma")
    replacement.replace(file)
    assert keys.find("gamma") and not keys.find("alpha")
    file.unlink()
    assert not keys.find("gamma")


@pytest.mark.parametrize("where", ["env", "file", "missing file", "empty env"])
def test_keys_that_are_asked_for_and_not_there_stop_the_start(
    service: ScriptedService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    (tmp_path / "empty").write_text("# none\n")
    monkeypatch.setenv("EMPTY_KEYS", " ,")
    config = {
        "env": ApiConfig(keys_env="NO_SUCH_VARIABLE"),
        "file": ApiConfig(keys_file=tmp_path / "empty"),
        "missing file": ApiConfig(keys_file=tmp_path / "nowhere"),
        "empty env": ApiConfig(keys_env="EMPTY_KEYS"),
    }[where]
    with pytest.raises(ValueError, match="no API key in"):
        build_api(service, config)


def test_a_key_has_its_limit_to_itself_until_an_answer_has_ended(service: ScriptedService, keyed: ApiConfig) -> None:
    async def run() -> None:
        go_on = asyncio.Event()

        async def slow(one: Call) -> AsyncIterator[Chunk]:
            yield Chunk("a", [7], None, 1, 3, 0)
            await go_on.wait()
            async for chunk in echo(one):
                yield chunk

        service.script = slow
        service.settings = RequestSettings(max_requests_per_key=2)
        transport = httpx.ASGITransport(build_api(service, keyed))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            first = [asyncio.create_task(client.request(**chat("alpha", stream=stream))) for stream in (True, False)]
            while len(service.calls) < 2:
                await asyncio.sleep(0)
            refused = await client.request(**chat("alpha"))
            assert refused.status_code == 429
            assert refused.headers["Retry-After"] == "1"
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            other = asyncio.create_task(client.request(**chat("beta")))
            while len(service.calls) < 3:
                await asyncio.sleep(0)
            go_on.set()
            answers = await asyncio.gather(*first, other)
            assert [answer.status_code for answer in answers] == [200, 200, 200]
            assert (await client.request(**chat("alpha"))).status_code == 200

    asyncio.run(asyncio.wait_for(run(), wait_limit(30)))


def test_browsers_are_let_in_where_the_configuration_says(service: ScriptedService, keyed: ApiConfig) -> None:
    ask = {
        "method": "OPTIONS",
        "url": "/v1/chat/completions",
        "headers": {"Origin": "https://page", "Access-Control-Request-Method": "POST"},
    }
    wrong = {"method": "GET", "url": "/v1/models", "headers": {"Origin": "https://page"}}
    closed, _ = call(service, ApiConfig(), ask, wrong)
    assert "Access-Control-Allow-Origin" not in closed.headers
    opened = keyed.model_copy(update={"cors_origins": ("https://page",)})
    asked, refused = call(service, opened, ask, wrong)
    assert asked.status_code == 200 and refused.status_code == 401
    for answer in (asked, refused):
        assert answer.headers["Access-Control-Allow-Origin"] == "https://page"
    elsewhere = ask | {"headers": {**ask["headers"], "Origin": "https://other"}}  # type: ignore[dict-item]
    (other,) = call(service, opened, elsewhere)
    assert "Access-Control-Allow-Origin" not in other.headers


def test_the_operator_s_limits_count_at_once(service: ScriptedService) -> None:
    service.settings = RequestSettings(max_prompt_tokens=3)
    (long,) = call(service, ApiConfig(), chat())
    assert long.status_code == 400
    assert long.json()["error"]["code"] == "context_length_exceeded"
    assert "max_prompt_tokens" in long.json()["error"]["message"]
    service.settings = RequestSettings(max_completion_tokens=5)
    call(service, ApiConfig(), chat(max_tokens=50), chat())
    assert [one.sampling.max_new_tokens for one in service.calls] == [5, 5]


def test_the_operator_s_defaults_come_before_the_model_s(service: ScriptedService) -> None:
    service.settings = RequestSettings.model_validate({"defaults": {"temperature": 0.3, "top_p": 0.5, "max_tokens": 9}})
    completion = {"method": "POST", "url": "/v1/completions", "json": {"model": "org/warm", "prompt": "a"}}
    own = completion | {"json": {"model": "org/warm", "prompt": "a", "temperature": 1.5, "max_tokens": 4}}
    call(service, ApiConfig(), completion, own)
    first, second = (one.sampling for one in service.calls)
    assert (first.temperature, first.top_p, first.top_k, first.max_new_tokens) == (0.3, 0.5, 50, 9)
    assert (second.temperature, second.top_p, second.max_new_tokens) == (1.5, 0.5, 4)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_prompt_token": 3}, "did you mean 'max_prompt_tokens'"),
        ({"max_prompt_tokens": 0}, "greater than or equal to 1"),
        ({"defaults": {"temprature": 1}}, "did you mean 'temperature'"),
        ({"defaults": {"temperature": 3}}, "less than or equal to 2"),
    ],
)
def test_wrong_settings_are_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RequestSettings.model_validate(fields)
