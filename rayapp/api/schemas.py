"""The request bodies: which fields there are and what each may hold.

`parse_body` is called by `rayapp.api.resolve`, which checks what depends on the model asked for; this module knows
nothing of models. Strict throughout: no string is taken for a number, no boolean for an integer.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from rayapp.api.errors import ApiError, invalid_request
from rayapp.api.messages import read_messages
from rayapp.api.refusals import (
    NOT_SERVED,
    NOT_SERVED_CHAT,
    NOT_SERVED_COMPLETIONS,
    Neutral,
    is_neutral,
    nearest,
    not_served,
    refuse,
    shown,
)
from rayapp.api.tool_fields import AnyTool, ResponseFormat, Structure, StructuredOutputs, ToolChoice, check_tools
from rayapp.text.template import Message

MAX_LOGIT_BIAS = 100
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000
MAX_CHOICES = 128
"""The most generations that one request may ask for: n times the number of prompts."""


def read_stops(value: Any) -> Any:
    """Stop strings; a pydantic validator."""
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list):
        raise refuse("stop must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise refuse(f"stop has {len(stops)} strings; {MAX_STOPS} are the most")
    for position, stop in enumerate(stops):
        at = () if stops is not value else (position,)
        if not isinstance(stop, str):
            raise refuse("a stop must be a string", *at)
        if not stop:
            raise refuse("a stop string must not be empty", *at)
        if len(stop) > MAX_STOP_LENGTH:
            raise refuse(f"the stop string has {len(stop)} characters; {MAX_STOP_LENGTH} are the most", *at)
    return stops


def _logit_bias(value: Any) -> Any:
    """Token ids are the keys of a JSON object and so strings; a bias may be any JSON number."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refuse("logit_bias must be an object: token id -> a number from -100 to 100")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 20:
            raise refuse(f"a key of logit_bias must be a token id, not {shown(key)}", key)
        if type(bias) not in (int, float) or not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise refuse(f"a bias must be a number from -{MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}, not {shown(bias)}", key)
        biases[int(key)] = float(bias)
    return biases


def _top_k(value: Any) -> Any:
    """-1 is how some clients write "off"."""
    if type(value) is int and value < -1:
        raise refuse(f"top_k must be 1 or more, or 0 or -1 for off, not {shown(value)}")
    return 0 if type(value) is int and value == -1 else value


Prompt = str | list[int]


def _prompts(value: Any) -> list[Prompt]:
    """The prompts of /completions, each a text or token ids. None is empty."""
    if isinstance(value, str) or (isinstance(value, list) and value and _is_ids(value)):
        value = [value]
    elif not isinstance(value, list):
        raise refuse("prompt must be a string, a list of strings, a list of token ids, or a list of such lists")
    if not value:
        raise refuse("prompt must not be empty")
    for position, prompt in enumerate(value):
        at = (position,) if len(value) > 1 else ()
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and _is_ids(prompt)):
            raise refuse("prompt must hold strings alone, or token ids (integers) alone, or lists of token ids", *at)
        if type(prompt) is not type(value[0]):
            raise refuse("prompt must not mix strings and token ids", *at)
        if not prompt:
            raise refuse("prompt must not be empty", *at)
    return list(value)


