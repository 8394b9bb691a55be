"""What makes a model call a function: a grammar whose every text the format's parser reads as calls.

For `tool_choice` "required" or a named function, and for "auto" where what is no call has a structure of its own. The
grammar is llguidance's dialect of Lark; this module only writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rayapp.text.reasoning import END as THINK_END
from rayapp.text.tools import deepseek, hermes, mistral, qwen3_coder
from rayapp.text.tools.formats import FORMATS
from rayapp.text.tools.requests import NO_PARAMETERS, Tool
from rayapp.text.tools.value_types import value_types

Structure = dict[str, Any]
"""`{"kind": "marked_grammar", "value": text}`: a grammar that may name special tokens, see `rayapp.grammar_text`. With
"answer", the structure that its rule `answer` is."""

LINE_END = "\n"
Functions = Sequence[Mapping[str, Any]]

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
    start = _LAYOUTS[format_name](grammar, functions, parallel)
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

    def calls(self, functions: Functions, head: Callable[[str], str], tail: str = "") -> str:
        """One of the functions: what stands before its arguments, by its name, they, and what stands after."""
        options = []
        for number, function in enumerate(functions):
            self.rules.append(f"arguments_{number}: %json {json.dumps(_schema(function))}")
            options.append(f"{head(function['name'])} arguments_{number} {tail}".strip())
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


def _json_head(key: str) -> Callable[[str], str]:
    return lambda name: _text(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ')


def _hermes(grammar: _Grammar, functions: Functions, parallel: bool) -> str:
    begin, end = grammar.marker(hermes.BEGIN), grammar.marker(hermes.END)
    call = grammar.calls(functions, _json_head("arguments"), '"}"')
    grammar.rules.append(f'block: {begin} "\\n" {call} "\\n" {end}')
    return _repeated("block", '"\\n"', parallel)


def _llama3_json(grammar: _Grammar, functions: Functions, parallel: bool) -> str:
    return _repeated(grammar.calls(functions, _json_head("parameters"), '"}"'), '"; "', parallel)


def _pythonic(grammar: _Grammar, functions: Functions, parallel: bool) -> str:
    """Arguments as an unpacked dict: so any schema fits, and JSON's own literals may stand in it."""
    call = grammar.calls(functions, lambda name: _text(f"{name}(**"), '")"')
    return f'"[" {_repeated(call, _text(", "), parallel)} "]"'


def _mistral(grammar: _Grammar, functions: Functions, parallel: bool) -> str:
    """The later form where the vocabulary has its marker, else the list."""
    marker = grammar.marker(mistral.CALLS)
    if mistral.ARGS in grammar.tokens:
        call = grammar.calls(functions, lambda name: f"{marker} {_text(name)} {grammar.marker(mistral.ARGS)}")
        return _repeated(call, "", parallel)
    call = grammar.calls(functions, _json_head("arguments"), '"}"')
    return f'{marker} "[" {_repeated(call, _text(", "), parallel)} "]"'


def _qwen3_coder(grammar: _Grammar, functions: Functions, parallel: bool) -> str:
    """Values as they stand in XML; of strings neither patterns nor formats are kept to."""
    begin, end = grammar.marker(qwen3_coder.BEGIN), grammar.marker(qwen3_coder.END)
    grammar.rules.append(f"text[suffix={_text(qwen3_coder.PARAMETER_END)}]: /(.|\\n)*/")
    calls = []
    for number, function in enumerate(functions):
        schema, required = _schema(function), _required(function)
        parts = [_text(f"{qwen3_coder.FUNCTION}{function['name']}>\n")]
        for place, name in enumerate(dict.fromkeys([*schema.get("properties", {}), *required])):
            if not re.fullmatch(qwen3_coder.NAME, name):
                raise ValueError(f"function {function['name']!r} has a parameter {name!r}, which XML cannot name")
            rule = f"value_{number}_{place}"
            grammar.rules.append(f"{rule}: {_xml_value(schema, name)}")
            part = f"{_text(qwen3_coder.PARAMETER + name + '>' + LINE_END)} {rule} {_text(LINE_END)}"
            parts.append(part if name in required else f"({part})?")
        calls.append(" ".join([*parts, _text(qwen3_coder.FUNCTION_END)]))
    grammar.rules += [f"call: {' | '.join(calls)}", f'block: {begin} "\\n" call "\\n" {end}']
    return _repeated("block", '"\\n"', parallel)


def _xml_value(schema: Mapping[str, Any], name: str) -> str:
    """What may stand for a parameter, and its end marker."""
    types, value, end = value_types(schema, name), schema.get("properties", {}).get(name), qwen3_coder.PARAMETER_END
    if not isinstance(value, dict):
        return "text"
    if isinstance(value.get("enum"), list):
        options = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in value["enum"]]
        return " | ".join(_text(f"{one}\n{end}") for one in options)
    least, most = value.get("minLength", 0), value.get("maxLength")
    if types == {"string"} and (least or most is not None):
        if not (type(least) is int and (most is None or type(most) is int)):
            raise ValueError(f"minLength and maxLength of parameter {name!r} must be integers")
        return f"/[^<]{{{least},{'' if most is None else most}}}/ {_text(LINE_END + end)}"
    if "string" in types:
        return "text"
    around = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return f"%json {json.dumps({'x-guidance': _JSON_STYLE, **around, **value})} {_text(LINE_END + end)}"


def _deepseek_v3(grammar: _Grammar, functions: Functions, parallel: bool) -> str:
    begin, end = (grammar.marker(one) for one in (deepseek.CALL, deepseek.CALL_END))
    separator = grammar.marker(deepseek.SEPARATOR)
    call = grammar.calls(
        functions,
        lambda name: f'{begin} "function" {separator} {_text(name + LINE_END + deepseek.FENCE + LINE_END)}',
        f"{_text(LINE_END + deepseek.FENCE_END)} {end}",
    )
    return _deepseek_block(grammar, _repeated(call, '"\\n"', parallel))


def _deepseek_v31(grammar: _Grammar, functions: Functions, parallel: bool) -> str:
    begin, end = (grammar.marker(one) for one in (deepseek.CALL, deepseek.CALL_END))
    separator = grammar.marker(deepseek.SEPARATOR)
    call = grammar.calls(functions, lambda name: f"{begin} {_text(name)} {separator}", end)
    return _deepseek_block(grammar, _repeated(call, "", parallel))


def _deepseek_block(grammar: _Grammar, calls: str) -> str:
    return f"{grammar.marker(deepseek.BEGIN)} {calls} {grammar.marker(deepseek.END)}"


_LAYOUTS: dict[str, Callable[[_Grammar, Functions, bool], str]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "pythonic": _pythonic,
    "mistral": _mistral,
    "qwen3_coder": _qwen3_coder,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
}


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters") or {**NO_PARAMETERS, "additionalProperties": False}
    if parameters.get("type", "object") != "object":
        raise ValueError(
            f"the parameters of function {function['name']!r} must be of type 'object', not {_cut(parameters['type'])}"
        )
    if not isinstance(parameters.get("properties", {}), dict):
        said = _cut(parameters["properties"])
        raise ValueError(f"the properties of function {function['name']!r} must be an object, not {said}")
    return {"x-guidance": _JSON_STYLE, **parameters, "type": "object"}


def _cut(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _required(function: Mapping[str, Any]) -> list[str]:
    required = (function.get("parameters") or {}).get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ValueError(f"required of function {function['name']!r} must be a list of names, not {_cut(required)}")
    return required
