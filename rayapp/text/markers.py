"""Finding markers such as `<think>` in text that comes in pieces.

Used by the parsers of reasoning and of tool calls. Knows nothing of what the markers mean.
"""

from __future__ import annotations

import re


class Markers:
    """A few strings, any of which may come next.

    Args:
        markers: non-empty; none is the beginning of another.
    """

    def __init__(self, *markers: str) -> None:
        self._pattern = re.compile("|".join(map(re.escape, markers)))
        self._beginnings = {marker[:size] for marker in markers for size in range(1, len(marker))}
        self._longest = max(map(len, markers)) - 1

    def search(self, text: str, at: int) -> re.Match[str] | None:
        """The first whole marker at or after `at`."""
        return self._pattern.search(text, at)

    def open_from(self, text: str, at: int) -> int:
        """Where the text's last characters begin a marker that is not finished; its length where they do not."""
        for begin in range(max(at, len(text) - self._longest), len(text)):
            if text[begin:] in self._beginnings:
                return begin
        return len(text)

    def match(self, text: str, at: int) -> int | None:
        """Where a marker that begins at `at` ends: `at` itself where there is none, None where more text must tell."""
        found = self._pattern.match(text, at)
        if found:
            return found.end()
        return None if len(text) - at <= self._longest and text[at:] in self._beginnings else at
