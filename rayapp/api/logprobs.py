"""Scored tokens in OpenAI's two forms: of chat, and the older one of completions.

Used by the shapes of the two endpoints. A token is shown by its text; one that is no whole character, by its bytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from rayapp.scored import ScoredToken
from rayapp.text.tokenizer import Tokenizer


def shown(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; `bytes:\\xe2\\x82` where its bytes are no whole characters, so that no two look alike."""
    data = tokenizer.shown_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def scored(tokens: Sequence[int]) -> list[ScoredToken]:
    """The tokens, which their request asked to be scored.

    Raises:
        TypeError: one of them has no score.
    """
    found = [token for token in tokens if isinstance(token, ScoredToken)]
    if len(found) != len(tokens):
        raise TypeError("a token came without the log-probability that was asked for")
    return found


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[int]) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        data = tokenizer.shown_bytes(token_id)
        return {"token": shown(tokenizer, token_id), "logprob": logprob, "bytes": list(data)}

    content = [
        entry(token, token.logprob) | {"top_logprobs": [entry(*one) for one in token.top]} for token in scored(tokens)
    ]
    return {"content": content, "refusal": None}


class TextLogprobs:
    """`choices[].logprobs` of completions, piece by piece: offsets go on from one piece to the next.

    Args:
        begun: characters that come before the first token.
    """

    def __init__(self, tokenizer: Tokenizer, begun: int = 0) -> None:
        self._tokenizer = tokenizer
        self._offset = begun
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def of(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Of the next tokens. The one that was chosen always stands among the most likely ones."""
        names, values, tops, offsets = [], [], [], []
        for token in scored(tokens):
            name = shown(self._tokenizer, token)
            names.append(name)
            values.append(token.logprob)
            offsets.append(self._offset)
            if token not in self._tokenizer.special_ids:
                self._offset += len(self._decode(self._tokenizer.shown_bytes(token)))
            top = {shown(self._tokenizer, token_id): logprob for token_id, logprob in token.top}
            tops.append(None if token.logprob is None else top | {name: token.logprob})
        return {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
