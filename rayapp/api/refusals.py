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

NEAR = 0.8
"""How alike two names must be for one to be taken for the other: below, suggestions mislead ("system": "stream")."""

FEW_FIELDS = 8

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
    "reasoning": ({}, {"effort": "none"}),
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
    """Whether a value asks for nothing; null inside an object is "left out" too."""
    if isinstance(value, dict):
        value = {key: one for key, one in value.items() if one is not None}
    return value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def not_served(field: str, value: Any, neutral: tuple[Any, ...]) -> str:
    accepted = ", ".join(json.dumps(one) for one in (*neutral, None))
    return f"{field!r} is not supported: it may be left out or be {accepted}, not {shown(value)}"


def nearest(field: str, known: Iterable[str]) -> str:
    """What to do about a field that is not known: the one that was meant, if one is near; few fields as they are; else
    where all of them stand."""
    names = {_letters(name): name for name in known}
    close = difflib.get_close_matches(_letters(field), list(names), n=1, cutoff=NEAR)
    if close:
        return f"; did you mean {names[close[0]]!r}?"
    if len(names) <= FEW_FIELDS:
        return f"; the fields are {', '.join(sorted(names.values()))}" if names else "; it has no fields"
    return "; GET /openapi.json lists the fields"


def _letters(name: str) -> str:
    """topP, top-p and top_p are the same to who looks for a name."""
    return name.lower().replace("_", "").replace("-", "")


def shown(value: Any) -> str:
    """A value as JSON, cut to a readable length."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
