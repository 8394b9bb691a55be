"""Tool calls out of text: the same however it is cut, nothing lost, nothing doubled."""

from __future__ import annotations

import ast
import itertools
import json
import random
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.grammar_text import grammar_text
from rayapp.text.detokenizer import Detokenizer
from rayapp.text.pieces import Content, Piece, ToolArguments, ToolStart, collected, merged
from rayapp.text.reasoning import ReasoningParser
from rayapp.text.reply import ReplyParser
from rayapp.text.template import ChatTemplate
from rayapp.text.tokenizer import Tokenizer
from rayapp.text.tools import (
    FORMATS,
    after_thinking,
    calls_for_template,
    forced_structure,
    functions_of,
    parser_name_for,
    tool_parser,
    tools_for_template,
)
from rayapp.text.tools.json_scanner import JsonScanner, json_object
from rayapp.text.tools.python_scanner import MAX_DEPTH, PythonScanner
from rayapp.text.tools.value_types import type_of

KNOWN = ["f", "get_weather"]
LONGEST_MARKER = 20


def feed(format_name: str, pieces: Sequence[str], known: Collection[str] = KNOWN) -> list[Piece]:
    numbers = itertools.count()
    parser = tool_parser(format_name, known, lambda: f"id{next(numbers)}")
    found: list[Piece] = []
    for piece in pieces:
        found += parser.push(piece)
        assert len(parser._rest) < LONGEST_MARKER  # what is read again with the next piece: so the cost is linear
    return merged([*found, *parser.finish()])


def summary(format_name: str, text: str, known: Collection[str] = KNOWN) -> tuple[str, list[tuple[str, str]]]:
    """Content, and name and arguments of each call; the same in one piece and character by character."""
    pieces = feed(format_name, [text], known)
    assert feed(format_name, list(text), known) == pieces
    reply = collected(pieces)
    return reply.content, [(call.name, call.arguments) for call in reply.calls]


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(edge, len(text)) for edge in cuts), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(edges)]


F = ("f", "{}")

