"""What makes a model call a function: a grammar whose every text the format's parser reads as calls.

For `tool_choice` "required" or a named function, and for "auto" where what is no call has a structure of its own. The
grammar is llguidance's dialect of Lark; this module only writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rayapp.text.reasoning import END as THINK_END
from rayapp.text.tools import hermes, mistral
from rayapp.text.tools.formats import FORMATS
from rayapp.text.tools.requests import NO_PARAMETERS, Tool

Structure = dict[str, Any]
"""`{"kind": "marked_grammar", "value": text}`: a grammar that may name special tokens, see `rayapp.grammar_text`. With
"answer", the structure that its rule `answer` is."""

# As models write JSON in their calls; free white space lets a small model write nothing else.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def forced_structure(
    format_name: str,
    tools: Sequence[Tool],
    choice: str,
    *,
    tokens: Mapping[str, int] | None = None,
    parallel: bool = True,
    thinking: bool = False,
    answer: Mapping[str, Any] | None = None,
) -> Structure:
    """The structure of an answer that is nothing but calls.

    Args:
        format_name: a key of `FORMATS`.
        choice: "required" for one call or more, or the name of the one function that is called once. (A function that
            is itself called "required" is told apart by passing it as the only one of `tools`.)
        tokens: ids of the format's markers, and of `</think>`, that the vocabulary has as one token: a model trained
            on the token does not write its letters.
        parallel: False for one call alone.
        thinking: the answer begins inside a `<think>` block: calls follow it.
        answer: the structure of what may come instead of calls; None: nothing may.

    Raises:
        ValueError: no such format or function, or parameters that are not those of an object.
    """
    if format_name not in FORMATS:
        raise ValueError(f"there is no tool call format {format_name!r}; there are {', '.join(FORMATS)}")
    functions = [tool["function"] for tool in tools]
    if choice != "required":
        functions = [function for function in functions if function["name"] == choice]
        parallel = False
    if not functions:
        raise ValueError(f"tool_choice names {choice!r}, and there is no such function among the tools")
    grammar = _Grammar(tokens or {})
    for number, function in enumerate(functions):
        grammar.rules.append(f"arguments_{number}: %json {json.dumps(_schema(function))}")
    names = [function["name"] for function in functions]
    start = _LAYOUTS[format_name](grammar, names, parallel)
    if answer is not None:
        grammar.rules.append(f"calls: {start}")
        start = "(calls | answer)"
    return grammar.structure(start, thinking, answer)


def after_thinking(answer: Mapping[str, Any], tokens: Mapping[str, int]) -> Structure:
    """A structure behind the end of a `<think>` block that the prompt has opened.

    Args:
        tokens: as for `forced_structure`.
    """
    return _Grammar(tokens).structure("answer", True, answer)


class _Grammar:
    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.tokens = tokens
        self.rules: list[str] = []

    def structure(self, start: str, thinking: bool, answer: Mapping[str, Any] | None) -> Structure:
        """The whole: `start` and the rules, behind thoughts or not."""
        if thinking:
            start = f"{self.thoughts()} {start}"
        text = "\n".join([f"start: {start}", *self.rules]) + "\n"
        return {"kind": "marked_grammar", "value": text} | ({} if answer is None else {"answer": dict(answer)})

    def marker(self, marker: str) -> str:
        return f"<[{self.tokens[marker]}]>" if marker in self.tokens else _text(marker)

    def calls(self, heads: Sequence[str], tail: str = "") -> str:
        """One of the functions: what stands before its arguments, they, and what stands after."""
        options = (f"{head} arguments_{number} {tail}".strip() for number, head in enumerate(heads))
        self.rules.append("call: " + " | ".join(options))
        return "call"

    def thoughts(self) -> str:
        if THINK_END in self.tokens:
            self.rules.append(f'thoughts: /(.|\\n)*/ {self.marker(THINK_END)} "\\n\\n"')
        else:
            self.rules += ['thoughts: thought "\\n\\n"', f"thought[suffix={_text(THINK_END)}]: /(.|\\n)*/"]
        return "thoughts"


def _text(text: str) -> str:
    """A string of the grammar: JSON's escapes are among its own."""
    return json.dumps(text, ensure_ascii=False)


def _repeated(call: str, separator: str, parallel: bool) -> str:
    more = f"{separator} {call}".strip()
    return f"{call} ({more})*" if parallel else call


def _json_heads(names: Sequence[str], key: str) -> list[str]:
    return [_text(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ') for name in names]


def _hermes(grammar: _Grammar, names: Sequence[str], parallel: bool) -> str:
    begin, end = grammar.marker(hermes.BEGIN), grammar.marker(hermes.END)
    call = grammar.calls(_json_heads(names, "arguments"), '"}"')
    grammar.rules.append(f'block: {begin} "\\n" {call} "\\n" {end}')
    return _repeated("block", '"\\n"', parallel)


def _llama3_json(grammar: _Grammar, names: Sequence[str], parallel: bool) -> str:
    return _repeated(grammar.calls(_json_heads(names, "parameters"), '"}"'), '"; "', parallel)


def _pythonic(grammar: _Grammar, names: Sequence[str], parallel: bool) -> str:
    """Arguments as an unpacked dict: so any schema fits, and JSON's own literals may stand in it."""
    call = grammar.calls([_text(f"{name}(**") for name in names], '")"')
    return f'"[" {_repeated(call, _text(", "), parallel)} "]"'


def _mistral(grammar: _Grammar, names: Sequence[str], parallel: bool) -> str:
    """The later form where the vocabulary has its marker, else the list."""
    marker = grammar.marker(mistral.CALLS)
    if mistral.ARGS in grammar.tokens:
        call = grammar.calls([f"{marker} {_text(name)} {grammar.marker(mistral.ARGS)}" for name in names])
        return _repeated(call, "", parallel)
    call = grammar.calls(_json_heads(names, "arguments"), '"}"')
    return f'{marker} "[" {_repeated(call, _text(", "), parallel)} "]"'


_LAYOUTS = {"hermes": _hermes, "llama3_json": _llama3_json, "pythonic": _pythonic, "mistral": _mistral}


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters") or {**NO_PARAMETERS, "additionalProperties": False}
    if parameters.get("type", "object") != "object":
        raise ValueError(f"the parameters of function {function['name']!r} must be of type object")
    return {"x-guidance": _JSON_STYLE, **parameters, "type": "object"}
