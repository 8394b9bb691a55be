"""Splits what a model thinks from what it says: `<think>` ... `</think>`.

The first parser over a generation's text, see `rayapp.text.reply`. Knows nothing of tools or HTTP.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rayapp.text.detokenizer import Detokenizer
from rayapp.text.machine import TextMachine
from rayapp.text.markers import Markers
from rayapp.text.pieces import Content, Piece, Reasoning
from rayapp.text.tokenizer import Tokenizer

BEGIN, END = "<think>", "</think>"

MARKERS = (BEGIN, END)
"""What the detokenizer must show where a tokenizer has them as special tokens."""

_BEGIN, _END = Markers(BEGIN), Markers(END)


def reasons(template_source: str | None, added_tokens: Collection[str]) -> bool:
    """Whether a model thinks in such a block, by its chat template and the tokens added to its vocabulary.

    The tokens alone do not tell: vocabularies are shared between models that think and models that do not.
    """
    source = template_source or ""
    return END in source or (BEGIN in source and END in added_tokens)


def opens_thinking(prompt: str) -> bool:
    """Whether a rendered prompt ends inside a block, so that the answer begins there."""
    return prompt.rstrip().endswith(BEGIN)


class ReasoningParser(TextMachine):
    """Text in, `Reasoning` and `Content` out.

    A block counts at the beginning of an answer alone: one that is spoken of later is content. White space after
    either marker belongs to it. Text is held only while it may still be the beginning of a marker, or is white space
    before the first one. What ends inside the block is reasoning.

    Args:
        inside: the prompt has opened the block, see `opens_thinking`; a model that opens it again is forgiven.
    """

    def __init__(self, inside: bool = False) -> None:
        super().__init__(self._opening)
        self._inside = inside
        self._has_block = False
        self._blank: list[str] = []

    @property
    def opened(self) -> bool:
        """The answer has a block, as far as is known."""
        return self._inside or self._has_block

    @property
    def decided(self) -> bool:
        """What comes now is content: the block has ended, or there is none."""
        return self._state in (self._thought, self._content)

    def finish(self) -> list[Piece]:
        """The text ends here: what was held."""
        if self._state == self._opening and not self._inside:
            rest = "".join(self._blank) + self._rest
            return [Content(rest)] if rest else []
        return [Reasoning(self._rest)] if self._rest else []

    def _opening(self, text: str, at: int) -> int | None:
        """Before the first character that is no white space."""
        blank_to = _skip_blank(text, at)
        if blank_to > at:
            self._blank.append(text[at:blank_to])
            return blank_to
        begun = _BEGIN.match(text, at)
        if begun is None:
            return None
        if begun > at or self._inside:
            self._has_block = True
            self._state = self._think_begun
            return begun
        self._out.append(Content("".join(self._blank) + text[at:]))
        self._state = self._content
        return len(text)

    def _think_begun(self, text: str, at: int) -> int:
        end = _skip_blank(text, at)
        if end < len(text):
            self._state = self._thinking
        return end

    def _thinking(self, text: str, at: int) -> int | None:
        found = _END.search(text, at)
        begin = found.start() if found else _END.open_from(text, at)
        if begin > at:
            self._out.append(Reasoning(text[at:begin]))
        if found:
            self._state = self._thought
            return found.end()
        return begin if begin > at else None

    def _thought(self, text: str, at: int) -> int:
        end = _skip_blank(text, at)
        if end < len(text):
            self._state = self._content
        return end

    def _content(self, text: str, at: int) -> int:
        self._out.append(Content(text[at:]))
        return len(text)


class ReasoningCount:
    """How many of an answer's tokens are of its block, markers included.

    Args:
        shown: special tokens that show in the text, as for `Detokenizer`.
        inside: as for `ReasoningParser`.

    Attributes:
        tokens: so many so far.
    """

    def __init__(self, tokenizer: Tokenizer, shown: Collection[int], inside: bool) -> None:
        self.tokens = 0
        self._detokenizer = Detokenizer(tokenizer, shown=shown)
        self._parser = ReasoningParser(inside)
        self._seen = 0

    def push(self, token_ids: Iterable[int]) -> None:
        """The next tokens. Costs nothing once the block has ended."""
        for token_id in token_ids:
            if self._parser.decided:
                return
            self._seen += 1
            self._parser.push(self._detokenizer.push([token_id]))
            if self._parser.opened:
                self.tokens = self._seen


def _skip_blank(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
