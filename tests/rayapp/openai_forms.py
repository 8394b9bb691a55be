"""What the openai client's own types say of every object that the API sends: faults of one, by the type's JSON schema.

The types allow fields that they do not know; here those are faults but for the ones that README names.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, get_args

import jsonschema
from openai.pagination import SyncPage
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.shared import ErrorObject
from pydantic import BaseModel, TypeAdapter

EXTENSIONS: dict[str, set[str]] = {
    "ChatCompletionMessage": {"reasoning_content"},
    "ChoiceDelta": {"reasoning_content"},
    "Response": {"store"},  # OpenAI sends it too; the client's type lacks it
    "ResponseFunctionCallArgumentsDoneEvent": {"name"},  # which older types of the client need
    "Logprob": {"bytes"},  # the events of a response have them as its items do
    "LogprobTopLogprob": {"bytes"},
}
"""Fields of ours by the title of the type they are in."""

NULLS: dict[str, set[str]] = {"CompletionChoice": {"finish_reason"}, "Logprobs": {"token_logprobs", "top_logprobs"}}
"""Where completions hold null as OpenAI's own do and the types do not say: the end of what has not ended, and the
score of a prompt's first token."""


class ErrorBody(BaseModel):
    error: ErrorObject


_KINDS: dict[str, Any] = {
    "list": SyncPage[Model],
    "model": Model,
    "chat.completion": ChatCompletion,
    "chat.completion.chunk": ChatCompletionChunk,
    "text_completion": Completion,
    "response": Response,
}


def faults(value: dict[str, Any], nulls: bool = False) -> list[str]:
    """What is wrong with an answer or an event, each with its place; which type it is of is told by itself.

    Args:
        nulls: those of `NULLS` are none.
    """
    return [
        f"{error.json_path}: {error.message[:300]}" for error in _validator(_type_of(value), nulls).iter_errors(value)
    ]


def _type_of(value: dict[str, Any]) -> Any:
    if "error" in value and "object" not in value:
        return ErrorBody
    if "sequence_number" in value:
        return _events()[value["type"]]
    return _KINDS[value["object"]]


@cache
def _events() -> dict[str, type[BaseModel]]:
    """The types of a response's events by their names."""
    members: tuple[type[BaseModel], ...] = get_args(get_args(ResponseStreamEvent)[0])
    return {name: one for one in members for name in get_args(one.model_fields["type"].annotation)}


@cache
def _validator(kind: Any, nulls: bool) -> jsonschema.protocols.Validator:
    schema = TypeAdapter(kind).json_schema()
    for part in (schema, *schema.get("$defs", {}).values()):
        if "properties" not in part:
            continue
        part["additionalProperties"] = False
        part["properties"] |= {name: {} for name in EXTENSIONS.get(part["title"], ())}
        for name in NULLS.get(part["title"], ()) if nulls else ():
            part["properties"][name] = _or_null(part["properties"][name])
    return jsonschema.Draft202012Validator(schema)


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The same, or null, or a list of the same that may hold null."""
    (*_, listed) = [{}, *(one for one in schema.get("anyOf", ()) if one.get("type") == "array")]
    loose = {"type": "array", "items": {"anyOf": [listed.get("items", {}), {"type": "null"}]}}
    return {"anyOf": [schema, {"type": "null"}, *([loose] if listed else [])]}


def read_json(text: str) -> Any:
    """JSON as the standard has it.

    Raises:
        ValueError: also for NaN and infinities.
    """
    return json.loads(text, parse_constant=_no_json)


def _no_json(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
