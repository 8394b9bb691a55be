"""Whatever stands anywhere in a request body, there is no 5xx: the answer, or a refusal in OpenAI's form."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from rayapp.api.routes import build_api
from rayapp.api.service import ServedModel
from rayapp.text.template import ChatTemplate
from tests.rayapp.scripted import ScriptedService
from tests.rayapp.test_api_responses import WEATHER as FLAT_WEATHER
from tests.rayapp.test_api_tools import TEMPLATE, WEATHER
from tests.rayapp.test_openai_forms import Said

CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
PARTS = [{"type": "text", "text": "Hi"}]
JSON_SCHEMA = {"name": "a", "schema": {"type": "object"}, "strict": True, "description": "d"}
SAMPLING = {
    "n": 1, "stop": ["x"], "min_tokens": 1, "temperature": 0, "top_p": 1, "top_k": 1, "min_p": 0, "seed": 1,
    "ignore_eos": True, "stop_token_ids": [1], "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1,
    "logit_bias": {"1": 1}, "cache_salt": "a", "priority": 1, "timeout": 9, "user": "me", "stream": True,
    "stream_options": {"include_usage": True}, "max_tokens": 5,
}  # fmt: skip
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", SAMPLING | {
        "messages": [
            {"role": "system", "content": "Be short.", "name": "me"},
            {"role": "user", "content": PARTS},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "annotations": []},
            {"role": "tool", "tool_call_id": "call_1", "content": "ok"},
        ],
        "tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": True, "logprobs": True, "top_logprobs": 1, "chat_template_kwargs": {"a": [1]},
        "modalities": ["text"], "metadata": {}, "functions": [],
    }),
    "form": ("/v1/chat/completions", {
        "messages": [{"role": "user", "content": "Hi"}],
        "response_format": {"type": "json_schema", "json_schema": JSON_SCHEMA},
    }),
    "structure": ("/v1/chat/completions", {
        "messages": [{"role": "user", "content": "Hi"}], "structured_outputs": {"choice": ["a", "b"]},
    }),
    "completions": ("/v1/completions", SAMPLING | {
        "prompt": [[1, 2], [3]], "echo": True, "logprobs": 1, "best_of": 1, "suffix": "",
    }),
    "responses": ("/v1/responses", {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
            {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}", "status": "completed"},
            {"type": "function_call_output", "call_id": "call_1", "output": "ok"},
        ],
        "instructions": "Be short.", "max_output_tokens": 5, "tools": [FLAT_WEATHER], "metadata": {"a": "b"},
        "tool_choice": {"type": "function", "name": "weather"}, "include": ["message.output_text.logprobs"],
        "top_logprobs": 1, "text": {"verbosity": "medium"}, "reasoning": {}, "stream_options": {}, "store": False,
    }),
    "text": ("/v1/responses", {"input": "Hi", "text": {"format": {"type": "json_schema", **JSON_SCHEMA}}}),
    "tokenize": ("/tokenize", {"messages": [{"role": "user", "content": PARTS}], "chat_template_kwargs": {"a": 1}}),
    "detokenize": ("/detokenize", {"tokens": [1, 2]}),
}  # fmt: skip
WRONG: list[Any] = [None, True, 0, 1.5, 10**30, "", "a", [], [[]], [{}], {}, {"type": {}}]


@pytest.fixture(scope="module")
def client(models: dict[str, ServedModel]) -> TestClient:
    plain = models["smol"]
    template = ChatTemplate(plain.tokenizer, TEMPLATE)
    able = replace(plain, name="able", template=template, tool_format="hermes", reasons=True)
    service = ScriptedService({"able": able}, script=Said().script)
    return TestClient(build_api(service), raise_server_exceptions=False)


def places(value: Any, *at: Any) -> Iterator[tuple[Any, ...]]:
    """The paths to everything in a body."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*at, key)
        yield from places(inner, *at, key)


@pytest.mark.parametrize("name", BODIES)
def test_any_kind_of_value_anywhere(client: TestClient, name: str) -> None:
    path, body = BODIES[name]
    body = {"model": "able"} | body
    assert client.post(path, json=body).status_code == 200
    for at in places(body):
        for wrong in WRONG:
            changed = copy.deepcopy(body)
            holder = changed
            for step in at[:-1]:
                holder = holder[step]
            holder[at[-1]] = wrong
            response = client.post(path, json=changed)
            assert response.status_code < 500, (at, wrong, response.text)
            assert response.status_code == 200 or set(response.json()["error"]) == {"message", "type", "param", "code"}
