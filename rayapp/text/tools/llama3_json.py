"""Calls of Llama 3.1 and later: `{"name": ..., "parameters": {...}}`, bare or after `<|python_tag|>`."""

from __future__ import annotations

from rayapp.text.markers import Markers
from rayapp.text.tools.bare import BareParser
from rayapp.text.tools.call_reader import CallReader
from rayapp.text.tools.parser import skip_blank

TAG = "<|python_tag|>"
_TAG = Markers(TAG)
_BARE_KEYS = frozenset({"type", "id", "name", "parameters", "arguments"})


class Llama3JsonParser(BareParser):
    """Several calls follow each other, separated by `;` or white space.

    A bare object is a call when it has a name, one of the known functions, and parameters, and no key that a call
    has not; any other object is content. What `<|python_tag|>` marks is a call of any name.
    """

    markers = begin_markers = (TAG,)
    bracket = "{"

    def _marked(self, text: str, at: int) -> int | None:
        self._is_marked = True
        self._begin_call(CallReader(self._held, self._any_name))
        return at

    def _unmarked(self, text: str, at: int) -> int | None:
        self._begin_call(CallReader(self._held, self._known_name, _BARE_KEYS, needs_arguments=True))
        return at

    def _after(self, text: str, at: int) -> int | None:
        if text[at] == ";" or text[at].isspace():
            return self._hold(text, at, skip_blank(text, at + 1))
        tag_to = _TAG.match(text, at)
        if tag_to is None:
            return None
        if tag_to > at:
            self._state = self._marked
            return self._hold(text, at, tag_to)
        if text[at] == "{":
            self._state = self._marked if self._is_marked else self._unmarked
        else:
            self._release()
            self._state = self._content
        return at
