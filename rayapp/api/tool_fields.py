"""The fields of a chat request about tools and the form of the answer, and what they ask of the generation.

The models are part of `schemas`; `wanted_reply` is called by `resolve`. Knows nothing of HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rayapp.api.errors import invalid_request
from rayapp.api.refusals import refuse, shown
from rayapp.api.service import ServedModel
from rayapp.text.reasoning import MARKERS, ReasoningCount, ReasoningParser, opens_thinking
from rayapp.text.reply import ReplyParser
from rayapp.text.tools import FORMATS, after_thinking, forced_structure, functions_of, tool_parser

MAX_TOOLS = 128
Structure = Mapping[str, Any]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
SchemaName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class Function(Strict):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class JsonSchema(Strict):
    name: SchemaName
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise refuse("json_schema is needed with type json_schema, and with no other", "json_schema")
        return self

    def structure(self) -> Structure | None:
        """What the text must be; None for anything."""
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.schema_ is None:
            return {"kind": "json_object", "value": None}
        return {"kind": "json_schema", "value": self.json_schema.schema_}


def _schema(value: Any) -> Any:
    """A JSON schema, or the text of one."""
    if not isinstance(value, str):
        return value
    try:
        schema = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise refuse(f"the text is not valid JSON: {error}") from None
    if not isinstance(schema, dict):
        raise refuse(f"the text must hold an object, which a JSON schema is, not {shown(schema)}")
    return schema


class StructuredOutputs(Strict):
    """One of these."""

    json_: Annotated[dict[str, Any] | None, BeforeValidator(_schema), Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> StructuredOutputs:
        if len(self.model_fields_set) != 1 or self.structure() is None:
            raise refuse("give one of json, regex, choice, grammar, json_object: true")
        return self

    def structure(self) -> Structure | None:
        """What the text must be."""
        kinds = {
            "json_schema": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar,
        }  # fmt: skip
        if self.json_object:
            return {"kind": "json_object", "value": None}
        given = [(kind, value) for kind, value in kinds.items() if value is not None]
        return {"kind": given[0][0], "value": given[0][1]} if given else None


def only_functions(value: Any) -> Any:
    """A validator that comes before those of the fields: of another type, others are right."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise refuse(f'the type {shown(kind)} is not supported; "function" is', "type")
    return value


def _tool_choice(value: Any) -> Any:
    if value is None or value in ("none", "auto", "required") or isinstance(value, dict):
        return only_functions(value)
    raise refuse(
        'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": "..."}}, not '
        + shown(value)
    )


ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedTool | None, BeforeValidator(_tool_choice)]


AnyTool = Annotated[Tool, BeforeValidator(only_functions)]


def check_tools(names: Sequence[str], choice: str | NamedTool | None, *name_at: str) -> None:
    """A validator of the fields together.

    Args:
        names: of the tools.
        name_at: where in a tool its name stands.

    Raises:
        PydanticCustomError: they do not fit.
    """
    if len(names) > MAX_TOOLS:
        raise refuse(f"there are {len(names)} tools; {MAX_TOOLS} are the most", "tools")
    for position, name in enumerate(names):
        if name in names[:position]:
            raise refuse(f"two tools are called {name!r}", "tools", position, *name_at)
    if choice in (None, "none", "auto"):
        return
    if not names:
        raise refuse("tool_choice needs tools", "tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise refuse(f"there is no tool {choice.function.name!r}; there are {', '.join(names)}", "tool_choice")


@dataclass(frozen=True, slots=True)
class Reply:
    """How the text of a chat answer is to be read.

    Attributes:
        parser: makes one for a generation; None where all text is content.
        structure: what the text must be.
        shown_ids: special tokens that the parser must see.
        one_call: the answer ends with its first call.
        counter: counts the tokens of a generation's reasoning; None where there is none.
    """

    parser: Callable[[], ReplyParser] | None = None
    structure: Structure | None = None
    shown_ids: tuple[int, ...] = ()
    one_call: bool = False
    counter: Callable[[], ReasoningCount] | None = None


ALL_CONTENT = Reply()


def check_can_call(model: ServedModel) -> None:
    """Raises ApiError for a model that tools are nothing to."""
    if model.tool_format is None:
        raise invalid_request(
            f"tools: the chat template of {model.name!r} shows no form of tool calls that is known here "
            f"({', '.join(FORMATS)}); if it is one of these, set tool_parser of the model",
            "tools",
        )


def wanted_reply(
    model: ServedModel,
    prompt: str,
    tools: Sequence[dict[str, Any]],
    choice: str | NamedTool | None,
    parallel: bool,
    structure: Structure | None,
) -> Reply:
    """What the fields ask for, given the rendered prompt.

    Args:
        tools: those that the model may call: none with tool_choice "none".
        structure: what an answer that is no call must be.

    Raises:
        ApiError: 400: this model cannot.
    """
    format_name = model.tool_format
    if tools:
        check_can_call(model)
    inside = model.reasons and opens_thinking(prompt)
    markers = [*(MARKERS if model.reasons else ()), *(FORMATS[format_name].markers if tools and format_name else ())]
    tokens = model.tokenizer.ids_of(markers)
    forced = choice not in (None, "auto")
    if tools and format_name and (forced or structure is not None):
        name = choice.function.name if isinstance(choice, NamedTool) else "required"
        named = [tool for tool in tools if name in ("required", tool["function"]["name"])]
        try:
            structure = forced_structure(
                format_name, named, "required", tokens=tokens, thinking=inside,
                parallel=parallel and name == "required", answer=None if forced else structure,
            )  # fmt: skip
        except ValueError as error:
            raise invalid_request(f"tools: {error}", "tools") from None
    elif structure is not None and inside:
        structure = after_thinking(structure, tokens)
    functions = functions_of(tools)

    def parser() -> ReplyParser:
        return ReplyParser(
            ReasoningParser(inside) if model.reasons else None,
            tool_parser(format_name, functions) if tools and format_name else None,
        )

    shown_ids = tuple(tokens.values())
    return Reply(
        parser if tools or model.reasons else None,
        structure,
        shown_ids,
        one_call=bool(tools) and not parallel,
        counter=partial(ReasoningCount, model.tokenizer, shown_ids, inside) if model.reasons else None,
    )
