"""Reads one JSON value that comes in pieces: where it ends, or where it stops being JSON.

Used by the tool parsers for arguments that are given out before they are complete. Builds no values.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_BLANK = re.compile(r"[ \t\r\n]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_SURROGATES = re.compile("[\ud800-\udfff]")
_SHORT_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


class JsonScanner:
    """One value, character by character; what was read does not depend on how the text was cut.

    Attributes:
        done: the value is complete; its last character is the last that was read.
        failed: the next character cannot belong to it.
    """

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._open: list[str] = []
        self._state: Callable[[str, int], tuple[int, str]] = self._value
        self._is_key = False
        self._hex_digits = 0
        self._scalar: list[str] = []

    def feed(self, text: str, at: int) -> tuple[int, str]:
        """Reads on from `text[at]`, up to the end of the value, of the text, or to what does not belong.

        Returns:
            Where it stopped, and what was read. Models put raw line ends into strings, which JSON forbids: they are
            returned escaped, everything else as it stands.
        """
        read = []
        while at < len(text) and not (self.done or self.failed):
            at, piece = self._state(text, at)
            read.append(piece)
        return at, "".join(read)

    def _fail(self, at: int) -> tuple[int, str]:
        self.failed = True
        return at, ""

    def _take(self, text: str, at: int, then: Callable[[str, int], tuple[int, str]]) -> tuple[int, str]:
        self._state = then
        return at + 1, text[at]

    def _value(self, text: str, at: int) -> tuple[int, str]:
        character = text[at]
        if blank := _BLANK.match(text, at):
            return blank.end(), blank[0]
        if character in "{[":
            self._open.append(character)
            return self._take(text, at, self._first_key if character == "{" else self._first_item)
        if character == '"':
            self._is_key = False
            return self._take(text, at, self._string)
        if character in "-0123456789tfn":
            self._state = self._in_scalar
            return at, ""
        return self._fail(at)

    def _first_item(self, text: str, at: int) -> tuple[int, str]:
        return self._close(text, at) if text[at] == "]" else self._value(text, at)

    def _first_key(self, text: str, at: int) -> tuple[int, str]:
        return self._close(text, at) if text[at] == "}" else self._key(text, at)

    def _key(self, text: str, at: int) -> tuple[int, str]:
        if blank := _BLANK.match(text, at):
            return blank.end(), blank[0]
        if text[at] != '"':
            return self._fail(at)
        self._is_key = True
        return self._take(text, at, self._string)

    def _colon(self, text: str, at: int) -> tuple[int, str]:
        if blank := _BLANK.match(text, at):
            return blank.end(), blank[0]
        return self._take(text, at, self._value) if text[at] == ":" else self._fail(at)

    def _next(self, text: str, at: int) -> tuple[int, str]:
        if blank := _BLANK.match(text, at):
            return blank.end(), blank[0]
        if text[at] == ",":
            return self._take(text, at, self._key if self._open[-1] == "{" else self._value)
        closes = "}" if self._open[-1] == "{" else "]"
        return self._close(text, at) if text[at] == closes else self._fail(at)

    def _close(self, text: str, at: int) -> tuple[int, str]:
        self._open.pop()
        self._ended()
        return at + 1, text[at]

    def _ended(self) -> None:
        self.done = not self._open
        self._state = self._next

    def _string(self, text: str, at: int) -> tuple[int, str]:
        if plain := _PLAIN.match(text, at):
            return plain.end(), plain[0]
        character = text[at]
        if character == "\\":
            return self._take(text, at, self._escape)
        if character != '"':
            return at + 1, _SHORT_ESCAPES.get(character) or f"\\u{ord(character):04x}"
        if self._is_key:
            self._state = self._colon
        else:
            self._ended()
        return at + 1, character

    def _escape(self, text: str, at: int) -> tuple[int, str]:
        if text[at] == "u":
            self._hex_digits = 4
            return self._take(text, at, self._hex)
        return self._take(text, at, self._string) if text[at] in '"\\/bfnrt' else self._fail(at)

    def _hex(self, text: str, at: int) -> tuple[int, str]:
        if text[at] not in "0123456789abcdefABCDEF":
            return self._fail(at)
        self._hex_digits -= 1
        return self._take(text, at, self._hex if self._hex_digits else self._string)

    def _in_scalar(self, text: str, at: int) -> tuple[int, str]:
        if run := _SCALAR_RUN.match(text, at):
            self._scalar.append(run[0])
            return run.end(), run[0]
        scalar, self._scalar = "".join(self._scalar), []
        if not _SCALAR.fullmatch(scalar):
            return self._fail(at)
        self._ended()
        return at, ""


def json_object(text: str) -> str | None:
    """`text` where it is one JSON object, raw line ends in its strings escaped; else None."""
    scanner = JsonScanner()
    end, read = scanner.feed(text, 0)
    whole = scanner.done and not text[end:].strip(" \t\r\n")
    return sendable(read.lstrip(" \t\r\n")) if whole and text.lstrip(" \t\r\n").startswith("{") else None


def sendable(json_text: str) -> str:
    """The same JSON with halves of surrogate pairs, which cannot be sent as UTF-8, escaped."""
    return _SURROGATES.sub(lambda half: f"\\u{ord(half[0]):04x}", json_text)
