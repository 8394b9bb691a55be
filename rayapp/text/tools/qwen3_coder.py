"""Calls of Qwen3-Coder and its like, in XML: `<tool_call><function=f><parameter=x>value</parameter></function>`.

Values stand as they are, without quotes: what they are in JSON is told by the function's parameters.
"""

from __future__ import annotations

import json
import re

from rayapp.text.markers import Markers
from rayapp.text.pieces import Piece
from rayapp.text.tools.call_reader import MAX_NAME, is_name
from rayapp.text.tools.json_scanner import sendable
from rayapp.text.tools.parser import ToolParser, skip_blank
from rayapp.text.tools.value_types import as_json, value_types

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_BEGINS = Markers(BEGIN, FUNCTION)
_FUNCTION = Markers(FUNCTION)
_BETWEEN = Markers(PARAMETER, FUNCTION_END, END)
_VALUE_ENDS = Markers("\n" + PARAMETER_END, PARAMETER_END)
_AFTER = Markers(END, FUNCTION)
NAME = re.compile(r"[^<>\n]+")


class Qwen3CoderParser(ToolParser):
    """One block a call; functions may follow each other in a block. Models forget the block's first marker, so that a
    bare `<function=` is a call too if the function is known.

    A string is given out as it comes, other values when they end; one line end on either side of a value is not part of
    it. A call that is cut ends where it is cut.
    """

    markers = (BEGIN, END)

    _function = ""
    _first = True  # no parameter of the call has come
    _is_string = False  # the value at hand is given out as it comes
    _value: list[str]  # else it is kept here
    _types: frozenset[str]

    def finish(self, cut: bool = False, forced: bool = False) -> list[Piece]:
        if self._state in (self._between, self._parameter_name, self._value_begun, self._in_value):
            if not self._is_string:
                self._give("".join(self._value) if self._state == self._in_value else "")
            self._held.clear()
            self._rest = ""
        return super().finish(cut, forced)

    def _content(self, text: str, at: int) -> int | None:
        end = self._seek(_BEGINS, text, at, self._block)
        if end is not None and self._state == self._block:
            self._is_marked = self._held[-1] == BEGIN
            self._name = ""
            if not self._is_marked:
                self._state = self._function_name
        return end

    def _block(self, text: str, at: int) -> int | None:
        """After `<tool_call>`."""
        if text[at].isspace():
            return self._hold(text, at, skip_blank(text, at))
        end = _FUNCTION.match(text, at)
        if end is None:
            return None
        if end == at:
            return self._not_a_call(at)
        self._name, self._state = "", self._function_name
        return self._hold(text, at, end)

    def _function_name(self, text: str, at: int) -> int | None:
        if len(self._name) <= MAX_NAME and (run := NAME.match(text, at)):
            return self._hold_name(run)
        if text[at] != ">" or not is_name(self._name) or not (self._is_marked or self._is_function(self._name)):
            return self._not_a_call(at)
        self._held.clear()
        self._start(self._name)
        self._function, self._first, self._state = self._name, True, self._between
        return at + 1

    def _between(self, text: str, at: int) -> int | None:
        """In a function, outside of its parameters."""
        if text[at].isspace():
            return self._hold(text, at, skip_blank(text, at))
        end = _BETWEEN.match(text, at)
        if end is None:
            return None
        if end == at:
            return self._not_a_call(at)
        self._held.clear()
        marker = text[at:end]
        if marker == PARAMETER:
            self._name, self._state = "", self._parameter_name
        else:
            self._give("{}" if self._first else "}")
            self._state = self._after if marker == FUNCTION_END else self._content
        return end

    def _parameter_name(self, text: str, at: int) -> int | None:
        if len(self._name) <= MAX_NAME and (run := NAME.match(text, at)):
            return self._hold_name(run)
        if text[at] != ">" or not is_name(self._name):
            return self._not_a_call(at)
        self._held.clear()
        self._types = value_types(self._parameters.get(self._function), self._name)
        self._is_string, self._value = self._types == {"string"}, []
        key = ("{" if self._first else ", ") + json.dumps(self._name, ensure_ascii=False) + ": "
        self._give(sendable(key) + ('"' if self._is_string else ""))
        self._first, self._state = False, self._value_begun
        return at + 1

    def _value_begun(self, text: str, at: int) -> int | None:
        """One line end before the value is not part of it, be it that of the end marker."""
        self._state = self._in_value
        if text[at] != "\n":
            return at
        return at + 1

    def _in_value(self, text: str, at: int) -> int | None:
        found = _VALUE_ENDS.search(text, at)
        end = found.start() if found else _VALUE_ENDS.open_from(text, at)
        self._more(text[at:end])
        if found is None:
            return end if end > at else None
        self._give('"' if self._is_string else as_json("".join(self._value), self._types))
        self._state = self._between
        return found.end()

    def _more(self, text: str) -> None:
        """More of the value."""
        if self._is_string:
            self._give(sendable(json.dumps(text, ensure_ascii=False)[1:-1]))
        else:
            self._value.append(text)

    def _after(self, text: str, at: int) -> int | None:
        if text[at].isspace():
            return self._hold(text, at, skip_blank(text, at))
        end = _AFTER.match(text, at)
        if end is None:
            return None
        if end == at:
            return self._not_a_call(at)
        if text[at:end] == FUNCTION:
            self._name, self._state = "", self._function_name
            return self._hold(text, at, end)
        self._held.clear()
        self._state = self._content
        return end

    def _is_function(self, name: str) -> bool:
        return name in self._names

    def _not_a_call(self, at: int) -> int:
        self._release()
        self._state = self._content
        return at
