"""Calls of Mistral's models: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, later `[TOOL_CALLS]name[ARGS]{...}`."""

from __future__ import annotations

import re
from collections.abc import Callable

from rayapp.text.markers import Markers
from rayapp.text.tools.call_reader import MAX_NAME, CallReader, is_name
from rayapp.text.tools.json_scanner import JsonScanner
from rayapp.text.tools.parser import ToolParser, random_characters, skip_blank

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_CALLS, _ARGS, _CALL_ID = Markers(CALLS), Markers(ARGS), Markers(CALL_ID)
_NAME = re.compile(r"[\w.:/-]+")


def mistral_id() -> str:
    """Mistral's templates take ids of nine letters and digits alone."""
    return random_characters(9)


class MistralParser(ToolParser):
    """A list of objects, one object, or a name and its arguments, with or without `[ARGS]` and an id in between.

    Ids that a model writes are read over: a call has begun before they come.
    """

    markers = (CALLS, ARGS, CALL_ID)
    id_maker: Callable[[], str] = staticmethod(mistral_id)

    _in_list = False
    _scanner: JsonScanner

    def _content(self, text: str, at: int) -> int | None:
        return self._seek(_CALLS, text, at, self._marked)

    def _marked(self, text: str, at: int) -> int | None:
        """After `[TOOL_CALLS]`."""
        if text[at].isspace():
            return self._hold(text, at, skip_blank(text, at))
        self._in_list = text[at] == "["
        self._name = ""
        if self._in_list:
            self._state = self._list_item
            return self._hold(text, at, at + 1)
        self._state = self._list_item if text[at] == "{" else self._named
        return at

    def _list_item(self, text: str, at: int) -> int | None:
        self._begin_call(CallReader(self._held, self._any_name))
        return at

    def _after(self, text: str, at: int) -> int | None:
        if not self._in_list:
            self._state = self._content
            return at
        if text[at].isspace():
            return self._hold(text, at, skip_blank(text, at))
        if text[at] == ",":
            self._state = self._list_item
            return self._hold(text, at, at + 1)
        if text[at] == "]":
            self._in_list = False
            self._held.clear()
            return at + 1
        return self._not_a_call(at)

    def _broken(self, text: str, at: int) -> int | None:
        return self._not_a_call(at)

    def _named(self, text: str, at: int) -> int | None:
        """In a function's name, or right after it."""
        if len(self._name) <= MAX_NAME and (run := _NAME.match(text, at)):
            return self._hold_name(run)
        if text[at].isspace():
            self._state = self._before_arguments
            return at
        id_from = _CALL_ID.match(text, at)
        if id_from == at:
            self._state = self._before_arguments
        elif id_from is not None:
            self._hold(text, at, id_from)
            self._state = self._in_id
        return id_from

    def _in_id(self, text: str, at: int) -> int | None:
        if run := _NAME.match(text, at):
            return self._hold(text, at, run.end())
        self._state = self._before_arguments
        return at

    def _before_arguments(self, text: str, at: int) -> int | None:
        if text[at].isspace():
            return self._hold(text, at, skip_blank(text, at))
        marker_to = _ARGS.match(text, at)
        if marker_to is None:
            return None
        self._state = self._open_arguments
        return self._hold(text, at, marker_to)

    def _open_arguments(self, text: str, at: int) -> int | None:
        if text[at].isspace():
            return self._hold(text, at, skip_blank(text, at))
        if text[at] != "{" or not is_name(self._name):
            return self._not_a_call(at)
        self._held.clear()
        self._start(self._name)
        self._scanner = JsonScanner()
        self._state = self._arguments
        return at

    def _unstarted_name(self) -> str | None:
        if self._state == self._open_arguments and is_name(self._name):
            return self._name
        return super()._unstarted_name()

    def _arguments(self, text: str, at: int) -> int | None:
        return self._give_json(self._scanner, text, at, self._after)

    def _not_a_call(self, at: int) -> int:
        self._in_list = False
        self._release()
        self._state = self._content
        return at
