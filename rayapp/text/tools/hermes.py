"""Calls of Hermes, Qwen 2.5, Qwen 3 and their like: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from rayapp.text.markers import Markers
from rayapp.text.tools.call_reader import CallReader
from rayapp.text.tools.parser import ToolParser, skip_blank

BEGIN, END = "<tool_call>", "</tool_call>"
_BEGIN, _END = Markers(BEGIN), Markers(END)


class HermesParser(ToolParser):
    """One block a call; several objects in one block are several calls, and an end marker may be missing."""

    markers = (BEGIN, END)

    def _content(self, text: str, at: int) -> int | None:
        return self._seek(_BEGIN, text, at, self._block)

    def _block(self, text: str, at: int) -> int | None:
        self._begin_call(CallReader(self._held, self._any_name))
        return at

    def _after(self, text: str, at: int) -> int | None:
        if text[at].isspace():
            return self._hold(text, at, skip_blank(text, at))
        end = _END.match(text, at)
        if end is None:
            return None
        if end == at and text[at] == "{":
            self._state = self._block
            return at
        if end > at:
            self._held.clear()
        self._release()
        self._state = self._content
        return end
