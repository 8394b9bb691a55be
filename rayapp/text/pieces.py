"""What a model's answer is made of: content, reasoning and tool calls, piece by piece.

The parsers of `rayapp.text.reasoning` and `rayapp.text.tools` give these, and the chat endpoints turn them into deltas
or a whole message. Plain data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thought by. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    """A call begins: the first piece of its `index`, which counts the calls of an answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """More of a call's arguments. Joined they are a JSON object as the model wrote it, unless it was cut or broke off.

    Never empty.
    """

    index: int
    text: str


Piece = Content | Reasoning | ToolStart | ToolArguments


@dataclass(slots=True)
class ToolCall:
    """One whole call. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Reply:
    """A whole answer, collected from its pieces."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """The same with neighbours of one kind joined, so that it no longer shows where the text was cut."""
    if len(pieces) < 2:
        return list(pieces)
    runs: list[tuple[Piece, list[str]]] = []
    for piece in pieces:
        if isinstance(piece, ToolStart):
            runs.append((piece, []))
        elif runs and _continues(runs[-1][0], piece):
            runs[-1][1].append(piece.text)
        else:
            runs.append((piece, [piece.text]))
    return [_joined(first, texts) for first, texts in runs]


def _continues(first: Piece, piece: Piece) -> bool:
    if isinstance(first, ToolArguments) and isinstance(piece, ToolArguments):
        return first.index == piece.index
    return type(first) is type(piece)


def _joined(first: Piece, texts: list[str]) -> Piece:
    if isinstance(first, ToolStart):
        return first
    text = "".join(texts)
    return ToolArguments(first.index, text) if isinstance(first, ToolArguments) else type(first)(text)


def collected(pieces: Sequence[Piece]) -> Reply:
    """The whole answer."""
    reply = Reply()
    for piece in merged(pieces):
        match piece:
            case Content(text):
                reply.content += text
            case Reasoning(text):
                reply.reasoning += text
            case ToolStart(_, call_id, name):
                reply.calls.append(ToolCall(call_id, name))
            case ToolArguments(index, text):
                reply.calls[index].arguments += text
    return reply