HERMES = [
    (
        '<tool_call>\n{"name": "f", "arguments": {"a": {"b": "}\\"{"}}}\n</tool_call>',
        "",
        [("f", '{"a": {"b": "}\\"{"}}')],
    ),
    ('Hi.\n<tool_call>{"arguments": {"x" : 1},"name":"f"}</tool_call> Bye', "Hi.\n Bye", [("f", '{"x" : 1}')]),
    (
        '\n<tool_call>{"name":"f"}</tool_call>\n\n<tool_call>{"name":"g","parameters":null}</tool_call>\n',
        "",
        [F, ("g", "{}")],
    ),
    ('<tool_call>{"name":"f","arguments":"{\\"你\\": 1}"}</tool_call>', "", [("f", '{"你": 1}')]),
    ('<tool_call>{"name":"f","arguments":{"a":"x\ny"}}</tool_call>', "", [("f", '{"a":"x\\ny"}')]),  # a raw line end
    ('<tool_call>{"id":5,"name":"f","more":[{}],"arguments":{}}</tool_call>', "", [F]),
    ('<tool_call>{"name":"f","arguments":{}}\n{"name":"g"}</tool_call>', "", [F, ("g", "{}")]),  # two in a block
    ('<tool_call>{"name":"f","arguments":{}}<tool_call>{"name":"g"}', "", [F, ("g", "{}")]),  # no end markers
    ('<tool_call>{"name":"f","arguments":{"a":1}</tool_call>', "", [("f", '{"a":1}')]),  # a bracket is missing
    (
        '<tool_call>{"name":"f","arguments":{"a": tru}}</tool_call>',
        "}}</tool_call>",
        [("f", '{"a": tru')],
    ),  # breaks off
    ('<tool_call>{"name":"f","arguments":{"a": "b', "", [("f", '{"a": "b')]),  # cut
    ('<tool_call>{"name":"f","arguments":{}, oops}</tool_call>', ", oops}</tool_call>", [F]),
    ("<tool_call>oops</tool_call>", None, []),
    ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, []),
    ('<tool_call>{"name": "", "arguments": {}}</tool_call>', None, []),
    ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', None, []),
    ('<tool_call>{"arguments": {"a": 1}, "name": 5}</tool_call>', None, []),
    ('<tool_call>{"arguments": {"a": 1}}</tool_call>', None, []),
    ('<tool_call>{"name": "f", "arg', None, []),
    ('<tool_call><tool_call>{"name":"f"}</tool_call>', "<tool_call>", [F]),
    ("a < b, <tool, </tool_call> <tool_", None, []),
    (" \n ", None, []),
]
LLAMA3 = [
    ('{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {}}', "", [("f", '{"a": 1}'), F]),
    ('{"name": "f", "parameters": {}}\n{"parameters": {}, "name": "f"};', "", [F, F]),
    ('<|python_tag|>{"type": "function", "name": "new", "parameters": {}}', "", [("new", "{}")]),
    (
        '<|python_tag|>{"name": "new", "x": 1};<|python_tag|>{"name": "f"};{"name": "g"}',
        "",
        [("new", "{}"), F, ("g", "{}")],
    ),
    ('Sure.\n\n {"name": "f", "parameters": {}}\nDone', "Sure.\n\n \nDone", [F]),
    ('{"name": "f", "parameters": {}}; and then', "; and then", [F]),
    ('{"name": "new", "parameters": {}}', None, []),  # not one of the functions
    ('{"name": "f", "age": 3}', None, []),
    ('{"name": "f"}', None, []),
    ('It is {"name": "f", "parameters": {}}', None, []),  # not on a line of its own
    ('{\n  "city": {"name": "f", "parameters": {}}\n}', None, []),
    ("<|python_tag|>print(1)", None, []),
    ("{{{", None, []),
]
PYTHONIC = [
    ('[f(a=1, b="x\\"])", c=[1,{"k":None}], d=true), get_weather()]', "",
     [("f", '{"a": 1, "b": "x\\"])", "c": [1, {"k": null}], "d": true}'), ("get_weather", "{}")]),
    ('<|tool_call_start|>[new-one(p=r"\\d+")]<|tool_call_end|>Done', "Done", [("new-one", '{"p": "\\\\d+"}')]),
    ('<|python_start|>[ f( a = -1.5 ,\n b = (1, \'你\') ) ]<|python_end|>', "", [("f", '{"a": -1.5, "b": [1, "你"]}')]),
    ('[f(**{"a": "\\/x"})]', "", [("f", '{"a": "\\/x"}')]),
    ('[f(a="\\d\n")]', "", [("f", '{"a": "\\\\d\\n"}')]),  # Python forbids the line end
    ('[f(a="\\ud83d\\ude00\\ud800")]', "", [("f", '{"a": "\\ud83d\\ude00\\ud800"}')]),
    ("Look:\n[f()]\nDone", "Look:\n\nDone", [F]),
    ("[f()]\n[f()]", "", [F, F]),
    ("[f()] [f()]", " [f()]", [F]),
    ("[f(), oops]", ", oops]", [F]),
    ("[f(), f(a=", ", f(a=", [F]),
    ("[f(), ", "", [F]),
    ("Look: [f()]", None, []),
    ("[new()]", None, []),  # not one of the functions
    ("[f](url) [1, 2]", None, []),
    ("[f(1)]", None, []),
    ("[f(a=b)]", None, []),
    ("[f(a=1, a=2)]", None, []),
    ("[f(a=1e999)]", None, []),
    ("[f(a=f'{x}')]", None, []),
    ("[f(a=__import__('os').system('true'))]", None, []),
    ("[f(a={1: 2})]", None, []),
    ("[f(a=(1])]", None, []),
]  # fmt: skip
MISTRAL = [
    ('[TOOL_CALLS] [{"name":"f","arguments":{"a":1}}, {"arguments":{},"name":"g","id":"abc"}]', "",
     [("f", '{"a":1}'), ("g", "{}")]),
    ('Hi[TOOL_CALLS]f[ARGS]{"a":[1]}[TOOL_CALLS]g[CALL_ID]abc123def[ARGS]{}', "Hi", [("f", '{"a":[1]}'), ("g", "{}")]),
    ('[TOOL_CALLS]f {"a":1} Done', " Done", [("f", '{"a":1}')]),
    ('[TOOL_CALLS]{"name":"f","arguments":{}}', "", [F]),
    ('[TOOL_CALLS][{"name":"f","arguments":{}}, oops]', ", oops]", [F]),
    ('[TOOL_CALLS][{"name":"f","arguments":{}},', "", [F]),
    ('[TOOL_CALLS]f[ARGS]{"a": oops}', " oops}".lstrip(), [("f", '{"a": ')]),
    ("[TOOL_CALLS] hello [ARGS", None, []),
    ("[TOOL_CALLS][]", None, []),
    ("[TOOL_CALLS]f[ARGS][1]", None, []),
    ("[TOOL_CALLS]" + "f" * 300 + "[ARGS]{}", None, []),
    ("[1, 2] [TOOL", None, []),
]  # fmt: skip
CODER = [
    ("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx \"y\"\n z\n</parameter>\n"
     "</function>\n</tool_call>", "", [("f", '{"a": "1", "b": "x \\"y\\"\\n z"}')]),
    ("Hi.\n<tool_call><function=f></function></tool_call> Bye", "Hi.\n Bye", [F]),
    ("<tool_call><function=f></function></tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>", "",
     [F, ("g", "{}")]),
    ("<tool_call><function=f></function><function=g></function></tool_call>", "", [F, ("g", "{}")]),
    ("<function=f><parameter=a>你</parameter></function>", "", [("f", '{"a": "你"}')]),  # no block
    ("<tool_call><function=f><parameter=a></parameter><parameter=b>\n</parameter></function>", "",
     [("f", '{"a": "", "b": ""}')]),
    ("<tool_call><function=f><parameter=a>\n\n<b>\n\n</parameter></function>", "", [("f", '{"a": "\\n<b>\\n"}')]),
    ("<tool_call><function=f><parameter=a>1</parameter></tool_call>x", "x", [("f", '{"a": "1"}')]),  # no </function>
    ("<tool_call><function=f><parameter=a>1</par", "", [("f", '{"a": "1')]),  # cut
    ("<tool_call><function=f><parameter=a>1</parameter>\n<par", "", [("f", '{"a": "1"')]),
    ("<tool_call><function=f><parameter=a>1</parameter> oops</function>", " oops</function>", [("f", '{"a": "1"')]),
    ("<tool_call><function=f></function> oops", " oops", [F]),
    ("<tool_call>oops</tool_call>", None, []),
    ("<tool_call><function=f", None, []),
    ("<tool_call><function=a\nb>", None, []),
    ("<function=new></function>", None, []),  # neither marked nor one of the functions
    ("<tool_call>" + "<function=" + "f" * 300 + ">", None, []),
    ("a < b, <function, </tool_call> <tool_", None, []),
]  # fmt: skip
V3 = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
V3_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31_CALL = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
DEEPSEEK = [
    ("Hi." + V3.format(V3_CALL.format("f", '{"a": 1}') + "\n" + V3_CALL.format("g", "{}")), "Hi.",
     [("f", '{"a": 1}'), ("g", "{}")]),
    (V3.format(V31_CALL.format("f", '{"a": "<｜tool▁sep｜>"}') + V31_CALL.format("function", "{}")), "",
     [("f", '{"a": "<｜tool▁sep｜>"}'), ("function", "{}")]),
    (V31_CALL.format("f", '{"a":"x\ny"}') + " Bye", " Bye", [("f", '{"a":"x\\ny"}')]),  # no outer markers
    (V3.format(V31_CALL.format("f", " {} ")) + "Done", "Done", [F]),
    ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", "", [F]),
    ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n``", "", [F]),
    ('<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "b', "", [("f", '{"a": "b')]),  # cut
    ('<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": oops}', "oops}", [("f", '{"a": ')]),  # breaks off
    ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜>", None, []),
    ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```py\n", None, []),
    ("<｜tool▁call▁begin｜>" + "f" * 300 + "<｜tool▁sep｜>{}", None, []),
    ("<｜tool▁calls▁begin｜> oops <｜tool▁calls▁end｜>", None, []),
    ("<｜tool▁call▁begin｜>f<｜tool", None, []),
    ("<｜tool▁sep｜> <｜tool▁c", None, []),
]  # fmt: skip
EXAMPLES = [
    (format_name, *example)
    for format_name, examples in [
        ("hermes", HERMES),
        ("llama3_json", LLAMA3),
        ("pythonic", PYTHONIC),
        ("mistral", MISTRAL),
        ("qwen3_coder", CODER),
        ("deepseek_v3", DEEPSEEK),
        ("deepseek_v31", DEEPSEEK),
    ]
    for example in examples
]


@pytest.mark.parametrize(("format_name", "text", "content", "calls"), EXAMPLES)
def test_examples(format_name: str, text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    assert summary(format_name, text) == (text if content is None else content, calls)


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *(
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        '{"name": "f", "arguments": {"a": 1}}',
        '"name": "f", ',
        '"parameters": ',
    ),
    *('{"a": "x', '\\"', "\\", '"', "{", "}", "[", "]", "(", ")", "[f(a=1, b='y')", "f(", "a=", ":", ",", ";", "'"),
    *("<function=", "<function=f>", "</function>", "<parameter=a>", "</parameter>", ">", "<｜tool▁calls▁begin｜>"),
    *("<｜tool▁call▁begin｜>f", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "```json", "```"),
    *(" ", "\n", "<", "text", "你", "1", "null", "\x00", "\ud800"),
]
documents = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


@pytest.mark.parametrize("format_name", FORMATS)
@given(text=documents, cuts=st.lists(st.integers(0, 200), max_size=10))
@settings(max_examples=300)
def test_any_pieces_give_the_same(format_name: str, text: str, cuts: list[int]) -> None:
    whole = feed(format_name, [text])
    assert feed(format_name, cut(text, cuts)) == feed(format_name, list(text)) == whole
    calls = [piece for piece in whole if isinstance(piece, ToolStart)]
    if not calls:
        assert whole == ([Content(text)] if text else [])
    assert [call.index for call in calls] == list(range(len(calls)))
    at = 0  # content stands in the text, in this order, and nothing of it twice
    for piece in whole:
        if isinstance(piece, Content):
            at = text.index(piece.text, at) + len(piece.text)


words = st.text(st.characters(codec="utf-8", exclude_characters='<[{"\n'), min_size=1).filter(
    lambda text: not text.translate({ord(","): " ", ord(";"): " "}).isspace()  # more than what separates calls
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
argument_dicts = st.dictionaries(st.from_regex(r"[a-z]{2,6}x", fullmatch=True), values, max_size=3)
turns = st.lists(st.tuples(st.sampled_from(KNOWN), argument_dicts), min_size=1, max_size=3)


def as_json(name: str, arguments: dict[str, Any], key: str, swapped: bool, indent: int | None) -> str:
    call = {key: arguments, "name": name} if swapped else {"name": name, key: arguments}
    return json.dumps(call, ensure_ascii=indent is None, indent=indent)


def as_python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


@given(st.data(), turns, words, words)
def test_what_is_written_is_read_back(data: st.DataObject, calls: list[Any], before: str, after: str) -> None:
    key, swapped = data.draw(st.sampled_from(["arguments", "parameters"])), data.draw(st.booleans())
    written = [as_json(*call, key, swapped, data.draw(st.sampled_from([None, 2]))) for call in calls]
    texts = {
        "hermes": "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in written),
        "llama3_json": "; ".join(written),
        "mistral": "[TOOL_CALLS][" + ", ".join(written) + "]",
        "pythonic": "[" + ", ".join(as_python(*call) for call in calls) + "]",
        "deepseek_v3": V3.format("\n".join(V3_CALL.format(name, json.dumps(given, indent=1)) for name, given in calls)),
        "deepseek_v31": V3.format("".join(V31_CALL.format(name, json.dumps(given)) for name, given in calls)),
    }
    for format_name, text in texts.items():
        content, found = summary(format_name, f"{before}\n{text}\n{after}")
        assert content == f"{before}\n\n{after}"
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls
        for _, arguments in found:
            arguments.encode()
    new_form = "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)
    assert summary("mistral", new_form) == ("", [(name, json.dumps(arguments)) for name, arguments in calls])


@given(turns, words, words)
def test_what_is_written_in_xml_is_read_back(calls: list[Any], before: str, after: str) -> None:
    """By the schemas, which say what is a string."""
    known: dict[str, Any] = {}
    texts = []
    for number, (_, arguments) in enumerate(calls):
        kinds = {key: {"type": type_of(value)} for key, value in arguments.items()}
        known[f"f{number}"] = {"type": "object", "properties": kinds}
        written = {key: one if isinstance(one, str) else json.dumps(one) for key, one in arguments.items()}
        parameters = "".join(f"<parameter={key}>\n{one}\n</parameter>\n" for key, one in written.items())
        texts.append(f"<tool_call>\n<function=f{number}>\n{parameters}</function>\n</tool_call>")
    content, found = summary("qwen3_coder", f"{before}\n" + "\n".join(texts) + f"\n{after}", known)
    assert content == f"{before}\n\n{after}"
    assert [(name, json.loads(arguments)) for name, arguments in found] == [
        (f"f{number}", arguments) for number, (_, arguments) in enumerate(calls)
    ]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", '"12"'),
        ({"type": "integer"}, " 12\n", "12"),
        ({"type": "integer"}, "twelve", '"twelve"'),
        ({"type": "number"}, "12", "12"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "boolean"}, "True", "true"),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "nil", '"nil"'),
        ({"type": "object"}, '{"a": [1, "你"]}', '{"a": [1, "你"]}'),
        ({"type": "array"}, "[1", '"[1"'),
        ({"enum": ["1", 2]}, "2", "2"),
        ({"enum": ["1", "2"]}, "2", '"2"'),
        ({"const": 5}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/flag"}]}, "false", "false"),
        ({"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/flag"}]}, "[]", '"[]"'),
        ({"$ref": "#/$defs/loop"}, "1", "1"),
        ({"$ref": "elsewhere"}, "1", "1"),
        ({}, "1", "1"),
        ({}, "one", '"one"'),
        ({"type": 5}, "1", "1"),
        (None, "1", '"1"'),
    ],
)
def test_values_are_what_the_schema_says(schema: Any, text: str, value: str) -> None:
    root = {"properties": {"x": schema}, "$defs": {"flag": {"type": "boolean"}, "loop": {"$ref": "#/$defs/loop"}}}
    written = f"<tool_call><function=f><parameter=x>\n{text}\n</parameter></function></tool_call>"
    assert summary("qwen3_coder", written, {"f": root}) == ("", [("f", f'{{"x": {value}}}')])  # type: ignore[arg-type]


def test_strings_in_xml_come_as_they_are_written() -> None:
    parser = tool_parser("qwen3_coder", KNOWN, lambda: "id")
    text = '<tool_call>\n<function=f>\n<parameter=a>\nx"y'
    given = [piece for character in text for piece in parser.push(character)]
    assert given == [ToolStart(0, "id", "f"), *(ToolArguments(0, one) for one in ['{"a": "', "x", '\\"', "y"])]


def test_arguments_come_as_they_are_written() -> None:
    for format_name, text in [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 12}}</tool_call>'),
        ("llama3_json", '{"name": "f", "parameters": {"a": 12}}'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 12}'),
        ("deepseek_v3", V3_CALL.format("f", '{"a": 12}')),
        ("deepseek_v31", V31_CALL.format("f", '{"a": 12}')),
    ]:
        parser = tool_parser(format_name, KNOWN, lambda: "id")
        given = [parser.push(character) for character in text]
        begin = text.index('{"a"')
        assert given[begin] == [ToolStart(0, "id", "f"), ToolArguments(0, "{")]
        shown = [pieces[0] for pieces in given[begin + 1 :] if pieces]
        assert shown == [ToolArguments(0, character) for character in '"a": 12}']


@pytest.mark.parametrize("format_name", FORMATS)
def test_content_is_not_held(format_name: str) -> None:
    parser = tool_parser(format_name, KNOWN)
    text = "First, x > y; (then) a list: 1, 2.\nAnd more."
    assert [parser.push(character) for character in text] == [[Content(character)] for character in text]


def test_ids() -> None:
    ids = {format_name: [piece.id for piece in tool_parser(format_name).push(text) if isinstance(piece, ToolStart)]
           for format_name, text in [("hermes", '<tool_call>{"name":"f"}<tool_call>{"name":"f"}'),
                                     ("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{}")]}  # fmt: skip
    for pattern, format_name in [(r"call_[A-Za-z0-9]{24}", "hermes"), (r"[A-Za-z0-9]{9}", "mistral")]:
        first, second = ids[format_name]
        assert re.fullmatch(pattern, first) and re.fullmatch(pattern, second) and first != second


def test_without_tools_any_name_is_a_call() -> None:
    assert summary("llama3_json", '{"name": "new", "parameters": {}}', known=[]) == ("", [("new", "{}")])
    assert summary("pythonic", "[new()]", known=[]) == ("", [("new", "{}")])


@given(values, st.sampled_from([None, 1]), st.sampled_from(["", " ", "x", "}", ","]))
def test_json_values_are_read_to_their_end(value: Any, indent: int | None, after: str) -> None:
    text = json.dumps([value], ensure_ascii=False, indent=indent)
    scanner = JsonScanner()
    assert scanner.feed(text + after, 0) == (len(text), text)
    assert scanner.done and not scanner.failed


@given(
    st.lists(
        st.sampled_from([*'{}[],:"\\ \n-+.0159eEunl', "true", "null", '"a"', "\\u00e9", "\\u00e", "{}"]), max_size=12
    )
)
def test_json_is_what_json_is(parts: list[str]) -> None:
    text = "{" + "".join(parts) + "}"
    try:
        expected = json.loads(text, strict=False)
    except ValueError:
        expected = None
    read = json_object(text)
    assert (read is None) == (expected is None)
    if read is not None:
        assert json.loads(read) == expected  # strictly


@pytest.mark.parametrize("value", ['"\\u00e"', '"\\x"', "01", "1.", "-", "nul", "NaN", "[1,]", "'a'", '{"a"}', "1 2"])
def test_almost_json(value: str) -> None:
    assert json_object(f'{{"a": {value}}}') is None


@given(argument_dicts)
def test_python_literals_are_what_they_are_in_python(arguments: dict[str, Any]) -> None:
    source = ", ".join(f"{key}={value!r}" for key, value in arguments.items()) + ")"
    scanner = PythonScanner()
    assert scanner.feed(source, 0) == len(source)
    read = scanner.arguments()
    assert read is not None
    assert json.loads(read) == {key: ast.literal_eval(repr(value)) for key, value in arguments.items()}


@pytest.mark.parametrize(
    "value", ["[" * (MAX_DEPTH + 1), "-" * 100_000 + "1", "1" + "+1" * 100_000, "9" * 10_000, "x" * 10**6]
)
def test_hostile_python_is_content(value: str) -> None:
    text = f"[f(a={value})]"
    assert collected(feed("pythonic", [text])).content == text


@pytest.mark.parametrize("format_name", FORMATS)
def test_hostile_json_is_read(format_name: str) -> None:
    deep = '{"a":' * 20_000 + "1" + "}" * 20_000
    begin = {"hermes": "<tool_call>", "llama3_json": "", "mistral": "[TOOL_CALLS]", "pythonic": "<|python_start|>"}
    text = f'{begin.get(format_name, "")}{{"name": "f", "parameters": {deep}}}'
    if format_name.startswith("deepseek"):
        text = f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{deep}"
    reply = collected(feed(format_name, [text]))
    as_content = format_name in ("pythonic", "qwen3_coder")
    assert (reply.calls[0].arguments if reply.calls else reply.content) == (text if as_content else deep)


def test_hostile_values_in_xml_are_strings() -> None:
    for value in ['{"a":' * 20_000 + "1" + "}" * 20_000, "9" * 10_000, "[" * 100_000]:
        text = f"<tool_call><function=f><parameter=a>{value}</parameter></function>"
        parser = tool_parser("qwen3_coder", {"f": {"properties": {"a": {"type": "array"}}}})
        reply = collected([*parser.push(text), *parser.finish()])
        assert json.loads(reply.calls[0].arguments) == {"a": value}


# --- what the models' templates show -------------------------------------------------------------------------------

QWEN = (
    "{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}{%- for tool in tools %}{{- tool | tojson }}"
    '{%- endfor %}{{- \'\\n</tools>\\nAnswer with <tool_call>\\n{"name": <function-name>, "arguments": <args>}\\n'
    "</tool_call><|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}{{- message.content or '' }}"
    '{%- for call in message.tool_calls or [] %}{{- \'\\n<tool_call>\\n{"name": "\' + call.function.name + '
    "'\", \"arguments\": ' }}{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
)
TEMPLATES: list[tuple[str | None, list[str], str | None]] = [
    (QWEN, ["<tool_call>", "</tool_call>"], "hermes"),
    (QWEN + "{%- if '</think>' in message.content %}{% endif %}", ["<tool_call>", "<think>"], "hermes"),
    ("'<tool_call>\\n{\\\"name\\\": f, \\\"arguments\\\": {}}'", [], "hermes"),
    ("{{ '<tool_call>\\n<function=' + name + '>\\n<parameter=' }} \"arguments\"", [], "qwen3_coder"),
    ("{{ '<tool_call>\\n<function=' + name + '>' }} \"arguments\"", [], None),  # calls in XML of another kind
    ("{{ '<tool_call>' + name + '\\n<arg_key>' }}", [], None),
    (
        "{{ '<|start_header_id|>' + role }} Respond as {\"name\": name, \"parameters\": values}."
        "{% if builtin_tools %}{{ '<|python_tag|>' + call.name + '.call(' }}{% endif %}",
        ["<|python_tag|>"],
        "llama3_json",
    ),
    ("{{ '<|start_header_id|>' }}{{ '{\"name\": \"' + name + '\", ' }}{{ '\"parameters\": ' }}", [], "llama3_json"),
    ("{{ '<|start_header_id|>' + message.role + '<|end_header_id|>' + message.content }}", ["<|python_tag|>"], None),
    ("{{ '<|header_start|>' }} Answer as [func_name1(params_name1=value1, ...), func_name2(params)]", [], "pythonic"),
    ("{{ '<|tool_list_start|>' + (tools | tojson) }}", ["<|tool_call_start|>"], "pythonic"),
    ("{{ bos_token + '[AVAILABLE_TOOLS]' }}{{ '[TOOL_CALLS][' + (call.function | tojson) + ']' }}", [], "mistral"),
    ("{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments }}", ["[ARGS]"], "mistral"),
    ("{{ '[INST]' + message.content + '[/INST]' }}", ["[TOOL_CALLS]"], None),
    ("{{ '<｜tool▁calls▁begin｜>' }}{{ '\\n```json' }}{{ '<｜Assistant｜><think>\\n' }}", [], "deepseek_v3"),
    ("{{ '<｜tool▁calls▁begin｜>' }}{{ '<｜Assistant｜><think>\\n' }}", ["<tool_call>", "<think>"], "deepseek_v31"),
    (None, ["<tool_call>"], None),
]  # fmt: skip


