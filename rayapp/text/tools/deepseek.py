"""Calls of DeepSeek's models: V3 and R1 write a name and JSON in a fence, V3.1 and later a name and JSON."""

from __future__ import annotations

import re

from rayapp.text.markers import Markers
from rayapp.text.tools.call_reader import MAX_NAME, is_name
from rayapp.text.tools.json_scanner import JsonScanner
from rayapp.text.tools.parser import ToolParser, skip_blank

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE, FENCE_END = "```json", "```"
_BEGINS = Markers(BEGIN, CALL)
_CALL = Markers(CALL)
_SEPARATOR = Markers(SEPARATOR)
_FENCE = Markers(FENCE)
_AFTER = Markers(FENCE_END, CALL_END, CALL, END)
_NAME = re.compile(r"[^\s<{`]+")


class DeepSeekParser(ToolParser):
    """`function<｜tool▁sep｜>name`, a line end and fenced JSON, or `name<｜tool▁sep｜>` and JSON, as what stands behind
    the separator tells. Markers around the calls may be missing."""

    markers = (BEGIN, END, CALL, CALL_END, SEPARATOR)

    _scanner: JsonScanner

    def _content(self, text: str, at: int) -> int | None:
        end = self._seek(_BEGINS, text, at, self._begun)
        if end is not None and self._state == self._begun and self._held[-1] == CALL:
            self._open_call()
        return end

    def _begun(self, text: str, at: int) -> int | None:
        """Before the first call."""
        if text[at].isspace():
            return self._hold(text, at, skip_blank(text, at))
        end = _CALL.match(text, at)
        if end is None:
            return None
        if end == at:
            return self._not_a_call(at)
        self._open_call()
        return self._hold(text, at, end)

    def _open_call(self) -> None:
        self._name, self._state = "", self._head

    def _head(self, text: str, at: int) -> int | None:
        """Before the separator: the call's type, or the name."""
        if len(self._name) <= MAX_NAME and (run := _NAME.match(text, at)):
            return self._hold_name(run)
        end = _SEPARATOR.match(text, at)
        if end is None:
            return None
        if end == at or not is_name(self._name):
            return self._not_a_call(at)
        self._state = self._separated
        return self._hold(text, at, end)

    def _separated(self, text: str, at: int) -> int | None:
        if text[at].isspace():
            return self._hold(text, at, skip_blank(text, at))
        if text[at] in "{`":
            self._state = self._before_arguments
            return at
        self._name, self._state = "", self._named
        return at

    def _named(self, text: str, at: int) -> int | None:
        """In the name behind the separator, or right after it."""
        if len(self._name) <= MAX_NAME and (run := _NAME.match(text, at)):
            return self._hold_name(run)
        if not is_name(self._name):
            return self._not_a_call(at)
        self._state = self._before_arguments
        return at

    def _before_arguments(self, text: str, at: int) -> int | None:
        if text[at].isspace():
            return self._hold(text, at, skip_blank(text, at))
        if text[at] == "{":
            self._held.clear()
            self._start(self._name)
            self._scanner, self._state = JsonScanner(), self._arguments
            return at
        end = _FENCE.match(text, at)
        if end is None:
            return None
        return self._not_a_call(at) if end == at else self._hold(text, at, end)

    def _unstarted_name(self) -> str | None:
        return self._name if self._state == self._before_arguments else None

    def _arguments(self, text: str, at: int) -> int | None:
        return self._give_json(self._scanner, text, at, self._after)

    def _after(self, text: str, at: int) -> int | None:
        if text[at].isspace():
            return self._hold(text, at, skip_blank(text, at))
        end = _AFTER.match(text, at)
        if end is None:
            return None
        if end == at:
            return self._not_a_call(at)
        self._held.clear()
        if text[at:end] == CALL:
            self._open_call()
            return self._hold(text, at, end)
        if text[at:end] == END:
            self._state = self._content
        return end

    def _not_a_call(self, at: int) -> int:
        self._release()
        self._state = self._content
        return at
