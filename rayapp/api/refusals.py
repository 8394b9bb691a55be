"""Words and tables for what a request body may not hold.

The fields that clients send but Convoy does not serve are in the tables here: such a field is accepted only with a
value that changes nothing, and otherwise refused by name. Used by `schemas` and `messages`, which know the fields
that are served.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any

from pydantic_core import PydanticCustomError

Neutral = dict[str, tuple[Any, ...]]

NOT_SERVED: Neutral = {
    # Field -> the values that ask for nothing (null always does). Any other value is refused.
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "prompt_logprobs": (),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "prompt_cache_key": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": (),
    "safety_identifier": (),
}

NOT_SERVED_CHAT: Neutral = NOT_SERVED | {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "moderation": (),
    "echo": (False,),
    "chat_template": (),
}

NOT_SERVED_RESPONSES: Neutral = {
    "access_programs": ([],),
    "background": (False,),
    "background_options": ({},),
    "conversation": (),
    "context_management": ([],),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_key": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": (),
    "reasoning": ({},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "truncation": ("disabled",),
}

NOT_SERVED_COMPLETIONS: Neutral = NOT_SERVED | {
    "suffix": ("",),
}


def refuse(message: str, *at: str | int) -> PydanticCustomError:
    """A refusal from inside a validator; `at` is where below the field."""
    return PydanticCustomError("refused", "{text}", {"text": message, "at": at})


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    return value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def not_served(field: str, value: Any, neutral: tuple[Any, ...]) -> str:
    accepted = ", ".join(json.dumps(one) for one in (*neutral, None))
    return f"{field!r} is not supported: it may be left out or be {accepted}, not {shown(value)}"


def nearest(field: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(field, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; the fields are {', '.join(sorted(known))}"


def shown(value: Any) -> str:
    """A value as JSON, cut to a readable length."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
