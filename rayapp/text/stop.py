"""Stop strings over text that comes in pieces.

`StopBuffer` is fed by the generation and says which text may be shown. Knows nothing of tokens or requests.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopBuffer:
    """Cuts a text before the earliest stop string in it, however the text is split into pieces.

    "Earliest" is by where a match begins: over all pieces the text shown equals
    `text[: min(begin of each stop's first match)]`. Text is held back only while it can still be the
    beginning of a match, so never more than `len(longest stop) - 1` characters stay held, except that a
    complete match is not decided while one that began before it may still complete.

    Args:
        stops: non-empty strings; none at all lets everything through.

    Raises:
        ValueError: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._held = ""
        self.matched = False
        """True once the text has been cut; everything later is discarded."""

    def push(self, text: str) -> tuple[str, bool]:
        """Takes the next piece; returns (text that may be shown now, whether a stop string has matched)."""
        if self.matched:
            return "", True
        if not self._stops:
            return text, False
        text = self._held + text
        open_from = self._first_open(text)
        match = self._first_match(text)
        if match is not None and match <= open_from:
            return self._cut(text, match), True
        self._held = text[open_from:]
        return text[:open_from], False

    def flush(self) -> str:
        """The text ends here: returns what was held, up to a match in it; then see `matched`."""
        text, self._held = self._held, ""
        match = self._first_match(text)
        return text if match is None else self._cut(text, match)

    def _cut(self, text: str, match: int) -> str:
        self.matched, self._held = True, ""
        return text[:match]

    def _first_match(self, text: str) -> int | None:
        """Where the earliest complete match begins."""
        return min((found for stop in self._stops if (found := text.find(stop)) >= 0), default=None)

    def _first_open(self, text: str) -> int:
        """Where the earliest match that more text could complete begins; len(text) if there is none."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return len(text) - longest
