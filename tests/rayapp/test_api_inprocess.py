"""The HTTP app over a scripted service: framing, choices, usage, refusals, failures, clients that hang up."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import httpx
import openai
import pytest
import uvicorn

from rayapp.api.errors import ApiError, invalid_request, overloaded
from rayapp.api.resolve import plan_completions
from rayapp.api.routes import build_api
from rayapp.api.service import Chunk, SamplingFields, ServedModel
from rayapp.api.settings import RequestSettings
from tests.conftest import wait_limit
from tests.models import CJK, COUNT, COUNT_TOKENS
from tests.rayapp.scripted import CONTEXT, Call, Script, ScriptedService, echo

T = TypeVar("T")
NEVER = 3600.0
CHAT = {"model": "smol", "messages": [{"role": "user", "content": "Say hi."}]}
COMPLETION = {"model": "smol", "prompt": COUNT}


def wait(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, wait_limit(30)))


def http(service: ScriptedService) -> httpx.AsyncClient:
    app = build_api(service)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test/v1")


def post(service: ScriptedService, path: str, body: Any) -> httpx.Response:
    async def call() -> httpx.Response:
        async with http(service) as client:
            if isinstance(body, bytes):
                return await client.post(path, content=body)
            return await client.post(path, json=body)

    return wait(call())


def chat(service: ScriptedService, **fields: Any) -> httpx.Response:
    return post(service, "/chat/completions", CHAT | fields)


def complete(service: ScriptedService, **fields: Any) -> httpx.Response:
    return post(service, "/completions", COMPLETION | fields)


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


def events_of(raw: bytes) -> list[Any]:
    """The events of a stream, with the framing checked byte by byte."""
    assert raw.endswith(b"\n\n")
    events = []
    for block in raw[:-2].split(b"\n\n"):
        assert block.startswith(b"data: ")
        assert b"\n" not in block
        assert b"\r" not in block
        data = block[len(b"data: ") :].decode()
        assert len(data.splitlines()) == 1  # by any line end of Unicode, as some clients split
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


def check_stream(events: list[Any], choices: int, chat: bool) -> list[dict[str, Any]]:
    """What O36 asks of every stream; returns the chunks."""
    assert events.count("[DONE]") == 1
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    for name in ("id", "created", "model", "object"):
        assert len({chunk[name] for chunk in chunks}) == 1
    assert chunks[0]["object"] == ("chat.completion.chunk" if chat else "text_completion")
    for index in range(choices):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        reasons = [choice["finish_reason"] for choice in own]
        assert reasons[-1] in ("stop", "length")
        assert reasons[:-1] == [None] * (len(own) - 1)
        if chat:
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            assert not any("role" in choice["delta"] for choice in own[1:])
    return chunks


def text_of(chunks: list[dict[str, Any]], index: int) -> str:
    own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in own)


# The answers


def test_chat(service: ScriptedService) -> None:
    body = chat(service).json()
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "<33.0>", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 33,
        "completion_tokens": 3,
        "total_tokens": 36,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "smol")


def test_O35_text_and_ids_are_the_same_request(service: ScriptedService, models: dict[str, ServedModel]) -> None:
    ids = models["smol"].tokenizer.encode(COUNT)
    bodies = [complete(service, prompt=prompt).json() for prompt in (COUNT, ids, [COUNT], [ids])]
    assert len(ids) == COUNT_TOKENS
    assert [call.prompt_ids for call in service.calls] == [ids] * 4
    for body in bodies:
        assert body["choices"] == [{"index": 0, "text": "<14.0>", "logprobs": None, "finish_reason": "stop"}]
        assert body["id"].startswith("cmpl-")


@pytest.mark.parametrize("stream", [False, True])
def test_O35_several_prompts_and_choices(service: ScriptedService, stream: bool) -> None:
    """index = prompt * n + choice; prompts count once each; the choice's number is told within its prompt."""
    fields = {"prompt": [COUNT, CJK], "n": 2, "stream": stream}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    response = complete(service, **fields)
    if stream:
        chunks = check_stream(events_of(response.content), 4, chat=False)
        texts, usage = [text_of(chunks, index) for index in range(4)], chunks[-1]["usage"]
    else:
        texts, usage = [choice["text"] for choice in response.json()["choices"]], response.json()["usage"]
    assert texts == ["<14.0>", "<14.1>", "<24.0>", "<24.1>"]
    assert usage == {
        "prompt_tokens": 14 + 24,
        "completion_tokens": 4 * 3,
        "total_tokens": 14 + 24 + 12,
        "prompt_tokens_details": {"cached_tokens": 2 * 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert [call.index for call in service.calls] == [0, 1, 0, 1]


@pytest.mark.parametrize("n", [1, 2])
def test_O36_framing(service: ScriptedService, n: int) -> None:
    for response, is_chat in [(chat(service, stream=True, n=n), True), (complete(service, stream=True, n=n), False)]:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        chunks = check_stream(events_of(response.content), n, is_chat)
        assert "usage" not in json.dumps(chunks)
        assert [text_of(chunks, index) for index in range(n)] == [
            f"<{33 if is_chat else 14}.{index}>" for index in range(n)
        ]
        texts = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"] is None]
        assert all(one["text"] if "text" in one else one["delta"] for one in texts)  # no empty pieces


def test_O36_any_text_survives_the_framing(service: ScriptedService) -> None:
    nasty = 'data: [DONE]\n\n\r\n\u2028\u2029\x85\x0b\x0c\x1c\x00"\\ 你好 🙂'

    async def script(call: Call) -> AsyncIterator[Chunk]:
        yield Chunk(nasty, [1], None, 1, 1, 0)
        yield Chunk("", [], "stop", 1, 1, 0)

    service.script = script
    raw = chat(service, stream=True).content
    assert text_of(check_stream(events_of(raw), 1, chat=True), 0) == nasty
    assert "你好".encode() in raw  # readable as it is
    assert chat(service).json()["choices"][0]["message"]["content"] == nasty


def test_O37_usage(service: ScriptedService) -> None:
    asked = chat(service, stream=True, stream_options={"include_usage": True})
    chunks = check_stream(events_of(asked.content), 1, chat=True)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == chat(service).json()["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for options in ({"include_usage": False}, {}, None):
        chunks = check_stream(events_of(chat(service, stream=True, stream_options=options).content), 1, chat=True)
        assert all("usage" not in chunk for chunk in chunks)
    assert refused(chat(service, stream_options={"include_usage": True}))["param"] == "stream_options"


def test_usage_so_far(service: ScriptedService) -> None:
    options = {"stream": True, "n": 2, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    for ask, is_chat in ((chat, True), (complete, False)):
        *chunks, last = check_stream(events_of(ask(service, **options).content), 2, is_chat)
        usages = [chunk["usage"] for chunk in chunks if chunk["usage"]]
        made = [usage["completion_tokens"] for usage in usages]
        assert made == sorted(made) and len(set(made)) > 2 and usages[-1] == last["usage"]
        assert len(usages) == len(chunks)
        assert all(usage["prompt_tokens"] == last["usage"]["prompt_tokens"] for usage in usages)
    alone = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert refused(chat(service, **alone))["param"] == "stream_options.continuous_usage_stats"


def openai_client(service: ScriptedService, strict: bool = True) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key="none",
        base_url="http://test/v1",
        max_retries=0,
        http_client=httpx.AsyncClient(transport=httpx.ASGITransport(build_api(service))),
        _strict_response_validation=strict,
    )


def test_openai_client_reads_everything_strictly(service: ScriptedService) -> None:
    async def use() -> None:
        async with openai_client(service) as client:
            whole = await client.chat.completions.create(**CHAT, n=2)
            assert [choice.message.content for choice in whole.choices] == ["<33.0>", "<33.1>"]
            text = await client.completions.create(**COMPLETION, n=2)
            assert [choice.text for choice in text.choices] == ["<14.0>", "<14.1>"]

            said = ""
            stream = await client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
            async for chunk in stream:
                said += "".join(choice.delta.content or "" for choice in chunk.choices)
            assert said == "<33.0>"
            assert chunk.usage is not None
            assert chunk.usage.total_tokens == 36
            assert [model.id async for model in client.models.list()] == list(service.models)
            assert (await client.models.retrieve("org/warm")).id == "org/warm"
            with pytest.raises(openai.BadRequestError) as bad:
                await client.chat.completions.create(**CHAT, temperature=3)
            assert bad.value.param == "temperature"
            with pytest.raises(openai.NotFoundError) as unknown:
                await client.chat.completions.create(**CHAT | {"model": "nope"}, stream=True)
            assert unknown.value.code == "model_not_found"

    wait(use())


def test_openai_client_reads_streamed_completions(service: ScriptedService) -> None:
    """Not strictly: the client's type has no null finish_reason, which OpenAI's API and ours send until the last."""

    async def use() -> None:
        async with openai_client(service, strict=False) as client:
            chunks = [chunk async for chunk in await client.completions.create(**COMPLETION, stream=True)]
            assert "".join(chunk.choices[0].text for chunk in chunks) == "<14.0>"
            assert chunks[-1].choices[0].finish_reason == "stop"

    wait(use())


# What the engine is asked for


def sampling(service: ScriptedService, **fields: Any) -> SamplingFields:
    service.calls.clear()
    response = complete(service, **fields)
    assert response.status_code == 200, response.text
    return service.calls[0].sampling


def test_defaults(service: ScriptedService) -> None:
    assert sampling(service) == SamplingFields(max_new_tokens=16)
    assert chat(service).status_code == 200
    assert service.calls[-1].sampling == SamplingFields(max_new_tokens=CONTEXT - 33)  # O10: to the context's end
    warm = sampling(service, model="org/warm")
    assert (warm.temperature, warm.top_k, warm.do_sample) == (0.7, 50, True)
    assert sampling(service, model="org/warm", temperature=0.2, top_k=0).top_k == 0


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.1}, {"top_k": 3}, {"seed": 5}, {"top_p": 0.1, "top_k": 3}])
def test_O11_temperature_zero_is_greedy_and_not_a_default(service: ScriptedService, fields: dict[str, Any]) -> None:
    for model in ("smol", "org/warm"):
        assert not sampling(service, model=model, temperature=0, **fields).do_sample
    tiny = sampling(service, temperature=1e-45, **fields)
    assert tiny.do_sample
    assert tiny.temperature == 1e-45


