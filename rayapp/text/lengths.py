"""How few tokens a text can have, by its length and the longest token of the vocabulary.

Used by `tokenizer`. Knows only of tokenizers whose tokens cover the whole text; of others it claims nothing.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

_LENGTHENING = {"Prepend"}  # normalizers that only add
_COVERING = {"ByteLevel", "Metaspace", "Split", "Digits", "Punctuation"}  # pre-tokenizers that drop nothing


class LeastTokens:
    """Made once for a vocabulary, called for each text."""

    def __init__(self, backend: Backend) -> None:
        self._longest = max(map(len, backend.get_vocab()), default=1)
        self._composes = False
        self._known = self._covers(backend)

    def __call__(self, text: str) -> int:
        """A number of tokens that `text` has at least; 0 where nothing is known."""
        if not self._known:
            return 0
        length = len(unicodedata.normalize("NFC", text)) if self._composes else len(text)
        return -(-length // self._longest)

    def _covers(self, backend: Backend) -> bool:
        model = backend.model
        if not isinstance(model, BPE) or (model.fuse_unk and not model.byte_fallback):
            return False  # an unknown token may stand for any number of characters
        if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
            return False  # takes the white space beside it in
        for step in _steps(backend.pre_tokenizer, "pretokenizers"):
            if step["type"] not in _COVERING or step.get("behavior") == "Removed":
                return False
        for step in _steps(backend.normalizer, "normalizers"):
            self._composes = self._composes or step["type"] == "NFC"
            if step["type"] not in {"NFC", *_LENGTHENING} and not _lengthens(step):
                return False
        return True


def _steps(step: Any, inner: str) -> Iterator[dict[str, Any]]:
    """What a normalizer or pre-tokenizer does, one after the other."""
    if step is None:
        return
    state = json.loads(step.__getstate__())
    yield from state[inner] if state["type"] == "Sequence" else [state]


def _lengthens(step: dict[str, Any]) -> bool:
    pattern = step.get("pattern", {}).get("String")
    return step["type"] == "Replace" and isinstance(pattern, str) and len(step["content"]) >= len(pattern)
