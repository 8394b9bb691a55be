"""Tools, reasoning and the form of answers over HTTP: what the openai client makes of scripted texts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from rayapp.api.service import Chunk, ServedModel
from rayapp.text.template import ChatTemplate
from tests.conftest import wait_limit
from tests.rayapp.local_server import serving
from tests.rayapp.scripted import Call, ScriptedService

TEMPLATE = (
    "{%- if tools %}Tools: {{ tools | tojson }}\n{% endif -%}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.city }}</tool_call>{% endfor -%}"
    "<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% if thinking %}<think>\n{% endif %}{% endif -%}"
)
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO = ONE + "\n" + ONE.replace("Paris", "Oslo")


class Said:
    """What the model says next, and how it was asked."""

    def __init__(self) -> None:
        self.text = ""
        self.reason = "stop"
        self.calls: list[Call] = []

    async def script(self, call: Call) -> AsyncIterator[Chunk]:
        self.calls.append(call)
        for number, start in enumerate(range(0, len(self.text), 3), 1):
            yield Chunk(self.text[start : start + 3], [7], None, number, len(call.prompt_ids), 0)
        yield Chunk("", [], self.reason, len(self.text) // 3 + 1, len(call.prompt_ids), 0)


@pytest.fixture(scope="module")
def said() -> Said:
    return Said()


@pytest.fixture(scope="module")
def client(models: dict[str, ServedModel], said: Said) -> Iterator[openai.OpenAI]:
    plain = models["smol"]
    able = replace(
        plain, name="able", template=ChatTemplate(plain.tokenizer, TEMPLATE), tool_format="hermes", reasons=True
    )
    service = ScriptedService({"smol": plain, "able": able}, script=said.script)
    with serving(service) as url:
        yield openai.OpenAI(
            base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=wait_limit(30), _strict_response_validation=True
        )


def prompt_of(said: Said, models: dict[str, ServedModel]) -> str:
    return str(models["smol"].tokenizer.backend.decode(said.calls[-1].prompt_ids, skip_special_tokens=False))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("text", "cities"), [(ONE, ["Paris"]), (TWO, ["Paris", "Oslo"]), ("It rains.", [])])
def test_calls_and_content(
    client: openai.OpenAI, said: Said, models: dict[str, ServedModel], text: str, cities: list[str], stream: bool
) -> None:
    said.text = text
    fields: dict[str, Any] = {"model": "able", "messages": ASK, "tools": [WEATHER]}
    if stream:
        with client.chat.completions.stream(**fields) as events:
            choice: Any = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**fields).choices[0]
    calls = choice.message.tool_calls or []
    assert [json.loads(call.function.arguments)["city"] for call in calls] == cities
    assert [call.function.name for call in calls] == ["weather"] * len(cities)
    assert len({call.id for call in calls}) == len(cities)
    assert choice.finish_reason == ("tool_calls" if cities else "stop")
    assert (choice.message.content or "") == ("" if cities else text)
    assert '"name": "weather"' in prompt_of(said, models)


def test_arguments_come_as_they_are_made(client: openai.OpenAI, said: Said) -> None:
    said.text = "Let me look. " + ONE
    pieces = []
    for chunk in client.chat.completions.create(model="able", messages=ASK, tools=[WEATHER], stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            pieces.append(call.function.arguments if call.function else None)
    assert len(pieces) > 4 and "".join(pieces) == '{"city": "Paris"}'


def test_one_call_alone(client: openai.OpenAI, said: Said) -> None:
    said.text = TWO
    answer = client.chat.completions.create(model="able", messages=ASK, tools=[WEATHER], parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls or []) == 1


def test_none_takes_the_tools_away(client: openai.OpenAI, said: Said, models: dict[str, ServedModel]) -> None:
    said.text = "I cannot."
    answer = client.chat.completions.create(model="able", messages=ASK, tools=[WEATHER], tool_choice="none")
    assert answer.choices[0].message.content == "I cannot."
    assert "weather" not in prompt_of(said, models).partition("<|im_start|>")[0]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_can_be_forced(client: openai.OpenAI, said: Said, choice: Any) -> None:
    said.text = ONE
    client.chat.completions.create(model="able", messages=ASK, tools=[WEATHER], tool_choice=choice)
    structure = said.calls[-1].sampling.structure
    assert structure is not None and structure["kind"] == "marked_grammar" and "weather" in structure["value"]


def test_calls_and_results_go_back_into_the_prompt(
    client: openai.OpenAI, said: Said, models: dict[str, ServedModel]
) -> None:
    said.text = "Rain."
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    history: Any = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    client.chat.completions.create(model="able", messages=history, tools=[WEATHER])
    assert "<tool_call>Paris</tool_call>" in prompt_of(said, models)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_goes_back_to_templates_that_read_it(
    client: openai.OpenAI, said: Said, models: dict[str, ServedModel], field: str
) -> None:
    said.text = "Rain."
    history: Any = [*ASK, {"role": "assistant", "content": "Rain.", field: "Hmm, rain?"}, *ASK]
    client.chat.completions.create(model="able", messages=history)
    assert "[Hmm, rain?]Rain." in prompt_of(said, models)
    client.chat.completions.create(model="smol", messages=history)  # its template knows of none
    assert "Hmm" not in prompt_of(said, models) and "Rain." in prompt_of(said, models)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "x", "reasoning": "y"}, "messages.0.reasoning"),
        ({"role": "assistant", "content": "x", "reasoning_content": 5}, "messages.0.reasoning_content"),
        ({"role": "assistant", "content": "x", "reasoning_content": "a", "reasoning": "b"}, "messages.0.reasoning"),
    ],
)
def test_O33_reasoning_out_of_place(client: openai.OpenAI, said: Said, message: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="able", messages=[message])
    assert refused.value.param == param


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_reasoning_is_told_apart(client: openai.OpenAI, said: Said, stream: bool, inside: bool) -> None:
    said.text = ("" if inside else "<think>\n") + "Hmm, rain?</think>\n\nIt rains."
    fields: dict[str, Any] = {
        "model": "able", "messages": ASK, "extra_body": {"chat_template_kwargs": {"thinking": inside}},
    }  # fmt: skip
    thought, content = "", ""
    if stream:
        for chunk in client.chat.completions.create(stream=True, **fields):
            delta: Any = chunk.choices[0].delta
            thought += getattr(delta, "reasoning_content", None) or ""
            content += delta.content or ""
    else:
        message: Any = client.chat.completions.create(**fields).choices[0].message
        thought, content = message.reasoning_content, message.content
    assert (thought.strip(), content) == ("Hmm, rain?", "It rains.")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "smol", "tools": [WEATHER]}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools.1.function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_O33_what_does_not_go_together_is_named(
    client: openai.OpenAI, said: Said, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="able", messages=ASK, extra_body=fields)
    assert refused.value.param == param


def test_parse_asks_for_its_schema(client: openai.OpenAI, said: Said) -> None:
    class Weather(BaseModel):
        city: str
        degrees: int

    said.text = '{"city": "Paris", "degrees": 7}'
    answer = client.chat.completions.parse(model="smol", messages=ASK, response_format=Weather)
    assert answer.choices[0].message.parsed == Weather(city="Paris", degrees=7)
    structure = said.calls[-1].sampling.structure
    assert structure is not None and structure["value"]["properties"].keys() == {"city", "degrees"}


def test_a_schema_may_be_text(client: openai.OpenAI, said: Said) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    said.text = "{}"
    for given in (schema, json.dumps(schema)):
        client.chat.completions.create(model="smol", messages=ASK, extra_body={"structured_outputs": {"json": given}})
        assert said.calls[-1].sampling.structure == {"kind": "json_schema", "value": schema}


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_thoughts_are_told_apart(models: dict[str, ServedModel], stream: bool) -> None:
    """In chat and in responses, added up over the choices; without thoughts it is 0."""
    tokenizer = models["smol"].tokenizer
    texts = ["<think>Hmm, rain?</think>\n\nIt rains.", "It rains.", "<think>Hmm"]
    ids = [tokenizer.encode(text) for text in texts]
    thought = [len(tokenizer.encode("<think>Hmm, rain?</think>")), 0, len(ids[2])]

    async def script(call: Call) -> AsyncIterator[Chunk]:
        given, text = ids[call.index], texts[call.index]
        for start in range(0, len(given), 3):
            piece = given[start : start + 3]
            yield Chunk(tokenizer.decode(piece), piece, None, start + len(piece), len(call.prompt_ids), 0)
        yield Chunk("", [], "stop" if text.endswith(".") else "length", len(given) + 1, len(call.prompt_ids), 0)

    able = replace(models["smol"], name="able", reasons=True)
    with serving(ScriptedService({"able": able}, script=script)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=wait_limit(30))
        for n in (1, 2, 3):
            fields: Any = {"model": "able", "messages": ASK, "n": n}
            if stream:
                chunks = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **fields)
                usage: Any = list(chunks)[-1].usage
            else:
                usage = client.chat.completions.create(**fields).usage
            assert usage.completion_tokens_details.reasoning_tokens == sum(thought[:n])
        response: Any = client.responses.create(model="able", input="x", stream=stream)
        if stream:
            response = list(response)[-1].response
        assert response.usage.output_tokens_details.reasoning_tokens == thought[0]


@pytest.mark.parametrize("stream", [False, True])
def test_values_in_xml_are_what_the_tool_s_parameters_say(models: dict[str, ServedModel], stream: bool) -> None:
    said = Said()
    said.text = (
        "<tool_call>\n<function=forecast>\n<parameter=city>\n75\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    parameters = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    tool: Any = {"type": "function", "function": {"name": "forecast", "parameters": parameters}}
    able = replace(models["smol"], name="able", tool_format="qwen3_coder")
    with serving(ScriptedService({"able": able}, script=said.script)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=wait_limit(30))
        fields: dict[str, Any] = {"model": "able", "messages": ASK, "tools": [tool]}
        if stream:
            with client.chat.completions.stream(**fields) as events:
                choice: Any = events.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(**fields).choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.name == "forecast" and json.loads(call.function.arguments) == {"city": "75", "days": 3}
    assert choice.finish_reason == "tool_calls" and not choice.message.content
