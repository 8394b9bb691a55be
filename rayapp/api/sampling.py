"""The sampling fields of a generation: what was asked for, what was left out, and how many tokens there is room for.

Called by `resolve`. Knows nothing of texts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rayapp.api.errors import ApiError, invalid_request
from rayapp.api.prompts import names_of
from rayapp.api.schemas import GenerationFields
from rayapp.api.service import SamplingFields, ServedModel
from rayapp.api.settings import RequestSettings


def sampling_of(
    fields: GenerationFields,
    model: ServedModel,
    settings: RequestSettings,
    prompts: Sequence[Sequence[int]],
    param: str,
    limit: int | None,
    default_limit: int,
    **more: Any,
) -> list[SamplingFields]:
    """Those of each prompt; they differ in their token limits.

    Left-out fields take the operator's defaults, then the model's, then OpenAI's.

    Args:
        param: what the prompts are called in a refusal.
        limit: the most tokens to generate, as the request or the operator says; None takes `default_limit`, and 0
            makes one, as the engine does at least.
        more: fields that are not the same at all endpoints.

    Raises:
        ApiError: 400.
    """
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
    deadline = None if fields.timeout is None else time.monotonic() + fields.timeout
    return [
        SamplingFields(
            max_new_tokens=_token_limit(fields, model, settings, len(prompt), name, limit, default_limit),
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
            deadline=deadline,
            timeout=fields.timeout,
            **more,
        )
        for prompt, name in zip(prompts, names_of(param, len(prompts)), strict=True)
    ]


def _token_limit(
    fields: GenerationFields,
    model: ServedModel,
    settings: RequestSettings,
    prompt_tokens: int,
    param: str,
    asked: int | None,
    default_limit: int,
) -> int:
    """What was asked for, cut to what the context and the operator leave."""
    room = model.context_length - prompt_tokens
    if room < 1:
        raise _too_long(model, prompt_tokens, param, asked)
    if settings.max_prompt_tokens is not None and prompt_tokens > settings.max_prompt_tokens:
        raise _over_the_limit(settings.max_prompt_tokens, prompt_tokens, param)
    if settings.max_completion_tokens is not None:
        room = min(room, settings.max_completion_tokens)
    limit = min(default_limit if asked is None else max(1, asked), room)
    if fields.min_tokens > limit:
        raise invalid_request(
            f"min_tokens ({fields.min_tokens}) is more than can be generated ({limit}: max_tokens, what the "
            f"context of {model.context_length} tokens leaves after a prompt of {prompt_tokens}, or the server's own "
            "limit)",
            "min_tokens",
        )
    return limit


def _too_long(model: ServedModel, prompt_tokens: int, param: str, asked: int | None) -> ApiError:
    limit = model.context_length
    wanted = f" and {asked} more were asked for" if asked else ""
    shorten = f"shorten the prompt by at least {prompt_tokens - limit + 1} tokens"
    if asked == 0:
        shorten += ", as there must be room for one even where none is asked for"
    elif asked is not None and 1 < asked < limit:
        shorten += f", which makes room for one, or by {prompt_tokens + asked - limit} for all that were asked for"
    return invalid_request(
        f"the prompt has {prompt_tokens} tokens{wanted}, but {model.name!r} takes {limit} in all, prompt and "
        f"completion together: {shorten}",
        param,
        "context_length_exceeded",
    )


def _over_the_limit(limit: int, prompt_tokens: int, param: str) -> ApiError:
    return invalid_request(
        f"the prompt has {prompt_tokens} tokens, and this server takes {limit} (max_prompt_tokens): shorten it by at "
        f"least {prompt_tokens - limit} tokens",
        param,
        "context_length_exceeded",
    )
