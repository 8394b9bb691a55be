"""Reads the arguments of a call written in Python, up to its closing bracket, and turns them into JSON.

Used by the pythonic format. Literals are read by `ast`; nothing is ever evaluated.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any

from rayapp.text.tools.json_scanner import json_object, sendable

MAX_DEPTH = 100
"""Brackets in brackets; Python's own parser takes 200."""

_WORD = re.compile(r"\w+")
_OTHER = re.compile(r"[^\w\"'()\[\]{}#]+")
_PLAIN = {quote: re.compile(rf"[^{quote}\\\n\r]+") for quote in "\"'"}
_CLOSES = {"(": ")", "[": "]", "{": "}"}
_ESCAPES = frozenset("\n\\'\"abfnrtv01234567xNuU")
_JSON_NAMES = {"true": True, "false": False, "null": None}
_UNPACKED = re.compile(r"\s*\*\*\s*(\{.*\})\s*,?\s*", re.DOTALL)


class PythonScanner:
    """What stands between the brackets of a call, character by character.

    Attributes:
        done: the closing bracket was read.
        failed: the next character cannot belong to it.
    """

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._source: list[str] = []  # as the model wrote it
        self._python: list[str] = []  # line ends and unknown escapes in strings mended
        self._closes = [")"]
        self._word: list[str] = []  # the letters right before: perhaps a string's prefix
        self._quote = ""
        self._raw = False
        self._state: Callable[[str, int], int] = self._code

    def feed(self, text: str, at: int) -> int:
        """Reads on from `text[at]`; returns where it stopped."""
        while at < len(text) and not (self.done or self.failed):
            at = self._state(text, at)
        return at

    def arguments(self) -> str | None:
        """The arguments as a JSON object, once done; None where they are not names with literals."""
        return arguments_to_json("".join(self._source), "".join(self._python))

    def _take(self, text: str, at: int, end: int, python: str | None = None) -> int:
        self._source.append(text[at:end])
        self._python.append(text[at:end] if python is None else python)
        return end

    def _code(self, text: str, at: int) -> int:
        if run := _WORD.match(text, at):
            self._word.append(run[0])
            return self._take(text, at, run.end())
        word, self._word = "".join(self._word), []
        character = text[at]
        if character in _PLAIN:
            self._raw = word in ("r", "R")
            self.failed = bool(word) and not self._raw
            self._quote, self._state = character, self._opened
        elif character in _CLOSES:
            self._closes.append(_CLOSES[character])
            self.failed = len(self._closes) > MAX_DEPTH
        elif character in ")]}":
            self.failed = character != self._closes.pop()
            self.done = not self.failed and not self._closes
            if self.done:
                return at + 1
        elif run := _OTHER.match(text, at):
            return self._take(text, at, run.end())
        else:
            self.failed = True  # a comment
        return at if self.failed else self._take(text, at, at + 1)

    def _opened(self, text: str, at: int) -> int:
        """After the quote that opens a string."""
        if text[at] != self._quote:
            self._state = self._string
            return at
        self._state = self._empty
        return self._take(text, at, at + 1)

    def _empty(self, text: str, at: int) -> int:
        """After two quotes: an empty string, but for a third one."""
        self.failed = text[at] == self._quote
        self._state = self._code
        return at

    def _string(self, text: str, at: int) -> int:
        if plain := _PLAIN[self._quote].match(text, at):
            return self._take(text, at, plain.end())
        character = text[at]
        if character == "\\":
            self._state = self._escape
            self._source.append(character)
            return at + 1
        if character == self._quote:
            self._state = self._code
            return self._take(text, at, at + 1)
        self.failed = self._raw  # a line end cannot be mended there
        return at if self.failed else self._take(text, at, at + 1, "\\n" if character == "\n" else "\\r")

    def _escape(self, text: str, at: int) -> int:
        character = text[at]
        self._state = self._string
        known = self._raw or character in _ESCAPES
        return self._take(text, at, at + 1, ("\\" if known else "\\\\") + character)


def arguments_to_json(source: str, python: str) -> str | None:
    """The arguments of a call, `a=1, b="x"` or `**{"a": 1}`, as a JSON object; None where they are anything else."""
    if unpacked := _UNPACKED.fullmatch(source):
        as_written = json_object(unpacked[1])
        if as_written is not None:
            return as_written
    try:
        call = ast.parse(f"f({python})", mode="eval").body
        arguments = _keywords(call)
        return sendable(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _keywords(call: ast.expr) -> dict[str, Any]:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("not a call by keywords")
    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
        value = _literal(keyword.value)
        given = value if keyword.arg is None else {keyword.arg: value}
        if not isinstance(given, dict) or given.keys() & arguments.keys():
            raise ValueError("an argument is given twice, or what is unpacked is not a dict")
        arguments |= given
    return arguments


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(str() | int() | float() | None as value):
            return value
        case ast.Name(name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            return -value
        case ast.List(items) | ast.Tuple(items):
            return [_literal(item) for item in items]
        case ast.Dict(keys, values):
            names = [None if key is None else _literal(key) for key in keys]
            if all(isinstance(name, str) for name in names):
                return dict(zip(names, map(_literal, values), strict=True))
    raise ValueError("not a literal that JSON has")