@pytest.mark.parametrize(("source", "added", "expected"), TEMPLATES)
def test_format_by_template(source: str | None, added: list[str], expected: str | None) -> None:
    assert parser_name_for(source, added) == expected


def test_the_bundled_model_has_no_tools(smol_path: Path) -> None:
    tokenizer = Tokenizer.load(smol_path)
    template = tokenizer.fast.chat_template
    assert isinstance(template, str)
    assert parser_name_for(template, tokenizer.added_tokens) is None


def test_an_unknown_format() -> None:
    with pytest.raises(ValueError, match="no tool call format 'nope'; there are hermes, llama3_json"):
        tool_parser("nope")
    with pytest.raises(ValueError, match="no tool call format"):
        forced_structure("nope", TOOLS, "required")


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 12},
                    "days": {"$ref": "#/$defs/days"},
                    "units": {"enum": ["°C", '"F"', None]},
                },
                "required": ["city"],
                "additionalProperties": False,
                "$defs": {"days": {"type": "integer", "minimum": 0, "maximum": 99}},
            },
        },
    },
    {"type": "function", "function": {"name": "get-time", "description": "The time."}},
    {"type": "function", "function": {"name": "free", "parameters": {"properties": {"x": {"type": "boolean"}}}}},
]


def test_tools_for_the_template() -> None:
    first, second, _ = tools_for_template(TOOLS)
    assert first["function"] == {
        "name": "get_weather",
        "description": "",
        "parameters": TOOLS[0]["function"]["parameters"],
    }
    assert second["function"]["parameters"] == {"type": "object", "properties": {}}
    assert TOOLS[0]["function"]["strict"]  # the request's own is left as it was


