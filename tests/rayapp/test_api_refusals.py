"""Refusals of all endpoints: whatever is wrong with a body, what is named is the client's own."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from rayapp.api.errors import ApiError
from rayapp.api.fields import ENDPOINTS
from rayapp.api.resolve import Plan, plan_chat, plan_completions
from rayapp.api.response_fields import ResponsesRequest
from rayapp.api.response_items import ITEMS
from rayapp.api.responses import plan_response
from rayapp.api.schemas import ChatRequest
from rayapp.api.service import ServedModel
from rayapp.api.settings import RequestSettings
from rayapp.text.template import ChatTemplate
from tests.rayapp.test_api_tools import TEMPLATE

SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
RESPONSE: Any = {
    "model": "able",
    "instructions": "Be short.",
    "input": [
        {"role": "user", "content": "Weather?"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "In Paris."}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ],
    "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
    "tool_choice": {"type": "function", "name": "weather"},
    "text": {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}},
    "max_output_tokens": 5,
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "temperature": 1.0, "top_p": 0.5, "seed": 1, "priority": 1, "timeout": 5, "cache_salt": "s", "stream": False,
    "parallel_tool_calls": True, "metadata": {"a": "b"}, "user": "u", "chat_template_kwargs": {"thinking": False},
}  # fmt: skip
CHAT: Any = {
    "model": "able",
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ],
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
    "max_tokens": 5, "logprobs": True, "top_logprobs": 2, "stop": ["x"], "logit_bias": {"1": 2}, "stream": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip
COMPLETION: Any = {
    "model": "able", "prompt": ["a", "b"], "structured_outputs": {"json": SCHEMA}, "logprobs": 1, "stop": "x",
    "stream": True, "stream_options": {"include_usage": True}, "stop_token_ids": [1],
}  # fmt: skip
BODIES = {"/v1/responses": RESPONSE, "/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
ODD: list[Any] = [None, True, -1, 10**9, "", "odd", "\x00", [], {}, [None], ["odd"], [{}], {"type": "odd"}, {"odd": 1}]


@pytest.fixture(scope="module")
def able(models: dict[str, ServedModel]) -> dict[str, ServedModel]:
    plain = models["smol"]
    template = ChatTemplate(plain.tokenizer, TEMPLATE)
    return models | {"able": replace(plain, name="able", template=template, tool_format="hermes", reasons=True)}


def plan(path: str, models: dict[str, ServedModel], body: Any, **settings: Any) -> Plan:
    data, limits = json.dumps(body).encode(), RequestSettings(**settings)
    if path == "/v1/responses":
        return plan_response(models, data, limits)[1]
    planner: Callable[..., Plan] = plan_chat if "chat" in path else plan_completions
    return planner(models, data, limits)


def places(value: Any, *path: str | int) -> Iterator[tuple[str | int, ...]]:
    """Every place in a JSON value but its root."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, one in inner:
        yield (*path, step)
        yield from places(one, *path, step)


def spoilt(body: Any) -> Iterator[Any]:
    """The body with one thing wrong, everywhere and in many ways; some of it is not wrong."""
    for *above, last in places(body):
        for odd in [*ODD, KeyError, "unknown"]:
            changed = copy.deepcopy(body)
            at = changed
            for step in above:
                at = at[step]
            if odd is KeyError:
                del at[last]
            elif odd == "unknown" and isinstance(at, dict):
                at["unknown_of_this"] = 1
            else:
                at[last] = odd
            yield changed


def refusals(path: str, models: dict[str, ServedModel]) -> list[ApiError]:
    found = []
    for body in spoilt(BODIES[path]):
        try:
            plan(path, models, body)
        except ApiError as error:
            found.append(error)
    return found


@pytest.mark.parametrize("path", BODIES)
def test_the_bodies_are_good_and_most_changes_are_not(path: str, able: dict[str, ServedModel]) -> None:
    assert plan(path, able, BODIES[path]).prompts
    assert len(refusals(path, able)) > 100