def test_fields_reach_the_engine(service: ScriptedService) -> None:
    fields = sampling(
        service, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=-5, min_tokens=2, max_tokens=9, ignore_eos=True,
        stop_token_ids=[3, 4], stop="x",
    )  # fmt: skip
    assert fields == SamplingFields(9, 2, True, 0.5, 7, 0.9, 0.1, -5, True, (3, 4))
    assert service.calls[-1].stop == ["x"]
    assert sampling(service, top_k=10**30).top_k == 0


def test_fields_of_every_kind_reach_each_prompt_s_generation(service: ScriptedService) -> None:
    """None is lost to another, and the prompts' own limits are the only difference."""
    body = {
        "model": "smol", "prompt": ["a", "a b c"], "max_tokens": 10_000, "echo": True, "logprobs": 2, "timeout": 60,
        "seed": 5, "structured_outputs": {"regex": "a"}, "stop_token_ids": [3], "priority": 2, "temperature": 0.5,
    }  # fmt: skip
    given = plan_completions(service.models, json.dumps(body).encode(), service.settings).sampling
    assert len({one.deadline for one in given}) == 1 and given[0].deadline is not None
    assert {one.max_new_tokens for one in given} == {CONTEXT - 1, CONTEXT - 3}
    assert [replace(one, max_new_tokens=1) for one in given] == [replace(given[0], max_new_tokens=1)] * 2
    assert (given[0].structure, given[0].logprobs, given[0].top_logprobs, given[0].prompt_logprobs) == (
        {"kind": "regex", "value": "a"}, True, 2, 2,
    )  # fmt: skip
    assert (given[0].seed, given[0].stop_token_ids, given[0].priority, given[0].temperature) == (5, (3,), 2, 0.5)


