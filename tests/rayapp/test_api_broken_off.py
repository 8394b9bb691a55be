"""Answers that do not come to their end over HTTP: what clients are told, and what they keep."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from rayapp.api.errors import out_of_time
from rayapp.api.service import Chunk, ServedModel
from rayapp.text.template import ChatTemplate
from tests.conftest import wait_limit
from tests.rayapp.local_server import local_server, serving, small
from tests.rayapp.scripted import Call, ScriptedService
from tests.rayapp.test_api_responses import WEATHER
from tests.rayapp.test_api_tools import ONE, TEMPLATE, TWO

LONG: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100_000},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 100_000},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 100_000},
}
TEXTS = {
    "content": ("It rains.", [("message", "It rains.")]),
    "thoughts": ("<think>Hm, Paris", [("reasoning", "Hm, Paris")]),
    "thoughts and content": ("<think>Hm.</think>\n\nIt rai", [("reasoning", "Hm."), ("message", "It rai")]),
    "a call": (ONE[:-20], [("function_call", '{"city": "Pa')]),
    "calls": (TWO, [("function_call", '{"city": "Paris"}'), ("function_call", '{"city": "Oslo"}')]),
    "nothing": ("", []),
}  # fmt: skip


@pytest.fixture(scope="module")
def url(tiny_http_path: Path) -> Iterator[str]:
    """Of an engine."""
    with local_server(small("tiny", tiny_http_path)) as url:
        yield url


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", LONG)
@pytest.mark.parametrize(("timeout", "said"), [(1e-6, "1e-06 s"), (0.05, "0.05 s")])
def test_a_timeout_says_how_long_it_was_and_what_to_change(
    url: str, path: str, stream: bool, timeout: float, said: str
) -> None:
    body = {"model": "tiny", "stream": stream, "timeout": timeout, "ignore_eos": True} | LONG[path]
    status, text = broken_off(url + path, body)
    assert status == 504 or (stream and timeout == 0.05)
    assert f"did not end within its timeout ({said})" in text
    assert "larger" in text and "fewer tokens" in text


@pytest.mark.parametrize("said", TEXTS)
def test_a_response_that_fails_keeps_what_was_streamed(said: str, models: dict[str, ServedModel]) -> None:
    """The deltas before it are its output, and what broke off is incomplete."""
    text, output = TEXTS[said]

    async def script(call: Call) -> AsyncIterator[Chunk]:
        yield Chunk("", [], None, 0, 1, 0)
        for number, start in enumerate(range(0, len(text), 3), 1):
            yield Chunk(text[start : start + 3], [7], None, number, 1, 0)
        raise out_of_time("too late")

    plain = models["smol"]
    able = replace(plain, template=ChatTemplate(plain.tokenizer, TEMPLATE), tool_format="hermes", reasons=True)
    with serving(ScriptedService({"smol": able}, script=script)) as url:
        body = {"model": "smol", "input": "Weather?", "tools": [WEATHER], "stream": True}
        status, lines = broken_off(f"{url}/v1/responses", body)
    events = [json.loads(line.removeprefix("data: ")) for line in lines.split("\n") if line.startswith("data: ")]
    assert (status, events[-1]["type"], events[-1]["response"]["status"]) == (200, "response.failed", "failed")
    items = events[-1]["response"]["output"]
    written = [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in items]
    deltas: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    assert [(item["id"], one) for item, one in zip(items, written, strict=True)] == list(deltas.items())
    assert [item["type"] for item in items] == [kind for kind, _ in output]
    assert all(whole.startswith(one) for (_, whole), one in zip(output, written, strict=True))
    assert [item["status"] for item in items] == ["completed"] * (len(items) - 1) + ["incomplete"] * bool(items)


def broken_off(url: str, body: dict[str, Any]) -> tuple[int, str]:
    """Status and text of an answer; a stream of one is closed without an end."""
    text = ""
    with httpx.stream("POST", url, json=body, timeout=wait_limit(60)) as response:
        try:
            for piece in response.iter_text():
                text += piece
        except httpx.RemoteProtocolError:
            assert response.status_code == 200
        else:
            assert response.status_code != 200
    return response.status_code, text
