"""From validated fields to generations: which model, which token ids, which sampling.

`plan_chat` and `plan_completions` run in a worker thread, called by the endpoints: rendering and tokenizing take
too long for the event loop. Everything a request can be refused for without asking a replica is refused here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayapp.api.errors import ApiError, invalid_request, not_found, overloaded
from rayapp.api.schemas import ChatRequest, CompletionRequest, GenerationFields, Prompt, TemplateFields, parse_body
from rayapp.api.service import SamplingFields, ServedModel
from rayapp.api.settings import RequestSettings
from rayapp.api.tool_fields import ALL_CONTENT, Reply, wanted_reply
from rayapp.failures import Overloaded
from rayapp.structured import check
from rayapp.text.template import Message
from rayapp.text.tools import tools_for_template

TEMPLATE_ARGUMENTS = frozenset(
    (
        "conversation", "messages", "chat_template", "documents", "tools", "tokenize", "add_generation_prompt",
        "continue_final_message", "return_tensors", "return_dict", "tokenizer_kwargs", "padding", "truncation",
        "max_length", "return_assistant_tokens_mask",
    )
)  # fmt: skip
"""Arguments of `apply_chat_template` that are not variables of templates."""

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
        ApiError: 400 or 404.
    """
    return plan_chat_fields(models, parse_body(ChatRequest, body), settings)


def plan_chat_fields(models: Mapping[str, ServedModel], fields: ChatRequest, settings: RequestSettings) -> Plan:
    """The plan of a chat request.

    Raises:
        ApiError: 400 or 404.
    """
    model = find_model(models, fields.model)
    tools = fields.callable_tools
    prompt, prompt_ids = render(model, fields.messages, fields, tools)
    reply = wanted_reply(model, prompt, tools, fields.tool_choice, fields.parallel_tool_calls, fields.structure)
    _check_structure(reply.structure, fields, model)
    asked = settings.defaults.max_tokens if fields.token_limit is None else fields.token_limit
    plan = _plan(fields, model, settings, [prompt_ids], "messages", asked, model.context_length)
    sampling = [
        replace(
            one,
            structure=reply.structure,
            shown_ids=reply.shown_ids,
            logprobs=fields.logprobs,
            top_logprobs=fields.top_logprobs,
        )
        for one in plan.sampling
    ]
    return replace(plan, sampling=sampling, logprobs=fields.logprobs, reply=reply)


def plan_completions(models: Mapping[str, ServedModel], body: bytes, settings: RequestSettings) -> Plan:
    """The plan of a body of POST /v1/completions.

    Raises:
        ApiError: 400 or 404.
    """
    fields = parse_body(CompletionRequest, body)
    model = find_model(models, fields.model)
    params = _params("prompt", len(fields.prompt))
    prompts = [_prompt_ids(model, prompt, param) for prompt, param in zip(fields.prompt, params, strict=True)]
    asked = settings.defaults.max_tokens if fields.max_tokens is None else max(1, fields.max_tokens)
    _check_structure(fields.structure, fields, model)
    plan = _plan(fields, model, settings, prompts, "prompt", asked, DEFAULT_COMPLETION_TOKENS)
    if fields.structure is not None:
        plan = replace(plan, sampling=[replace(one, structure=fields.structure) for one in plan.sampling])
    if fields.logprobs is not None:
        of_prompt = fields.logprobs if fields.echo else None
        scored = [
            replace(one, logprobs=True, top_logprobs=fields.logprobs, prompt_logprobs=of_prompt)
            for one in plan.sampling
        ]
        plan = replace(plan, sampling=scored, logprobs=True)
    if not fields.echo:
        return plan
    texts = [one if isinstance(one, str) else model.tokenizer.decode(one) for one in fields.prompt]
    return replace(plan, echo=tuple(texts), prompt_only=fields.max_tokens == 0)


def _check_structure(structure: Mapping[str, Any] | None, fields: GenerationFields, model: ServedModel) -> None:
    """Raises ApiError for a structure that cannot be kept to."""
    if structure is None:
        return
    given = ("response_format", "structured_outputs")
    param = next((name for name in given if getattr(fields, name) is not None), "tools")
    try:
        check(structure, model.tokenizer)
    except Overloaded as error:
        raise overloaded(error.message) from None
    except ValueError as error:
        raise invalid_request(f"{param}: {error}", param) from None


def render(
    model: ServedModel, messages: list[Message], fields: TemplateFields, tools: Sequence[dict[str, Any]] = ()
) -> tuple[str, list[int]]:
    """The prompt that the model's template makes of messages and tools, as text and as token ids.

    Raises:
        ApiError: 400.
    """
    if model.template is None:
        raise invalid_request(
            f"model {model.name!r} has no chat template; use /v1/completions with a finished prompt", "messages"
        )
    options = _template_options(fields)
    if tools:
        options["tools"] = tools_for_template(tools)
    try:
        text = model.template.render(messages, **options)
        _check_length(model, text, "messages")
        return text, model.tokenizer.encode(text, add_special_tokens=False)
    except ValueError as error:
        raise invalid_request(str(error), "messages") from None


def _template_options(fields: TemplateFields) -> dict[str, Any]:
    """What the chat template gets beside the messages.

    Raises:
        ApiError: 400.
    """
    for name in fields.chat_template_kwargs.keys() & TEMPLATE_ARGUMENTS:
        raise invalid_request(f"chat_template_kwargs: {name!r} is not for the template", f"chat_template_kwargs.{name}")
    add = not fields.continue_final_message if fields.add_generation_prompt is None else fields.add_generation_prompt
    return {
        **fields.chat_template_kwargs,
        "add_generation_prompt": add,
        "continue_final_message": fields.continue_final_message,
    }