def test_calls_of_the_history_render_as_the_model_writes_them(smol_path: Path) -> None:
    """What goes into the prompt is what the parser reads: arguments are not JSON in JSON."""
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "你"}'}},
        {"id": "2", "type": "function", "function": {"name": "f", "arguments": ""}},
        {"id": "3", "type": "function", "function": {"name": "f", "arguments": '{"cut'}},
    ]
    for_template = calls_for_template(calls)
    assert [call["function"]["arguments"] for call in for_template] == [{"a": "你"}, {}, '{"cut']
    rendered = ChatTemplate(Tokenizer.load(smol_path), QWEN).render(
        [{"role": "assistant", "content": None, "tool_calls": for_template[:2]}]
    )
    _, found = summary("hermes", rendered)
    assert [(name, json.loads(arguments)) for name, arguments in found] == [("f", {"a": "你"}), ("f", {})]


def test_templates_that_put_arguments_between_texts(smol_path: Path) -> None:
    """As DeepSeek's do: what goes into the prompt is JSON, which the parser reads."""
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ '<｜tool▁call▁begin｜>' + c.type }}"
        "{{ '<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' + c.function.arguments }}"
        "\n```<｜tool▁call▁end｜>"
        "{% endfor %}{% endfor %}"
    )
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "你"}'}}]
    rendered = ChatTemplate(Tokenizer.load(smol_path), template).render(
        [{"role": "assistant", "content": None, "tool_calls": calls_for_template(calls)}]
    )
    assert summary("deepseek_v3", rendered) == ("", [("f", '{"a": "你"}')])