def test_O09_prompts_around_the_context(service: ScriptedService) -> None:
    """A prompt that fills the context leaves no room for a token: 400, as for a longer one."""
    for length, max_tokens, room in [(254, 100, 2), (255, 100, 1), (255, 1, 1), (200, 10**9, 56), (200, 2**63, 56)]:
        assert sampling(service, prompt=[5] * length, max_tokens=max_tokens).max_new_tokens == room
    for length in (256, 257, 5000):
        for stream in (False, True):
            error = refused(complete(service, prompt=[5] * length, max_tokens=100, stream=stream))
            assert error["code"] == "context_length_exceeded"
            assert error["param"] == "prompt"
            for number in (length, 100, CONTEXT, length - CONTEXT + 1):
                assert f" {number} " in error["message"] + " "
    error = refused(complete(service, prompt=[[5], [5] * 300]))
    assert error["param"] == "prompt.1"
    error = refused(chat(service, messages=[{"role": "user", "content": "word " * 300}]))
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


@pytest.mark.parametrize(
    ("length", "fields", "shorten"),
    [
        (260, {"max_tokens": 12}, [5, 16]),
        (300, {"max_tokens": 1}, [45]),
        (300, {"max_tokens": 10**9}, [45]),  # no prompt leaves room for these
        (256, {"max_tokens": 0, "echo": True}, [1]),
    ],
)
def test_O09_what_is_told_to_do_would_do(
    service: ScriptedService, length: int, fields: dict[str, Any], shorten: list[int]
) -> None:
    """The least makes room for one token, the most for all that were asked for; zero are not called one."""
    message = refused(complete(service, prompt=[5] * length, **fields))["message"]
    told = message.partition("shorten the prompt")[2]
    assert [int(number) for number in re.findall(r"by (?:at least )?(\d+)", told)] == shorten
    assert (" were asked for, but" in message) == (fields["max_tokens"] > 0)
    assert sampling(service, prompt=[5] * (length - shorten[0]), **fields).max_new_tokens == 1
    if len(shorten) > 1:
        shorter = sampling(service, prompt=[5] * (length - shorten[1]), **fields)
        assert shorter.max_new_tokens == fields["max_tokens"]


