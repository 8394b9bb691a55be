"""Generations that end inside a call, at every character: no markup as content, and a reason that tells it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rayapp.api.chat import ChatShape
from rayapp.api.choices import Choice
from rayapp.api.resolve import plan_chat
from rayapp.api.service import Chunk, ServedModel
from rayapp.api.settings import RequestSettings

ARGUMENTS = {"a": "xy", "b": "C"}
JSON = json.dumps(ARGUMENTS)
XML = "\n<parameter=a>\nxy\n</parameter>\n<parameter=b>\nC\n</parameter>\n</function>"
NAMED, V3_NAMED = '{"name": "look", "arguments": ', "function<｜tool▁sep｜>look\n```json\n"
BEGIN, END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
STRINGS = {"type": "object", "properties": {name: {"type": "string"} for name in ARGUMENTS}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {**STRINGS, "required": ["a"]}}}

# Two calls: what opens the first, what names it, its arguments; the same of the second; what closes them.
HERMES = ("<tool_call>", "\n" + NAMED, JSON, "}\n</tool_call>\n<tool_call>", "\n" + NAMED, JSON, "}\n</tool_call>")
CODER_OPEN, CODER_NAMED = "<tool_call>", "\n<function=look>"
CODER = (CODER_OPEN, CODER_NAMED, XML, "\n</tool_call>\n" + CODER_OPEN, CODER_NAMED, XML, "\n</tool_call>")
MISTRAL_OPEN, MISTRAL_NAMED = "[TOOL_CALLS]", "look[ARGS]"
V3 = ("<｜tool▁calls▁begin｜>" + BEGIN, V3_NAMED, JSON, f"\n```{END}\n{BEGIN}", V3_NAMED, JSON, f"\n```{END}")
V31_NAMED = "look<｜tool▁sep｜>"
FORMS = [
    ("hermes", HERMES),
    ("qwen3_coder", CODER),
    ("mistral", ("[TOOL_CALLS][", NAMED, JSON, "}, {", NAMED[1:], JSON, "}]")),
    ("mistral", (MISTRAL_OPEN, MISTRAL_NAMED, JSON, MISTRAL_OPEN, MISTRAL_NAMED, JSON, "")),
    ("deepseek_v3", V3),
    ("deepseek_v31", (BEGIN, V31_NAMED, JSON, END + BEGIN, V31_NAMED, JSON, END + "<｜tool▁calls▁end｜>")),
]
MARKED = [
    *FORMS,
    ("llama3_json", ("<|python_tag|>", NAMED, JSON, "}; {", NAMED[1:], JSON, "}")),
    ("pythonic", ("<|python_start|>", "[look(**", JSON + ")", ", l", "ook(**", JSON + ")", "]")),
]
FORCED = [
    *FORMS,
    ("llama3_json", ("{", NAMED[1:], JSON, "}; {", NAMED[1:], JSON, "}")),
    ("pythonic", ("[", "look(**", JSON + ")", ", l", "ook(**", JSON + ")", "]")),
]
ENDS = [("stop", True), ("length", False)]


class Answers:
    """Of two choices to one request: the first says `whole`, the second what it is asked to."""

    def __init__(self, models: dict[str, ServedModel], form: str, choice: str, whole: str, **fields: Any) -> None:
        able = replace(models["smol"], tool_format=form, reasons=choice == "required")
        body = {"model": "smol", "messages": [{"role": "user", "content": "?"}], "tools": [LOOK], "n": 2}
        self._plan = plan_chat(
            {"smol": able}, json.dumps({**body, "tool_choice": choice, **fields}).encode(), RequestSettings()
        )
        self._tokenizer, self._whole = able.tokenizer, whole

    def _chunks(self, text: str, reason: str, matched: bool, size: int) -> Iterator[Chunk]:
        for start in range(0, len(text), size):
            yield Chunk(text[start : start + size], [], None, 1, 1, 0)
        yield Chunk("", [], reason, 1, 1, 0, matched=matched)

    def said(self, text: str, reason: str, matched: bool) -> tuple[str | None, list[tuple[str, str]], str]:
        """Content, calls and reason of the second choice, the same streamed; the first is as though it were alone."""
        choices = [Choice(), Choice()]
        for choice, one in zip(choices, ((self._whole, "stop", False), (text, reason, matched)), strict=True):
            for chunk in self._chunks(*one, size=100):
                choice.add(chunk)
        first, second = ChatShape(self._plan, self._tokenizer).whole(choices, {})["choices"]
        assert (first["finish_reason"], len(first["message"]["tool_calls"])) == ("tool_calls", 2)
        message = second["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
        streamed = self.streamed(text, reason, matched)
        assert streamed == (message["content"] or "", calls, second["finish_reason"])
        return message["content"], calls, second["finish_reason"]

    def streamed(self, text: str, reason: str, matched: bool) -> tuple[str, list[tuple[str, str]], str]:
        """The second choice alone, a few characters at a time."""
        shape, calls = ChatShape(self._plan, self._tokenizer), list[tuple[str, str]]()
        content, end = "", ""
        for chunk in self._chunks(text, reason, matched, size=3):
            for event in shape.piece(1, chunk, None):
                choice = json.loads(event.removeprefix(b"data: "))["choices"][0]
                content += choice["delta"].get("content") or ""
                end = choice["finish_reason"] or end
                for call in choice["delta"].get("tool_calls", []):
                    if "id" in call:
                        calls.append((call["function"]["name"], ""))
                    name, arguments = calls[call["index"]]
                    calls[call["index"]] = (name, arguments + call["function"]["arguments"])
        return content, calls, end


def edges(parts: tuple[str, ...]) -> list[int]:
    """Where each part ends."""
    return [len("".join(parts[: number + 1])) for number in range(len(parts))]


def check_calls(parts: tuple[str, ...], at: int, calls: list[tuple[str, str]]) -> int:
    """The calls of a text cut at `at` are as far as it has them; returns how many it has whole."""
    ends = edges(parts)
    whole, named = sum(ends[part] <= at for part in (2, 5)), sum(ends[part] < at for part in (1, 4))
    assert named <= len(calls) <= sum(ends[part] <= at for part in (0, 3))
    assert all(name == "look" and JSON.startswith(arguments) for name, arguments in calls)
    assert [arguments for _, arguments in calls[:whole]] == [JSON] * whole
    return whole


def check_reason(parts: tuple[str, ...], at: int, reason: str, found: str) -> None:
    """A call that is not whole keeps the reason; between two calls a text may be either."""
    ends = edges(parts)
    if reason == "length" or at < ends[2] or ends[3] <= at < ends[5]:
        assert found == reason
    elif at in (ends[2], ends[5]) or at == ends[6]:
        assert found == "tool_calls"


@pytest.mark.parametrize(("form", "parts"), FORCED)
@pytest.mark.parametrize(("reason", "matched"), ENDS)
def test_a_forced_call_that_is_cut(
    models: dict[str, ServedModel], form: str, parts: tuple[str, ...], reason: str, matched: bool
) -> None:
    text = "".join(parts)
    answers = Answers(models, form, "required", text)
    for at in range(len(text) + 1):
        content, calls, found = answers.said(text[:at], reason, matched)
        assert content is None
        check_calls(parts, at, calls)
        check_reason(parts, at, reason, found)


@pytest.mark.parametrize(("form", "parts"), MARKED)
@pytest.mark.parametrize(("reason", "matched"), ENDS)
def test_a_call_that_is_cut_behind_its_marker(
    models: dict[str, ServedModel], form: str, parts: tuple[str, ...], reason: str, matched: bool
) -> None:
    """Before the marker is whole it is content, and so is one that nothing but the model's own end follows."""
    text, ends = "".join(parts), edges(parts)
    marker = re.match(r"<[^>]*>|\[TOOL_CALLS\]", text)
    assert marker is not None
    answers = Answers(models, form, "auto", text)
    for at in range(len(text) + 1):
        content, calls, found = answers.said(text[:at], reason, matched)
        check_calls(parts, at, calls)
        check_reason(parts, at, reason, found)
        if 0 < at < marker.end():
            assert content == text[:at]
        elif at and not ends[2] < at < ends[3]:
            assert content is None
    assert answers.said(marker[0], "stop", False) == (marker[0], [], "stop")


@pytest.mark.parametrize(("form", "parts"), FORCED)
def test_a_call_behind_the_only_one_wanted(models: dict[str, ServedModel], form: str, parts: tuple[str, ...]) -> None:
    """A client does not see it: that it is cut changes nothing."""
    answers = Answers(models, form, "auto", "".join(parts), parallel_tool_calls=False, n=1)
    text = "".join(parts)
    for at in range(edges(parts)[3], len(text)):
        assert answers.streamed(text[:at], "stop", True) == ("", [("look", JSON)], "tool_calls")


@pytest.mark.parametrize(("form", "parts"), [one for one in MARKED if one[0] != "qwen3_coder"])
def test_a_call_that_breaks_off_cannot_be_run(
    models: dict[str, ServedModel], form: str, parts: tuple[str, ...]
) -> None:
    """By the model's own fault. (In XML any text is a value.)"""
    answers = Answers(models, form, "auto", "".join(parts))
    assert answers.said("".join(parts[:3]).replace('"xy"', "oops"), "stop", False)[2] == "stop"