# --- forced calls --------------------------------------------------------------------------------------------------


class Writer:
    """Writes random texts of a grammar, token by token."""

    def __init__(self, path: Path) -> None:
        pytest.importorskip("llguidance")
        from llguidance.hf import from_tokenizer

        self.tokenizer = Tokenizer.load(path)
        self.backend = from_tokenizer(self.tokenizer.fast)

    def text(self, structure: dict[str, Any], seed: int, begin: str = "") -> str:
        from llguidance import LLMatcher

        assert structure["kind"] == "marked_grammar"
        grammar = grammar_text(structure)
        assert not LLMatcher.validate_grammar(grammar, self.backend)
        matcher, chosen = LLMatcher(self.backend, grammar), random.Random(seed)
        ids = self.tokenizer.encode(begin)
        assert matcher.consume_tokens(ids)
        while not matcher.is_stopped() and not (len(ids) > 60 and matcher.is_accepting()):
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            ids.append(int(chosen.choice(allowed)))
            assert matcher.consume_token(ids[-1]), matcher.get_error()
            assert len(ids) < 1000
        shown = set(self.tokenizer.special_ids) - {self.backend.eos_token}
        detokenizer = Detokenizer(self.tokenizer, shown=shown)
        return detokenizer.push(ids) + detokenizer.finish()


