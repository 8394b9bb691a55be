"""Every object that the API sends, whole or streamed, against the openai client's own types (see openai_forms).

Texts are scripted, so that each form comes; the server, and all that makes an object of a text, are real.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from rayapp.api.errors import overloaded
from rayapp.api.service import Chunk, ServedModel
from rayapp.scored import ScoredToken
from rayapp.text.template import ChatTemplate
from tests.conftest import wait_limit
from tests.rayapp.local_server import serving
from tests.rayapp.openai_forms import faults, read_json
from tests.rayapp.scripted import Call, ScriptedService
from tests.rayapp.test_api_responses import WEATHER as FLAT_WEATHER
from tests.rayapp.test_api_tools import ONE, TEMPLATE, TWO, WEATHER

TEXTS = {  # and how they end
    "text": ("It rains. 你好", "stop"),
    "cut text": ("It rai", "length"),
    "nothing": ("", "stop"),
    "thoughts": ("<think>Hm.</think>\n\nIt rains.", "stop"),
    "cut thoughts": ("<think>Hm.", "length"),
    "call": (ONE, "stop"),
    "cut call": (ONE[:60], "length"),
    "thoughts, text, calls": ("<think>Hm.</think>Look:\n" + TWO, "stop"),
    "JSON": ('{"city": "Paris"}', "stop"),
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
JSON_SCHEMA = {"name": "weather", "schema": SCHEMA, "strict": True}
ASK = [{"role": "user", "content": "Weather?"}]
ENDPOINTS = {"/chat/completions": {"messages": ASK}, "/completions": {"prompt": "a"}, "/responses": {"input": "a"}}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}

CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several": {"n": 3, "temperature": 1, "seed": 3, "stop": ["never said"]},
    "scores": {"logprobs": True, "top_logprobs": 2},
    "scores alone": {"logprobs": True, "n": 2},
    "tools": {"tools": [WEATHER]},
    "a tool by force": {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False},
    "scores and tools": {"tools": [WEATHER], "logprobs": True, "top_logprobs": 1},
    "form": {"response_format": {"type": "json_schema", "json_schema": JSON_SCHEMA}},
    "choice": {"structured_outputs": {"choice": ["a", "b"]}},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {"prompt": "a"},
    "several": {"prompt": ["a", "b"], "n": 2},
    "ids": {"prompt": [5, 6, 7]},
    "echo": {"prompt": "Once upon", "echo": True},
    "scores": {"prompt": "a", "logprobs": 2},
    "scores alone": {"prompt": "a", "logprobs": 0},
    "echo and scores": {"prompt": ["Once upon", "a time"], "echo": True, "logprobs": 1},
    "echo alone": {"prompt": "Once upon", "echo": True, "logprobs": 1, "max_tokens": 0},
    "form": {"prompt": "a", "structured_outputs": {"regex": "a*"}},
}
RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {"input": "Weather?", "instructions": "Be short.", "metadata": {"a": "b"}, "user": "me"},
    "items": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}], "temperature": 0},
    "scores": {"input": "Weather?", "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "tools": {"input": "Weather?", "tools": [FLAT_WEATHER], "parallel_tool_calls": False},
    "a tool by force": {
        "input": "Weather?", "tools": [FLAT_WEATHER], "tool_choice": {"type": "function", "name": "weather"},
    },
    "form": {"input": "Weather?", "text": {"format": {"type": "json_schema", **JSON_SCHEMA}}, "top_p": 0.5},
}  # fmt: skip


class Said:
    """What the model says, how it ends ("stop", "length", "breaks", "full" before it begins), and how it is scored."""

    text, end = "", "stop"

    async def script(self, call: Call) -> AsyncIterator[Chunk]:
        if self.end == "full":
            raise overloaded("no room")
        asked, count = call.sampling, len(call.prompt_ids)
        token: int = ScoredToken(7, -0.5, [(i, -1.0 - i) for i in range(asked.top_logprobs)]) if asked.logprobs else 7
        prompt = None
        if asked.prompt_logprobs is not None:
            top = [(i, -1.0 - i) for i in range(asked.prompt_logprobs)]
            prompt = [ScoredToken(one, -2.0 if i else None, top if i else []) for i, one in enumerate(call.prompt_ids)]
        yield Chunk("", [], None, 0, count, 0, prompt)
        for number, start in enumerate(range(0, len(self.text), 3), 1):
            yield Chunk(self.text[start : start + 3], [token], None, number, count, 0)
        if self.end == "breaks":
            raise RuntimeError("broken")
        yield Chunk("", [], self.end, len(self.text) // 3 + 1, count, 0)


@pytest.fixture(scope="module")
def said() -> Said:
    return Said()


@pytest.fixture(scope="module")
def http(models: dict[str, ServedModel], said: Said) -> Iterator[httpx.Client]:
    plain = models["smol"]
    template = ChatTemplate(plain.tokenizer, TEMPLATE)
    able = replace(plain, name="able", template=template, tool_format="hermes", reasons=True)
    with (
        serving(ScriptedService(models | {"able": able}, script=said.script)) as url,
        httpx.Client(base_url=f"{url}/v1", timeout=wait_limit(30)) as client,
    ):
        yield client


def sent(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Every object of an answer."""
    response = http.post(path, json={"model": "able"} | body)
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        return [read_json(response.text)]
    data = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    return [read_json(one) for one in data if one != "[DONE]"]


