"""The openai client with strict response validation against a real `serve run`: every shape it parses must be right."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.conftest import wait_limit
from tests.models import CJK, COUNT, COUNT_TOKENS
from tests.serving import ServeRun

COUNT_TEXT = " 6, 7, 8, 9, 10,"
SAY_HI: list[Any] = [{"role": "user", "content": "Say hi."}]


class Person(BaseModel):
    age: Annotated[int, Field(ge=0, le=99)]


@pytest.fixture(scope="module")
def client(served: ServeRun) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{served.url}/v1",
        api_key="unused",
        max_retries=0,
        timeout=served.timeout,
        _strict_response_validation=True,
    )


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smol", messages=SAY_HI, temperature=0)
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.message.role == "assistant" and choice.message.content
    assert answer.usage is not None and answer.usage.prompt_tokens == 33
    parts = [{"type": "text", "text": "Say hi."}]
    same = client.chat.completions.create(model="smol", messages=[{"role": "user", "content": parts}], temperature=0)  # type: ignore[list-item,misc]
    assert same.choices[0].message.content == choice.message.content


def test_chat_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="smol", messages=SAY_HI, temperature=0)
    stream = client.chat.completions.create(
        model="smol", messages=SAY_HI, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_with_four_choices(client: openai.OpenAI, stream: bool) -> None:
    fields: dict[str, Any] = {
        "model": "smol",
        "messages": SAY_HI,
        "n": 4,
        "max_tokens": 12,
        "temperature": 1,
        "seed": 3,
    }
    whole = client.chat.completions.create(**fields)
    texts = {choice.index: choice.message.content for choice in whole.choices}
    assert sorted(texts) == [0, 1, 2, 3]
    assert len(set(texts.values())) > 1
    if stream:
        streamed = dict.fromkeys(range(4), "")
        for chunk in client.chat.completions.create(**fields, stream=True):
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
        assert streamed == texts


def test_completions_with_lists_and_choices(client: openai.OpenAI) -> None:
    # The client's type for a streamed completion knows no null finish_reason, which the API itself sends in every
    # piece but the last; so that one form is read without the strict check.
    lenient = client.with_options(_extra_kwargs={"_strict_response_validation": False})
    fields: dict[str, Any] = {"model": "smol", "prompt": [COUNT, CJK], "n": 4, "max_tokens": 15, "temperature": 0}
    whole = client.completions.create(**fields)
    assert [choice.index for choice in whole.choices] == list(range(8))
    assert {choice.text for choice in whole.choices[4:]} == {" 你好" * 3}
    assert whole.usage is not None and whole.usage.prompt_tokens == COUNT_TOKENS + 24
    streamed = dict.fromkeys(range(8), "")
    for chunk in lenient.completions.create(**fields, stream=True):
        for part in chunk.choices:
            streamed[part.index] += part.text
    assert streamed == {choice.index: choice.text for choice in whole.choices}


def test_structured_answers_are_parsed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.parse(model="smol", messages=SAY_HI, temperature=0, response_format=Person)
    person = whole.choices[0].message.parsed
    assert isinstance(person, Person)
    with client.chat.completions.stream(model="smol", messages=SAY_HI, temperature=0, response_format=Person) as events:
        done = [event.parsed for event in events if event.type == "content.done"]
    assert done == [person]
    with client.responses.stream(model="smol", input="Say hi.", temperature=0, text_format=Person) as stream:
        assert stream.get_final_response().output_parsed == person
    assert (
        client.responses.parse(model="smol", input="Say hi.", temperature=0, text_format=Person).output_parsed == person
    )


def test_raw_and_streaming_answers(client: openai.OpenAI) -> None:
    raw = client.responses.with_raw_response.create(model="smol", input="Say hi.", temperature=0)
    assert raw.headers["content-type"] == "application/json" and raw.parse().status == "completed"
    with client.chat.completions.with_streaming_response.create(
        model="smol", messages=SAY_HI, temperature=0, stream=True
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        text = "".join(chunk.choices[0].delta.content or "" for chunk in response.parse())
    assert text == raw.parse().output_text


def test_asyncio(client: openai.OpenAI) -> None:
    async def use() -> None:
        async with openai.AsyncOpenAI(
            base_url=client.base_url, api_key="unused", max_retries=0, _strict_response_validation=True
        ) as aclient:

            async def said() -> str:
                stream = await aclient.chat.completions.create(
                    model="smol", messages=SAY_HI, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            texts = await asyncio.gather(said(), said(), said())
            answer = await aclient.responses.create(model="smol", input="Say hi.", temperature=0)
            assert set(texts) == {answer.output_text}

    asyncio.run(asyncio.wait_for(use(), wait_limit(120)))


def test_models(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert "smol" in names
    assert client.models.retrieve("smol").id == "smol"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="nope", prompt=COUNT)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="smol", messages=SAY_HI, top_logprobs=3)
    assert bad.value.param == "top_logprobs"


def test_health_answers(served: ServeRun) -> None:
    response = httpx.get(f"{served.url}/health", timeout=served.timeout)
    assert response.status_code == 200
