"""What callers may ask an output to look like, as text of llguidance's grammars.

Called by `structured`. Refuses what the library would take too long over, or would answer with tokens that never show
as text. Compiles nothing and knows no tokens.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from llguidance import regex_to_lark

MAX_BYTES = 64 * 1024  # compiling takes time in proportion to the square of a schema's properties
MAX_CHOICES = 1000
MAX_MULTIPLE = 10_000  # a multiple is found by an automaton with that many states
WHITESPACE = r"[ \t\n\r]{1,32}"
"""Between the tokens of JSON. Models that may go on for ever do: they fill the rest of their budget with newlines."""

# Text that can go on in one way only is otherwise followed to its end at once, and that of "(x{1000}){1000}" is far.
# Without, the model splits such text into tokens as it likes.
_NO_FORCING = '\n%llguidance {"no_forcing": true}'
_LITERALS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/')


def grammar_text(structure: Mapping[str, Any]) -> str:
    """The grammar of a structure `{"kind": ..., "value": ...}`, as JSON text that llguidance compiles.

    Kinds and their values: "json_object" (None), "json_schema" (a schema), "regex" (the whole output; Rust's syntax
    without look-around), "choice" (strings), "grammar" (Lark, as llguidance reads it),
    "marked_grammar" (the same, made here and not by callers: it may name special tokens, and, as its rule `answer`,
    another structure under the key "answer").

    Raises:
        ValueError: the kind is unknown, or the value is of the wrong type, too large, or asks for what is not done.
    """
    if structure.get("kind") == "grammar":
        return _lark(_callers_grammar(structure.get("value")))
    if structure.get("kind") != "marked_grammar":
        return _lark(_rule("start", structure))
    text = _text(structure.get("value"), "a grammar")
    answer = structure.get("answer")
    return _lark(text if answer is None else text + _rule("answer", answer))


def _rule(name: str, structure: Mapping[str, Any]) -> str:
    """Rules of a grammar, of which that of this name is the structure."""
    kind = structure.get("kind")
    if kind not in _RULES:
        raise ValueError(f"unknown kind {kind!r} of structure; these are {', '.join(_RULES)}, marked_grammar")
    return _RULES[kind](name, structure.get("value"))


def _json_object(name: str, value: Any) -> str:
    if value is not None:
        raise ValueError("json_object takes no value")
    return _json_schema(name, {"type": "object"})


def _json_schema(name: str, value: Any) -> str:
    if not isinstance(value, dict | bool):
        raise ValueError(f"expected a JSON schema, which is an object or a boolean, and got {type(value).__name__}")
    try:
        _check_size(len(json.dumps(value, allow_nan=False)), "the schema")
        multiple = math.lcm(*_multiples(value))
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    if multiple > MAX_MULTIPLE:
        raise ValueError(f"its multipleOf come to multiples of {multiple}, and {MAX_MULTIPLE} is the largest kept to")
    if isinstance(value, dict):
        value = {"x-guidance": {"whitespace_pattern": WHITESPACE}} | value
    elif value:
        return _json_schema(name, {})
    return f"{name}: %json {json.dumps(value)}"


def _regex(name: str, value: Any) -> str:
    return f"{name}: /{regex_to_lark(_text(value, 'a regular expression'), use_ascii='')}/"


def _choice(name: str, value: Any) -> str:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise ValueError("expected a list of one or more strings to choose from")
    if len(value) > MAX_CHOICES:
        raise ValueError(f"there are {len(value)} strings to choose from; at most {MAX_CHOICES} are taken")
    _check_size(sum(len(one.encode(errors="replace")) for one in value), "the list of strings")
    return f"{name}: C\nC: " + " | ".join(json.dumps(one) for one in value)


def _nested_grammar(name: str, value: Any) -> str:
    return f"{name}: %lark {{\n{_callers_grammar(value)}\n}}"


def _callers_grammar(value: Any) -> str:
    text = _text(value, "a grammar")
    bare = _LITERALS.sub(" ", text)
    if "::=" in bare:
        raise ValueError("it must be in Lark's syntax: rules are written as 'name: ...', the first is 'start'")
    if "%llguidance" in bare:
        raise ValueError("the directive %llguidance is not taken")
    if "<" in bare:
        raise ValueError("it names special tokens, which never show as text")
    return text


_RULES: dict[Any, Callable[[str, Any], str]] = {
    "json_object": _json_object,
    "json_schema": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _nested_grammar,
}


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected {what} as a string, and got {type(value).__name__}")
    _check_size(len(value.encode(errors="replace")), what)
    return value


def _check_size(size: int, what: str) -> None:
    if size > MAX_BYTES:
        raise ValueError(f"{what} has {size} bytes; at most {MAX_BYTES} are taken")


def _multiples(schema: Any) -> Iterator[int]:
    """Every multipleOf, without its power of ten."""
    if isinstance(schema, dict):
        number = schema.get("multipleOf")
        if isinstance(number, int | float) and not isinstance(number, bool):
            yield _digits(number)
        schema = list(schema.values())
    if isinstance(schema, list):
        for one in schema:
            yield from _multiples(one)


def _digits(number: float) -> int:
    digits = "".join(map(str, Decimal(str(number)).as_tuple().digits)).rstrip("0")
    return int(digits or 1)


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text + _NO_FORCING}]})
