"""What a request says about tools, in the form that chat templates take.

Called before a prompt is rendered. Knows nothing of HTTP; fields were validated before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Tool = dict[str, Any]
"""OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters", "strict"}}`."""

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


def tools_for_template(tools: Sequence[Tool]) -> list[Tool]:
    """The `tools` of a chat template. Templates read name, description and parameters without asking whether they are
    there, so all three are; `strict` is between client and server."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool["function"]["name"],
                "description": tool["function"].get("description") or "",
                "parameters": tool["function"].get("parameters") or NO_PARAMETERS,
            },
        }
        for tool in tools
    ]


def calls_for_template(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The `tool_calls` of an assistant's message. Clients send arguments as JSON text and templates write them as JSON
    again, so they are read here; text that is no JSON object, such as of a call that was cut, stays text."""
    return [{**call, "function": {**call["function"], "arguments": _read(call["function"])}} for call in calls]


def with_written_arguments(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for templates that put a call's arguments between texts: as JSON text."""
    return [
        {**message, "tool_calls": [_written(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _written(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def _read(function: dict[str, Any]) -> Any:
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        return arguments
    try:
        read = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments


def functions_of(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    """The functions' parameters by their names, for `ToolParser`."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or NO_PARAMETERS for tool in tools}
