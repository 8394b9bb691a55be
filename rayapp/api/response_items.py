"""The input items of POST /v1/responses, checked under their own names, and the chat messages that they stand for.

`read_input` is called by `response_fields`. What it lets through makes messages that chat takes, so that no refusal
names a field of chat's.
"""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticCustomError

from rayapp.api.messages import ROLES, function_call, read_content, reasoning_fields
from rayapp.api.refusals import nearest, refuse, shown
from rayapp.text.template import Message

MESSAGE_ROLES = tuple(role for role in ROLES if role != "tool")
TEXT_PARTS: dict[str, tuple[str, ...]] = {
    "input_text": (),
    "output_text": ("annotations", "logprobs"),  # of an earlier answer; the model is not shown them again
    "text": (),
}
THOUGHT_PARTS: dict[str, tuple[str, ...]] = {"reasoning_text": (), "text": ()}
ITEMS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("content", "summary", "encrypted_content"),
}


def read_input(value: Any) -> list[Message]:
    """Messages for the template; a pydantic validator. A string is what the user says.

    Calls that follow what the assistant said, and what it thought before, are of one message.

    Raises:
        PydanticCustomError: with the path to what is at fault.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise refuse("input must be a string or a non-empty list of items")
    messages: list[Message] = []
    thought = ""
    for position, item in enumerate(value):
        try:
            kind = _checked(item)
            if kind == "reasoning":
                thought += _thought(item)
                continue
            _add(messages, kind, item, thought)
            thought = ""
        except PydanticCustomError as error:
            context = error.context or {}
            raise refuse(context["text"], position, *context["at"]) from None
    if not messages:
        raise refuse("input must hold a message, not reasoning alone")
    return messages


def _checked(item: Any) -> str:
    """What kind of item it is."""
    if not isinstance(item, dict):
        raise refuse("an input item must be an object")
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in ITEMS:
        raise refuse(f"input items can be of type {', '.join(ITEMS)}, not {shown(kind)}", "type")
    for field, given in item.items():
        if given is not None and field not in ("type", "id", "status", *ITEMS[kind]):
            raise refuse(f"unknown field {field!r}{nearest(field, ITEMS[kind])}", field)
    for field in ITEMS[kind]:
        if field not in item and kind != "reasoning":
            raise refuse(f"{field!r} is missing", field)
    return kind


def _add(messages: list[Message], kind: str, item: dict[str, Any], thought: str) -> None:
    """What an item adds to the conversation."""
    if kind == "function_call_output":
        messages.append(
            {
                "role": "tool",
                "content": read_content(item["output"], "output", TEXT_PARTS),
                "tool_call_id": _text(item, "call_id"),
            }
        )
    elif kind == "function_call":
        call = function_call(_text(item, "call_id"), _text(item, "name"), _text(item, "arguments", empty=True))
        if thought or not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""} | reasoning_fields(thought))
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        role = item["role"]
        if not isinstance(role, str) or role not in MESSAGE_ROLES:
            raise refuse(f"role must be one of {', '.join(MESSAGE_ROLES)}, not {shown(role)}", "role")
        content = "" if item["content"] in ([], None) and role == "assistant" else item["content"]
        message = {
            "role": "system" if role == "developer" else role,
            "content": read_content(content, "content", TEXT_PARTS),
        }
        messages.append(message | (reasoning_fields(thought) if role == "assistant" else {}))


def _thought(item: dict[str, Any]) -> str:
    content = item.get("content")
    return read_content(content, "content", THOUGHT_PARTS) if content else ""


def _text(item: dict[str, Any], field: str, empty: bool = False) -> str:
    given = item[field]
    if not isinstance(given, str) or not (given or empty):
        raise refuse(f"{field} must be a {'' if empty else 'non-empty '}string, not {shown(given)}", field)
    return given
