"""What the text of a chat generation says: content, reasoning, tool calls, and why it ended.

Used by the shapes of chat completions and responses. Knows nothing of JSON.
"""

from __future__ import annotations

from rayapp.api.tool_fields import Reply
from rayapp.text.pieces import Content, Piece, ToolStart


class Reader:
    """Of one choice."""

    def __init__(self, reply: Reply) -> None:
        self._parser = None if reply.parser is None else reply.parser()
        self._one_call = reply.one_call
        self._calls = 0

    def read(self, text: str, *, ended: bool) -> list[Piece]:
        """The pieces that these characters, or the end behind them, make certain."""
        if self._parser is None:
            return [Content(text)] if text else []
        pieces = self._parser.push(text)
        return [piece for piece in (pieces + self._parser.finish() if ended else pieces) if self._counts(piece)]

    def reason(self, finish_reason: str | None) -> str | None:
        """Why the choice ended, as OpenAI says it."""
        return "tool_calls" if finish_reason == "stop" and self._calls else finish_reason

    def _counts(self, piece: Piece) -> bool:
        """Whether a client who wants one call alone is to see it."""
        if isinstance(piece, ToolStart):
            self._calls += 1
        return not self._one_call or self._calls <= 1