def check(objects: list[dict[str, Any]], nulls: bool = False) -> None:
    found = {fault: one for one in objects for fault in faults(one, nulls)}
    assert objects and not found


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("said_is", TEXTS)
@pytest.mark.parametrize("asked", CHATS)
def test_chats(http: httpx.Client, said: Said, asked: str, said_is: str, stream: bool) -> None:
    said.text, said.end = TEXTS[said_is]
    usage = USAGE if stream and asked != "plain" else {}
    check(sent(http, "/chat/completions", {"messages": ASK, "stream": stream} | CHATS[asked] | usage))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("asked", COMPLETIONS)
def test_completions(http: httpx.Client, said: Said, asked: str, stream: bool) -> None:
    fields = COMPLETIONS[asked] | {"stream": stream}
    usage = USAGE if stream and asked != "plain" else {}
    nulls = stream or ("echo" in fields and "logprobs" in fields)
    for said.text, said.end in (TEXTS["text"], TEXTS["cut text"], TEXTS["nothing"]):
        check(sent(http, "/completions", fields | usage), nulls)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("said_is", TEXTS)
@pytest.mark.parametrize("asked", RESPONSES)
def test_responses(http: httpx.Client, said: Said, asked: str, said_is: str, stream: bool) -> None:
    said.text, said.end = TEXTS[said_is]
    check(sent(http, "/responses", {"stream": stream} | RESPONSES[asked]))


def test_models(http: httpx.Client) -> None:
    check([read_json(http.get("/models").text), read_json(http.get("/models/able").text)])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_errors(http: httpx.Client, said: Said, path: str, stream: bool) -> None:
    body = {"model": "able", "stream": stream} | ENDPOINTS[path]
    said.text, said.end = "It rains.", "full"
    answers = [http.post(path, json=body | change) for change in ({}, {"temperature": 3}, {"no": 1}, {"model": "no"})]
    answers += [http.post(path, content=b"{"), http.get(path), http.get("/nothing"), http.get("/models/no")]
    assert [answer.status_code for answer in answers] == [503, 400, 400, 404, 400, 405, 404, 404]
    check([read_json(answer.text) for answer in answers])
    said.end = "breaks"
    if not stream:
        answer = http.post(path, json=body)
        assert answer.status_code == 500
        check([read_json(answer.text)])
        return
    lines: list[str] = []
    with http.stream("POST", path, json=body) as response, pytest.raises(httpx.RemoteProtocolError):
        lines.extend(response.iter_lines())
    objects = [read_json(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert any("error" in (one.get("type"), *one) for one in objects)
    check(objects, nulls=path == "/completions")


def test_what_the_types_do_not_hold_is_found(http: httpx.Client, said: Said) -> None:
    said.text, said.end = TEXTS["thoughts"]
    (answer,) = sent(http, "/chat/completions", {"messages": ASK})
    assert faults(answer) == []
    message = answer["choices"][0]["message"]
    for change in ({"thoughts": "Hm."}, {"role": "user"}, {"content": 5}):
        answer["choices"][0]["message"] = message | change
        assert any("$.choices[0].message" in fault for fault in faults(answer))
    (text,) = sent(http, "/completions", {"prompt": "a"})
    text["choices"][0]["finish_reason"] = None
    assert faults(text) and not faults(text, nulls=True)
