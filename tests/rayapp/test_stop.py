"""Stop strings against the plain definition: the text up to the earliest match, however it is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.text.stop import StopBuffer


def feed(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    buffer = StopBuffer(stops)
    shown = "".join(buffer.push(piece)[0] for piece in pieces) + buffer.flush()
    return shown, buffer.matched


def cut(text: str, stops: list[str]) -> int | None:
    return min((text.index(stop) for stop in stops if stop in text), default=None)


def may_begin_match(rest: str, stops: list[str]) -> bool:
    """Whether a match begins where `rest` does, or would if more text came."""
    return any(rest.startswith(stop) or stop.startswith(rest) for stop in stops)


few_letters = st.text("ab", max_size=12)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


@given(stop_lists, st.lists(few_letters, max_size=8))
def test_equals_the_definition_for_any_pieces(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    where = cut(text, stops)
    assert feed(stops, pieces) == ((text, False) if where is None else (text[:where], True))


@given(stop_lists, st.lists(st.text("abc", max_size=4), max_size=8))
def test_holds_only_what_may_be_a_match(stops: list[str], pieces: list[str]) -> None:
    buffer, text, shown = StopBuffer(stops), "", ""
    for piece in pieces:
        text += piece
        new, matched = buffer.push(piece)
        shown += new
        if matched:
            break
        first = next((i for i in range(len(text)) if may_begin_match(text[i:], stops)), len(text))
        assert shown == text[:first]
        if cut(text, stops) is None:
            assert len(text) - len(shown) <= max(map(len, stops)) - 1


def test_O04_stop_over_several_pieces() -> None:
    buffer = StopBuffer(["8, 9"])
    pieces = [" ", "6", ",", " ", "7", ",", " ", "8", ",", " ", "9", ","]
    shown = [buffer.push(piece) for piece in pieces]
    assert "".join(text for text, _ in shown) == " 6, 7, "
    assert all("8" not in text for text, _ in shown)
    assert [matched for _, matched in shown].index(True) == pieces.index("9")


def test_O05_a_stop_that_never_completes() -> None:
    buffer = StopBuffer(["8, X"])
    shown = [buffer.push(piece)[0] for piece in ["7", ",", " ", "8", ",", " ", "9", ",", " 8"]]
    assert shown == ["7", ",", " ", "", "", "", "8, 9", ",", " "]  # back as soon as it cannot match any more
    assert buffer.flush() == "8"
    assert not buffer.matched


@pytest.mark.parametrize("stops", [[", 8", " 7"], [" 7", ", 8"]])
def test_O06_earliest_in_the_text_wins(stops: list[str]) -> None:
    text = " 6, 7, 8, 9"
    assert feed(stops, list(text)) == feed(stops, [text]) == (" 6,", True)


@pytest.mark.parametrize("stops", [["re", "he"], ["he", "re"]])
def test_O06_earliest_within_one_piece(stops: list[str]) -> None:
    assert feed(stops, ["there", " a"]) == ("t", True)


def test_a_match_waits_for_one_that_began_before_it() -> None:
    assert feed(["abcd", "bc"], list("xabcd")) == ("x", True)
    assert feed(["abcd", "bc"], list("xabce")) == ("xa", True)
    assert feed(["abcd", "bc"], list("xabc")) == ("xa", True)  # decided by the end


def test_nothing_after_a_match() -> None:
    buffer = StopBuffer(["x"])
    assert buffer.push("ax") == ("a", True)
    assert buffer.push("b") == ("", True)
    assert buffer.flush() == ""


def test_without_stops_all_goes_through() -> None:
    assert feed([], ["a", "", "b"]) == ("ab", False)


def test_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopBuffer(["a", ""])
