"""Calls written as Python: `[f(a=1), g(b="x")]`, bare or between markers (Llama 3.2 and 4, LFM2, ToolACE).

Each call is given out when its bracket closes, its arguments as JSON.
"""

from __future__ import annotations

import re

from rayapp.text.markers import Markers
from rayapp.text.tools.bare import BareParser
from rayapp.text.tools.call_reader import MAX_NAME, is_name
from rayapp.text.tools.parser import skip_blank
from rayapp.text.tools.python_scanner import PythonScanner

BEGIN_MARKERS = ("<|python_start|>", "<|tool_call_start|>")
END_MARKERS = ("<|python_end|>", "<|tool_call_end|>")
_ENDS = Markers(*END_MARKERS)
_NAME = re.compile(r"[\w.-]+")


class PythonicParser(BareParser):
    """A list in brackets. Bare, it opens a line and names known functions; anything else is content."""

    begin_markers = BEGIN_MARKERS
    markers = BEGIN_MARKERS + END_MARKERS
    bracket = "["

    _scanner: PythonScanner

    def _marked(self, text: str, at: int) -> int | None:
        if text[at].isspace():
            return self._hold(text, at, skip_blank(text, at))
        return self._open(text, at)

    def _unmarked(self, text: str, at: int) -> int | None:
        return self._open(text, at)

    def _open(self, text: str, at: int) -> int:
        if text[at] != "[":
            return self._not_a_call(at)
        self._state, self._name = self._item, ""
        return self._hold(text, at, at + 1)

    def _item(self, text: str, at: int) -> int | None:
        """Before a function's name, in it, or right after it."""
        if len(self._name) <= MAX_NAME and (run := _NAME.match(text, at)):
            return self._hold_name(run)
        if text[at].isspace() and not self._name:
            return self._hold(text, at, skip_blank(text, at))
        name = self._name
        if text[at] != "(" or not is_name(name) or not (self._is_marked or self._known_name(name)):
            return self._not_a_call(at)
        self._state, self._scanner = self._arguments, PythonScanner()
        return self._hold(text, at, at + 1)

    def _arguments(self, text: str, at: int) -> int | None:
        end = self._hold(text, at, self._scanner.feed(text, at))
        if self._scanner.failed:
            return self._not_a_call(end)
        if self._scanner.done:
            arguments = self._scanner.arguments()
            if arguments is None:
                return self._not_a_call(end)
            self._held.clear()
            self._start(self._name)
            self._give(arguments)
            self._state = self._next
        return end

    def _unstarted_name(self) -> str | None:
        return self._name if self._state == self._arguments else None

    def _next(self, text: str, at: int) -> int | None:
        """After a call in the list."""
        if text[at].isspace():
            return self._hold(text, at, skip_blank(text, at))
        if text[at] == "]":
            self._held.clear()
            self._state = self._after
            return at + 1
        if text[at] != ",":
            return self._not_a_call(at)
        self._state, self._name = self._item, ""
        return self._hold(text, at, at + 1)

    def _after(self, text: str, at: int) -> int | None:
        """After a list."""
        if text[at].isspace():
            return self._hold(text, at, skip_blank(text, at))
        end = _ENDS.match(text, at)
        if end is None:
            return None
        if end > at:
            self._held.clear()
        else:
            self._release()
        self._state = self._content
        return end

    def _not_a_call(self, at: int) -> int:
        self._release()
        self._state = self._content
        return at
