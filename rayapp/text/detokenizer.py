"""Token ids to text as they come, whole characters only.

One `Detokenizer` a generation, driven by `rayapp.generation`. Knows nothing of stop strings or requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence

from rayapp.text.tokenizer import Tokenizer

PROMPT_CONTEXT = 8
"""Prompt tokens that a decoder which is not byte-level sees before the first generated one."""

MAX_PENDING = 8
"""Tokens without a finished character after which they are taken for rubbish."""

MAX_BYTES = 4
"""Of a character."""

UNFINISHED = "\ufffd"


class Detokenizer:
    """The text of one generation, piece by piece.

    The joined pieces equal `tokenizer.decode(all ids)` up to an unfinished character at the very end, which is
    left out: a generation cut inside a character ends before it. Bytes that can no longer become a character
    show as U+FFFD, as they do in `decode`; bytes that still can are held. Special tokens do not show, but for those of
    `shown`. Spaces are neither stripped nor merged. The cost of a token does not depend on how many came before.

    Args:
        prompt_ids: what the generated tokens follow; some tokenizers drop the space before a text's first word.
        shown: ids of special tokens that show as they are written, such as the markers of tool calls. An unfinished
            character before one can no longer become one.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), shown: Collection[int] = frozenset()
    ) -> None:
        self._decoder = _ByteDecoder(tokenizer) if tokenizer.byte_level else _StreamDecoder(tokenizer, prompt_ids)
        written = ((token_id, tokenizer.backend.id_to_token(token_id)) for token_id in shown)
        self._shown = {token_id: text for token_id, text in written if text and token_id in tokenizer.special_ids}

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens finish; may be empty."""
        if not self._shown:
            return "".join(map(self._decoder.step, token_ids))
        return "".join(map(self._step, token_ids))

    def _step(self, token_id: int) -> str:
        marker = self._shown.get(token_id)
        return self._decoder.step(token_id) if marker is None else self._decoder.interrupt() + marker

    def finish(self) -> str:
        """The text ends here: returns what was held but for an unfinished character."""
        return self._decoder.finish()


class _ByteDecoder:
    """Byte-level tokenizers: an incremental UTF-8 decoder over the tokens' bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def step(self, token_id: int) -> str:
        return self._decode(self._token_bytes(token_id))

    def interrupt(self) -> str:
        """What was held, before text from elsewhere."""
        return self._decode(b"", True)

    def finish(self) -> str:
        return ""  # only bytes of an unfinished character are ever held


class _StreamDecoder:
    """Any other tokenizer: what its decoder says more of the last tokens with the next ones than without.

    A run that stays without a finished character is given out from time to time, but for tokens at its end that may
    still become one.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        context = [i for i in prompt_ids[-4 * PROMPT_CONTEXT :] if i not in tokenizer.special_ids]
        self._context = context[-PROMPT_CONTEXT:]  # what was given out last
        self._pending: list[int] = []

    def step(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids:
            return ""
        self._pending.append(token_id)
        text = self._text_of(self._pending)
        if text and not text.endswith(UNFINISHED):
            return self._give(text, len(self._pending))
        return self._give_up(text) if len(self._pending) > MAX_PENDING else ""

    def interrupt(self) -> str:
        """What was held, before text from elsewhere."""
        text, self._pending = self._text_of(self._pending), []
        return text

    def finish(self) -> str:
        return self._text_of(self._pending).rstrip(UNFINISHED)

    def _give(self, text: str, count: int) -> str:
        """That is the text of so many of the pending tokens."""
        self._context, self._pending = self._pending[:count], self._pending[count:]
        return text

    def _give_up(self, text: str) -> str:
        """Of a run without a finished character all but what may be the beginning of one."""
        for count in range(len(self._pending) - 1, len(self._pending) - MAX_BYTES, -1):
            part = self._text_of(self._pending[:count])
            if len(part) < len(text) and text.startswith(part):
                return self._give(part, count)
        return self._give(text, len(self._pending))

    def _text_of(self, token_ids: list[int]) -> str:
        before = self._tokenizer.decode(self._context)
        both = self._tokenizer.decode(self._context + token_ids)
        return both[len(before) :] if both.startswith(before) else self._tokenizer.decode(token_ids)
