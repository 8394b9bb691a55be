"""LangChain and LiteLLM against a server: plain answers, streams, tool calls, parsed answers; and with asyncio.

    ENV/bin/python tests/outside/clients.py http://127.0.0.1:8000 MODEL

MODEL must know tools. Needs langchain-openai and litellm alone; test_clients.py runs it. Every failed check raises.
"""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Any

import litellm
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field

ASK = "Who is there?"
LIMIT = 400


class Person(BaseModel):
    """Somebody."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "Person", "description": "Somebody.", "parameters": Person.model_json_schema()},
}


def langchain(url: str, model: str, responses: bool) -> None:
    """Through chat completions or through responses."""
    fields: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "unused", "model": model, "max_retries": 0}
    chat = ChatOpenAI(**fields, temperature=1, max_tokens=LIMIT, use_responses_api=responses, stream_usage=True)
    short = ChatOpenAI(**fields, temperature=0, max_tokens=8, use_responses_api=responses, stream_usage=True)

    whole = short.invoke(ASK)
    pieces = list(short.stream(ASK))
    streamed = _sum(pieces)
    assert whole.text == streamed.text and len(pieces) > 3, (whole, streamed)
    assert whole.usage_metadata and streamed.usage_metadata
    assert whole.usage_metadata["output_tokens"] == streamed.usage_metadata["output_tokens"]

    caller = chat.bind_tools([Person], tool_choice="required", parallel_tool_calls=False)
    chunks = list(caller.stream(ASK))
    assert len(chunks) > 3, "a call comes in pieces"
    said = _sum(chunks)
    for answer in (said, caller.invoke(ASK)):
        (call,) = answer.tool_calls
        assert call["name"] == "Person" and call["id"] and Person.model_validate(call["args"])
    (call,) = said.tool_calls
    history = [
        HumanMessage(ASK),
        AIMessage("", tool_calls=said.tool_calls),
        ToolMessage("found", tool_call_id=call["id"]),
    ]
    assert short.bind_tools([Person]).invoke(history).response_metadata

    parser = chat.with_structured_output(Person, method="json_schema")
    assert isinstance(parser.invoke(ASK), Person)
    assert list(parser.stream(ASK))[-1]

    if not responses:
        text = OpenAI(**fields, temperature=0, max_tokens=8)
        assert text.invoke("Once upon") == "".join(text.stream("Once upon"))


def _sum(chunks: list[Any]) -> Any:
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    assert isinstance(total, BaseMessage)
    return total


def lite(url: str, model: str) -> None:
    """LiteLLM, as a server of OpenAI's API and as one of vLLM's."""
    messages = [{"role": "user", "content": ASK}]
    for provider in ("openai", "hosted_vllm"):
        fields: dict[str, Any] = {
            "model": f"{provider}/{model}", "api_base": f"{url}/v1", "api_key": "unused", "num_retries": 0,
            "messages": messages,
        }  # fmt: skip
        short = fields | {"temperature": 0, "max_tokens": 8}
        whole = litellm.completion(**short)
        built = _built(litellm.completion(**short, stream=True, stream_options={"include_usage": True}), messages)
        assert built.choices[0].message.content == whole.choices[0].message.content
        assert built.usage.completion_tokens == whole.usage.completion_tokens == 8

        forced = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": LIMIT}
        chunks = list(litellm.completion(**fields, **forced, stream=True))
        assert sum(bool(chunk.choices and chunk.choices[0].delta.tool_calls) for chunk in chunks) > 3
        for answer in (_built(chunks, messages), litellm.completion(**fields, **forced)):
            (call,) = answer.choices[0].message.tool_calls
            assert call.function.name == "Person" and Person.model_validate_json(call.function.arguments)
            assert answer.choices[0].finish_reason == "tool_calls"

        parsed = litellm.completion(**fields, max_tokens=LIMIT, response_format=Person).choices[0].message.content
        assert Person.model_validate(json.loads(parsed))
    text = litellm.text_completion(
        model=f"text-completion-openai/{model}", api_base=f"{url}/v1", api_key="unused", prompt="Once upon",
        max_tokens=8, temperature=0,
    )  # fmt: skip
    assert text.choices[0].text


def _built(chunks: Any, messages: list[dict[str, str]]) -> Any:
    return litellm.stream_chunk_builder(list(chunks), messages=messages)


async def with_asyncio(url: str, model: str) -> None:
    """All in one loop: both keep their connections."""
    short: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
    for responses in (False, True):
        fields: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "unused", "model": model, "max_retries": 0}
        chat = ChatOpenAI(**fields, **short, use_responses_api=responses)
        whole = await chat.ainvoke(ASK)
        assert _sum([piece async for piece in chat.astream(ASK)]).text == whole.text
        assert [one.text for one in await chat.abatch([ASK, ASK])] == [whole.text] * 2
    for provider in ("openai", "hosted_vllm"):
        messages = [{"role": "user", "content": ASK}]
        fields = {"model": f"{provider}/{model}", "api_base": f"{url}/v1", "api_key": "unused", "messages": messages}
        answer = await litellm.acompletion(**fields, **short)
        stream = await litellm.acompletion(**fields, **short, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == answer.choices[0].message.content


def main() -> None:
    url, model = sys.argv[1:]
    langchain(url, model, responses=False)
    langchain(url, model, responses=True)
    lite(url, model)
    asyncio.run(with_asyncio(url, model))
    print(", ".join(f"{name} {version(name)}" for name in ("langchain-openai", "litellm", "openai")) + ": all well")


if __name__ == "__main__":
    main()