@pytest.fixture(scope="module")
def writer(smol_path: Path) -> Writer:
    return Writer(smol_path)


def check_calls(calls: list[tuple[str, str]]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    parameters = {tool["function"]["name"]: tool["function"].get("parameters") for tool in TOOLS}
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), parameters[name] or {"maxProperties": 0})


@pytest.mark.parametrize("format_name", FORMATS)
def test_whatever_is_forced_is_read_as_calls(writer: Writer, format_name: str) -> None:
    structure = forced_structure(format_name, TOOLS[:2], "required")
    several = False
    for seed in range(8):
        content, calls = summary(format_name, writer.text(structure, seed), functions_of(TOOLS))
        assert content == "" and calls
        check_calls(calls)
        several = several or len(calls) > 1
    assert several
    one = forced_structure(format_name, TOOLS[:2], "required", parallel=False)
    named = forced_structure(format_name, TOOLS, "get_weather")
    for seed in range(4):
        assert len(summary(format_name, writer.text(one, seed), functions_of(TOOLS))[1]) == 1
        _, [(name, _)] = summary(format_name, writer.text(named, seed), functions_of(TOOLS))
        assert name == "get_weather"


@pytest.mark.parametrize("format_name", FORMATS)
def test_any_parameters_make_a_grammar_or_a_refusal(format_name: str) -> None:
    odd: list[Any] = [None, True, -1, "x", [], {}, [{}], {"type": 5}, {"enum": [{}]}, {"$ref": 5}, {"anyOf": [5]}]
    schemas = [{field: one} for field in ("properties", "required", "$defs", "x") for one in odd]
    schemas += [{"properties": {"a": one}} for one in odd]
    schemas += [{"properties": {"a": {"type": "string", key: one}}} for key in ("minLength", "enum") for one in odd]
    schemas += [{"properties": {name: {"type": "string"}}} for name in ("", "a>b", "a\nb")]
    made = 0
    for schema in schemas:
        tool = {"function": {"name": "f", "parameters": {"type": "object", **schema}}}
        try:
            grammar_text(forced_structure(format_name, [tool], "f"))
            made += 1
        except ValueError:
            continue
        text = "<tool_call><function=f><parameter=a>\n1\n</parameter></function>"
        parser = tool_parser(format_name, functions_of([tool]))
        assert collected([*parser.push(text), *parser.finish()])
    assert made