def find_model(models: Mapping[str, ServedModel], name: str) -> ServedModel:
    """The model of that name.

    Raises:
        ApiError: 404 that says which there are.
    """
    if name in models:
        return models[name]
    served = ", ".join(repr(one) for one in models) or "none"
    raise not_found(f"there is no model {name[:100]!r}; the models served here: {served}", "model", "model_not_found")


def _params(field: str, count: int) -> list[str]:
    """What to call each of `count` prompts in an error."""
    return [field] if count == 1 else [f"{field}.{position}" for position in range(count)]


def _prompt_ids(model: ServedModel, prompt: Prompt, param: str) -> list[int]:
    try:
        if isinstance(prompt, str):
            _check_length(model, prompt, param)
            prompt_ids = model.tokenizer.encode(prompt)
        else:
            model.tokenizer.check_ids(prompt)
            prompt_ids = prompt
    except ValueError as error:
        raise invalid_request(f"{param}: {error}", param) from None
    if not prompt_ids:
        raise invalid_request(f"{param} has no tokens", param)
    return prompt_ids


def _plan(
    fields: GenerationFields,
    model: ServedModel,
    settings: RequestSettings,
    prompts: list[list[int]],
    param: str,
    asked: int | None,
    default_limit: int,
) -> Plan:
    sampling = [
        _sampling(fields, model, settings, len(prompt), name, asked, default_limit)
        for prompt, name in zip(prompts, _params(param, len(prompts)), strict=True)
    ]
    if fields.timeout is not None:
        deadline = time.monotonic() + fields.timeout
        sampling = [replace(one, deadline=deadline) for one in sampling]
    return Plan(model.name, prompts, sampling, fields.stop, fields.n, fields.stream, fields.include_usage)


def _sampling(
    fields: GenerationFields,
    model: ServedModel,
    settings: RequestSettings,
    prompt_tokens: int,
    param: str,
    asked: int | None,
    default_limit: int,
) -> SamplingFields:
    """Left-out fields take the operator's defaults, then the model's, then OpenAI's; the token limit is cut to what
    the context and the operator leave."""
    room = model.context_length - prompt_tokens
    if room < 1:
        raise _too_long(model, prompt_tokens, param, asked)
    if settings.max_prompt_tokens is not None and prompt_tokens > settings.max_prompt_tokens:
        raise _over_the_limit(settings.max_prompt_tokens, prompt_tokens, param)
    if settings.max_completion_tokens is not None:
        room = min(room, settings.max_completion_tokens)
    limit = min(default_limit if asked is None else asked, room)
    if fields.min_tokens > limit:
        raise invalid_request(
            f"min_tokens ({fields.min_tokens}) is more than can be generated ({limit}: max_tokens, what the "
            f"context of {model.context_length} tokens leaves after a prompt of {prompt_tokens}, or the server's own "
            "limit)",
            "min_tokens",
        )
    for name in ("stop_token_ids", "logit_bias"):
        try:
            model.tokenizer.check_ids(list(getattr(fields, name)))
        except ValueError as error:
            raise invalid_request(f"{name}: {error}", name) from None
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0} | dict(model.default_sampling)
    defaults |= {name: value for name, value in settings.defaults if value is not None and name in defaults}
    chosen = {name: value if (value := getattr(fields, name)) is not None else defaults[name] for name in defaults}
    do_sample = chosen["temperature"] > 0
    top_k = int(chosen["top_k"])
    return SamplingFields(
        max_new_tokens=limit,
        min_new_tokens=fields.min_tokens,
        do_sample=do_sample,
        temperature=float(chosen["temperature"]) if do_sample else 1.0,
        top_k=top_k if 0 < top_k < model.tokenizer.vocab_size else 0,
        top_p=float(chosen["top_p"]),
        min_p=float(chosen["min_p"]),
        seed=fields.seed,
        ignore_eos=fields.ignore_eos,
        stop_token_ids=tuple(fields.stop_token_ids),
        repetition_penalty=fields.repetition_penalty,
        frequency_penalty=fields.frequency_penalty,
        presence_penalty=fields.presence_penalty,
        logit_bias=fields.logit_bias or None,
        cache_salt=fields.cache_salt,
        priority=fields.priority,
    )


def _check_length(model: ServedModel, text: str, param: str) -> None:
    """Raises ApiError for a text that is too long by far: tokenizing megabytes takes seconds."""
    least = model.tokenizer.least_tokens(text)
    if least > model.context_length:
        raise invalid_request(
            f"the prompt has {len(text)} characters, which are at least {least} tokens, but {model.name!r} takes "
            f"{model.context_length} in all, prompt and completion together",
            param,
            "context_length_exceeded",
        )


def _too_long(model: ServedModel, prompt_tokens: int, param: str, asked: int | None) -> ApiError:
    wanted = "" if asked is None else f" and {asked} more were asked for"
    return invalid_request(
        f"the prompt has {prompt_tokens} tokens{wanted}, but {model.name!r} takes {model.context_length} in all, "
        f"prompt and completion together: shorten the prompt by at least {prompt_tokens - model.context_length + 1}",
        param,
        "context_length_exceeded",
    )


def _over_the_limit(limit: int, prompt_tokens: int, param: str) -> ApiError:
    return invalid_request(
        f"the prompt has {prompt_tokens} tokens, and this server takes {limit} (max_prompt_tokens): shorten it by at "
        f"least {prompt_tokens - limit}",
        param,
        "context_length_exceeded",
    )
