"""Thoughts against the plain definition: a block at the beginning, however the text is cut into pieces."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from rayapp.text.pieces import Content, Piece, Reasoning, ToolArguments, ToolStart, collected, merged
from rayapp.text.reasoning import ReasoningCount, ReasoningParser, opens_thinking, reasons
from rayapp.text.reply import ReplyParser
from rayapp.text.tokenizer import Tokenizer
from rayapp.text.tools import tool_parser

fragments = st.lists(
    st.sampled_from(["<think>", "</think>", "<thi", "</", "nk>", "<", " ", "\n", "a", "你", "x > y"]), max_size=10
)


def feed(parser: ReasoningParser | ReplyParser, pieces: list[str]) -> list[Piece]:
    out = [found for piece in pieces for found in parser.push(piece)]
    return merged([*out, *parser.finish()])


def by_definition(text: str, inside: bool) -> list[Piece]:
    body = text.lstrip()
    begun = body.startswith("<think>")
    if not begun and not inside:
        return [Content(text)] if text else []
    thought, end, said = body.removeprefix("<think>").lstrip().partition("</think>")
    if not end and not thought:
        return []
    return [kind(part) for kind, part in ((Reasoning, thought), (Content, said.lstrip() if end else "")) if part]


@given(fragments, st.booleans(), st.lists(st.integers(0, 60), max_size=8))
def test_equals_the_definition_for_any_pieces(parts: list[str], inside: bool, cuts: list[int]) -> None:
    text = "".join(parts)
    edges = [0, *sorted(cuts), len(text)]
    pieces = [text[begin:end] for begin, end in itertools.pairwise(edges)]
    expected = by_definition(text, inside)
    assert feed(ReasoningParser(inside), pieces) == expected
    assert feed(ReasoningParser(inside), list(text)) == expected
    assert feed(ReplyParser(ReasoningParser(inside)), pieces) == expected


def test_holds_only_what_may_be_a_marker() -> None:
    parser = ReasoningParser()
    given = [parser.push(character) for character in "<think>a < b</thin </think>so <think>"]
    shown = ["".join(piece.text for piece in pieces) for pieces in given]  # type: ignore[union-attr]
    assert shown[:7] == [""] * 7
    assert shown[7:13] == ["a", " ", "", "< ", "b", ""]
    assert "".join(shown) == "a < b</thin so <think>"  # one that is spoken of is content, and is given at once
    assert shown[-8:] == [" ", *"<think>"]


def test_ends_inside() -> None:
    assert feed(ReasoningParser(), ["<think>", "well", "</thi"]) == [Reasoning("well</thi")]
    assert feed(ReasoningParser(inside=True), ["well"]) == [Reasoning("well")]


def test_an_empty_block_leaves_no_piece() -> None:
    assert feed(ReasoningParser(), ["<think>\n\n</think>\n\nHi"]) == [Content("Hi")]


@pytest.mark.parametrize(
    ("prompt", "inside"), [("<user>Say <think>\n<assistant>", False), ("<assistant><think>\n", True)]
)
def test_what_the_prompt_opens(prompt: str, inside: bool) -> None:
    assert opens_thinking(prompt) == inside


def test_which_models_reason() -> None:
    shared = ["<think>", "</think>", "<tool_call>"]
    assert reasons("{% if '</think>' in content %}{{ content.split('</think>')[-1] }}{% endif %}", [])
    assert reasons("{{ '<assistant><think>\\n' }}", shared)
    assert not reasons("{% for m in messages %}{{ m.content }}{% endfor %}", shared)
    assert not reasons(None, shared)


def test_calls_come_after_thoughts() -> None:
    text = '<think>I could <tool_call> something</think>\n\nSure.<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    expected: list[Piece] = [
        Reasoning("I could <tool_call> something"),
        Content("Sure."),
        ToolStart(0, "id", "f"),
        ToolArguments(0, "{}"),
    ]
    for pieces in (list(text), [text]):
        found = feed(ReplyParser(ReasoningParser(), tool_parser("hermes", new_id=lambda: "id")), pieces)
        assert found == expected
    reply = collected(expected)
    assert (reply.reasoning, reply.content, reply.calls[0].arguments) == (
        "I could <tool_call> something",
        "Sure.",
        "{}",
    )


@pytest.fixture(scope="module")
def smol_text(smol_path: Path) -> Tokenizer:
    return Tokenizer.load(smol_path)


def counted_by_definition(tokenizer: Tokenizer, ids: list[int], inside: bool) -> int:
    """The fewest tokens whose text has the block's end; all of them where it has no end."""
    for count in range(len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        if (inside or text.lstrip().startswith("<think>")) and "</think>" in text:
            return count
    return len(ids) if inside or tokenizer.decode(ids).lstrip().startswith("<think>") else 0


@given(fragments, st.booleans(), st.integers(1, 5))
def test_tokens_of_thoughts_are_counted(smol_text: Tokenizer, parts: list[str], inside: bool, step: int) -> None:
    ids = smol_text.encode("".join(parts))
    count = ReasoningCount(smol_text, (), inside)
    for start in range(0, len(ids), step):
        count.push(ids[start : start + step])
    assert count.tokens == counted_by_definition(smol_text, ids, inside)


def test_a_marker_that_is_a_special_token_ends_the_count(smol_path: Path) -> None:
    fast = PreTrainedTokenizerFast.from_pretrained(smol_path)
    fast.add_special_tokens({"additional_special_tokens": ["</think>"]})
    tokenizer = Tokenizer(fast)
    (marker,) = tokenizer.ids_of(["</think>"]).values()
    count = ReasoningCount(tokenizer, (marker,), inside=True)
    count.push([*tokenizer.encode("a b"), marker, *tokenizer.encode(" c d")])
    assert count.tokens == 3
