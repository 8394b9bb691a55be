"""`TextMachine`: what the parsers of reasoning and of tool calls have in common, a state that reads on as text comes.

Knows nothing of either.
"""

from __future__ import annotations

from collections.abc import Callable

from rayapp.text.pieces import Piece

State = Callable[[str, int], int | None]
"""Reads on from a position and returns where it stopped; None: what is left may be the beginning of a marker."""


class TextMachine:
    """Text in, pieces out, however the text is cut.

    Args:
        state: the first one; states put what is certain into `_out` and set the one that follows them.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._rest = ""  # not read: perhaps the beginning of a marker
        self._out: list[Piece] = []

    def push(self, text: str) -> list[Piece]:
        """What these characters make certain."""
        text, self._rest = self._rest + text, ""
        at = 0
        while at < len(text):
            end = self._state(text, at)
            if end is None:
                self._rest = text[at:]
                break
            at = end
        return self._taken()

    def _taken(self) -> list[Piece]:
        pieces, self._out = self._out, []
        return pieces
