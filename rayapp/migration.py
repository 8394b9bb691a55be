"""A generation that outlives its replica: when one is lost in the middle, the rest comes from another.

`Migrating` stands before a `Link` in the Router; `Resumption` is the bookkeeping alone, for callers without an event
loop. Prompt, tokens so far and seed are all there is to a request, so its tokens are those that it would have had.
Knows nothing of text, and nothing of how a replica is chosen.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Protocol

from rayapp.failures import EngineUnavailable, GenerationError, Overloaded
from rayapp.link import Item

logger = logging.getLogger(__name__)

MAX_MIGRATIONS = 3
MIGRATION_TIMEOUT_S = 120.0

# Before each further attempt: long enough for a replica whose engine died to have left the rotation.
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
POLL_S = 0.25  # how often one that waits for its first token looks whether that is in vain
LEAST_TIMEOUT_S = 0.001  # of a request whose time is over: the engine is to say so


class NoReplica(EngineUnavailable):
    """Nobody goes on with a generation, and it is in vain to wait."""


class TokenSource(Protocol):
    """One attempt at one replica."""

    def generate(self, request: dict[str, Any]) -> AsyncGenerator[Item, None]:
        """See `rayapp.link.Link.generate`. The token that ends a generation comes in one item with its reason."""


class Resumption:
    """What has come of one request, and what to ask of the next replica.

    Args:
        request: as `rayapp.link.wire_request` makes it.
        limit: how often it may move; 0 ends it with its first replica.
        timeout_s: how long after the loss of a replica the next token may take to come.
    """

    def __init__(
        self, request: dict[str, Any], limit: int = MAX_MIGRATIONS, timeout_s: float = MIGRATION_TIMEOUT_S
    ) -> None:
        self._request = request
        self._limit = limit
        self._timeout_s = timeout_s
        self._began = time.monotonic()
        self._output_ids: list[int] = list(request["output_ids"])
        self._cached_tokens: int | None = None
        self._attempts = 0
        self._moves = 0
        self._deadline: float | None = None
        self._pause_s = FIRST_PAUSE_S

    def next_request(self) -> dict[str, Any]:
        """The request for the next attempt: what is left of it, under an id of its own."""
        self._attempts += 1
        if self._attempts == 1:
            return self._request
        rest = {
            "request_id": f"{self._request['request_id']}-{self._attempts}",
            "output_ids": list(self._output_ids),
        }
        if self._request.get("timeout_s") is not None:
            rest["timeout_s"] = max(LEAST_TIMEOUT_S, self._request["timeout_s"] - (time.monotonic() - self._began))
        return self._request | rest

    def take(self, item: Item) -> Item:
        """Note an item; returns it as the caller is to see it: cached is what the first replica found."""
        tokens, reason, info = item
        self._output_ids += tokens
        if self._deadline is not None:
            self._deadline, self._pause_s = None, FIRST_PAUSE_S
        if info is None:
            return item
        if self._cached_tokens is None:
            self._cached_tokens = info["cached_tokens"]
        return tokens, reason, {**info, "cached_tokens": self._cached_tokens, "migrations": self._moves}

    def failed(self, error: GenerationError) -> float:
        """What to do about the end of an attempt: seconds to wait before the next one.

        Raises:
            GenerationError: `error` itself, or why it goes no further.
        """
        if isinstance(error, NoReplica):
            raise error
        if isinstance(error, EngineUnavailable) and self._moves < self._limit:
            self._moves += 1
            logger.warning(
                "request %s: %s; it goes on elsewhere behind %d tokens (move %d of %d)",
                self._request["request_id"], error, len(self._output_ids), self._moves, self._limit,
            )  # fmt: skip
        elif isinstance(error, EngineUnavailable) and self._limit:
            raise EngineUnavailable(f"{error} (it had moved {self._moves} times already: max_migrations)") from error
        elif not (isinstance(error, Overloaded) and self._moves):
            raise error
        if self._deadline is None:
            self._deadline = time.monotonic() + self._timeout_s
        self.check_time()
        pause, self._pause_s = self._pause_s, min(LONGEST_PAUSE_S, 2 * self._pause_s)
        return pause

    def check_time(self) -> None:
        """Raises NoReplica when a replica was lost and the next token has not come in time."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise NoReplica(
                f"its replica was lost, and no other went on with it within {self._timeout_s:g} s (migration_timeout_s)"
            )


class Migrating:
    """The same generations as those of `source`, from as many replicas as it takes.

    Args:
        source: where each attempt goes; every one may reach another replica.
        limit, timeout_s: as for `Resumption`.
        is_gone: whether there will never be a replica any more, so that an attempt that waits for one is in vain.
    """

    def __init__(
        self,
        source: TokenSource,
        limit: int = MAX_MIGRATIONS,
        timeout_s: float = MIGRATION_TIMEOUT_S,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        self._source = source
        self._limit = limit
        self._timeout_s = timeout_s
        self._is_gone = is_gone

    async def generate(self, request: dict[str, Any]) -> AsyncGenerator[Item, None]:
        """As `Link.generate`. An item's info also counts the `migrations` before it.

        Raises:
            GenerationError: one of its subclasses. EngineUnavailable only when it may not, or could not, go on.
        """
        state = Resumption(request, self._limit, self._timeout_s)
        while True:
            try:
                async with aclosing(self._source.generate(state.next_request())) as items:
                    item = await self._first(items, state)
                    while item is not None:
                        yield state.take(item)
                        if item[1] is not None:
                            return
                        item = await anext(items, None)
                raise EngineUnavailable("the replica ended the stream before the generation was done")
            except GenerationError as error:
                pause = state.failed(error)
            await asyncio.sleep(pause)

    async def _first(self, items: AsyncGenerator[Item, None], state: Resumption) -> Item | None:
        """The first item of an attempt, None when it ends without any."""
        coming = asyncio.ensure_future(anext(items, None))
        try:
            while not (await asyncio.wait({coming}, timeout=POLL_S))[0]:
                state.check_time()
                if self._is_gone():
                    raise NoReplica("there is no replica any more, and none will come")
            return coming.result()
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
