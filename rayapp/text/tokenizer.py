"""A model's tokenizer: text to token ids, and what the detokenizer needs for the way back.

Loaded by the Router (and by Python clients that want ids); used by the endpoints from worker threads. Must not
load torch: `PreTrainedTokenizerFast` does not, `AutoTokenizer` does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

from rayapp.text.lengths import LeastTokens


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the rest is moved to 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(moved)}


BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")  # of SentencePiece vocabularies, as is the mark of a word's beginning
WORD_BEGINNING = "\u2581"

BYTE_OF_CHARACTER = _byte_level_alphabet()


class Tokenizer:
    """Text to ids for one model. Every method may be called from any thread.

    Args:
        fast: the loaded tokenizer; its truncation and padding settings are turned off.
        vocab_size: ids below it are valid; None takes the tokenizer's own size. Pass the model's number of
            embedding rows where it is known.

    Attributes:
        fast: for the chat template.
        backend: the `tokenizers` object.
        byte_level: tokens are runs of UTF-8 bytes, see `token_bytes`.
        special_ids: ids that do not show in text unless asked for.
        least_tokens: a number of tokens that a text has at least, found at once; 0 where nothing is known.
        added_tokens: text -> id of the tokens that were added to the vocabulary, special or not.
    """

    def __init__(self, fast: PreTrainedTokenizerFast, vocab_size: int | None = None) -> None:
        self.fast = fast
        self.backend: Backend = fast.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self.vocab_size: int = vocab_size if vocab_size is not None else len(fast)
        self.byte_level = isinstance(self.backend.decoder, ByteLevel)
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        self.least_tokens = LeastTokens(self.backend)
        self._bytes: dict[int, bytes] = dict.fromkeys(self.special_ids, b"")

    @classmethod
    def load(cls, path: str | os.PathLike[str], vocab_size: int | None = None) -> Tokenizer:
        """Loads the tokenizer of the model in the folder `path`; nothing is fetched from anywhere.

        Raises:
            OSError, ValueError: the folder has no usable `tokenizer.json`.
        """
        return cls(PreTrainedTokenizerFast.from_pretrained(os.fspath(path), local_files_only=True), vocab_size)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.fast, self.vocab_size)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: what the tokenizer itself puts around a text (such as a leading BOS). False for a
                rendered chat template, which already holds them.

        Raises:
            ValueError: the text is not valid Unicode (half of a surrogate pair).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"character {error.start} of the text is half of a surrogate pair") from None
        # Of one text alone `encode` would keep every other thread waiting until it is done.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of ids at once, nothing tidied."""
        text: str = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def ids_of(self, markers: Iterable[str]) -> dict[str, int]:
        """Those of the markers, such as `<tool_call>`, that are one added token, and its id."""
        return {marker: self.added_tokens[marker] for marker in markers if marker in self.added_tokens}

    def check_ids(self, token_ids: list[int]) -> None:
        """Raises ValueError naming the first id that is not in the vocabulary."""
        for position, token_id in enumerate(token_ids):
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(
                    f"token id {token_id} at position {position} is not in the vocabulary: "
                    f"ids run from 0 to {self.vocab_size - 1}"
                )

    def shown_bytes(self, token_id: int) -> bytes:
        """What one token stands for on its own, special tokens by their name; b"" for unused ids."""
        token: str = self.backend.id_to_token(token_id) or ""
        if token_id in self.special_ids:
            return token.encode()
        if self.byte_level:
            return self.token_bytes(token_id)
        if BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace(WORD_BEGINNING, " ").encode()

    def token_bytes(self, token_id: int) -> bytes:
        """What one token of a byte-level tokenizer adds to the text: b"" for special tokens and unused ids."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self.backend.id_to_token(token_id) or ""
            values = [BYTE_OF_CHARACTER.get(character) for character in token]
            # An added token may hold characters outside the alphabet: it is then plain text.
            known = token.encode() if None in values else bytes(value for value in values if value is not None)
            self._bytes[token_id] = known
        return known
