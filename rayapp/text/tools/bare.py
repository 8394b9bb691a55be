"""Finding calls that nothing but their look tells: a bracket that opens a line.

The base of formats whose calls may come without a marker.
"""

from __future__ import annotations

import re

from rayapp.text.markers import Markers
from rayapp.text.tools.parser import ToolParser


class BareParser(ToolParser):
    """Content in which a call begins with a marker, or with a bracket that has nothing but spaces before it on its
    line: models put calls on lines of their own, and texts have brackets everywhere."""

    begin_markers: tuple[str, ...] = ()
    bracket = ""

    def __init_subclass__(cls) -> None:
        bracket = rf"[ \t\r]*{re.escape(cls.bracket)}"
        markers = "|".join(map(re.escape, cls.begin_markers))
        cls._indented = re.compile(bracket)
        cls._begins = re.compile(rf"{markers}|\n{bracket}")
        cls._markers = Markers(*cls.begin_markers)

    _indented: re.Pattern[str]
    _begins: re.Pattern[str]
    _markers: Markers

    _line_opens = True  # nothing but spaces since the last line end

    def _content(self, text: str, at: int) -> int | None:
        bare = self._indented.match(text, at) if self._line_opens else None
        found = bare or self._begins.search(text, at)
        if found is None:
            begin = self._markers.open_from(text, at)
            self._say(text[at:begin])
            return begin if begin > at else None
        if found[0] in self.begin_markers:
            self._say(text[at : found.start()])
            self._held.append(found[0])
            self._is_marked, self._state = True, self._marked
            return found.end()
        self._say(text[at : found.end() - 1])
        self._is_marked, self._state = False, self._unmarked
        return found.end() - 1

    def _marked(self, text: str, at: int) -> int | None:
        """After a marker."""
        raise NotImplementedError

    def _unmarked(self, text: str, at: int) -> int | None:
        """At a bracket."""
        raise NotImplementedError

    def _say(self, text: str) -> None:
        super()._say(text)
        last_line = text[text.rfind("\n") + 1 :]
        self._line_opens = (self._line_opens or len(last_line) < len(text)) and not last_line.strip(" \t\r")

    def _start(self, name: str) -> None:
        super()._start(name)
        self._line_opens = False
