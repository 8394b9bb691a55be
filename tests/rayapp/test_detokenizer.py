"""Text out of tokens: whole characters, nothing lost, nothing tidied, for byte-level and other tokenizers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from transformers import PreTrainedTokenizerFast

from rayapp.text.detokenizer import MAX_PENDING, Detokenizer, _StreamDecoder
from rayapp.text.tokenizer import Tokenizer

CJK = " 你好 你好 你好"
CJK_IDS = [216, 18645, 250, 48392, 138] * 3
ACC_IDS = [297, 151, 219] * 5
HALVES = [18645, 48392, 151, 250, 138, 219]  # each a part of a character


@pytest.fixture(scope="module")
def smol_text(smol_path: Path) -> Tokenizer:
    return Tokenizer.load(smol_path)


@pytest.fixture(scope="module")
def metaspace() -> Tokenizer:
    """A tokenizer of the SentencePiece kind: ▁ for a space, bytes as <0xNN>, the first space of a text dropped."""
    words = ["<s>", "▁", "▁Paris", "Paris", "▁is", "你", "a"]
    vocab = {word: index for index, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    backend = Backend(BPE(vocab, [], byte_fallback=True))
    backend.pre_tokenizer = Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def pieces(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [])
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.finish()]


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]


def test_O01_split_characters(smol_text: Tokenizer) -> None:
    for ids, text in [(CJK_IDS, CJK), (ACC_IDS, " e\u0301" * 5)]:
        streamed = pieces(smol_text, ids)
        assert "".join(streamed) == smol_text.decode(ids) == text
        assert not any("\ufffd" in piece for piece in streamed)
        assert Detokenizer(smol_text).push(ids) == text


def test_O02_an_unfinished_character_is_left_out(smol_text: Tokenizer) -> None:
    assert pieces(smol_text, [216, 18645]) == [" ", "", ""]
    whole = Detokenizer(smol_text)
    assert whole.push([216, 18645]) + whole.finish() == " "


def test_O03_spaces_and_newlines_kept(smol_text: Tokenizer) -> None:
    paris = smol_text.encode(" Paris")
    assert len(paris) == 1
    assert "".join(pieces(smol_text, paris, smol_text.encode("The capital of France is"))) == " Paris"
    assert pieces(smol_text, [198, 253, 216, 28]) == ["\n", " a", " ", ",", ""]


def test_special_tokens_do_not_show(smol_text: Tokenizer) -> None:
    assert "".join(pieces(smol_text, [253, 2, 28, 0, 216, 1])) == " a, "


def test_special_tokens_that_are_asked_for_show(smol_text: Tokenizer) -> None:
    """As they are written, in their place; what is no special token is shown once."""
    detokenizer = Detokenizer(smol_text, shown={1, 253})
    assert [detokenizer.push([token_id]) for token_id in [253, 1, 2, 28]] == [" a", "<|im_start|>", "", ","]
    assert detokenizer.push([18645, 1, 28]) + detokenizer.finish() == "\ufffd<|im_start|>,"


def test_metaspace_special_tokens_that_are_asked_for_show(metaspace: Tokenizer) -> None:
    half, space, word = byte_ids(metaspace, "你")[0], 1, 6
    detokenizer = Detokenizer(metaspace, [word], shown={0})
    shown = [detokenizer.push([token_id]) for token_id in [space, 0, space, word, half, 0, word]]
    assert shown == [" ", "<s>", " ", "a", "", "\ufffd<s>", "a"]
    assert detokenizer.finish() == ""


def test_ids_without_a_token_do_not_show(smol_path: Path) -> None:
    padded = Tokenizer.load(smol_path, vocab_size=50_000)
    assert "".join(pieces(padded, [253, 49_999, 28])) == " a,"


ids_with_many_halves = st.lists(
    st.one_of(st.sampled_from([*HALVES, 0, 2]), st.sampled_from(HALVES), st.integers(0, 49151)), max_size=40
)


@given(ids_with_many_halves, st.integers(1, 4))
def test_any_ids_give_what_decode_gives(smol_text: Tokenizer, ids: list[int], step: int) -> None:
    """Only an unfinished character at the very end may be missing."""
    detokenizer = Detokenizer(smol_text)
    text = "".join(detokenizer.push(ids[i : i + step]) for i in range(0, len(ids), step)) + detokenizer.finish()
    assert smol_text.decode(ids) in (text, text + "\ufffd")


@given(ids_with_many_halves)
def test_both_ways_agree(smol_text: Tokenizer, ids: list[int]) -> None:
    """The way for tokenizers that are not byte-level gives the same, runs of rubbish included."""
    stream = _StreamDecoder(smol_text, [])
    text = "".join(map(stream.step, ids)) + stream.finish()
    assert smol_text.decode(ids).rstrip("\ufffd") == text.rstrip("\ufffd")


@given(st.lists(st.one_of(st.sampled_from([0, 6]), st.sampled_from(sorted(set("é你好🙂".encode()))))), st.data())
def test_metaspace_every_byte_shows_once(metaspace: Tokenizer, ids: list[int], data: st.DataObject) -> None:
    """As itself in a character, or as U+FFFD: none twice and none never, whatever was a run of rubbish."""
    ids = [token_id if token_id < 7 else 7 + token_id for token_id in ids]
    detokenizer = Detokenizer(metaspace, [6])
    text, at = "", 0
    while at < len(ids):
        step = data.draw(st.integers(1, 12))
        text += detokenizer.push(ids[at : at + step])
        at += step
    text += detokenizer.push([6]) + detokenizer.finish()
    shown = sum(1 if character == "\ufffd" else len(character.encode()) for character in text)
    assert shown == len([token_id for token_id in ids if token_id]) + 1


def test_metaspace_first_space_kept_after_a_prompt(metaspace: Tokenizer) -> None:
    paris, is_ = metaspace.backend.token_to_id("▁Paris"), metaspace.backend.token_to_id("▁is")
    assert not metaspace.byte_level
    assert "".join(pieces(metaspace, [paris, paris], [is_])) == " Paris Paris"
    assert "".join(pieces(metaspace, [paris, paris])) == "Paris Paris"  # nothing before: the text's first space


def test_metaspace_characters_from_bytes(metaspace: Tokenizer) -> None:
    ids = byte_ids(metaspace, "a你好e\u0301🙂")
    streamed = pieces(metaspace, ids)
    assert "".join(streamed) == "a你好e\u0301🙂"
    assert not any("\ufffd" in piece for piece in streamed)
    assert "".join(pieces(metaspace, ids[:-1])) == "a你好e\u0301"


def test_metaspace_rubbish_does_not_pile_up(metaspace: Tokenizer) -> None:
    """A run of half characters comes out in bounded portions, and so does what follows it."""
    half, word = byte_ids(metaspace, "你")[0], 6
    stream = _StreamDecoder(metaspace, [])
    shown = [stream.step(half) for _ in range(100)]
    assert all(any(shown[i : i + MAX_PENDING + 1]) for i in range(90))
    after = "".join(stream.step(token_id) for token_id in [word, *byte_ids(metaspace, "好"), word])
    assert after.lstrip("\ufffd") == "a好a"


def test_metaspace_special_tokens_and_spaces(metaspace: Tokenizer) -> None:
    space, word = 1, 6
    assert "".join(pieces(metaspace, [word, 0, space, space, word, 0, space], [word])) == "a  a "
