"""Chat messages of a request body, checked and brought into the form that templates read.

`read_messages` is called by `schemas`. Nothing a client says is dropped: a message either reaches the template or is
refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError

from rayapp.api.refusals import Neutral, is_neutral, nearest, not_served, refuse, shown
from rayapp.text.template import Message
from rayapp.text.tools import calls_for_template

MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")
NOT_SERVED_MESSAGE: Neutral = {
    # What clients send back from an earlier answer; empty values are left out.
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "function_call": (),
}
REASONING_FIELDS = ("reasoning_content", "reasoning")  # the second is the newer name of the first
ROLES = ("system", "developer", "user", "assistant", "tool")


CHAT_PARTS: dict[str, tuple[str, ...]] = {"text": ()}


def _content(value: Any, role: str) -> str:
    """The text of a message: null is empty where the assistant said nothing."""
    if value is None and role == "assistant":
        return ""
    if value is None:
        raise refuse(f"a {role} message needs content: a string or a list of text parts", "content")
    return read_content(value, "content", CHAT_PARTS)


def read_content(value: Any, field: str, parts: Mapping[str, tuple[str, ...]]) -> str:
    """The text of a string or of parts, which are joined as they are.

    Args:
        field: what the value is called.
        parts: types of parts with text, and the fields beside it that may be there.

    Raises:
        PydanticCustomError: with the path to what is at fault.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise refuse(f"{field} must be a string or a non-empty list of text parts", field)
    return "".join(_part(part, parts, field, position) for position, part in enumerate(value))


def _part(part: Any, parts: Mapping[str, tuple[str, ...]], *at: str | int) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        example = json.dumps({"type": next(iter(parts)), "text": "..."})
        raise refuse(f"a {at[0]} part must be an object with a type, such as {example}", *at)
    kind = part["type"]
    if kind not in parts:
        known = ", ".join(map(repr, parts))
        raise refuse(f"{at[0]} parts of type {kind!r} are not supported, only {known}", *at, "type")
    if not isinstance(part.get("text"), str):
        raise refuse("a text part needs text: a string", *at, "text")
    for field, given in part.items():
        if field not in ("type", "text", *parts[kind]) and given is not None:
            raise refuse(f"unknown field {field!r}{nearest(field, ['type', 'text'])}", *at, field)
    text: str = part["text"]
    return text


def _message(value: Any) -> Message:
    """A message as the template gets it: text content, `developer` as `system`, no empty extras."""
    if not isinstance(value, dict):
        raise refuse("a message must be an object with role and content")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise refuse(f"role must be one of {', '.join(ROLES)}, not {shown(role)}", "role")
    for field, given in value.items():
        if field in NOT_SERVED_MESSAGE and not is_neutral(given, NOT_SERVED_MESSAGE[field]):
            raise refuse(not_served(field, given, NOT_SERVED_MESSAGE[field]), field)
        if field not in NOT_SERVED_MESSAGE and field not in MESSAGE_FIELDS:
            raise refuse(f"unknown field {field!r}{nearest(field, MESSAGE_FIELDS)}", field)
    message: Message = {
        "role": "system" if role == "developer" else role,
        "content": _content(value.get("content"), role),
    }
    if (name := value.get("name")) is not None:
        if not isinstance(name, str):
            raise refuse("name must be a string", "name")
        message["name"] = name
    return message | _reasoning(value, role) | _tool_fields(value, role)


def _reasoning(value: dict[str, Any], role: str) -> Message:
    """What the assistant thought before, as a client sends it back."""
    given = {field: value[field] for field in REASONING_FIELDS if value.get(field) not in (None, "")}
    for field, thought in given.items():
        if not isinstance(thought, str):
            raise refuse(f"{field} must be a string", field)
        if role != "assistant":
            raise refuse(f"a {role} message cannot have {field}; only an assistant one can", field)
    if len(set(given.values())) > 1:
        raise refuse("reasoning and reasoning_content, its older name, say different things; give one", "reasoning")
    return reasoning_fields(next(iter(given.values()), ""))


def reasoning_fields(thought: str) -> Message:
    """A message's reasoning, under both names that templates know. Those that read neither leave it out."""
    return dict.fromkeys(REASONING_FIELDS, thought) if thought else {}


def _tool_fields(value: dict[str, Any], role: str) -> Message:
    calls, call_id = value.get("tool_calls"), value.get("tool_call_id")
    if role == "tool" and (not isinstance(call_id, str) or not call_id):
        raise refuse("a tool message needs the tool_call_id that it answers: a non-empty string", "tool_call_id")
    if role != "tool" and call_id is not None:
        raise refuse(f"a {role} message cannot have a tool_call_id; only a tool one can", "tool_call_id")
    if calls in (None, []):
        return {} if call_id is None else {"tool_call_id": call_id}
    if role != "assistant":
        raise refuse(f"a {role} message cannot have tool_calls; only an assistant one can", "tool_calls")
    if not isinstance(calls, list):
        raise refuse("tool_calls must be a list of objects", "tool_calls")
    for position, call in enumerate(calls):
        _check_call(call, "tool_calls", position)
    return {"tool_calls": calls_for_template(calls)}


def function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call as templates take it."""
    (call,) = calls_for_template(
        [{"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}]
    )
    return call


def _check_call(call: Any, *at: str | int) -> None:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise refuse('a tool call must be {"id", "type": "function", "function": {"name", "arguments"}}', *at)
    if call.get("type", "function") != "function":
        raise refuse(f"tool calls of type {shown(call['type'])} are not supported, only 'function'", *at, "type")
    function = call["function"]
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise refuse("the function needs a name: a non-empty string", *at, "function", "name")
    if not isinstance(function.get("arguments", ""), str):
        raise refuse("arguments must be a string of JSON", *at, "function", "arguments")


def read_messages(value: Any) -> list[Message]:
    """The messages for the template; a pydantic validator.

    Raises:
        PydanticCustomError: with the path to what is at fault.
    """
    if not isinstance(value, list):
        raise refuse("messages must be a list of messages")
    if not value:
        raise refuse("messages must not be empty")
    messages = []
    for position, message in enumerate(value):
        try:
            messages.append(_message(message))
        except PydanticCustomError as error:
            context = error.context or {}
            raise refuse(context["text"], position, *context["at"]) from None
    return messages
