"""The body of POST /v1/responses, and the chat request that it stands for.

Responses are chat under other names: instructions and input items are messages, `text.format` is the form of the
answer. Called by `responses`; what the fields mean is decided where chat's are. Knows nothing of models.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from rayapp.api.refusals import NOT_SERVED_RESPONSES, Neutral, refuse, shown
from rayapp.api.response_items import read_input
from rayapp.api.schemas import MAX_TOP_LOGPROBS, Body, ChatRequest, or_default, read_stops
from rayapp.api.tool_fields import (
    Function,
    FunctionName,
    JsonSchema,
    NamedTool,
    ResponseFormat,
    SchemaName,
    Strict,
    Tool,
    ToolName,
    check_tools,
    only_functions,
)
from rayapp.text.template import Message

INCLUDED_LOGPROBS = "message.output_text.logprobs"
INCLUDED = (INCLUDED_LOGPROBS, "reasoning.encrypted_content")  # the second is for what a server does not keep: nothing


class FunctionTool(Strict):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_chat(self) -> Tool:
        """The same in chat's form."""
        return Tool(type="function", function=Function(**self.model_dump(exclude={"type"})))


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: SchemaName | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> TextFormat:
        if self.type == "json_schema" and (self.name is None or self.schema_ is None):
            raise refuse("the format json_schema needs name and schema", "name" if self.name is None else "schema")
        return self

    def for_chat(self) -> ResponseFormat:
        """The same in chat's form."""
        if self.type != "json_schema":
            return ResponseFormat(type=self.type)
        schema = JsonSchema(**self.model_dump(exclude={"type"}, by_alias=True))
        return ResponseFormat(type="json_schema", json_schema=schema)


class Text(Strict):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class NamedFunction(Strict):
    type: Literal["function"]
    name: str


def _tool_choice(value: Any) -> Any:
    if value is None or value in ("none", "auto", "required") or isinstance(value, dict):
        return only_functions(value)
    raise refuse(
        f'tool_choice must be "none", "auto", "required" or {{"type": "function", "name": "..."}}, not {shown(value)}'
    )


class ChatOfResponse(ChatRequest):
    """A chat request whose fields came under other names, which are those to tell clients."""

    messages_field: ClassVar[str] = "input"

    @property
    def structure_field(self) -> str:
        return "text.format"


class ResponsesRequest(Body):
    """POST /v1/responses. Nothing is stored, so a conversation is sent as a whole each time."""

    refused: ClassVar[Neutral] = NOT_SERVED_RESPONSES

    input: Annotated[list[Message], BeforeValidator(read_input)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: Annotated[bool, BeforeValidator(or_default(False))] = False
    tools: Annotated[
        list[Annotated[FunctionTool, BeforeValidator(only_functions)]],
        BeforeValidator(or_default([])),
        Field(default_factory=list),
    ]
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedFunction | None, BeforeValidator(_tool_choice)
    ] = None
    parallel_tool_calls: Annotated[bool, BeforeValidator(or_default(True))] = True
    text: Text | None = None
    top_logprobs: Annotated[int, BeforeValidator(or_default(0)), Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    include: Annotated[list[str], BeforeValidator(or_default([])), Field(default_factory=list)]
    metadata: Annotated[dict[str, str], BeforeValidator(or_default({})), Field(default_factory=dict)]
    user: str | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[str], BeforeValidator(read_stops), Field(default_factory=list)]
    ignore_eos: Annotated[bool, BeforeValidator(or_default(False))] = False
    priority: Annotated[int, BeforeValidator(or_default(0)), Field(ge=-(2**31), lt=2**31)] = 0
    timeout: Annotated[float, Field(gt=0)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(or_default({})), Field(default_factory=dict)]

    @model_validator(mode="after")
    def _check_fields(self) -> ResponsesRequest:
        for position, name in enumerate(self.include):
            if name not in INCLUDED:
                raise refuse(f"include can hold {', '.join(INCLUDED)}, not {shown(name)}", "include", position)
        if self.top_logprobs and not self.wants_logprobs:
            raise refuse(f'top_logprobs ({self.top_logprobs}) needs include: ["{INCLUDED_LOGPROBS}"]', "top_logprobs")
        check_tools([tool.name for tool in self.tools], self._chosen, "name")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return INCLUDED_LOGPROBS in self.include

    @property
    def _chosen(self) -> str | NamedTool | None:
        if not isinstance(self.tool_choice, NamedFunction):
            return self.tool_choice
        return NamedTool(type="function", function=FunctionName(name=self.tool_choice.name))

    def for_chat(self) -> ChatRequest:
        """The chat request; what it holds was checked here."""
        messages = self.input
        if self.instructions is not None:
            messages = [{"role": "system", "content": self.instructions}, *messages]
        same = (
            "model", "stream", "parallel_tool_calls", "temperature", "top_p", "user", "seed", "priority", "timeout",
            "cache_salt", "chat_template_kwargs", "top_logprobs", "stop", "ignore_eos",
        )  # fmt: skip
        return ChatOfResponse.model_construct(
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            tools=[tool.for_chat() for tool in self.tools],
            tool_choice=self._chosen,
            response_format=self.text.format.for_chat() if self.text and self.text.format else None,
            logprobs=self.wants_logprobs,
            **{name: getattr(self, name) for name in same},
        )