@pytest.mark.parametrize("path", BODIES)
def test_O33_what_is_named_is_in_the_body_or_missing_there(path: str, able: dict[str, ServedModel]) -> None:
    """`param` is a path of field names: nothing of how the fields are checked shows in it."""
    known = {
        *(word for place in places(BODIES[path]) for word in place if isinstance(word, str)),
        *ENDPOINTS[path].model_fields, "unknown_of_this", "odd", "tool_calls", "tool_call_id",
    }  # fmt: skip
    for error in refusals(path, able):
        assert error.status in (400, 404)
        steps = (error.param or "").split(".")
        assert all(step.isdecimal() or step in known for step in steps if step), error.param
        assert "literal[" not in error.message and "NamedTool" not in error.message, error.message


@pytest.mark.parametrize("path", BODIES)
def test_patterns_are_told_as_they_are(path: str, able: dict[str, ServedModel]) -> None:
    """Only the first letter of what is said of a value is made small."""
    told = set()
    for *above, last in places(BODIES[path]):
        if last != "name":
            continue
        body = copy.deepcopy(BODIES[path])
        at = body
        for step in above:
            at = at[step]
        at[last] = "two words"
        try:
            plan(path, able, body)
        except ApiError as error:
            told |= set(re.findall(r"string should match pattern '(.*)', not", error.message))
    patterns = {"^[A-Za-z0-9_.-]{1,64}$", "^[A-Za-z0-9_-]{1,64}$"}
    assert told == (set() if path == "/v1/completions" else patterns)


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("/v1/chat/completions", {"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools.0.type"),
        ("/v1/chat/completions", {"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.type"),
        ("/v1/chat/completions", {"tool_choice": {"type": "custom", "custom": {"name": "a"}}}, "tool_choice.type"),
        ("/v1/responses", {"tools": [{"type": "custom", "name": "a", "format": {}}]}, "tools.0.type"),
        ("/v1/responses", {"tools": [{"type": "web_search", "filters": {}}]}, "tools.0.type"),
        ("/v1/responses", {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.type"),
        ("/v1/responses", {"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ],
)
def test_of_a_type_that_is_not_served_the_type_is_named(
    path: str, change: Any, param: str, able: dict[str, ServedModel]
) -> None:
    """Not the fields that only this type has."""
    with pytest.raises(ApiError) as caught:
        plan(path, able, BODIES[path] | change)
    (value,) = change.values()
    kind = (value[0] if isinstance(value, list) else value)["type"]
    assert caught.value.param == param
    assert f'"{kind}"' in caught.value.message and '"function"' in caught.value.message


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"type": "objet"}, "objet"),
        ({"type": "object", "properties": {"a": {"type": "objet"}}}, "objet"),
        ({"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}, "/nowhere"),
        ({"type": "object", "properties": "prop"}, "prop"),
    ],
)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "wrong"}}])
def test_a_function_whose_parameters_cannot_be_kept_to_is_named(
    parameters: Any, says: str, choice: Any, able: dict[str, ServedModel]
) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": one}}
        for name, one in (("fine", SCHEMA), ("wrong", parameters), ("too", SCHEMA))
    ]
    with pytest.raises(ApiError) as caught:
        plan("/v1/chat/completions", able, CHAT | {"tools": tools, "tool_choice": choice, "response_format": None})
    assert caught.value.param == "tools"
    assert "'wrong'" in caught.value.message and says in caught.value.message