@pytest.mark.parametrize("format_name", FORMATS)
def test_forced_after_thoughts(writer: Writer, format_name: str) -> None:
    structure = forced_structure(format_name, TOOLS[:2], "required", thinking=True)
    text = writer.text(structure, 1, "I call.\nSo <b></think>\n\n")
    parser = ReplyParser(ReasoningParser(inside=True), tool_parser(format_name, functions_of(TOOLS)))
    reply = collected([*parser.push(text), *parser.finish()])
    assert (reply.reasoning, reply.content) == ("I call.\nSo <b>", "")
    check_calls([(call.name, call.arguments) for call in reply.calls])


ANSWERS: list[tuple[dict[str, Any], str]] = [
    ({"kind": "choice", "value": ["a/b", 'say "c"']}, r'a/b|say "c"'),
    ({"kind": "regex", "value": r"[0-9]{4}/x\/y"}, r"[0-9]{4}/x/y"),
    ({"kind": "grammar", "value": 'start: "{" end\nend: "x" | "}"'}, r"\{[x}]"),
    ({"kind": "json_schema", "value": {"enum": [1, "}"]}}, r'1|"\}"'),
]


@pytest.mark.parametrize(("answer", "pattern"), ANSWERS)
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("format_name", ["hermes", "mistral"])
def test_calls_or_a_text_of_a_form(
    writer: Writer, format_name: str, thinking: bool, answer: dict[str, Any], pattern: str
) -> None:
    """Either way, behind thoughts or not, and nothing else."""
    structure = forced_structure(format_name, TOOLS[:2], "required", thinking=thinking, answer=answer)
    seen = set()
    for seed in range(6):
        begin = {"hermes": "<", "mistral": "["}[format_name] if seed % 2 else ""
        text = writer.text(structure, seed, ("Hm.</think>\n\n" if thinking else "") + begin)
        parser = ReplyParser(ReasoningParser(thinking), tool_parser(format_name, functions_of(TOOLS)))
        reply = collected([*parser.push(text), *parser.finish()])
        seen.add(bool(reply.calls))
        assert reply.reasoning == ("Hm." if thinking else "")
        if reply.calls:
            assert not reply.content
            check_calls([(call.name, call.arguments) for call in reply.calls])
        else:
            assert re.fullmatch(pattern, reply.content.strip())
    assert seen == {True, False}


