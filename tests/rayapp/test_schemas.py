"""Request bodies: what is taken, what is refused, and whether the refusal names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.api.errors import ApiError
from rayapp.api.refusals import NOT_SERVED_CHAT, NOT_SERVED_COMPLETIONS
from rayapp.api.schemas import MAX_CHOICES, MAX_STOPS, ChatRequest, CompletionRequest, GenerationFields, parse_body

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi"}


def chat(**fields: Any) -> ChatRequest:
    return parse_body(ChatRequest, json.dumps(CHAT | fields).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse_body(CompletionRequest, json.dumps(COMPLETION | fields).encode())


def refusal(kind: type[GenerationFields], body: bytes | dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_body(kind, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert caught.value.status == 400
    assert caught.value.type == "invalid_request_error"
    return caught.value


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b"{", "not valid JSON"),
        (b'{"model": "m",}', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"model": "\xff"}', "not valid JSON"),
        (b'{"model": "\\ud800"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"temperature": NaN}', "not valid JSON"),
        (b"[]", "must be a JSON object, not a list"),
        (b'"text"', "must be a JSON object, not a string"),
        (b"null", "must be a JSON object, not null"),
        (b"true", "must be a JSON object, not a boolean"),
    ],
)
def test_O33_bodies_that_are_no_object(body: bytes, says: str) -> None:
    for kind in (ChatRequest, CompletionRequest):
        assert says in refusal(kind, body).message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 5), ("model", None), ("model", ["m"]),
        ("temperature", -1), ("temperature", 3), ("temperature", "hot"), ("temperature", True), ("temperature", "0"),
        ("top_p", 2), ("top_p", 0), ("top_p", -0.1), ("top_k", -2), ("top_k", 1.5), ("top_k", True),
        ("min_p", -0.1), ("min_p", 1.1), ("n", 0), ("n", -1), ("n", MAX_CHOICES + 1), ("n", True), ("n", 1.0),
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", "5"), ("max_tokens", 1.5), ("max_tokens", True),
        ("min_tokens", -1), ("min_tokens", "1"), ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", "x"),
        ("stream", "maybe"), ("stream", 1), ("stream", "true"), ("ignore_eos", 1), ("ignore_eos", "yes"),
        ("stop", ""), ("stop", 5), ("stop", {"a": 1}), ("stop", ["a"] * (MAX_STOPS + 1)), ("stop", "a" * 1001),
        ("stop_token_ids", 5), ("user", 5), ("stream_options", {"include_usage": True}), ("stream_options", {}),
        ("priority", 1.5), ("priority", "high"), ("priority", True), ("priority", 2**31),
        ("timeout", 0), ("timeout", -1), ("timeout", "5"), ("timeout", True),
        ("stop", ["a", ""]), ("stop", [1]), ("stop_token_ids", [True]), ("stop_token_ids", ["1"]),
    ],
)  # fmt: skip
def test_O33_values_out_of_place(field: str, value: Any) -> None:
    for kind, body in ((ChatRequest, CHAT), (CompletionRequest, COMPLETION)):
        error = refusal(kind, body | {field: value})
        assert error.param is not None
        assert error.param.split(".")[0] == field
        assert field in error.message


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"temperature": 3}, "temperature: input should be less than or equal to 2, not 3"),
        ({"stream": "maybe"}, 'stream: input should be a valid boolean, not "maybe"'),
        ({"maxtokens": 3}, "unknown field 'maxtokens'; did you mean 'max_tokens'?"),
        ({"store": True}, "'store' is not supported: it may be left out or be false, null, not true"),
        ({"stream": True, "stream_options": {"includ_usage": True}}, "did you mean 'include_usage'?"),
        ({"stream": True, "stream_options": 5}, "stream_options: must be an object, not 5"),
        ({"top_k": -5}, "top_k must be 1 or more, or 0 or -1 for off, not -5"),
    ],
)
def test_messages_say_what_is_wrong_and_what_would_do(fields: dict[str, Any], says: str) -> None:
    assert says in refusal(ChatRequest, CHAT | fields).message


@given(st.sampled_from(list(GenerationFields.model_fields)), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
))  # fmt: skip
def test_any_value_is_taken_or_refused_by_name(field: str, value: Any) -> None:
    body = json.dumps(CHAT | {field: value}).encode()
    error = None
    try:
        parse_body(ChatRequest, body)
    except ApiError as caught:
        error = caught
    assert error is None or error.status == 400
    assert error is None or error.param is None or error.param.split(".")[0] in (field, "stream_options")


@pytest.mark.parametrize("field", sorted(NOT_SERVED_CHAT))
def test_chat_fields_that_are_not_served(field: str) -> None:
    for neutral in (*NOT_SERVED_CHAT[field], None):
        assert chat(**{field: neutral}) == chat()
    for value in (0.5, "other", {"type": "json_schema"}, [{"type": "function"}]):
        error = refusal(ChatRequest, CHAT | {field: value})
        assert error.param == field
        assert field in error.message


@pytest.mark.parametrize("field", sorted(NOT_SERVED_COMPLETIONS))
def test_completion_fields_that_are_not_served(field: str) -> None:
    for neutral in (*NOT_SERVED_COMPLETIONS[field], None):
        assert completion(**{field: neutral}) == completion()
    for value in (0.5, "other", {"type": "json_schema"}):
        assert refusal(CompletionRequest, COMPLETION | {field: value}).param == field


def test_false_is_not_zero_and_zero_is_not_false() -> None:
    assert refusal(ChatRequest, CHAT | {"frequency_penalty": False}).param == "frequency_penalty"
    assert refusal(ChatRequest, CHAT | {"logprobs": 0}).param == "logprobs"


def test_null_is_left_out() -> None:
    optional = [name for name, field in ChatRequest.model_fields.items() if not field.is_required()]
    assert chat(**dict.fromkeys(optional)) == chat()
    optional = [name for name, field in CompletionRequest.model_fields.items() if not field.is_required()]
    assert completion(**dict.fromkeys(optional)) == completion()


def test_values_that_are_taken() -> None:
    fields = chat(
        temperature=0, top_p=1, top_k=-1, min_p=0, seed=-(2**63), stop="x", stop_token_ids=[1], n=3, user="u",
        max_completion_tokens=2**63, stream=True, stream_options={"include_usage": True}, ignore_eos=True, min_tokens=2,
    )  # fmt: skip
    assert (fields.temperature, fields.top_p, fields.top_k, fields.stop) == (0, 1, 0, ["x"])
    assert fields.token_limit == 2**63
    assert fields.include_usage
    assert not chat(stream=True, stream_options={"include_usage": False}).include_usage
    assert not chat(stream=True, stream_options={}).include_usage
    assert chat(max_tokens=5, max_completion_tokens=5).token_limit == 5
    assert chat(max_tokens=5).token_limit == 5
    assert completion(n=2, best_of=2).n == 2


def test_fields_that_contradict_each_other() -> None:
    assert refusal(ChatRequest, CHAT | {"max_tokens": 5, "max_completion_tokens": 6}).param == "max_completion_tokens"
    assert refusal(CompletionRequest, COMPLETION | {"n": 2, "best_of": 3}).param == "best_of"
    error = refusal(CompletionRequest, COMPLETION | {"prompt": ["a"] * 65, "n": 2})
    assert error.param == "n"
    assert "130" in error.message
    assert "128" in error.message
    error = refusal(CompletionRequest, COMPLETION | {"prompt": ["a"] * 129})
    assert error.param == "prompt"
    assert "129" in error.message and "128" in error.message


@pytest.mark.parametrize(
    "body", [b'{"a": "\\ud83d"}', b'{"a": "\\ud83d x"}', b'{"a": "\\udc00"}', b'{"\\ud83d\\u0041": 1}']
)
def test_half_of_a_surrogate_pair_is_called_so(body: bytes) -> None:
    assert "lone surrogate" in refusal(ChatRequest, body).message
    assert (
        "surrogate" not in refusal(ChatRequest, body.replace(b"\\ud83d", b"\\uzz").replace(b"\\udc00", b"\\u1")).message
    )


def test_a_byte_order_mark_is_called_so() -> None:
    for encoding in ("utf-8-sig", "utf-16", "utf-16-be"):
        text = json.dumps(CHAT)
        body = ("\ufeff" + text if encoding == "utf-16-be" else text).encode(encoding)
        assert "byte order mark" in refusal(ChatRequest, body).message


def test_missing_fields() -> None:
    assert refusal(ChatRequest, {"messages": CHAT["messages"]}).param == "model"
    assert refusal(ChatRequest, {"model": "m"}).param == "messages"
    assert refusal(CompletionRequest, {"model": "m"}).param == "prompt"
    assert refusal(CompletionRequest, {"model": "m", "promt": "a"}).param == "promt"  # not "prompt is missing"


@pytest.mark.parametrize(
    ("prompt", "read"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_O35_prompt_forms(prompt: Any, read: list[Any]) -> None:
    assert completion(prompt=prompt).prompt == read


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"), ([], "prompt"), ([""], "prompt"), ([[]], "prompt"), (["a", ""], "prompt.1"),
        ([[1], []], "prompt.1"), (["a", 5], "prompt.1"), ([5, "a"], "prompt.0"), ([True], "prompt"),
        ([1, True], "prompt.0"), ([[1], "a"], "prompt.1"), (["a", [1]], "prompt.1"), ([[1], ["a"]], "prompt.1"),
        ([1.5], "prompt"), (5, "prompt"), (None, "prompt"), ({"text": "a"}, "prompt"), ([[[1]]], "prompt"),
    ],
)  # fmt: skip
def test_O08_O35_prompts_that_are_refused(prompt: Any, param: str) -> None:
    assert refusal(CompletionRequest, COMPLETION | {"prompt": prompt}).param == param


def messages(*given: Any) -> list[dict[str, Any]]:
    return chat(messages=list(given)).messages


def test_O30_content_parts_are_joined_in_order() -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hi."}]
    assert messages({"role": "user", "content": parts}) == messages({"role": "user", "content": "Say hi."})
    assert messages({"role": "assistant", "content": parts[:1]}) == [{"role": "assistant", "content": "Say "}]


def test_O31_null_content_and_tool_messages() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    read = messages(
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "u", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None, "annotations": []},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        {"role": "assistant"},
    )
    assert read == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "u", "name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": [calls[0] | {"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("message", "param", "says"),
    [
        ({"role": "user", "content": 5}, "content", "content"),
        ({"role": "user", "content": None}, "content", "user message needs content"),
        ({"role": "system"}, "content", "system message needs content"),
        ({"role": "tool", "content": None, "tool_call_id": "1"}, "content", "needs content"),
        ({"role": "user", "content": []}, "content", "non-empty"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "content.0.type", "'image_url'"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}, "content.1.type",
         "'input_audio'"),
        ({"role": "user", "content": [{"type": "text"}]}, "content.0.text", "text"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "cache": 1}]}, "content.0.cache", "'cache'"),
        ({"role": "user", "content": ["a"]}, "content.0", "type"),
        ({"role": "boss", "content": "a"}, "role", '"boss"'),
        ({"content": "a"}, "role", "role must be one of"),
        ({"role": ["user"], "content": "a"}, "role", "role must be one of"),
        ({"role": "user", "content": "a", "contnt": "b"}, "contnt", "did you mean 'content'?"),
        ({"role": "user", "content": "a", "name": 5}, "name", "string"),
        ({"role": "tool", "content": "a"}, "tool_call_id", "tool_call_id"),
        ({"role": "user", "content": "a", "tool_call_id": "1"}, "tool_call_id", "only a tool one"),
        ({"role": "user", "content": "a", "tool_calls": [{}]}, "tool_calls", "only an assistant one"),
        ({"role": "assistant", "tool_calls": "f()"}, "tool_calls", "list of objects"),
        ({"role": "assistant", "tool_calls": 0}, "tool_calls", "list of objects"),
        ({"role": "assistant", "content": None, "refusal": "no"}, "refusal", "'refusal' is not supported"),
        ("hi", None, "object with role"),
    ],
)  # fmt: skip
def test_O30_O31_messages_that_are_refused(message: Any, param: str | None, says: str) -> None:
    error = refusal(ChatRequest, CHAT | {"messages": [CHAT["messages"][0], message]})
    assert error.param == ("messages.1" if param is None else f"messages.1.{param}")
    assert says in error.message


def test_messages_of_another_kind() -> None:
    assert refusal(ChatRequest, CHAT | {"messages": {}}).param == "messages"
    assert refusal(ChatRequest, CHAT | {"messages": []}).param == "messages"
    assert refusal(ChatRequest, CHAT | {"messages": "hi"}).param == "messages"