def test_O10_max_tokens(service: ScriptedService) -> None:
    assert sampling(service, max_tokens=1).max_new_tokens == 1
    assert sampling(service, max_tokens=10**9).max_new_tokens == CONTEXT - COUNT_TOKENS
    for bad in (-1, 0, "5", 1.5):
        assert refused(complete(service, max_tokens=bad))["param"] == "max_tokens"
    assert refused(complete(service, max_tokens=3, min_tokens=4))["param"] == "min_tokens"


def test_O30_parts_and_text_give_the_same_prompt(service: ScriptedService) -> None:
    for content in (
        "Say hi.",
        [{"type": "text", "text": "Say hi."}],
        [{"type": "text", "text": t} for t in ("Say", " hi.")],
    ):
        assert chat(service, messages=[{"role": "user", "content": content}]).status_code == 200
    assert len({tuple(call.prompt_ids) for call in service.calls}) == 1
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    assert "'image_url'" in refused(chat(service, messages=[image]))["message"]


# Refusals


@pytest.mark.parametrize("prompt", [[49152], [-1], [[1], [10**18]], ["a", 5], [True], "", [], [""]])
def test_O08_O35_bad_prompts(service: ScriptedService, prompt: Any) -> None:
    error = refused(complete(service, prompt=prompt))
    assert error["param"].split(".")[0] == "prompt"
    assert service.calls == []


def test_stop_token_ids_are_checked(service: ScriptedService) -> None:
    assert refused(complete(service, stop_token_ids=[49152]))["param"] == "stop_token_ids"


@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 10_000])
def test_O33_broken_bodies(service: ScriptedService, path: str, body: bytes) -> None:
    refused(post(service, path, body))


