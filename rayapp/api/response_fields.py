"""The body of POST /v1/responses, and the chat request that it stands for.

Responses are chat under other names: instructions and input items are messages, `text.format` is the form of the
answer. Called by `responses`; what the fields mean is decided where chat's are. Knows nothing of models.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from rayapp.api.refusals import NOT_SERVED_RESPONSES, Neutral, nearest, refuse, shown
from rayapp.api.schemas import MAX_TOP_LOGPROBS, Body, or_default
from rayapp.api.tool_fields import Strict

INCLUDED_LOGPROBS = "message.output_text.logprobs"
INCLUDED = (INCLUDED_LOGPROBS, "reasoning.encrypted_content")  # the second is for what a server does not keep: nothing
TEXT_PARTS = ("input_text", "output_text", "text")


class FunctionTool(Strict):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        """The same in chat's form."""
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> TextFormat:
        if self.type == "json_schema" and (self.name is None or self.schema_ is None):
            raise refuse("the format json_schema needs name and schema", "name" if self.name is None else "schema")
        return self

    def for_chat(self) -> dict[str, Any]:
        """The same in chat's form."""
        if self.type != "json_schema":
            return {"type": self.type}
        fields = self.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
        return {"type": "json_schema", "json_schema": {"name": "answer", **fields}}


class Text(Strict):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(Body):
    """POST /v1/responses. Nothing is stored, so a conversation is sent as a whole each time."""

    refused: ClassVar[Neutral] = NOT_SERVED_RESPONSES

    input: Annotated[list[dict[str, Any]], BeforeValidator(lambda value: read_input(value))]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: Annotated[bool, BeforeValidator(or_default(False))] = False
    tools: Annotated[list[FunctionTool], BeforeValidator(or_default([])), Field(default_factory=list)]
    tool_choice: Any = None
    parallel_tool_calls: Annotated[bool, BeforeValidator(or_default(True))] = True
    text: Text | None = None
    top_logprobs: Annotated[int, BeforeValidator(or_default(0)), Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    include: Annotated[list[str], BeforeValidator(or_default([])), Field(default_factory=list)]
    metadata: Annotated[dict[str, str], BeforeValidator(or_default({})), Field(default_factory=dict)]
    user: str | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    priority: Annotated[int, BeforeValidator(or_default(0)), Field(ge=-(2**31), lt=2**31)] = 0
    timeout: Annotated[float, Field(gt=0)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(or_default({})), Field(default_factory=dict)]

    @model_validator(mode="after")
    def _check_include(self) -> ResponsesRequest:
        for position, name in enumerate(self.include):
            if name not in INCLUDED:
                raise refuse(f"include can hold {', '.join(INCLUDED)}, not {shown(name)}", "include", position)
        if self.top_logprobs and not self.wants_logprobs:
            raise refuse(f'top_logprobs ({self.top_logprobs}) needs include: ["{INCLUDED_LOGPROBS}"]', "top_logprobs")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return INCLUDED_LOGPROBS in self.include

    def for_chat(self) -> dict[str, Any]:
        """The fields of the chat request; without those left out."""
        messages = messages_of(self.input)
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function":
            choice = {"type": "function", "function": {key: choice[key] for key in choice if key != "type"}}
        fields = {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "stream": self.stream,
            "tools": [tool.for_chat() for tool in self.tools],
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self.text.format.for_chat() if self.text and self.text.format else None,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs,
        }
        same = ("temperature", "top_p", "user", "seed", "priority", "timeout", "cache_salt", "chat_template_kwargs")
        fields |= {name: getattr(self, name) for name in same}
        return {name: value for name, value in fields.items() if value is not None}


def read_input(value: Any) -> list[dict[str, Any]]:
    """The input items; a pydantic validator. A string is what the user says."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise refuse("input must be a string or a non-empty list of items")
    for position, item in enumerate(value):
        if not isinstance(item, dict):
            raise refuse("an input item must be an object", position)
        kind = item.get("type", "message")
        if kind not in _ITEMS:
            raise refuse(f"input items can be of type {', '.join(_ITEMS)}, not {shown(kind)}", position, "type")
        for field in item.keys() - {"type", "id", "status", *_ITEMS[kind]}:
            raise refuse(f"unknown field {field!r}{nearest(field, _ITEMS[kind])}", position, field)
        for field in _ITEMS[kind]:
            if field not in item and kind != "reasoning":
                raise refuse(f"{field!r} is missing", position, field)
    return value


_ITEMS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("content", "summary", "encrypted_content"),
}


def messages_of(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages. Calls that follow what the assistant said are its own; what it thought then is not sent again."""
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item["role"], "content": _content(item["content"])})
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _content(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
    return messages


def _content(content: Any) -> Any:
    """Parts under chat's names; whatever else is there chat refuses."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, dict) and part.get("type") in TEXT_PARTS
        else part
        for part in content
    ]
