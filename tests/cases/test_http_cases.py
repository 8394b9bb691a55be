"""Cases O01-O06, O08-O11, O13, O29, O33-O37 over HTTP, through a real `serve run` and real weights in float32.

Texts are exact: the prompts have known gaps (see tests/models.py), and the CHAIN models dictate theirs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.models import ACC, ACC_IDS, CHAIN_NEWLINES, CHAIN_THERE, CJK, CJK_IDS, COUNT, COUNT_IDS, COUNT_TOKENS
from tests.serving import ServeRun

COUNT_TEXT = " 6, 7, 8, 9, 10,"


@pytest.fixture(scope="module")
def http(served: ServeRun) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=served.timeout) as client:
        yield client


def complete(http: httpx.Client, prompt: Any, model: str = "smol", **fields: Any) -> dict[str, Any]:
    """One non-streamed completion."""
    response = http.post("/v1/completions", json={"model": model, "prompt": prompt, "temperature": 0} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The JSON of every event of a stream that must be framed right and end with one [DONE]."""
    raw = b""
    with http.stream("POST", path, json={"temperature": 0, "stream": True} | body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        for part in response.iter_bytes():
            raw += part
    blocks = raw.decode("utf-8").split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks.count("data: [DONE]") == 1 and blocks[-1] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def pieces(http: httpx.Client, prompt: Any, model: str = "smol", **fields: Any) -> tuple[list[str], str, int]:
    """Text pieces, finish reason and completion tokens of a streamed completion."""
    body = {"model": model, "prompt": prompt, "stream_options": {"include_usage": True}} | fields
    *chunks, usage = events(http, "/v1/completions", body)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert len(reasons) == 1
    return [chunk["choices"][0]["text"] for chunk in chunks], reasons[0], usage["usage"]["completion_tokens"]


def both(http: httpx.Client, prompt: Any, model: str = "smol", **fields: Any) -> tuple[str, str, int, list[str]]:
    """Text, finish reason, completion tokens, which must be the same streamed and not; and the pieces."""
    whole = complete(http, prompt, model, **fields)
    choice = whole["choices"][0]
    parts, reason, count = pieces(http, prompt, model, **fields)
    assert "".join(parts) == choice["text"]
    assert (reason, count) == (choice["finish_reason"], whole["usage"]["completion_tokens"])
    return choice["text"], reason, count, parts


def refused(response: httpx.Response, status: int = 400, param: str | None = None) -> dict[str, Any]:
    """The error of a refusal in the OpenAI shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    if param is not None:
        assert body["error"]["param"] == param, body
    return body["error"]


@pytest.mark.parametrize(("prompt", "ids"), [(CJK, CJK_IDS), (ACC, ACC_IDS)])
def test_O01_characters_split_over_streamed_tokens(
    http: httpx.Client, smol_tokenizer: Any, prompt: str, ids: list[int]
) -> None:
    text, reason, count, parts = both(http, prompt, max_tokens=15)
    assert all("\ufffd" not in part for part in parts)
    assert text == smol_tokenizer.decode(ids)
    assert (reason, count) == ("length", 15)
    if prompt == CJK:
        assert text.count("你好") == 3


def test_O02_a_limit_inside_a_character(http: httpx.Client) -> None:
    text, reason, count, _ = both(http, CJK, max_tokens=2)
    assert (text, reason, count) == (" ", "length", 2)


def test_O03_leading_space_and_newlines(http: httpx.Client) -> None:
    assert both(http, "The capital of France is", max_tokens=1)[0] == " Paris"
    text, reason, _, _ = both(http, [CHAIN_NEWLINES], "chain", max_tokens=20)
    assert (text, reason) == ("\n a ,", "stop")


def test_O04_a_stop_string_across_tokens(http: httpx.Client) -> None:
    text, reason, count, parts = both(http, COUNT, stop=["8, 9"], max_tokens=30)
    assert (text, reason) == (" 6, 7, ", "stop")
    assert all("8" not in part for part in parts)
    assert count <= 11


def test_O05_a_stop_that_never_completes(http: httpx.Client) -> None:
    plain = both(http, COUNT, max_tokens=16)
    text, reason, count, parts = both(http, COUNT, stop=["8, X"], max_tokens=16)
    assert (text, reason, count) == plain[:3] == (COUNT_TEXT, "length", 16)
    seen = ""
    for part in parts[:-1]:
        seen += part
        assert not seen.endswith(" 8, 9") or part, "held text comes out when the stop can no longer match"


@pytest.mark.parametrize("reverse", [False, True])
def test_O06_the_earliest_of_several_stops(http: httpx.Client, reverse: bool) -> None:
    def stops(*stop: str) -> list[str]:
        return list(reversed(stop)) if reverse else list(stop)

    assert both(http, COUNT, stop=stops(", 8", " 7"), max_tokens=30)[:2] == (" 6,", "stop")
    assert both(http, [CHAIN_THERE], "chain", stop=stops("re", "he"), max_tokens=10)[:2] == ("t", "stop")


def test_O08_empty_prompts(http: httpx.Client) -> None:
    for prompt in ("", [], [""], [[]]):
        refused(http.post("/v1/completions", json={"model": "smol", "prompt": prompt}), param="prompt")
    assert complete(http, COUNT, max_tokens=16)["choices"][0]["text"] == COUNT_TEXT


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [4094, 4095, 4096, 4097, 9000])
def test_O09_prompts_around_the_context(http: httpx.Client, length: int, stream: bool) -> None:
    for asked in (1, 100):
        body = {"model": "tiny", "prompt": [7] * length, "max_tokens": asked, "temperature": 0}
        if length >= 4096:
            error = refused(http.post("/v1/completions", json=body | {"stream": stream}), param="prompt")
            assert str(length) in error["message"] and "4096" in error["message"]
            assert error["code"] == "context_length_exceeded"
        elif stream:
            _, reason, count = pieces(http, body["prompt"], "tiny", max_tokens=asked)
            assert (reason, count) == ("length", min(asked, 4096 - length))
        else:
            usage = complete(http, body["prompt"], "tiny", max_tokens=asked)["usage"]
            assert usage["total_tokens"] <= 4096
            assert usage["completion_tokens"] == min(asked, 4096 - length)


def test_O10_limits(http: httpx.Client) -> None:
    assert both(http, COUNT, max_tokens=1)[1:3] == ("length", 1)
    for bad in (-1, 0, "5", 1.5, True):
        body = {"model": "smol", "prompt": COUNT, "max_tokens": bad}
        refused(http.post("/v1/completions", json=body), param="max_tokens")
    for huge in (10**9, 2**63):  # capped to the context
        body = {"model": "tiny", "prompt": [7] * 4090, "max_tokens": huge, "temperature": 0}
        response = http.post("/v1/completions", json=body)
        assert response.json()["usage"]["completion_tokens"] == 6
    chat = {"model": "smol", "temperature": 0, "messages": [{"role": "user", "content": "Say hi."}]}
    answer = http.post("/v1/chat/completions", json=chat).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == 33


def test_O11_temperature_zero_and_nearly_zero(http: httpx.Client) -> None:
    mixes: list[dict[str, Any]] = [{"temperature": 0, "top_p": 0.1}, {"temperature": 0, "top_k": 3, "seed": 5}]
    mixes += [{"temperature": 0.0, "top_p": 0.1, "top_k": 3, "seed": 5}]
    mixes += [{"temperature": temperature} for temperature in (1e-6, 1e-10, 1e-45)]
    for mix in mixes:
        assert complete(http, COUNT, max_tokens=16, **mix)["choices"][0]["text"] == COUNT_TEXT


def test_O13_seeds(http: httpx.Client) -> None:
    def sample(**fields: Any) -> list[str]:
        answer = complete(http, [5, 6, 7], "tiny", max_tokens=12, temperature=1, **fields)
        return [choice["text"] for choice in answer["choices"]]

    first = sample(seed=7)
    with ThreadPoolExecutor(6) as pool:
        same = [pool.submit(sample, seed=7) for _ in range(3)]
        others = [pool.submit(sample, seed=seed) for seed in (1, 2, 3)]
        assert all(future.result() == first for future in same)
        assert len({tuple(future.result()) for future in others}) > 1
    pair = sample(seed=7, n=2)
    assert pair[0] != pair[1] and pair == sample(seed=7, n=2)
    assert sample() != sample()


def test_O29_the_same_request_id_twice_at_once(http: httpx.Client) -> None:
    def ask(prompt: str) -> str:
        body = {"model": "smol", "prompt": prompt, "temperature": 0, "max_tokens": 15}
        answer = http.post("/v1/completions", json=body, headers={"X-Request-Id": "same"})
        return answer.json()["choices"][0]["text"]

    with ThreadPoolExecutor(2) as pool:
        count, cjk = pool.map(ask, [COUNT, CJK])
    assert COUNT_TEXT.startswith(count) and count
    assert cjk == " 你好" * 3


BAD_CHATS: list[tuple[Any, str | None]] = [
    ({"messages": {"role": "user"}}, "messages"),
    ({"messages": []}, "messages"),
    ({}, "messages"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"n": 0}, "n"),
    ({"stream": "maybe"}, "stream"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"logprobs": 999}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"no_such_field": 1}, "no_such_field"),
]


@pytest.mark.parametrize(("change", "param"), BAD_CHATS, ids=[json.dumps(change)[:40] for change, _ in BAD_CHATS])
def test_O33_bad_fields(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    body: dict[str, Any] = {"model": "smol"}
    if "messages" not in change and change:
        body["messages"] = [{"role": "user", "content": "Say hi."}]
    error = refused(http.post("/v1/chat/completions", json=body | change))
    assert str(error["param"]).split(".")[0] == param


def test_O33_bad_bodies_read_by_the_client(http: httpx.Client, served: ServeRun) -> None:
    for content in (b"{broken", b"[]", b"", b"\xff\xfe", b'"text"'):
        for path in ("/v1/chat/completions", "/v1/completions"):
            refused(http.post(path, content=content, headers={"content-type": "application/json"}))
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="smol", prompt=COUNT, temperature=3)
    assert caught.value.param == "temperature"
    refused(http.get("/v1/nothing"), 404)
    refused(http.get("/v1/completions"), 405)
    assert complete(http, COUNT, max_tokens=16)["choices"][0]["text"] == COUNT_TEXT


@pytest.mark.parametrize("stream", [False, True])
def test_O34_unknown_models(http: httpx.Client, stream: bool) -> None:
    chat = {"messages": [{"role": "user", "content": "Say hi."}], "stream": stream}
    text = {"prompt": COUNT, "stream": stream}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", text)):
        for name in ("no-such-model", ""):
            error = refused(http.post(path, json=body | {"model": name}), 404, "model")
            assert error["code"] == "model_not_found"
        refused(http.post(path, json=body), param="model")
        refused(http.post(path, json=body | {"model": 5}), param="model")


def test_O34_models_lists_what_works(http: httpx.Client) -> None:
    names = [model["id"] for model in http.get("/v1/models").json()["data"]]
    assert set(names) == {"smol", "tiny", "chain"}
    for name in names:
        assert http.get(f"/v1/models/{name}").json()["id"] == name
        assert complete(http, [504], name, max_tokens=1)["model"] == name
    refused(http.get("/v1/models/nope"), 404)


def test_O35_prompt_forms(http: httpx.Client, smol_tokenizer: Any) -> None:
    count_ids, cjk_ids = smol_tokenizer.encode(COUNT), smol_tokenizer.encode(CJK)
    assert complete(http, count_ids, max_tokens=16)["choices"][0]["text"] == COUNT_TEXT
    for prompt in ([COUNT, CJK], [count_ids, cjk_ids]):
        answer = complete(http, prompt, max_tokens=15, n=2)
        texts = {choice["index"]: choice["text"] for choice in answer["choices"]}
        wanted = [smol_tokenizer.decode(COUNT_IDS[:15])] * 2 + [smol_tokenizer.decode(CJK_IDS)] * 2
        assert [texts[i] for i in range(4)] == wanted
        assert all(choice["finish_reason"] == "length" for choice in answer["choices"])
        assert answer["usage"]["prompt_tokens"] == len(count_ids) + len(cjk_ids)
        assert answer["usage"]["completion_tokens"] == 60
        streamed = [""] * 4
        body = {"model": "smol", "prompt": prompt, "max_tokens": 15, "n": 2}
        for chunk in events(http, "/v1/completions", body):
            for choice in chunk["choices"]:
                streamed[choice["index"]] += choice["text"]
        assert streamed == wanted


@pytest.mark.parametrize("prompt", [[49152], [-1], [[1], [10**18]], ["a", 5], [True], [[1], "a"], 5, {"a": 1}, None])
def test_O35_bad_prompts(http: httpx.Client, prompt: Any) -> None:
    error = refused(http.post("/v1/completions", json={"model": "smol", "prompt": prompt}))
    assert str(error["param"]).split(".")[0].split("[")[0] == "prompt"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_O36_framing(http: httpx.Client, kind: str, n: int) -> None:
    chat = {"messages": [{"role": "user", "content": "Say hi."}]}
    path, body = ("/v1/chat/completions", chat) if kind == "chat" else ("/v1/completions", {"prompt": COUNT})
    chunks = events(http, path, body | {"model": "smol", "n": n, "max_tokens": 8})
    for field in ("id", "created", "model", "object"):
        assert len({chunk[field] for chunk in chunks}) == 1
    for index in range(n):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [choice["finish_reason"] is None for choice in mine] == [True] * (len(mine) - 1) + [False]
        if kind == "chat":
            roles = [choice["delta"].get("role") for choice in mine]
            assert roles == ["assistant"] + [None] * (len(mine) - 1)


def test_O36_one_byte_at_a_time(http: httpx.Client) -> None:
    body = {"model": "smol", "prompt": CJK, "max_tokens": 15, "temperature": 0, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        raw = b"".join(response.iter_bytes())
    lines, line = [], b""
    for i in range(len(raw)):
        line += raw[i : i + 1]
        if line.endswith(b"\n\n"):
            lines.append(line)
            line = b""
    assert line == b"" and lines[-1] == b"data: [DONE]\n\n"
    text = "".join(json.loads(part[6:])["choices"][0]["text"] for part in lines[:-1])
    assert text == " 你好" * 3


def test_O37_usage(http: httpx.Client) -> None:
    for fields in ({}, {"stop": ["8, 9"]}):
        usage = complete(http, COUNT, max_tokens=12, **fields)["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        if not fields:
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (COUNT_TOKENS, 12)
        body = {"model": "smol", "prompt": COUNT, "max_tokens": 12} | fields
        *chunks, last = events(http, "/v1/completions", body | {"stream_options": {"include_usage": True}})
        assert last["choices"] == []
        for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert last["usage"][key] == usage[key]
        assert all(chunk.get("usage") is None for chunk in chunks)
        for options in ({"stream_options": {"include_usage": False}}, {"stream_options": {}}, {}):
            chunks = events(http, "/v1/completions", body | options)
            assert all(chunk.get("usage") is None and chunk["choices"] for chunk in chunks)
    body = {"model": "smol", "prompt": COUNT, "stream_options": {"include_usage": True}}
    refused(http.post("/v1/completions", json=body), param="stream_options")
