"""Chat messages of a request body, checked and brought into the form that templates read.

`read_messages` is called by `schemas`. Nothing a client says is dropped: a message either reaches the template or is
refused by name.
"""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticCustomError

from rayapp.api.refusals import Neutral, is_neutral, nearest, not_served, refuse, shown
from rayapp.text.template import Message
from rayapp.text.tools import calls_for_template

MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id")
NOT_SERVED_MESSAGE: Neutral = {
    # What clients send back from an earlier answer; empty values are left out.
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "function_call": (),
    "reasoning_content": ("",),
    "reasoning": ("",),
}
ROLES = ("system", "developer", "user", "assistant", "tool")


def _content(value: Any, role: str) -> str:
    """The text of a message: parts are joined as they are, null is empty where the assistant said nothing."""
    if isinstance(value, str):
        return value
    if value is None and role == "assistant":
        return ""
    if value is None:
        raise refuse(f"a {role} message needs content: a string or a list of text parts", "content")
    if not isinstance(value, list) or not value:
        raise refuse("content must be a string or a non-empty list of text parts", "content")
    return "".join(_part(part, position) for position, part in enumerate(value))


def _part(part: Any, position: int) -> str:
    at = ("content", position)
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise refuse('a content part must be an object with a type, such as {"type": "text", "text": "..."}', *at)
    if part["type"] != "text":
        raise refuse(f"content parts of type {part['type']!r} are not supported, only 'text'", *at, "type")
    if not isinstance(part.get("text"), str):
        raise refuse("a text part needs text: a string", *at, "text")
    for field in part.keys() - {"type", "text"}:
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
    return message | _tool_fields(value, role)


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
