"""The data plane without Ray: batches of a subscription, inboxes, and what breaks between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, ActorUnavailableError

from engine.outputs import GenerationOutput
from engine.request import FinishReason, Request, RequestStatus
from engine.sampling.params import SamplingParams
from rayapp.failures import EngineUnavailable
from rayapp.subscriber import Inbox, Item, Subscriber
from rayapp.subscription import Followed, Row, Subscription
from tests.conftest import wait_limit


class Generation:
    """A request whose tokens come when the test says so."""

    def __init__(self, subscription: Subscription, name: str, given: int = 0) -> None:
        self.request = Request(name, [0] * (3 + given), 3, SamplingParams(max_new_tokens=10**6))
        self.followed: Followed = subscription.follow(name, given)
        self.given = given

    def grow(self, count: int, reason: FinishReason | None = None) -> None:
        for _ in range(count):
            self.request.token_ids.append(len(self.request.token_ids))
            self.followed.put(GenerationOutput(self.request))
        if reason is not None:
            self.request.status, self.request.finish_reason = RequestStatus.FINISHED, reason
            self.followed.put(GenerationOutput(self.request))

    @property
    def tokens(self) -> list[int]:
        return self.request.token_ids[3 + self.given :]


def info_of(output: GenerationOutput) -> dict[str, Any]:
    return {"prompt_tokens": output.num_prompt_tokens}


def subscription(on_silence: Callable[[list[str]], None] = lambda ids: None, lease_s: float = 600) -> Subscription:
    return Subscription(info_of, on_silence, lease_s)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, wait_limit(30)))


# The engine actor's end


def test_a_batch_has_one_row_for_each_request_with_news() -> None:
    async def scenario() -> None:
        feed = subscription()
        one, two, three = (Generation(feed, name, given) for name, given in (("a", 0), ("b", 2), ("c", 0)))
        one.grow(2)
        two.grow(1)
        info = {"prompt_tokens": 3}
        assert await feed.next(0) == [("a", 0, one.tokens, None, info), ("b", 0, two.tokens, None, info)]
        two.grow(2, FinishReason.STOP)
        one.grow(1)
        three.grow(1)
        assert await feed.next(0) == [
            ("b", 1, two.tokens[1:], "stop", info),
            ("a", 2, one.tokens[2:], None, None),
            ("c", 0, three.tokens, None, info),
        ]
        assert await feed.next(0, wait_s=0.01) == []

    run(scenario())


def test_first_tokens_and_ends_do_not_wait_for_the_pause_others_do() -> None:
    async def scenario() -> None:
        feed = subscription()
        one, two = Generation(feed, "a"), Generation(feed, "b")
        one.grow(1)
        await feed.next(pause=3600)
        one.grow(5)
        assert await feed.next(pause=3600, wait_s=0.05) == []
        two.grow(1)
        assert [len(row[2]) for row in await feed.next(pause=3600)] == [5, 1]
        one.grow(1)
        two.grow(1, FinishReason.LENGTH)
        assert [row[3] for row in await feed.next(pause=0.2)] == [None, "length"]
        asked = asyncio.get_running_loop().time()
        one.grow(1)
        assert len(await feed.next(pause=3600)) == 1
        assert asyncio.get_running_loop().time() - asked > 0.1

    run(scenario())


def test_reopening_sends_everything_again_and_ends_the_call_before() -> None:
    async def scenario() -> None:
        feed = subscription()
        one, two = Generation(feed, "a"), Generation(feed, "b")
        one.grow(3)
        lost = asyncio.create_task(feed.next(0))
        await asyncio.sleep(0)
        assert len(await lost) == 1
        parked = asyncio.create_task(feed.next(0))
        await asyncio.sleep(0.01)
        two.grow(1)
        rows = await feed.next(0, reopened=True)
        assert {row[0]: row[1:3] for row in rows} == {"a": (0, one.tokens), "b": (0, two.tokens)}
        assert await parked == []

    run(scenario())


def test_a_silent_reader_is_given_up_and_one_that_waits_is_not() -> None:
    async def scenario() -> None:
        silent: list[list[str]] = []
        feed = subscription(silent.append, lease_s=0.1)
        Generation(feed, "a")
        for _ in range(4):
            await feed.next(0, wait_s=0.08)
        assert silent == []
        await asyncio.sleep(0.3)
        assert silent == [["a"]]

    run(scenario())


# The Router's end


class ScriptedEngine:
    """What a `_Feed` needs of an engine actor's handle: `poll.remote`, which may break in any of three ways."""

    def __init__(self, feed: Subscription, breaks: list[str]) -> None:
        self.feed = feed
        self.breaks = breaks
        self.reopened = 0
        self.poll = self

    async def remote(self, subscriber: str, reopened: bool) -> list[Row]:
        self.reopened += reopened
        broken = self.breaks.pop(0) if self.breaks else ""
        if broken == "died":
            raise ActorDiedError()
        if broken == "request":
            raise ActorUnavailableError("away", None)
        rows = await self.feed.next(0, reopened=reopened, wait_s=0.05)
        if broken == "answer":
            raise ActorUnavailableError("away", None)
        return rows


async def read(inbox: Inbox) -> list[Item]:
    items: list[Item] = []
    while not items or items[-1][1] is None:
        items.append(await inbox.next())
        await asyncio.sleep(0)
    return items


