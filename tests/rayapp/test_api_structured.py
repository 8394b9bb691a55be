"""Structured answers over HTTP from a real engine: whatever the model would have said, the form is kept."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.conftest import wait_limit
from tests.rayapp.local_server import local_server, small

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASK: Any = [{"role": "user", "content": "Who?"}]
WEATHER: Any = {
    "type": "function",
    "function": {"name": "look", "parameters": SCHEMA},
}


@pytest.fixture(scope="module")
def client(
    tiny_http_path: Path, smol_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    """Of TINY with a token that ends its answers."""
    folder = shutil.copytree(tiny_http_path, tmp_path_factory.mktemp("models") / "ending")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": smol_tokenizer.eos_token_id}))
    with local_server(small("tiny", folder, tool_parser="hermes")) as url:
        yield openai.OpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            max_retries=0,
            timeout=wait_limit(60),
            _strict_response_validation=True,
        )


def said(client: openai.OpenAI, stream: bool = False, **fields: Any) -> str:
    fields = {"model": "tiny", "messages": ASK, "max_tokens": 200, "temperature": 1, "seed": 3} | fields
    if not stream:
        (choice,) = client.chat.completions.create(**fields).choices
        assert choice.finish_reason == "stop"
        return choice.message.content or ""
    chunks = client.chat.completions.create(stream=True, **fields)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_schema(client: openai.OpenAI, stream: bool, seed: int) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    jsonschema.validate(json.loads(said(client, stream, response_format=form, seed=seed)), SCHEMA)


def test_other_forms(client: openai.OpenAI) -> None:
    def asked(**structure: Any) -> str:
        return said(client, extra_body={"structured_outputs": structure})

    assert re.fullmatch(r"[a-c]{3}-\d{2}", asked(regex=r"[a-c]{3}-\d{2}"))
    assert asked(choice=["yes", "no", "perhaps"]) in ("yes", "no", "perhaps")
    assert isinstance(json.loads(asked(json_object=True)), dict)
    assert re.fullmatch(r"(ab)+c", asked(grammar='start: ("ab")+ "c"'))
    jsonschema.validate(json.loads(asked(json=SCHEMA)), SCHEMA)


def test_several_choices_and_completions_keep_to_it(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["a", "b"], n=3, max_tokens=50, temperature=1, seed=1,
        extra_body={"structured_outputs": {"regex": "[0-9]{4}"}},
    )  # fmt: skip
    assert len(answer.choices) == 6 and all(re.fullmatch("[0-9]{4}", choice.text) for choice in answer.choices)
    assert len({choice.text for choice in answer.choices}) > 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_forced_call_is_one(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, tools=[WEATHER], tool_choice=choice, max_tokens=400, temperature=1, seed=2,
        parallel_tool_calls=False,
    )  # fmt: skip
    (said,) = answer.choices
    assert said.message.tool_calls and said.finish_reason == "tool_calls" and not said.message.content
    (call,) = said.message.tool_calls
    assert call.type == "function" and call.function.name == "look"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


@pytest.mark.parametrize(
    ("structure", "words"),
    [
        ({"regex": "a(?=b)"}, "regular expression"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"grammar": "start: <|im_end|>"}, "special"),
        ({"json": {"type": "thing"}}, "thing"),
        ({"choice": []}, "one or more"),
    ],
)
def test_O33_what_cannot_be_kept_to_is_refused(client: openai.OpenAI, structure: Any, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        said(client, extra_body={"structured_outputs": structure})
    assert refused.value.param == "structured_outputs"


def test_tools_and_a_form_together(client: openai.OpenAI, smol_tokenizer: Any) -> None:
    """With `auto` an answer is calls, or a text of that form, and both come; with `none` the form; forced, calls."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    kinds: dict[str, set[str]] = {}
    (begins_a_call,) = smol_tokenizer.encode("<")
    for choice in ("auto", "none", "required"):
        for seed in range(4):
            (said,) = client.chat.completions.create(
                model="tiny", messages=ASK, tools=[WEATHER], tool_choice=choice,  # type: ignore[arg-type]
                response_format=form, max_tokens=400, temperature=1, seed=seed, parallel_tool_calls=False,
                logit_bias={str(begins_a_call): 20 if seed % 2 else 0},
            ).choices  # fmt: skip
            calls: Any = said.message.tool_calls or []
            kinds.setdefault(choice, set()).add("calls" if calls else "text")
            assert said.finish_reason == ("tool_calls" if calls else "stop")
            assert not (calls and said.message.content)
            for written in [call.function.arguments for call in calls] or [said.message.content]:
                jsonschema.validate(json.loads(written), SCHEMA)
    assert kinds == {"auto": {"calls", "text"}, "none": {"text"}, "required": {"calls"}}


def test_what_cannot_be_kept_to_beside_tools_is_refused(client: openai.OpenAI) -> None:
    for structure, tool, param in [
        ({"regex": "("}, WEATHER, "structured_outputs"),
        ({"regex": "a"}, {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}, "tools"),
        ({"regex": "a"}, {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/no"}}}, "tools"),
    ]:
        with pytest.raises(openai.BadRequestError) as refused:
            said(client, tools=[tool], extra_body={"structured_outputs": structure})
        assert refused.value.param == param