@pytest.mark.parametrize(("answer", "pattern"), ANSWERS)
def test_a_form_after_thoughts(writer: Writer, answer: dict[str, Any], pattern: str) -> None:
    text = writer.text(after_thinking(answer, {}), 3, "So.</think>\n\n")
    assert re.fullmatch(pattern, text.removeprefix("So.</think>\n\n").strip())


def test_forced_markers_that_are_tokens(writer: Writer) -> None:
    """A marker that is one special token is written as that token, which the detokenizer shows."""
    token = writer.tokenizer.ids_of(["<repo_name>", "nothing"])
    assert list(token) == ["<repo_name>"]
    marker_id = token["<repo_name>"]
    tokens = {"<tool_call>": marker_id, "[TOOL_CALLS]": marker_id, "[ARGS]": marker_id}
    hermes = writer.text(forced_structure("hermes", TOOLS, "get-time", tokens=tokens), 0)
    assert hermes == '<repo_name>\n{"name": "get-time", "arguments": {}}\n</tool_call>'
    assert (
        writer.text(forced_structure("mistral", TOOLS, "get-time", tokens=tokens), 0)
        == "<repo_name>get-time<repo_name>{}"
    )
    thoughts = forced_structure("hermes", TOOLS, "get-time", tokens={"</think>": marker_id}, thinking=True)
    assert writer.text(thoughts, 0, "hm<repo_name>").startswith("hm<repo_name>\n\n<tool_call>")


@pytest.mark.parametrize(
    ("tools", "choice", "reason"),
    [
        (TOOLS, "nope", "names 'nope'"),
        ([], "required", "no such function"),
        ([{"function": {"name": "f", "parameters": {"type": "string"}}}], "f", "of type 'object', not "),
    ],
)
def test_what_cannot_be_forced(tools: list[dict[str, Any]], choice: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        forced_structure("hermes", tools, choice)