@given(
    breaks=st.lists(st.sampled_from(["", "request", "answer"]), max_size=8),
    growth=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.booleans()), max_size=20),
    slow=st.booleans(),
)
def test_no_token_is_lost_or_doubled(breaks: list[str], growth: list[tuple[int, int, bool]], slow: bool) -> None:
    """Whatever breaks, three generations arrive whole: by their batches, and if need be by their held call's end."""

    async def scenario() -> None:
        feed, subscriber = subscription(), Subscriber()
        engine = ScriptedEngine(feed, list(breaks))
        generations = [Generation(feed, str(number), number) for number in range(3)]
        inboxes = [subscriber.open(generation.request.request_id) for generation in generations]
        for generation in generations:
            subscriber.follow(generation.request.request_id, "replica", engine)
        readers = [] if slow else [asyncio.create_task(read(inbox)) for inbox in inboxes]
        for which, count, wait in growth:
            generations[which].grow(count)
            if wait:
                await asyncio.sleep(0.001)
        for generation in generations:
            generation.grow(1, FinishReason.LENGTH)
        await asyncio.sleep(0.001)
        for generation, inbox in zip(generations, inboxes, strict=True):
            feed.leave(generation.followed)
            inbox.put(0, generation.tokens, "length", {"end": True})
        readers = readers or [asyncio.create_task(read(inbox)) for inbox in inboxes]
        for generation, reader in zip(generations, readers, strict=True):
            items = await reader
            assert [token for tokens, _, _ in items for token in tokens] == generation.tokens
            assert [reason for _, reason, _ in items] == [None] * (len(items) - 1) + ["length"]
            assert items[0][2] is not None
            assert items[-1][2] is not None
            subscriber.close(generation.request.request_id)
        while subscriber.num_feeds:
            await asyncio.sleep(0.005)

    import rayapp.subscriber

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rayapp.subscriber, "REOPEN_S", 0.0)
        run(scenario())


def test_the_batches_alone_bring_everything_when_one_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayapp.subscriber.REOPEN_S", 0.0)

    async def scenario() -> None:
        feed, subscriber = subscription(), Subscriber()
        engine = ScriptedEngine(feed, ["", "answer", "request", ""])
        generation = Generation(feed, "a")
        inbox = subscriber.open("a")
        subscriber.follow("a", "replica", engine)
        got: list[int] = []
        for count in (2, 3, 4):
            generation.grow(count)
            while len(got) < len(generation.tokens):
                got += (await inbox.next())[0]
        assert got == generation.tokens
        assert engine.reopened == 2  # asked once more after the question itself was lost

    run(scenario())


def test_the_request_that_began_the_asking_does_not_own_it() -> None:
    """Ray tells by the context which request a call belongs to, and cancels it with that request."""
    request: ContextVar[str | None] = ContextVar("request", default=None)
    owners = []

    class Engine(ScriptedEngine):
        async def remote(self, subscriber: str, reopened: bool) -> list[Row]:
            owners.append(request.get())
            return await super().remote(subscriber, reopened)

    async def scenario() -> None:
        feed, subscriber = subscription(), Subscriber()
        request.set("a")
        subscriber.open("a")
        subscriber.follow("a", "replica", Engine(feed, []))
        subscriber.close("a")
        while subscriber.num_feeds:
            await asyncio.sleep(0.005)
        assert set(owners) == {None}

    run(scenario())


def test_tokens_may_come_before_the_call_is_known_to_be_accepted() -> None:
    async def scenario() -> None:
        feed, subscriber = subscription(), Subscriber()
        engine = ScriptedEngine(feed, [])
        subscriber.open("a")
        subscriber.follow("a", "replica", engine)
        early, inbox = Generation(feed, "early"), subscriber.open("early")
        early.grow(2)
        tokens, reason, info = await inbox.next()
        assert (tokens, reason, info) == (early.tokens, None, {"prompt_tokens": 3, "replica": "replica"})

    run(scenario())


def test_a_feed_ends_with_its_requests_or_its_engine() -> None:
    async def scenario() -> None:
        subscriber = Subscriber()
        for breaks in (["", "died"], []):
            engine = ScriptedEngine(subscription(), breaks)
            inbox = subscriber.open("a")
            subscriber.follow("a", "replica", engine)
            assert subscriber.num_feeds == 1
            if not breaks:
                await asyncio.sleep(0.15)
                assert subscriber.num_feeds == 1  # the request is outstanding, however little comes
                subscriber.close("a")
            while subscriber.num_feeds:
                await asyncio.sleep(0.005)
            assert not inbox.ended  # that is for the held call to say

    run(scenario())


def test_a_failure_comes_behind_the_tokens() -> None:
    async def scenario() -> None:
        inbox = Inbox()
        inbox.put(0, [1, 2], None, {})
        inbox.put(1, [2, 3], None, None)
        inbox.put(5, [6], None, None)  # behind a gap: it will come again
        inbox.fail(EngineUnavailable("gone"))
        inbox.put(0, [1, 2, 3, 4], "stop", {})
        assert (await inbox.next())[:2] == ([1, 2, 3], None)
        with pytest.raises(EngineUnavailable, match="gone"):
            await inbox.next()

    run(scenario())