def test_O33_long_bodies(service: ScriptedService) -> None:
    body = json.dumps(COMPLETION).encode() + b" " * 1024
    service.settings = RequestSettings(max_body_bytes=len(body))
    assert post(service, "/completions", body).status_code == 200
    service.settings = RequestSettings(max_body_bytes=len(body) - 1)
    assert refused(post(service, "/completions", body), 413)["code"] == "body_too_large"

    async def without_length() -> httpx.Response:
        async def pieces() -> AsyncIterator[bytes]:
            for byte in body:
                yield bytes([byte])

        async with http(service) as client:
            return await client.post("/completions", content=pieces())

    refused(wait(without_length()), 413)


@pytest.mark.parametrize(
    ("headers", "body", "status", "says"),
    [
        (
            {"Content-Encoding": "gzip"},
            gzip.compress(json.dumps(COMPLETION).encode(), mtime=0),
            415,
            "Content-Encoding",
        ),
        ({"Content-Encoding": "br"}, b"\x00\x01", 415, "Content-Encoding"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, b"model=smol&prompt=a", 415, "Content-Type"),
        ({"Content-Type": "multipart/form-data; boundary=x"}, b"--x\r\n", 415, "Content-Type"),
        ({"Content-Type": "application/xml"}, b"<prompt/>", 415, "Content-Type"),
        ({"Content-Type": "application/json; charset=utf-8"}, b"model=smol", 400, "not valid JSON"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, b'{"model": ', 400, "not valid JSON"),
        ({"Content-Type": "text/plain"}, b"", 400, "the body is empty"),
    ],
)
def test_O33_bodies_that_are_said_to_be_no_json(
    service: ScriptedService, headers: dict[str, str], body: bytes, status: int, says: str
) -> None:
    async def send(content: bytes) -> httpx.Response:
        async with http(service) as client:
            return await client.post("/completions", content=content, headers=headers)

    assert says in refused(wait(send(body)), status)["message"]
    if "Content-Encoding" not in headers:  # curl calls JSON a form if it is not told
        assert wait(send(json.dumps(COMPLETION).encode())).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_O34_unknown_models(service: ScriptedService, stream: bool) -> None:
    for model in ("no-such-model", ""):
        for ask in (chat, complete):
            error = refused(ask(service, model=model, stream=stream), 404)
            assert (error["param"], error["code"]) == ("model", "model_not_found")
            assert "'smol', 'org/warm', 'picky'" in error["message"]
    assert refused(complete(service, model=5, stream=stream))["param"] == "model"
    assert refused(post(service, "/completions", {"prompt": "a", "stream": stream}))["param"] == "model"
    assert service.calls == []


def test_O34_models(service: ScriptedService) -> None:
    async def use() -> None:
        async with http(service) as client:
            listed = (await client.get("/models")).json()
            assert [model["id"] for model in listed["data"]] == list(service.models)
            for name in service.models:
                assert (await client.get(f"/models/{name}")).json()["id"] == name
            refused(await client.get("/models/nope"), 404)
            refused(await client.get("/nope"), 404)
            refused(await client.get("/chat/completions"), 405)

    wait(use())


def test_chat_without_a_template_or_against_it(service: ScriptedService) -> None:
    assert "no chat template" in refused(chat(service, model="org/warm"))["message"]
    assert "refuses this conversation: no" in refused(chat(service, model="picky"))["message"]


def test_health(service: ScriptedService) -> None:
    async def get() -> httpx.Response:
        async with http(service) as client:
            return await client.get("http://test/health")

    assert (wait(get()).status_code, wait(get()).json()["status"]) == (200, "ok")
    service.healthy = False
    assert (wait(get()).status_code, wait(get()).json()["status"]) == (503, "unavailable")


# Failures


