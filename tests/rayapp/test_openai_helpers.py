"""What the openai client offers beside plain calls (streams with events, parsing, raw answers, asyncio), validating
strictly, over a real engine.

Fields and refusals: test_api_tools, test_api_responses, test_api_structured. Through Ray: tests/conformance.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Annotated, Any

import openai
import pytest
from openai.lib.streaming.chat import ChunkEvent
from pydantic import BaseModel, Field

from tests.conftest import wait_limit
from tests.rayapp.test_api_structured import client  # noqa: F401


class Person(BaseModel):
    """Somebody."""

    name: Annotated[str, Field(max_length=8)]
    age: Annotated[int, Field(ge=0, le=99)]


ASK: Any = [{"role": "user", "content": "Who?"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 400, "temperature": 1, "seed": 3}
RESPONSE: dict[str, Any] = {
    "model": "tiny", "input": "Who?", "max_output_tokens": 400, "temperature": 1, "extra_body": {"seed": 3},
}  # fmt: skip
PLAIN: dict[str, Any] = CHAT | {"max_tokens": 6, "temperature": 0}
FORCED: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
TOOLS: dict[str, Any] = {"tools": [openai.pydantic_function_tool(Person)]} | FORCED
FLAT_TOOLS: dict[str, Any] = {
    "tools": [{"type": "function", **openai.pydantic_function_tool(Person)["function"]}]
} | FORCED


@pytest.fixture
def aclient(client: openai.OpenAI) -> openai.AsyncOpenAI:  # noqa: F811
    return openai.AsyncOpenAI(
        base_url=client.base_url,
        api_key="none",
        max_retries=0,
        timeout=wait_limit(60),
        _strict_response_validation=True,
    )


def wait(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, wait_limit(60)))


def kinds(events: list[Any]) -> list[str]:
    """The kinds of events in their order, without repetitions, and without the chunks that they are made of."""
    return list(dict.fromkeys(event.type for event in events if not isinstance(event, ChunkEvent)))


def test_a_stream_is_parsed(client: openai.OpenAI) -> None:  # noqa: F811
    whole = client.chat.completions.parse(**CHAT, response_format=Person, logprobs=True, top_logprobs=2)
    with client.chat.completions.stream(
        **CHAT, response_format=Person, logprobs=True, top_logprobs=2, stream_options={"include_usage": True}
    ) as stream:
        events: list[Any] = list(stream)
        final = stream.get_final_completion()
    assert kinds(events) == ["content.delta", "logprobs.content.delta", "content.done", "logprobs.content.done"]
    done = next(event for event in events if event.type == "content.done")
    assert isinstance(done.parsed, Person)
    assert done.parsed == final.choices[0].message.parsed == whole.choices[0].message.parsed
    assert final.choices[0].logprobs == whole.choices[0].logprobs
    assert final.usage and whole.usage and final.usage.completion_tokens == whole.usage.completion_tokens
    part = [event.parsed for event in events if event.type == "content.delta"]
    assert part[-1] == done.parsed.model_dump() and part[0] != part[-1]


def test_a_streamed_call_is_parsed(client: openai.OpenAI) -> None:  # noqa: F811
    whole = client.chat.completions.parse(**CHAT, **TOOLS)
    with client.chat.completions.stream(**CHAT, **TOOLS) as stream:
        events: list[Any] = list(stream)
        final = stream.get_final_completion()
    assert kinds(events)[-2:] == ["tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"]
    assert not any(event.delta for event in events if event.type == "content.delta")
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"
    done = [event.parsed_arguments for event in events if event.type == "tool_calls.function.arguments.done"]
    for answer in (final, whole):
        calls = answer.choices[0].message.tool_calls or []
        assert [call.function.parsed_arguments for call in calls] == done
    assert done and all(isinstance(person, Person) for person in done)


def test_an_answer_cut_short_is_the_clients_own_error(client: openai.OpenAI) -> None:  # noqa: F811
    cut = CHAT | {"max_tokens": 3, "response_format": Person}
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**cut)
    with pytest.raises(openai.LengthFinishReasonError), client.chat.completions.stream(**cut) as stream:
        stream.until_done()


def test_responses_are_parsed(client: openai.OpenAI) -> None:  # noqa: F811
    whole = client.responses.parse(**RESPONSE, text_format=Person)
    with client.responses.stream(**RESPONSE, text_format=Person) as stream:
        assert "response.output_text.delta" in kinds(list(stream))
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Person) and final.output_parsed == whole.output_parsed
    with client.responses.stream(**RESPONSE, **FLAT_TOOLS) as stream:
        events: list[Any] = list(stream)
        final = stream.get_final_response()
    (done, *_) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert Person.model_validate_json(done.arguments)
    (item, *_) = final.output
    assert item.type == "function_call" and item.arguments == done.arguments and item.name == "Person"


def test_raw_answers(client: openai.OpenAI) -> None:  # noqa: F811
    for raw, path in [
        (client.chat.completions.with_raw_response.create(**PLAIN), "chat/completions"),
        (client.completions.with_raw_response.create(model="tiny", prompt="a", max_tokens=2), "completions"),
        (client.responses.with_raw_response.create(**RESPONSE | {"max_output_tokens": 2}), "responses"),
        (client.models.with_raw_response.list(), "models"),
        (client.models.with_raw_response.retrieve("tiny"), "models/tiny"),
    ]:
        assert raw.status_code == 200 and raw.headers["content-type"] == "application/json"
        assert str(raw.http_request.url).endswith(f"/v1/{path}")
        assert raw.parse().model_dump(exclude_unset=True, by_alias=True) == json.loads(raw.content)
    stream = client.chat.completions.with_raw_response.create(**PLAIN, stream=True).parse()
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == client.chat.completions.create(**PLAIN).choices[0].message.content
    with pytest.raises(openai.NotFoundError):
        client.models.with_raw_response.retrieve("nope")


def test_answers_read_as_they_come(client: openai.OpenAI) -> None:  # noqa: F811
    whole = client.chat.completions.create(**PLAIN).choices[0].message.content
    with client.chat.completions.with_streaming_response.create(**PLAIN) as response:
        assert response.parse().choices[0].message.content == whole
    with client.chat.completions.with_streaming_response.create(**PLAIN, stream=True) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines) == whole
    with client.responses.with_streaming_response.create(**RESPONSE, stream=True) as response:
        assert [event.type for event in response.parse()][-1] in ("response.completed", "response.incomplete")
    with client.completions.with_streaming_response.create(model="tiny", prompt="a", max_tokens=2) as response:
        assert json.loads(response.read())["object"] == "text_completion"


def test_the_same_with_asyncio(aclient: openai.AsyncOpenAI) -> None:
    async def use() -> None:
        async with aclient:
            chats, responses = aclient.chat.completions, aclient.responses
            person = (await chats.parse(**CHAT, response_format=Person)).choices[0].message.parsed
            async with chats.stream(**CHAT, response_format=Person) as stream:
                assert "content.done" in kinds([event async for event in stream])
                assert (await stream.get_final_completion()).choices[0].message.parsed == person
            async with chats.stream(**CHAT, **TOOLS) as stream:
                (choice,) = (await stream.get_final_completion()).choices
                assert isinstance((choice.message.tool_calls or [])[0].function.parsed_arguments, Person)
            parsed = await responses.parse(**RESPONSE, text_format=Person)
            async with responses.stream(**RESPONSE, text_format=Person) as events:
                assert (await events.get_final_response()).output_parsed == parsed.output_parsed
            whole = (await chats.create(**PLAIN)).choices[0].message.content
            text = [chunk.choices[0].delta.content or "" async for chunk in await chats.create(**PLAIN, stream=True)]
            assert "".join(text) == whole
            raw = await chats.with_raw_response.create(**PLAIN)
            assert raw.parse().choices[0].message.content == whole
            async with chats.with_streaming_response.create(**PLAIN) as response:
                assert (await response.parse()).choices[0].message.content == whole
            assert [model.id async for model in aclient.models.list()] == ["tiny"]
            assert (await aclient.completions.create(model="tiny", prompt=["a", "b"], max_tokens=2)).choices[1].text

    wait(use())


def test_hanging_up_in_a_stream(client: openai.OpenAI) -> None:  # noqa: F811
    stream = client.chat.completions.create(**PLAIN | {"max_tokens": 3000}, stream=True)
    next(stream)
    stream.close()
    with client.chat.completions.stream(**PLAIN | {"max_tokens": 3000}) as events:
        next(iter(events))
    assert client.chat.completions.create(**PLAIN).choices[0].message.content
