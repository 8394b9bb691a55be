"""Beside generations: tokens, versions, load, probes."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import httpx
import pytest

from engine import __version__
from rayapp.api.routes import build_api
from rayapp.api.settings import RequestSettings
from rayapp.text.template import ChatTemplate
from rayapp.text.tokenizer import Tokenizer
from tests.rayapp.scripted import ScriptedService
from tests.rayapp.test_api_tools import TEMPLATE, WEATHER

HELLO = [{"role": "user", "content": "Hello"}]


def ask(service: ScriptedService, method: str, path: str, body: Any = None) -> httpx.Response:
    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(build_api(service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            content = None if body is None else json.dumps(body)
            return await client.request(method, path, content=content)

    return asyncio.run(call())


@pytest.mark.parametrize("text", ["Hello world", "", "caf\u00e9 \u4f60\u597d \U0001f600"])
def test_tokens_and_back(service: ScriptedService, text: str) -> None:
    answer = ask(service, "POST", "/tokenize", {"model": "smol", "prompt": text, "return_token_strs": True}).json()
    tokenizer = service.models["smol"].tokenizer
    assert answer["tokens"] == tokenizer.encode(text)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 256)
    assert len(answer["token_strs"]) == answer["count"]
    back = ask(service, "POST", "/detokenize", {"model": "smol", "tokens": answer["tokens"]})
    assert back.json() == {"prompt": text}


def test_messages_are_counted_as_chat_would(service: ScriptedService) -> None:
    counted = ask(service, "POST", "/tokenize", {"model": "smol", "messages": HELLO}).json()
    answered = ask(service, "POST", "/v1/chat/completions", {"model": "smol", "messages": HELLO}).json()
    assert counted["count"] == answered["usage"]["prompt_tokens"]
    assert counted["token_strs"] is None
    bare = ask(
        service, "POST", "/tokenize", {"model": "smol", "messages": HELLO, "add_generation_prompt": False}
    ).json()
    assert counted["tokens"][: bare["count"]] == bare["tokens"] and bare["count"] < counted["count"]


def test_tools_are_counted_as_chat_would(service: ScriptedService) -> None:
    plain = service.models["smol"]
    able = replace(plain, template=ChatTemplate(plain.tokenizer, TEMPLATE), tool_format="hermes")
    service.models = service.models | {"smol": able}
    body = {"model": "smol", "messages": HELLO, "tools": [WEATHER]}
    counted = ask(service, "POST", "/tokenize", body).json()
    answered = ask(service, "POST", "/v1/chat/completions", body).json()
    assert counted["count"] == answered["usage"]["prompt_tokens"]
    assert counted["count"] > ask(service, "POST", "/tokenize", body | {"tools": []}).json()["count"]


def test_special_tokens_are_added_where_they_are_asked_for(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left out, to a text and not to messages."""
    plain, added = service.models["smol"].tokenizer.encode, []

    def encode(_: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        added.append(add_special_tokens)
        return plain(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    for said in ({}, {"add_special_tokens": None}, {"add_special_tokens": False}, {"add_special_tokens": True}):
        for body in ({"prompt": "a"}, {"messages": HELLO}):
            assert ask(service, "POST", "/tokenize", {"model": "smol", **body, **said}).status_code == 200
    assert added == [True, False] * 2 + [False, False] + [True, True]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": "", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [WEATHER]}, "tools"),
        ("/tokenize", {"messages": HELLO, "tools": [WEATHER]}, "tools"),  # the model can call none
        ("/tokenize", {"messages": HELLO, "tools": [WEATHER, WEATHER]}, "tools.1.function.name"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, None),  # no valid JSON, so no field has it
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompts": "a"}, "prompts"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_O33_what_is_wrong_is_named(
    service: ScriptedService, path: str, body: dict[str, Any], param: str | None
) -> None:
    answer = ask(service, "POST", path, {"model": "smol"} | body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_O34_unknown_models(service: ScriptedService, path: str) -> None:
    body = {"model": "nobody", "prompt": "a"} if path == "/tokenize" else {"model": "nobody", "tokens": []}
    assert ask(service, "POST", path, body).status_code == 404


def test_tokenizer_info(service: ScriptedService) -> None:
    facts = ask(service, "GET", "/tokenizer_info?model=smol").json()
    tokenizer = service.models["smol"].tokenizer
    assert (facts["vocab_size"], facts["max_model_len"]) == (tokenizer.vocab_size, 256)
    assert facts["special_tokens"]["eos_token"] == "<|im_end|>" and "im_start" in facts["chat_template"]
    assert (facts["bos_token"], facts["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert ask(service, "GET", "/tokenizer_info?model=org/warm").json()["chat_template"] is None


def test_a_model_is_named_where_there_are_several(service: ScriptedService) -> None:
    calls: list[tuple[str, str, Any]] = [
        ("GET", "/tokenizer_info", None),
        ("POST", "/tokenize", {"prompt": "a"}),
        ("POST", "/detokenize", {"tokens": [5]}),
    ]
    for call in calls:
        answer = ask(service, *call)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    service.models = {"smol": service.models["smol"]}
    assert [ask(service, *call).status_code for call in calls] == [200, 200, 200]


def test_probes(service: ScriptedService) -> None:
    assert [ask(service, method, "/ping").status_code for method in ("GET", "POST")] == [200, 200]
    service.healthy = False
    assert ask(service, "GET", "/ping").status_code == 503
    assert ask(service, "GET", "/version").json() == {"version": __version__}
    assert ask(service, "GET", "/load").json() == {"server_load": 0}
    assert ask(service, "GET", "/metrics").status_code == 404


def test_special_tokens_come_back(service: ScriptedService) -> None:
    """What was tokenized is what is told, chat templates included."""
    tokens = ask(service, "POST", "/tokenize", {"model": "smol", "messages": HELLO}).json()["tokens"]
    text = ask(service, "POST", "/detokenize", {"model": "smol", "tokens": tokens}).json()["prompt"]
    assert text.startswith("<|im_start|>") and text.endswith("<|im_start|>assistant\n")
    again = ask(service, "POST", "/tokenize", {"model": "smol", "prompt": text, "add_special_tokens": False}).json()
    assert again["tokens"] == tokens


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "x " * 51}, "prompt"),
        ("/tokenize", {"messages": HELLO * 10}, "messages"),
        ("/v1/completions", {"prompt": "x " * 51}, "prompt"),
        ("/v1/completions", {"prompt": ["x " * 30, "x " * 30]}, "prompt"),
        ("/v1/chat/completions", {"messages": HELLO * 10}, "messages"),
        ("/v1/responses", {"input": "x " * 51}, "input"),
    ],
)
def test_a_text_too_long_to_tokenize(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str
) -> None:
    """It is refused before it is tokenized, and the setting is named."""
    service.settings = RequestSettings(max_text_length=100)
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    answer = ask(service, "POST", path, {"model": "smol"} | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (413, "text_too_long", param)
    assert "max_text_length" in error["message"] and "100" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("settings", [{}, {"max_prompt_tokens": 3}])
def test_a_prompt_that_cannot_fit_is_not_tokenized(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch, path: str, settings: dict[str, int]
) -> None:
    service.settings = RequestSettings(**settings)
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    text = "x" * (1000 if settings else 30_000)
    body = {"prompt": text, "messages": [{"role": "user", "content": text}], "input": text}
    field = {"/v1/completions": "prompt", "/v1/chat/completions": "messages", "/v1/responses": "input"}[path]
    answer = ask(service, "POST", path, {"model": "smol", field: body[field]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert answer.json()["error"]["param"] == field
    message = answer.json()["error"]["message"]
    assert ("max_prompt_tokens" if settings else "256 in all") in message
    least = int(re.findall(r"at least (\d+) tokens, ", message)[0])
    assert f"by at least {least - (3 if settings else 255)} tokens" in message
