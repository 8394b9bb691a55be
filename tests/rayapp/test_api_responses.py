"""POST /v1/responses: what the openai client, validating strictly, makes of it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from rayapp.api.service import ServedModel
from tests.rayapp.test_api_tools import ONE, TWO, Said, client, prompt_of, said  # noqa: F401

WEATHER: Any = {
    "type": "function", "name": "weather", "description": None, "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}  # fmt: skip


def test_text(client: openai.OpenAI, said: Said, models: dict[str, ServedModel]) -> None:  # noqa: F811
    said.text, said.reason = "It rains.", "stop"
    answer = client.responses.create(model="able", input="Weather?", instructions="Be short.", temperature=0.5)
    assert (answer.status, answer.output_text, answer.store) == ("completed", "It rains.", False)
    assert answer.usage is not None and answer.usage.input_tokens == len(said.calls[-1].prompt_ids)
    assert said.calls[-1].sampling.temperature == 0.5
    assert prompt_of(said, models).startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nWeather?")


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("It rains.", ["message"]),
        ("<think>Hm.</think>\n\nIt rains.", ["reasoning", "message"]),
        (ONE, ["function_call"]),
        ("<think>Hm.</think>Look:\n" + TWO, ["reasoning", "message", "function_call", "function_call"]),
    ],
)
def test_a_stream_is_the_whole(client: openai.OpenAI, said: Said, text: str, kinds: list[str], reason: str) -> None:  # noqa: F811
    said.text, said.reason = text, reason
    fields: dict[str, Any] = {"model": "able", "input": "Weather?", "tools": [WEATHER]}
    whole = client.responses.create(**fields)
    assert [item.type for item in whole.output] == kinds
    with client.responses.stream(**fields) as events:
        seen: list[Any] = list(events)
    streamed = seen[-1].response
    assert [event.sequence_number for event in seen] == sorted(event.sequence_number for event in seen)
    assert [event.type for event in seen][:2] == ["response.created", "response.in_progress"]
    assert seen[-1].type == ("response.completed" if reason == "stop" else "response.incomplete")
    said.reason = "stop"

    def content(answer: Any) -> list[Any]:
        items = [item.model_dump(exclude={"id", "call_id", "parsed_arguments", "parsed"}) for item in answer.output]
        for item in items:
            for part in item.get("content") or []:
                part.pop("parsed", None)
        return items

    assert content(streamed) == content(whole)
    deltas = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    assert deltas == whole.output_text
    added = [event.item.id for event in seen if event.type == "response.output_item.added"]
    done = [event.item.id for event in seen if event.type == "response.output_item.done"]
    assert added == done and len(added) == len(kinds)


def test_calls_go_back_with_their_outputs(client: openai.OpenAI, said: Said, models: dict[str, ServedModel]) -> None:  # noqa: F811
    said.text = ONE
    first = client.responses.create(model="able", input="Weather?", tools=[WEATHER])
    call: Any = first.output[0]
    assert json.loads(call.arguments) == {"city": "Paris"}
    history: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}]
    history += [item.model_dump(exclude_none=True) for item in first.output]
    history += [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    said.text = "Rain."
    assert client.responses.create(model="able", input=history, tools=[WEATHER]).output_text == "Rain."
    assert "<tool_call>Paris</tool_call><|im_end|>\n<|im_start|>tool\nrain" in prompt_of(said, models)


def test_what_chat_takes_beside_the_fields_of_openai(client: openai.OpenAI, said: Said) -> None:  # noqa: F811
    said.text = "It rains."
    asked = {"stop": ["x"], "ignore_eos": True, "seed": 5, "priority": 1, "cache_salt": "a"}
    client.responses.create(model="able", input="Weather?", extra_body=asked)
    call = said.calls[-1]
    assert (call.stop, call.sampling.ignore_eos, call.sampling.seed) == (["x"], True, 5)
    assert (call.sampling.priority, call.sampling.cache_salt) == (1, "a")
    client.responses.create(model="able", input="Weather?", extra_body={"stop": None, "ignore_eos": None})
    assert said.calls[-1].stop == [] and not said.calls[-1].sampling.ignore_eos


def test_parse(client: openai.OpenAI, said: Said) -> None:  # noqa: F811
    class Weather(BaseModel):
        city: str

    said.text = '{"city": "Paris"}'
    answer = client.responses.parse(model="smol", input="Weather?", text_format=Weather)
    assert answer.output_parsed == Weather(city="Paris")
    structure = said.calls[-1].sampling.structure
    assert structure is not None and structure["kind"] == "json_schema"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.type",
        ),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input.0.role"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"include": ["everything"]}, "include.0"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"inputs": "x"}, "inputs"),
    ],
)
def test_O33_what_is_not_served_is_named(client: openai.OpenAI, said: Said, fields: dict[str, Any], param: str) -> None:  # noqa: F811
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="able", input="x", extra_body=fields)
    assert refused.value.param == param


def test_reasoning_goes_back_to_templates_that_read_it(
    client: openai.OpenAI,  # noqa: F811
    said: Said,  # noqa: F811
    models: dict[str, ServedModel],
) -> None:
    said.text = "<think>It pours there.</think>" + ONE
    first = client.responses.create(model="able", input="Weather?", tools=[WEATHER])
    history: Any = [{"role": "user", "content": "Weather?"}]
    history += [item.model_dump() for item in first.output]
    call: Any = first.output[1]
    history += [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    client.responses.create(model="able", input=history, tools=[WEATHER])
    assert "[It pours there.]" in prompt_of(said, models)


def test_effort_none_asks_for_nothing(client: openai.OpenAI, said: Said) -> None:  # noqa: F811
    said.text = "It rains."
    effort: Any = {"effort": "none", "summary": None}
    assert client.responses.create(model="able", input="x", reasoning=effort).output_text == "It rains."
    with pytest.raises(openai.BadRequestError, match="may be left out or be"):
        client.responses.create(model="able", input="x", reasoning={"effort": "high"})
