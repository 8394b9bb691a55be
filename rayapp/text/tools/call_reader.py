"""Reads one call written as JSON, `{"name": ..., "arguments": {...}}`, and gives its arguments out as they come.

Used by the formats that write calls so. Knows nothing of what stands around the object.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

from rayapp.text.tools.json_scanner import JsonScanner, json_object

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_BLANK = " \t\r\n"
MAX_NAME = 256


def is_name(name: object) -> bool:
    """Whether a function may be called so: what can be shown on one line."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable() and name == name.strip()


class CallReader:
    """One object. Keys may come in any order: arguments wait for the name. None at all, or null, are `{}`; a string
    that holds an object, as OpenAI's API writes it, is that object.

    Args:
        held: is given the text that was read and not given out, and emptied when it has been: what is in it when the
            reader fails is not part of a call.
        accepts: whether a call of that name is one.
        keys: the only ones that a call may have; None: whatever else there is is skipped.
        needs_arguments: an object without them is no call.

    Attributes:
        name: None until it is known.
        started: what was read is a call; set no later than the first arguments are returned.
        done: the object is complete.
        failed: the text from here on is not a call. When `started`, arguments returned before stay given.
    """

    def __init__(
        self,
        held: list[str],
        accepts: Callable[[str], bool],
        keys: Collection[str] | None = None,
        needs_arguments: bool = False,
    ) -> None:
        self.name: str | None = None
        self.started = self.done = self.failed = False
        self._held = held
        self._accepts = accepts
        self._keys = keys
        self._needs_arguments = needs_arguments
        self._expect = "{"
        self._key = ""
        self._scanner: JsonScanner | None = None
        self._read: list[str] = []  # of the key or value that is being read
        self._streams = False  # that value is an object of arguments
        self._has_arguments = False
        self._arguments: list[str] = []  # complete or not, waiting for the name

    def feed(self, text: str, at: int) -> tuple[int, str]:
        """Reads on from `text[at]`; returns where it stopped, and arguments that may be given out."""
        given: list[str] = []
        while at < len(text) and not (self.done or self.failed):
            if self._scanner is None:
                at = self._between(text, at)
            else:
                at = self._within(self._scanner, text, at)
            if self.name is not None and self._arguments:
                self.started = True
                given += self._arguments
                self._arguments.clear()
                self._held.clear()
        return at, "".join(given)

    def _between(self, text: str, at: int) -> int:
        """One character of what separates keys and values, or the first of one of them."""
        character = text[at]
        if character not in _BLANK:
            if self._expect == "value":
                return self._begin_value(character, at)
            if character == '"' and "key" in self._expect:
                self._scanner = JsonScanner()
                return at
            following = {"{": "key or }", ":": "value", ",": "key", "}": ""}
            self.failed = character not in following or character not in self._expect
            if self.failed:
                return at
            self._expect = following[character]
        self._held.append(character)
        if not self._expect:
            self._end_object()
        return at + 1

    def _begin_value(self, character: str, at: int) -> int:
        if self._key == "name":
            self.failed = character != '"' or self.name is not None
        elif self._key in ARGUMENT_KEYS:
            self.failed = character not in '{"n' or self._has_arguments
            self._has_arguments = True
            self._streams = character == "{"
        self._scanner = JsonScanner()
        return at

    def _within(self, scanner: JsonScanner, text: str, at: int) -> int:
        """More of the key or value at hand."""
        end, read = scanner.feed(text, at)
        self._held.append(text[at:end])
        (self._arguments if self._streams else self._read).append(read)
        if scanner.done:
            self._scanner = None
            whole, self._read = "".join(self._read), []
            if self._expect == "value":
                self._end_value(whole)
            else:
                self._end_key(whole)
            self._streams = False
        self.failed = self.failed or scanner.failed
        return end

    def _end_key(self, whole: str) -> None:
        self._key = json.loads(whole)
        self.failed = self._keys is not None and self._key not in self._keys
        self._expect = ":"

    def _end_value(self, whole: str) -> None:
        self._expect = ", or }"
        if self._key == "name":
            name = json.loads(whole)
            self.failed = not (is_name(name) and self._accepts(name))
            self.name = None if self.failed else name
        elif self._key in ARGUMENT_KEYS and not self._streams:
            arguments = "{}" if whole == "null" else json_object(json.loads(whole))
            self.failed = arguments is None
            self._arguments = [arguments] if arguments else []

    def _end_object(self) -> None:
        if not self._has_arguments and not self._needs_arguments:
            self._arguments = ["{}"]
        self.done = self.name is not None and (self.started or bool(self._arguments))
        self.failed = not self.done
