"""How few tokens a text can have: never more than it has, for tokenizers of many kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordPiece

from rayapp.text.lengths import LeastTokens

texts = st.lists(
    st.sampled_from(["a", "aa", " ", "   ", "\n", "u\u0308\u0304", "\u1100\u1161\u11a8", "<s>", "你", "b", "\ud7a3"]),
    max_size=30,
).map("".join)


def pieces(byte_fallback: bool = True, fuse_unk: bool = False, normalizer: object = None) -> Tokenizer:
    """A vocabulary of the SentencePiece kind."""
    vocab = {token: index for index, token in enumerate(["<unk>", "<s>", "\u2581", "a", "aa"])}
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    backend = Tokenizer(BPE(vocab, [("a", "a")], unk_token="<unk>", fuse_unk=fuse_unk, byte_fallback=byte_fallback))
    backend.normalizer = normalizer  # type: ignore[assignment]
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return backend


def metaspace() -> Tokenizer:
    return pieces(normalizer=normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]))


def composing() -> Tokenizer:
    backend = pieces(normalizer=normalizers.NFC())
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def swallowing() -> Tokenizer:
    backend = metaspace()
    backend.add_special_tokens([AddedToken("<s>", special=True, lstrip=True, rstrip=True)])
    return backend


def words() -> Tokenizer:
    backend = Tokenizer(WordPiece({"[UNK]": 0, "a": 1, "aa": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


def dropping() -> Tokenizer:
    backend = pieces()
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    return backend


KNOWN = [metaspace, composing, pieces]
UNKNOWN = [
    swallowing,
    words,
    dropping,
    lambda: pieces(byte_fallback=False, fuse_unk=True),
    lambda: pieces(normalizer=normalizers.Strip()),
    lambda: pieces(normalizer=normalizers.Replace("  ", " ")),
    lambda: Tokenizer(Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)),
]


@pytest.mark.parametrize("make", [*KNOWN, *UNKNOWN])
@given(text=texts)
def test_never_more_than_there_are(make: Callable[[], Tokenizer], text: str) -> None:
    backend = make()
    assert LeastTokens(backend)(text) <= len(backend.encode(text, add_special_tokens=False).ids)


def test_what_is_claimed(smol_path: Path) -> None:
    assert LeastTokens(Tokenizer.from_file(str(smol_path / "tokenizer.json")))("x" * 10_000) > 100
    for make in KNOWN:
        assert LeastTokens(make())("a" * 600) == 100  # <0x00> is the longest
    for unknown in UNKNOWN:
        assert LeastTokens(unknown())("a" * 600) == 0
    assert LeastTokens(composing())("\u1100\u1161\u11a8" * 600) == 100
