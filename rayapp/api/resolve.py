"""From validated fields to generations: which model, which token ids, which sampling.

`plan_chat` and `plan_completions` run in a worker thread, called by the endpoints. Everything a request can be refused
for without asking a replica is refused here or in what is called from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayapp.api.errors import ApiError, invalid_request, overloaded
from rayapp.api.prompts import PromptReader, find_model
from rayapp.api.sampling import sampling_of
from rayapp.api.schemas import ChatRequest, CompletionRequest, parse_body
from rayapp.api.service import SamplingFields, ServedModel
from rayapp.api.settings import RequestSettings
from rayapp.api.tool_fields import ALL_CONTENT, NamedTool, Reply, Structure, wanted_reply
from rayapp.failures import Overloaded
from rayapp.structured import check

DEFAULT_COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions where it is left out, as OpenAI's; chat goes on to the context limit."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The generations that one request asks for: `n` for each prompt, in order.

    Attributes:
        sampling: one for each prompt; they differ in their token limits.
        reply: how a chat's text is to be read.
        logprobs: the answer has those of its tokens.
        echo: the text of each prompt, which the choices' texts begin with; empty without.
        prompt_only: nothing is to be generated.
    """

    model: str
    prompts: list[list[int]]
    sampling: list[SamplingFields]
    stop: list[str]
    n: int
    stream: bool
    include_usage: bool
    running_usage: bool
    reply: Reply = ALL_CONTENT
    logprobs: bool = False
    echo: tuple[str, ...] = ()
    prompt_only: bool = False

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n


def plan_chat(models: Mapping[str, ServedModel], body: bytes, settings: RequestSettings) -> Plan:
    """The plan of a body of POST /v1/chat/completions.

    Raises:
        ApiError: 400, 404 or 413.
    """
    return plan_chat_fields(models, parse_body(ChatRequest, body), settings)


def plan_chat_fields(models: Mapping[str, ServedModel], fields: ChatRequest, settings: RequestSettings) -> Plan:
    """The plan of a chat request.

    Raises:
        ApiError: 400, 404 or 413.
    """
    model = find_model(models, fields.model)
    reader, param, tools = PromptReader(model, settings), fields.messages_field, fields.callable_tools
    prompt = reader.render(fields.messages, fields, param, tools)
    prompts = [reader.encode(prompt, param, add_special_tokens=False)]
    reply = wanted_reply(model, prompt, tools, fields.tool_choice, fields.parallel_tool_calls, fields.structure)
    _check_structure(fields.structure, fields.structure_field, model)
    if tools:
        _check_calls(reply.structure, tools, fields.tool_choice, model)
    elif reply.structure is not fields.structure:
        _check_structure(reply.structure, fields.structure_field, model)
    limit = settings.defaults.max_tokens if fields.token_limit is None else fields.token_limit
    sampling = sampling_of(
        fields, model, settings, prompts, param, limit, model.context_length,
        structure=reply.structure,
        shown_ids=reply.shown_ids,
        logprobs=fields.logprobs,
        top_logprobs=fields.top_logprobs,
    )  # fmt: skip
    return Plan(
        model.name, prompts, sampling, fields.stop, fields.n, fields.stream, fields.include_usage, fields.running_usage,
        reply=reply,
        logprobs=fields.logprobs,
    )  # fmt: skip


def plan_completions(models: Mapping[str, ServedModel], body: bytes, settings: RequestSettings) -> Plan:
    """The plan of a body of POST /v1/completions.

    Raises:
        ApiError: 400, 404 or 413.
    """
    fields = parse_body(CompletionRequest, body)
    model = find_model(models, fields.model)
    prompts = PromptReader(model, settings).prompts(fields.prompt, "prompt")
    _check_structure(fields.structure, fields.structure_field, model)
    limit = settings.defaults.max_tokens if fields.max_tokens is None else fields.max_tokens
    scored = fields.logprobs is not None
    sampling = sampling_of(
        fields, model, settings, prompts, "prompt", limit, DEFAULT_COMPLETION_TOKENS,
        structure=fields.structure,
        logprobs=scored,
        top_logprobs=fields.logprobs or 0,
        prompt_logprobs=fields.logprobs if fields.echo else None,
    )  # fmt: skip
    echo = [one if isinstance(one, str) else model.tokenizer.decode(one) for one in fields.prompt if fields.echo]
    return Plan(
        model.name, prompts, sampling, fields.stop, fields.n, fields.stream, fields.include_usage, fields.running_usage,
        logprobs=scored,
        echo=tuple(echo),
        prompt_only=fields.echo and fields.max_tokens == 0,
    )  # fmt: skip


def _check_calls(
    structure: Structure | None, tools: Sequence[dict[str, Any]], choice: str | NamedTool | None, model: ServedModel
) -> None:
    """Raises ApiError for calls that cannot be made to come; it names the function whose parameters are why."""
    try:
        _check_structure(structure, "tools", model)
    except ApiError as error:
        for function in (tool["function"] for tool in tools if error.status == 400):
            if not isinstance(choice, NamedTool) or function["name"] == choice.function.name:
                alone = {"kind": "json_schema", "value": function.get("parameters") or {}}
                _check_structure(alone, "tools", model, f"tools: the parameters of function {function['name']!r}")
        raise


def _check_structure(structure: Structure | None, param: str, model: ServedModel, what: str | None = None) -> None:
    """Raises ApiError for a structure that cannot be kept to; `what` it is called, if not as the field."""
    if structure is None:
        return
    try:
        check(structure, model.tokenizer)
    except Overloaded as error:
        raise overloaded(error.message) from None
    except ValueError as error:
        raise invalid_request(f"{what or param}: {error}", param) from None