async def refuse_second(call: Call) -> AsyncIterator[Chunk]:
    """The first choice talks at once, the second is refused a little later."""
    if call.index == 1:
        for _ in range(20):
            await asyncio.sleep(0)
        raise overloaded("the queue is full")
    while True:
        yield Chunk("a", [1], None, 1, 1, 0)
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_choice_is_a_status(service: ScriptedService, stream: bool) -> None:
    service.script = refuse_second
    response = chat(service, n=2, stream=stream)
    assert refused(response, 503)["code"] == "overloaded"
    assert response.headers["retry-after"] == "1"
    assert [(call.ended, call.closed_early) for call in service.calls] == [(True, True)] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_O38_failure_before_the_first_token(service: ScriptedService, stream: bool) -> None:
    async def script(call: Call) -> AsyncIterator[Chunk]:
        raise RuntimeError("forward failed")
        yield

    service.script = script
    error = refused(chat(service, stream=stream), 500)
    assert "forward" not in error["message"]


@pytest.mark.parametrize("ending", ["raise", "return", "cancelled"])
def test_a_generation_that_ends_wrong_is_no_answer(service: ScriptedService, ending: str) -> None:
    async def script(call: Call) -> AsyncIterator[Chunk]:
        yield Chunk("a", [1], None, 1, 1, 0)
        if ending == "raise":
            raise invalid_request("too late")
        if ending == "cancelled":
            yield Chunk("", [], "cancelled", 1, 1, 0)

    service.script = script
    assert chat(service).status_code == (400 if ending == "raise" else 500)


# Over a socket: what ASGI alone cannot show