def _is_ids(value: list[Any]) -> bool:
    return all(type(one) is int for one in value)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @model_validator(mode="after")
    def _check_usage(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise refuse("continuous_usage_stats needs include_usage: true", "continuous_usage_stats")
        return self


def or_default(default: Any) -> Callable[[Any], Any]:
    """A validator that takes null for "left out"."""
    return lambda value: default if value is None else value


class Body(BaseModel):
    """A request body about one model.

    Attributes:
        refused: fields that clients send and that are not served.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    refused: ClassVar[Neutral] = {}

    model: str


class TemplateFields(Body):
    """How messages become a prompt. `add_generation_prompt` is true where neither it nor the other is given."""

    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[bool, BeforeValidator(or_default(False))] = False
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(or_default({}))] = {}

    @model_validator(mode="after")
    def _check_ends(self) -> TemplateFields:
        if self.continue_final_message and self.add_generation_prompt:
            raise refuse(
                "continue_final_message goes on with the last message, add_generation_prompt begins a new one: "
                "only one of them can be true",
                "continue_final_message",
            )
        return self


class GenerationFields(Body):
    """What all generations take. None is "left out": the model's default or the API's applies."""

    refused: ClassVar[Neutral] = NOT_SERVED

    stream: Annotated[bool, BeforeValidator(or_default(False))] = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, BeforeValidator(or_default(1)), Field(ge=1, le=MAX_CHOICES)] = 1
    stop: Annotated[list[str], BeforeValidator(read_stops)] = []
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, BeforeValidator(or_default(0)), Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, BeforeValidator(_top_k), Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    ignore_eos: Annotated[bool, BeforeValidator(or_default(False))] = False
    stop_token_ids: Annotated[list[int], BeforeValidator(or_default([]))] = []
    frequency_penalty: Annotated[float, BeforeValidator(or_default(0.0)), Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, BeforeValidator(or_default(0.0)), Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, BeforeValidator(or_default(1.0)), Field(ge=0.01, le=100)] = 1.0
    logit_bias: Annotated[dict[int, float], BeforeValidator(_logit_bias)] = {}
    cache_salt: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    priority: Annotated[int, BeforeValidator(or_default(0)), Field(ge=-(2**31), lt=2**31)] = 0
    timeout: Annotated[float, Field(gt=0)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    user: str | None = None  # names the end user to the operator; by definition no part of the answer

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise refuse("stream_options needs stream: true", "stream_options")
        if self.response_format is not None and self.structured_outputs is not None:
            raise refuse("response_format and structured_outputs exclude each other", "structured_outputs")
        return self

    @property
    def structure(self) -> Structure | None:
        """What the text must be; None for anything."""
        asked = self.response_format or self.structured_outputs
        return None if asked is None else asked.structure()

    @property
    def structure_field(self) -> str:
        """Where clients say so."""
        return "response_format" if self.response_format is not None else "structured_outputs"

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def running_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class ChatRequest(GenerationFields, TemplateFields):
    """POST /v1/chat/completions."""

    refused: ClassVar[Neutral] = NOT_SERVED_CHAT
    messages_field: ClassVar[str] = "messages"  # what clients call them

    messages: Annotated[list[Message], BeforeValidator(read_messages)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[bool, BeforeValidator(or_default(False))] = False
    top_logprobs: Annotated[int, BeforeValidator(or_default(0)), Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    tools: Annotated[list[AnyTool], BeforeValidator(or_default([]))] = []
    tool_choice: ToolChoice = None
    parallel_tool_calls: Annotated[bool, BeforeValidator(or_default(True))] = True

    @model_validator(mode="after")
    def _check_fields(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise refuse(f"top_logprobs ({self.top_logprobs}) needs logprobs: true", "top_logprobs")
        check_tools([tool.function.name for tool in self.tools], self.tool_choice, "function", "name")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise refuse(
                f"max_completion_tokens is {self.max_completion_tokens} but max_tokens, its older name, is "
                f"{self.max_tokens}; give one",
                "max_completion_tokens",
            )
        return self

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """Tools in OpenAI's form, for the template; none where they must not be called."""
        return [] if self.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    refused: ClassVar[Neutral] = NOT_SERVED_COMPLETIONS

    prompt: Annotated[list[Prompt], BeforeValidator(_prompts)]
    best_of: int | None = None
    echo: Annotated[bool, BeforeValidator(or_default(False))] = False
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_counts(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise refuse("max_tokens is 0, which leaves nothing to answer with; only with echo it may be", "max_tokens")
        if self.best_of is not None and self.best_of != self.n:
            raise refuse(f"best_of is not supported: it may be left out or equal n ({self.n})", "best_of")
        if len(self.prompt) > MAX_CHOICES:
            raise refuse(
                f"there are {len(self.prompt)} prompts; one request may have {MAX_CHOICES}: "
                f"send the other {len(self.prompt) - MAX_CHOICES} in another",
                "prompt",
            )
        if self.n * len(self.prompt) > MAX_CHOICES:
            raise refuse(
                f"n ({self.n}) times the number of prompts ({len(self.prompt)}) is {self.n * len(self.prompt)}; "
                f"one request may ask for {MAX_CHOICES}",
                "n",
            )
        return self


Fields = TypeVar("Fields", bound=Body)


def parse_body(kind: type[Fields], body: bytes) -> Fields:
    """The validated fields of a request body.

    Raises:
        ApiError: 400, with `param` set where one field is at fault.
    """
    try:
        given = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise invalid_request(_json_fault(body, str(error))) from None
    if not isinstance(given, dict):
        raise invalid_request(f"the body must be a JSON object, not {_json_kind(given)}")
    fields: dict[str, Any] = {}
    for field, value in given.items():
        if field not in kind.refused:
            fields[field] = value
        elif not is_neutral(value, kind.refused[field]):
            raise invalid_request(not_served(field, value, kind.refused[field]), field, "unsupported_value")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _as_api_error(error, kind) from None


def _json_fault(body: bytes, said: str) -> str:
    """What is wrong with a body that is no JSON."""
    if not body:
        return "the body is empty"
    if body.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        said = "it begins with a byte order mark; send UTF-8 without one"
    elif "hex escape" in said and _is_python_json(body):
        said = f"a lone surrogate is no character (\\ud800 to \\udfff come in pairs): {said}"
    return f"the body is not valid JSON: {said}"


def _is_python_json(body: bytes) -> bool:
    """JSON as Python has it: surrogates may stand alone."""
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def _json_kind(value: Any) -> str:
    kinds = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


def _as_api_error(error: ValidationError, kind: type[BaseModel]) -> ApiError:
    """The first fault, unknown fields before the rest: a misspelt name is why another field is missing."""
    faults = error.errors(include_url=False)
    # An object is not meant to be one of the words that could stand in its place.
    faults = [one for one in faults if one["type"] != "literal_error" or type(one["input"]) is not dict] or faults
    fault = next((one for one in faults if one["type"] == "extra_forbidden"), faults[0])
    context = fault.get("ctx", {})
    unknown = fault["type"] == "extra_forbidden"
    path, known = _path(kind, fault["loc"], unknown)
    at = [*path, *context.get("at", ())]
    param = ".".join(str(step) for step in at) or None
    if unknown:
        return invalid_request(f"unknown field {param!r}{nearest(str(at[-1]), known)}", param, "unknown_field")
    if fault["type"] == "missing":
        return invalid_request(f"{param!r} is missing", param, "missing_field")
    if fault["type"] == "refused":
        return invalid_request(f"{param}: {context['text']}" if len(at) > 1 else context["text"], param)
    reason = "must be an object" if fault["type"] == "model_type" else fault["msg"][:1].lower() + fault["msg"][1:]
    return invalid_request(f"{param}: {reason}, not {shown(fault['input'])}", param)


def _path(kind: type[BaseModel], loc: Sequence[str | int], unknown: bool) -> tuple[list[str | int], list[str]]:
    """Where a fault is, without pydantic's names of a union's members, and the fields that there are at that place.

    Args:
        unknown: the last step is no field.
    """
    path: list[str | int] = []
    known: list[str] = []
    here: type[BaseModel] | None = kind
    for number, step in enumerate(loc, 1):
        fields = {} if here is None else {info.alias or name: info for name, info in here.model_fields.items()}
        if isinstance(step, int) or step in fields or here is None or (unknown and number == len(loc)):
            path.append(step)
        if isinstance(step, str) and fields:
            known = list(fields)
            here = _model_in(fields[step].annotation) if step in fields else here
    return path, known


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The first model that a type is or holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for one in get_args(annotation) if (found := _model_in(one))), None)
