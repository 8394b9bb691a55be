"""One answer from text to pieces: reasoning first, then tool calls, then content.

One `ReplyParser` a chat generation, fed with the text that stop strings let through. Knows nothing of HTTP or tokens.
"""

from __future__ import annotations

from rayapp.text.pieces import Content, Piece, merged
from rayapp.text.reasoning import ReasoningParser
from rayapp.text.tools import ToolParser


class ReplyParser:
    """Joined and merged, the pieces do not depend on how the text was cut.

    Args:
        reasoning: None takes no text for reasoning.
        tools: None takes no text for calls.
        forced: what is not reasoning can be nothing but calls.
    """

    def __init__(
        self, reasoning: ReasoningParser | None = None, tools: ToolParser | None = None, forced: bool = False
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._forced = forced

    @property
    def unfinished(self) -> bool:
        """See `ToolParser`."""
        return self._tools is not None and self._tools.unfinished

    def push(self, text: str) -> list[Piece]:
        """What these characters make certain."""
        if not text:
            return []
        return merged(self._through_tools([Content(text)] if self._reasoning is None else self._reasoning.push(text)))

    def finish(self, cut: bool = False) -> list[Piece]:
        """The text ends here: what was held. Arguments as `ToolParser.finish`."""
        pieces = [] if self._reasoning is None else self._through_tools(self._reasoning.finish())
        return merged(pieces if self._tools is None else [*pieces, *self._tools.finish(cut, self._forced)])

    def _through_tools(self, pieces: list[Piece]) -> list[Piece]:
        if self._tools is None:
            return pieces
        found: list[Piece] = []
        for piece in pieces:
            found += self._tools.push(piece.text) if isinstance(piece, Content) else [piece]
        return found
