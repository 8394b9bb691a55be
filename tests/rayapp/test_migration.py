"""Generations that go on at another replica, over scripted ones: what is asked of each, what the caller gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp import migration
from rayapp.api.service import Chunk, SamplingFields
from rayapp.failures import EngineUnavailable, GenerationError, GenerationFailed, InvalidRequest, Overloaded
from rayapp.generation import generate
from rayapp.link import Item, wire_request
from rayapp.migration import Migrating, Resumption
from rayapp.text.tokenizer import Tokenizer
from tests.conftest import wait_limit

PROMPT = [5, 6]
TEXT_TOKENS = [216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28]  # " 6, 7, 8, 9,"

EARLY_END = "ends without a reason"
HANGS = "hangs"
Loss = Exception | str | None


@dataclass
class Attempt:
    """One replica: gives this many tokens in items of this size, then is lost as said; None goes on to the end."""

    tokens: int = 10**9
    size: int = 1
    loss: Loss = None
    cached: int = 0


@dataclass
class Replicas:
    """A deployment whose answer to the prompt is known; attempts reach the scripted replicas in turn."""

    answer: list[int]
    reason: str
    script: list[Attempt]
    asked: list[dict[str, Any]] = field(default_factory=list)
    open: int = 0

    async def generate(self, request: dict[str, Any]) -> AsyncGenerator[Item, None]:
        attempt = self.script[len(self.asked)]
        self.asked.append(request)
        self.open += 1
        try:
            start = len(request["output_ids"])
            assert request["output_ids"] == self.answer[:start]
            assert start < len(self.answer), "asked for more than there is"
            rest = self.answer[start : start + attempt.tokens]
            info = {
                "prompt_tokens": 2,
                "cached_tokens": attempt.cached,
                "error": None,
                "replica": f"r{len(self.asked)}",
            }
            for first in range(0, len(rest), attempt.size):
                tokens = rest[first : first + attempt.size]
                last = attempt.loss is None and first + attempt.size >= len(rest)
                yield tokens, self.reason if last else None, info if last or first == 0 else None
                await asyncio.sleep(0)
            if attempt.loss == HANGS:
                await asyncio.sleep(wait_limit(60))
            if isinstance(attempt.loss, Exception):
                raise attempt.loss
        finally:
            self.open -= 1


@pytest.fixture(autouse=True, scope="module")
def _at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migration, "FIRST_PAUSE_S", 0.0)
        patch.setattr(migration, "LONGEST_PAUSE_S", 0.0)
        patch.setattr(migration, "POLL_S", 0.01)
        yield


def ask(
    replicas: Replicas, limit: int, timeout_s: float = 60, is_gone: Callable[[], bool] = lambda: False, **sampling: Any
) -> tuple[list[Item], Exception | None]:
    """The items that came, and the error that ended them."""
    items: list[Item] = []

    async def collect() -> None:
        source = Migrating(replicas, limit, timeout_s, is_gone)
        async for item in source.generate(wire_request(PROMPT, {"max_new_tokens": 50, **sampling})):
            items.append(item)

    error = None
    try:
        asyncio.run(asyncio.wait_for(collect(), wait_limit(20)))
    except GenerationError as raised:
        error = raised
    assert replicas.open == 0
    return items, error


def tokens_of(items: list[Item]) -> list[int]:
    return [token for tokens, _, _ in items for token in tokens]


answers = st.lists(st.integers(0, 99), min_size=1, max_size=20)
lost = st.sampled_from(["died", EARLY_END]).map(lambda how: EngineUnavailable(how) if how == "died" else how)


@st.composite
def losing(draw: st.DrawFn, answer_length: int) -> Attempt:
    """A replica that is lost before it has said everything."""
    return Attempt(
        draw(st.integers(0, answer_length - 1)), draw(st.integers(1, 5)), draw(lost), draw(st.integers(0, 2))
    )


@given(st.data(), answers, st.sampled_from(["stop", "length"]), st.integers(0, 5), st.integers(0, 6))
def test_whatever_is_lost_the_tokens_are_those_of_one_replica(
    data: st.DataObject, answer: list[int], reason: str, losses: int, limit: int
) -> None:
    script = [data.draw(losing(len(answer))) for _ in range(losses)]
    left = len(answer)
    for attempt in script:  # each begins behind the ones before
        attempt.tokens = min(attempt.tokens, left - 1)
        left -= attempt.tokens
    script.append(Attempt(size=data.draw(st.integers(1, 5)), cached=2))
    replicas = Replicas(answer, reason, script)
    items, error = ask(replicas, limit, do_sample=True)

    assert tokens_of(items) == answer[: len(tokens_of(items))]
    assert len(replicas.asked) == min(losses, limit) + 1
    assert len({request["request_id"] for request in replicas.asked}) == len(replicas.asked)
    for request in replicas.asked:
        assert request["sampling"] == replicas.asked[0]["sampling"]
        assert request["prompt_ids"] == PROMPT
    reasons = [item[1] for item in items]
    if losses > limit:
        assert isinstance(error, EngineUnavailable)
        assert reasons == [None] * len(items)
        return
    assert error is None
    assert tokens_of(items) == answer
    assert reasons == [None] * (len(items) - 1) + [reason]
    last = items[-1][2]
    assert last is not None
    began = next(attempt for attempt in script if attempt.tokens)
    assert last | {"prompt_tokens": 2, "cached_tokens": began.cached, "migrations": losses} == last
    assert last["replica"] == f"r{losses + 1}"


@given(st.data(), answers, st.integers(0, 3), st.sampled_from([GenerationFailed, InvalidRequest]))
def test_what_every_replica_would_do_is_never_tried_elsewhere(
    data: st.DataObject, answer: list[int], losses: int, kind: type[GenerationError]
) -> None:
    script = [Attempt(0, 1, EngineUnavailable("died")) for _ in range(losses)]
    said = data.draw(st.integers(0, len(answer) - 1))
    replicas = Replicas(answer, "stop", [*script, Attempt(said, 2, kind("no"))])
    items, error = ask(replicas, 10)
    assert type(error) is kind
    assert tokens_of(items) == answer[:said]
    assert len(replicas.asked) == losses + 1


def test_full_replicas_refuse_a_new_request_and_not_one_that_moves() -> None:
    full = Attempt(0, 1, Overloaded("full"))
    items, error = ask(Replicas([1, 2, 3], "stop", [full]), 3)
    assert (items, type(error)) == ([], Overloaded)
    script = [Attempt(1, 1, EngineUnavailable("died")), full, full, full, full, Attempt()]
    items, error = ask(Replicas([1, 2, 3], "stop", script), 1)
    assert (tokens_of(items), error) == ([1, 2, 3], None)


def test_the_error_of_a_request_that_may_not_move_is_the_replicas_own() -> None:
    died = EngineUnavailable("died")
    assert ask(Replicas([1, 2], "stop", [Attempt(1, 1, died)]), 0)[1] is died
    moved = ask(Replicas([1, 2], "stop", [Attempt(1, 1, died), Attempt(0, 1, died)]), 1)[1]
    assert "moved 1 times already: max_migrations" in str(moved)


def test_no_replica_in_time_is_an_error() -> None:
    script = [Attempt(1, 1, EngineUnavailable("died")), Attempt(0, 1, HANGS)]
    items, error = ask(Replicas([1, 2], "stop", script), 3, timeout_s=0.05)
    assert tokens_of(items) == [1]
    assert "within 0.05 s (migration_timeout_s)" in str(error)


@pytest.mark.parametrize("lost", [0, 1])
def test_nobody_waits_for_a_deployment_that_is_gone(lost: int) -> None:
    script = [Attempt(0, 1, EngineUnavailable("died"))] * lost + [Attempt(0, 1, HANGS)]
    items, error = ask(Replicas([1, 2], "stop", script), 3, is_gone=lambda: True)
    assert items == []
    assert "none will come" in str(error)


def test_the_time_to_move_is_no_limit_for_a_replica_that_answers() -> None:
    class Slow(Replicas):
        async def generate(self, request: dict[str, Any]) -> AsyncGenerator[Item, None]:
            async for item in super().generate(request):
                yield item
                await asyncio.sleep(0.1)

    script = [Attempt(1, 1, EngineUnavailable("died")), Attempt(1, 1, EngineUnavailable("died")), Attempt()]
    items, error = ask(Slow([1, 2, 3, 4], "stop", script), 3, timeout_s=0.08)
    assert (tokens_of(items), error) == ([1, 2, 3, 4], None)


def test_the_time_limit_of_a_request_counts_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(migration.time, "monotonic", lambda: now[0])
    state = Resumption(wire_request(PROMPT, {}) | {"timeout_s": 10.0})
    assert state.next_request()["timeout_s"] == 10.0
    now[0] = 107.0
    state.failed(EngineUnavailable("died"))
    assert state.next_request()["timeout_s"] == 3.0
    now[0] = 120.0
    assert state.next_request()["timeout_s"] == 0.001


def test_pauses_grow_and_begin_anew_after_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "FIRST_PAUSE_S", 1.0)
    monkeypatch.setattr(migration, "LONGEST_PAUSE_S", 4.0)
    state = Resumption(wire_request(PROMPT, {}), limit=10)
    died = EngineUnavailable("died")
    assert [state.failed(died) for _ in range(4)] == [1.0, 2.0, 4.0, 4.0]
    state.take(([1], None, None))
    assert state.failed(died) == 1.0


@pytest.mark.parametrize("during", ["an attempt", "the pause before one", "the wait for a replica"])
def test_leaving_closes_the_attempt_and_makes_no_other(during: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if during == "the pause before one":
        monkeypatch.setattr(migration, "FIRST_PAUSE_S", wait_limit(60))
    first = Attempt(loss=None) if during == "an attempt" else Attempt(1, 1, EngineUnavailable("died"))
    replicas = Replicas(list(range(10)), "stop", [first, Attempt(0, 1, HANGS)])

    async def leave() -> None:
        items = Migrating(replicas, 3).generate(wire_request(PROMPT, {}))
        await anext(items)
        if during == "an attempt":
            await items.aclose()
            return
        task = asyncio.ensure_future(anext(items))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(leave(), wait_limit(20)))
    assert (len(replicas.asked), replicas.open) == (1 + (during == "the wait for a replica"), 0)


# With text


@pytest.fixture(scope="module")
def tokenizer(smol_path: Any) -> Tokenizer:
    return Tokenizer.load(smol_path)


STOPS: list[list[str]] = [[], ["8, 9"], ["7, X"], [","], [" 9"], ["9,X", "8, 9,"]]


@given(st.data(), st.sampled_from(STOPS), st.integers(0, 3))
def test_text_and_stop_strings_half_held_survive(
    tokenizer: Tokenizer, data: st.DataObject, stop: list[str], losses: int
) -> None:
    def chunks_of(script: list[Attempt]) -> tuple[list[Chunk], Replicas]:
        replicas = Replicas(TEXT_TOKENS, "length", script)

        async def collect() -> list[Chunk]:
            fields = SamplingFields(max_new_tokens=12, seed=3)
            return [chunk async for chunk in generate(Migrating(replicas, 3), tokenizer, PROMPT, fields, stop)]

        return asyncio.run(collect()), replicas

    cuts = sorted(data.draw(st.lists(st.integers(0, 11), min_size=losses, max_size=losses)))
    sizes = st.integers(1, 4)
    died = EngineUnavailable("died")
    script = [Attempt(end - start, data.draw(sizes), died) for start, end in zip([0, *cuts], cuts, strict=False)]
    chunks, replicas = chunks_of([*script, Attempt(size=data.draw(sizes))])
    whole, _ = chunks_of([Attempt()])
    assert "".join(chunk.text for chunk in chunks) == "".join(chunk.text for chunk in whole)
    assert [token for chunk in chunks for token in chunk.token_ids] == [
        token for chunk in whole for token in chunk.token_ids
    ]
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [whole[-1].finish_reason]
    assert chunks[-1].completion_tokens == whole[-1].completion_tokens
    assert {request["sampling"]["seed"] for request in replicas.asked} == {3}