def test_responses_are_never_told_of_fields_of_chat(able: dict[str, ServedModel]) -> None:
    schema = ResponsesRequest.model_json_schema()
    own = {field for one in [schema, *schema["$defs"].values()] for field in one["properties"]}
    own |= {*ITEMS, *(field for fields in ITEMS.values() for field in fields), *ResponsesRequest.refused}
    words = {*ChatRequest.model_fields, *ChatRequest.refused, "tool_calls", "tool_call_id", "image_url"} - own
    words -= {"n", "stop"}  # words of English
    assert {"messages", "max_tokens", "max_completion_tokens", "response_format", "structured_outputs"} <= words
    pattern = re.compile(rf"(?<![\w.])({'|'.join(words)})(?!\w)")
    long = "word " * 400
    planned: list[ApiError] = []
    for change, settings in [
        ({"input": long, "max_output_tokens": 7}, {}),
        ({"input": "hi"}, {"max_prompt_tokens": 1}),
        ({"input": "x" * 50_000}, {}),
        ({"input": "word", "tools": [], "tool_choice": "auto"}, {"max_text_length": 10}),
        ({"model": "org/warm"}, {}),
        ({"model": "picky"}, {}),
        ({"model": "smol"}, {}),
        ({"model": "nobody"}, {}),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 5}}}, "tool_choice": "auto"}, {}),
        ({"chat_template_kwargs": {"tokenize": True}}, {}),
    ]:  # fmt: skip
        with pytest.raises(ApiError) as caught:
            plan("/v1/responses", able, RESPONSE | change, **settings)
        planned.append(caught.value)
    assert {error.param for error in planned} >= {"input", "model", "tools", "text.format"}
    for error in [*planned, *refusals("/v1/responses", able)]:
        said = error.message.split(", not ")[0]  # behind it stands what the client sent
        assert not pattern.search(said), error.message
        assert (error.param or "model").split(".")[0] in {
            *ResponsesRequest.model_fields,
            *ResponsesRequest.refused,
            "unknown_of_this",
        }


def test_items_are_counted_as_they_were_sent(able: dict[str, ServedModel]) -> None:
    """Neither instructions nor calls that go into the message before them move the others."""
    for position in range(len(RESPONSE["input"])):
        body = copy.deepcopy(RESPONSE)
        body["input"][position]["wrong"] = 1
        with pytest.raises(ApiError) as caught:
            plan("/v1/responses", able, body)
        assert caught.value.param == f"input.{position}.wrong"


@pytest.mark.parametrize(
    ("path", "at", "field", "says"),
    [
        ("/v1/chat/completions", (), "temprature", "did you mean 'temperature'?"),
        ("/v1/chat/completions", (), "topK", "did you mean 'top_k'?"),
        ("/v1/chat/completions", (), "max_new_tokens", "did you mean 'max_tokens'?"),
        ("/v1/chat/completions", (), "system", "GET /openapi.json lists the fields"),  # not "stream"
        ("/v1/chat/completions", (), "input", "GET /openapi.json lists the fields"),  # not "min_p"
        ("/v1/chat/completions", (), "prompt", "GET /openapi.json lists the fields"),
        ("/v1/chat/completions", ("tools", 0), "functions", "did you mean 'function'?"),
        ("/v1/chat/completions", ("tools", 0, "function"), "strct", "did you mean 'strict'?"),
        ("/v1/chat/completions", ("tools", 0, "function"), "x", "description, name, parameters, strict"),
        ("/v1/chat/completions", ("response_format", "json_schema"), "shema", "did you mean 'schema'?"),
        ("/v1/chat/completions", ("tool_choice", "function"), "nam", "did you mean 'name'?"),
        ("/v1/chat/completions", ("stream_options",), "usage", "the fields are continuous_usage_stats, include_usage"),
        ("/v1/chat/completions", ("messages", 1), "conten", "did you mean 'content'?"),
        ("/v1/completions", ("structured_outputs",), "jsn", "did you mean 'json'?"),
        ("/v1/completions", (), "messages", "GET /openapi.json lists the fields"),
        ("/v1/responses", (), "max_tokens", "GET /openapi.json lists the fields"),
        ("/v1/responses", ("text", "format"), "scheme", "did you mean 'schema'?"),
        ("/v1/responses", ("input", 3), "argument", "did you mean 'arguments'?"),
        ("/v1/responses", ("tool_choice",), "nme", "did you mean 'name'?"),
    ],
)
def test_only_a_near_name_is_suggested(
    path: str, at: tuple[str | int, ...], field: str, says: str, able: dict[str, ServedModel]
) -> None:
    body = copy.deepcopy(BODIES[path])
    place = body
    for step in at:
        place = place[step]
    place[field] = 1
    with pytest.raises(ApiError) as caught:
        plan(path, able, body)
    assert says in caught.value.message
    assert caught.value.param == ".".join(map(str, (*at, field)))
