"""What the text of a chat generation says: content, reasoning, tool calls, and why it ended.

Used by the shapes of chat completions and responses. Knows nothing of JSON.
"""

from __future__ import annotations

from rayapp.api.tool_fields import Reply
from rayapp.text.pieces import Content, Piece, ToolArguments, ToolStart
from rayapp.text.tools.json_scanner import json_object


class Reader:
    """Of one choice."""

    def __init__(self, reply: Reply) -> None:
        self._parser = None if reply.parser is None else reply.parser()
        self._one_call = reply.one_call
        self._forced = reply.forced
        self._calls = 0
        self._arguments: list[list[str]] = []  # of the calls that the client sees

    def read(self, text: str, *, ended: bool, cut: bool = False) -> list[Piece]:
        """The pieces that these characters, or the end behind them, make certain.

        Args:
            cut: the end is not the model's own.
        """
        if self._parser is None:
            return [Content(text)] if text else []
        pieces = self._parser.push(text)
        return [piece for piece in (pieces + self._parser.finish(cut) if ended else pieces) if self._counts(piece)]

    def reason(self, finish_reason: str | None) -> str | None:
        """Why the choice ended, as OpenAI says it."""
        return "tool_calls" if finish_reason == "stop" and self._calls and self._are_whole() else finish_reason

    @property
    def is_calls(self) -> bool:
        """The choice has calls, or was cut before the first that it would have had."""
        return bool(self._calls or self._forced or self._unfinished)

    @property
    def _unfinished(self) -> bool:
        return self._parser is not None and self._parser.unfinished

    def _are_whole(self) -> bool:
        """Whether a client can run all the calls that it sees."""
        whole = all(json_object("".join(arguments)) is not None for arguments in self._arguments)
        return whole and (self._one_call or not self._unfinished)

    def _counts(self, piece: Piece) -> bool:
        """Whether a client who wants one call alone is to see it."""
        if isinstance(piece, ToolStart):
            self._calls += 1
        counts = not self._one_call or self._calls <= 1
        if counts and isinstance(piece, ToolStart):
            self._arguments.append([])
        elif counts and isinstance(piece, ToolArguments):
            self._arguments[-1].append(piece.text)
        return counts