@asynccontextmanager
async def serve(service: ScriptedService) -> AsyncIterator[str]:
    """The app under uvicorn on a free port."""
    config = uvicorn.Config(build_api(service), port=0, log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        await task


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def over_socket(service: ScriptedService, use: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with serve(service) as url, httpx.AsyncClient(base_url=url, timeout=wait_limit(30)) as client:
            await use(client)

    wait(run())


@pytest.mark.parametrize("path", ["/completions", "/chat/completions", "/tokenize"])
def test_a_huge_prompt_keeps_nobody_waiting(service: ScriptedService, path: str) -> None:
    """However long it is tokenized: what counts is that others are answered before it is, not how fast."""
    text = "x" * 2_000_000 if path == "/tokenize" else "x" * 15_000_000
    said = {"messages": [{"role": "user", "content": text}]} if path.startswith("/chat") else {"prompt": text}

    async def use(client: httpx.AsyncClient) -> None:
        url = str(client.base_url).replace("/v1/", "/tokenize") if path == "/tokenize" else path
        huge = asyncio.create_task(client.post(url, json={"model": "smol"} | said))
        answered = 0
        while not huge.done():
            answered += (await client.get("/models")).status_code == 200
        answer = huge.result()
        if path == "/tokenize":
            assert answer.status_code == 200 and answered > 20
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
            assert "15000" in answer.text

    over_socket(service, use)


def test_O38_failure_in_mid_stream(service: ScriptedService) -> None:
    async def script(call: Call) -> AsyncIterator[Chunk]:
        for number in range(5):
            yield Chunk(f"{number}", [1], None, number + 1, 1, 0)
            await asyncio.sleep(0)
        if call.index == 1:
            raise ApiError(503, "the engine stopped")
        await asyncio.sleep(NEVER)

    service.script = script

    async def use(client: httpx.AsyncClient) -> None:
        raw = bytearray()

        async def read() -> None:
            async with client.stream("POST", "/chat/completions", json=CHAT | {"stream": True, "n": 2}) as response:
                assert response.status_code == 200
                async for piece in response.aiter_bytes():
                    raw.extend(piece)

        with pytest.raises(httpx.RemoteProtocolError):
            await read()
        *chunks, last = events_of(bytes(raw))
        assert last == {"error": {"message": "the engine stopped", "type": "server_error", "param": None, "code": None}}
        assert text_of(chunks, 1) == "01234"
        assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
        assert all(call.ended and call.closed_early for call in service.calls)

    over_socket(service, use)


async def endless(call: Call) -> AsyncIterator[Chunk]:
    number = 0
    while True:
        number += 1
        yield Chunk("a", [1], None, number, 1, 0)
        await asyncio.sleep(0.001)


async def silent(call: Call) -> AsyncIterator[Chunk]:
    await asyncio.sleep(NEVER)
    yield Chunk("", [], "stop", 1, 1, 0)


@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
@pytest.mark.parametrize(
    ("script", "stream"), [(endless, True), (silent, True), (endless, False), (silent, False)]
)  # fmt: skip
def test_O39_a_client_that_hangs_up_closes_its_generations(
    service: ScriptedService, path: str, script: Script, stream: bool
) -> None:
    """In mid-stream, before the first token, and without streaming; the next request is answered."""
    service.script = script
    body = (CHAT if path.startswith("/chat") else COMPLETION) | {"stream": stream, "n": 3}

    async def ask(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", path, json=body) as response:
            async for _ in response.aiter_bytes():
                return

    async def use(client: httpx.AsyncClient) -> None:
        task = asyncio.create_task(ask(client))
        await until(lambda: len(service.calls) == 3)
        if script is endless and stream:
            await task  # hung up after the first event
        else:
            await asyncio.sleep(0.05)
            assert not any(call.ended for call in service.calls)
            task.cancel()
        await until(lambda: all(call.ended for call in service.calls))
        assert all(call.closed_early for call in service.calls)
        service.script = echo
        assert (await client.post("/completions", json=COMPLETION)).json()["choices"][0]["text"] == "<14.0>"

    over_socket(service, use)


@pytest.mark.parametrize(("script", "stream"), [(endless, True), (silent, True), (silent, False)])
def test_a_cancelled_request_closes_its_generations(service: ScriptedService, script: Script, stream: bool) -> None:
    """Ray Serve cancels the task of a request whose client is gone."""
    service.script = script

    async def run() -> None:
        task = asyncio.create_task(call_asgi(service, CHAT | {"stream": stream, "n": 2}, asyncio.Event()))
        await until(lambda: len(service.calls) == 2)
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert all(call.ended and call.closed_early for call in service.calls)

    wait(run())


@pytest.mark.parametrize(("script", "stream"), [(endless, True), (silent, True), (silent, False)])
def test_a_server_that_cannot_tell_of_the_client_any_more(
    service: ScriptedService, script: Script, stream: bool
) -> None:
    """Ray Serve's `receive` raises once its other end is gone."""
    service.script = script

    async def run() -> None:
        gone = asyncio.Event()
        task = asyncio.create_task(call_asgi(service, CHAT | {"stream": stream, "n": 2}, gone))
        await until(lambda: len(service.calls) == 2)
        await asyncio.sleep(0.02)
        gone.set()
        await task
        assert all(call.ended and call.closed_early for call in service.calls)

    wait(run())


async def call_asgi(service: ScriptedService, body: dict[str, Any], gone: asyncio.Event) -> None:
    """One chat request, whose `receive` raises when `gone` is set."""
    sent = iter([json.dumps(body).encode()])

    async def receive() -> dict[str, Any]:
        for part in sent:
            return {"type": "http.request", "body": part, "more_body": False}
        await gone.wait()
        raise RuntimeError

    async def send(message: Any) -> None:
        await asyncio.sleep(0)

    path = "/v1/chat/completions"
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": [],
    }  # fmt: skip
    await build_api(service)(scope, receive, send)


def test_a_slow_reader_holds_its_generation_back(service: ScriptedService) -> None:
    """The app does not pile up what the client does not read."""
    made = 0

    async def script(call: Call) -> AsyncIterator[Chunk]:
        nonlocal made
        while True:
            made += 1
            yield Chunk("a" * 10_000, [1], None, made, 1, 0)
            await asyncio.sleep(0)

    service.script = script

    async def use(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", "/completions", json=COMPLETION | {"stream": True}) as response:
            assert response.status_code == 200
            before = -1
            while before != made:  # the sockets' buffers fill up, then it stands still
                before = made
                await asyncio.sleep(0.3)
            assert not service.calls[0].ended
        await until(lambda: service.calls[0].ended)

    over_socket(service, use)
