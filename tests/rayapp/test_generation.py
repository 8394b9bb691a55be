"""One generation over a scripted replica: text, stop strings, counts, seeds, and what reaches the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from rayapp.api.service import Chunk, SamplingFields
from rayapp.failures import DeadlineExceeded, EngineUnavailable, GenerationFailed
from rayapp.generation import choice_seed, generate
from rayapp.link import Item, raise_if_failed, wire_request
from rayapp.text.tokenizer import Tokenizer

INFO = {"prompt_tokens": 2, "cached_tokens": 1, "error": None, "engine_failed": False, "replica": "r"}
EOS = 2
STOP_STRING_TOKENS = [216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28]  # " 6, 7, 8, 9,"


class ScriptedLink:
    """Yields what it is told, the first and last item with info, and notes how it was used."""

    def __init__(self, items: list[list[int]], reason: str = "length", error: Exception | None = None) -> None:
        self.items, self.reason, self.error = items, reason, error
        self.request: dict[str, Any] = {}
        self.ended: bool | None = None

    async def generate(self, request: dict[str, Any]) -> AsyncGenerator[Item, None]:
        self.request, self.ended = request, False
        for position, tokens in enumerate(self.items):
            last = position == len(self.items) - 1 and self.error is None
            yield tokens, self.reason if last else None, INFO if last or position == 0 else None
            self.ended = last
        if self.error is not None:
            raise self.error


@pytest.fixture(scope="module")
def tokenizer(smol_path: Any) -> Tokenizer:
    return Tokenizer.load(smol_path)


def run(link: ScriptedLink, tokenizer: Tokenizer, stop: list[str] | None = None, **sampling: Any) -> list[Chunk]:
    async def collect() -> list[Chunk]:
        fields = SamplingFields(max_new_tokens=20, **{"do_sample": False, **sampling})
        return [chunk async for chunk in generate(link, tokenizer, [5, 6], fields, stop or [])]

    return asyncio.run(collect())


def text(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


@pytest.mark.parametrize("size", [1, 2, 5, 12])
def test_text_and_counts_whatever_the_pieces(tokenizer: Tokenizer, size: int) -> None:
    pieces = [STOP_STRING_TOKENS[i : i + size] for i in range(0, 12, size)]
    chunks = run(ScriptedLink(pieces), tokenizer)
    assert text(chunks) == " 6, 7, 8, 9,"
    assert [token for chunk in chunks for token in chunk.token_ids] == STOP_STRING_TOKENS
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(pieces) - 1) + ["length"]
    assert (chunks[-1].completion_tokens, chunks[-1].prompt_tokens, chunks[-1].cached_tokens) == (12, 2, 1)


@pytest.mark.parametrize("size", [1, 2, 5, 12])
def test_O04_stop_string_cuts_counts_and_aborts(tokenizer: Tokenizer, size: int) -> None:
    """Tokens that came with the matching one and lie behind it are discarded."""
    pieces = [STOP_STRING_TOKENS[i : i + size] for i in range(0, 12, size)] + [[216, 33, 32]]
    link = ScriptedLink(pieces)
    chunks = run(link, tokenizer, ["8, 9"])
    assert text(chunks) == " 6, 7, "
    assert not any("8" in chunk.text for chunk in chunks)
    assert (chunks[-1].finish_reason, chunks[-1].completion_tokens, chunks[-1].cached_tokens) == ("stop", 11, 1)
    assert [chunk.cut for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert link.ended is False


def test_O05_a_stop_that_never_completes_loses_nothing(tokenizer: Tokenizer) -> None:
    chunks = run(ScriptedLink([[token] for token in STOP_STRING_TOKENS]), tokenizer, ["9,X", "8, X"])
    assert text(chunks) == " 6, 7, 8, 9,"
    assert chunks[-1].finish_reason == "length" and chunks[-1].cut


def test_a_stop_that_completes_with_the_last_token_is_a_stop(tokenizer: Tokenizer) -> None:
    chunks = run(ScriptedLink([STOP_STRING_TOKENS]), tokenizer, ["9,"])
    assert (text(chunks), chunks[-1].finish_reason) == (" 6, 7, 8, ", "stop") and chunks[-1].cut


def test_the_ending_token_counts_and_does_not_show(tokenizer: Tokenizer) -> None:
    for ending in (EOS, 28):  # the model's own, and a visible one that the caller chose
        chunks = run(ScriptedLink([[216, 38, ending]], "stop"), tokenizer)
        assert (text(chunks), chunks[-1].completion_tokens, chunks[-1].finish_reason) == (" 6", 3, "stop")
        assert not chunks[-1].cut


def test_failure_after_text_is_an_exception(tokenizer: Tokenizer) -> None:
    link = ScriptedLink([[216], [38]], error=EngineUnavailable("gone"))
    seen: list[Chunk] = []

    async def collect() -> None:
        async for chunk in generate(link, tokenizer, [5, 6], SamplingFields(5), []):
            seen.append(chunk)

    with pytest.raises(EngineUnavailable, match="gone"):
        asyncio.run(collect())
    assert text(seen) == " 6"
    assert not any(chunk.finish_reason for chunk in seen)


def test_closing_early_closes_the_link(tokenizer: Tokenizer) -> None:
    link = ScriptedLink([[216], [38], [28]])

    async def leave() -> None:
        chunks = generate(link, tokenizer, [5, 6], SamplingFields(5), [])
        await anext(chunks)
        await chunks.aclose()

    asyncio.run(leave())
    assert link.ended is False


def test_what_the_replica_gets(tokenizer: Tokenizer) -> None:
    link = ScriptedLink([[216]])
    run(link, tokenizer, do_sample=True, temperature=0.5, stop_token_ids=(7,), seed=3)
    assert link.request["prompt_ids"] == [5, 6]
    assert link.request["output_ids"] == []
    sampling = link.request["sampling"]
    assert (sampling["temperature"], sampling["seed"], list(sampling["stop_token_ids"])) == (0.5, 3, [7])
    first = link.request["request_id"]
    run(link, tokenizer)
    assert link.request["request_id"] != first
    assert "seed" not in link.request["sampling"]


def test_priority_and_deadline_go_beside_the_sampling(tokenizer: Tokenizer) -> None:
    link = ScriptedLink([[216]])
    run(link, tokenizer, priority=-3, deadline=time.monotonic() + 60)
    assert link.request["priority"] == -3
    assert 50 < link.request["timeout_s"] <= 60
    assert not {"priority", "deadline", "timeout_s"} & link.request["sampling"].keys()
    run(link, tokenizer, deadline=time.monotonic() - 1)
    assert (link.request["priority"], link.request["timeout_s"]) == (0, 0.0)
    run(link, tokenizer)
    assert link.request["timeout_s"] is None
    assert wire_request([1], {"timeout_s": 2.5, "priority": 1})["timeout_s"] == 2.5


def test_O13_seeds_of_choices() -> None:
    assert choice_seed(7, 0) == 7
    derived = [choice_seed(7, index) for index in range(1, 100)]
    assert derived == [choice_seed(7, index) for index in range(1, 100)]
    assert len({7, *derived, choice_seed(8, 1)}) == 101
    assert all(0 <= seed < 2**63 for seed in derived)
    assert choice_seed(None, 0) != choice_seed(None, 0)


def test_wire_request_draws_a_seed_only_for_sampling_without_one() -> None:
    assert "seed" not in wire_request([1], {"do_sample": False})["sampling"]
    assert wire_request([1], {"do_sample": True, "seed": 0})["sampling"]["seed"] == 0
    drawn = {wire_request([1], {"do_sample": True, "seed": None})["sampling"]["seed"] for _ in range(5)}
    assert len(drawn) == 5


def test_ends_that_are_failures() -> None:
    raise_if_failed(([1], "stop", INFO))
    with pytest.raises(GenerationFailed, match="nan"):
        raise_if_failed(([], "error", INFO | {"error": "nan"}))
    with pytest.raises(EngineUnavailable, match="boom"):
        raise_if_failed(([], "error", INFO | {"error": "boom", "engine_failed": True}))
    with pytest.raises(EngineUnavailable):
        raise_if_failed(([], "cancelled", INFO))
    with pytest.raises(DeadlineExceeded, match=r"^it took too long"):
        raise_if_failed(([], "timeout", INFO | {"error": "TimeoutError: it took too long"}))
