"""The tokens of many requests on their way to the process that reads them: one batch a step for each reader.

Kept by the engine actor, a `Subscription` a reading process; everything runs on the actor's event loop. A reader asks
for the next batch when it has the last one, so that a slow one finds all that has come meanwhile in one batch, and a
dead one is known by its silence. Knows of requests only their outputs; nothing of Ray or of engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rayapp.scored import tokens_since

if TYPE_CHECKING:
    from engine.outputs import GenerationOutput

POLL_S = 5.0  # how long a reader's question for news waits for some
LEASE_S = 30.0  # a reader that has not asked for so long is dead, and nobody else will read its requests

Row = tuple[str, int, list[int], str | None, dict[str, Any] | None]
"""News of one request: its id, how many of its tokens were generated here before these, the token ids, and finish
reason and info as in an `Item`."""

InfoOf = Callable[["GenerationOutput"], dict[str, Any]]


class Pace:
    """Lets one waiting coroutine go on when there is news: urgent news at once, other news after a pause."""

    def __init__(self) -> None:
        self._due = asyncio.Event()
        self._not_before = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def news(self, *, urgent: bool) -> None:
        """There is something to read."""
        if self._due.is_set():
            return
        loop = asyncio.get_running_loop()
        if urgent or loop.time() >= self._not_before:
            self._due.set()
        elif self._timer is None:
            self._timer = loop.call_at(self._not_before, self._pause_ended)

    async def wait(self) -> None:
        """Until there is news that is due. Cancelling it loses none."""
        await self._due.wait()

    def restart(self, pause: float) -> None:
        """All was read: what is not urgent waits `pause` seconds from now."""
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._not_before = asyncio.get_running_loop().time() + pause

    def _pause_ended(self) -> None:
        self._timer = None
        self._due.set()


class Followed:
    """One request of a subscription.

    Args:
        first: tokens that were generated elsewhere, before.

    Attributes:
        ended: its terminal output.
    """

    def __init__(self, subscription: Subscription, request_id: str, first: int) -> None:
        self._subscription = subscription
        self._latest: GenerationOutput | None = None
        self._info_sent = False
        self.request_id = request_id
        self.first = first
        self.sent = first
        self.ended: asyncio.Future[GenerationOutput] = asyncio.get_running_loop().create_future()

    def put(self, output: GenerationOutput) -> None:
        """The result handler of the request."""
        self._latest = output
        finished = output.is_finished()
        if finished and not self.ended.done():
            self.ended.set_result(output)
        self._subscription.note(self, urgent=finished or not self._info_sent)

    def rewind(self) -> None:
        """What was sent may have been lost: all of it is news again."""
        self.sent, self._info_sent = self.first, False
        if self._latest is not None:
            self._subscription.note(self, urgent=True)

    def row(self, info_of: InfoOf) -> Row:
        """What has come since the last one."""
        output = self._latest
        assert output is not None
        tokens = tokens_since(output, self.sent)
        reason = finish_reason(output)
        info = info_of(output) if reason is not None or not self._info_sent else None
        row = (self.request_id, self.sent - self.first, tokens, reason, info)
        self.sent += len(tokens)
        self._info_sent = True
        return row


class Subscription:
    """The requests of one reading process.

    Args:
        info_of: makes the info of an item from an output.
        on_silence: called with the ids of the requests that still run, once the reader has been silent for too long.
    """

    def __init__(self, info_of: InfoOf, on_silence: Callable[[list[str]], None], lease_s: float | None = None) -> None:
        self._info_of = info_of
        self._on_silence = on_silence
        self._lease_s = LEASE_S if lease_s is None else lease_s
        self._live: dict[str, Followed] = {}
        self._news: dict[Followed, None] = {}  # in the order in which it came
        self._pace = Pace()
        self._reader = 0
        self._silence: asyncio.TimerHandle | None = None
        self._expect_reader()

    def __len__(self) -> int:
        """Requests that run."""
        return len(self._live)

    def follow(self, request_id: str, first: int) -> Followed:
        """A request that is about to be submitted."""
        self._live[request_id] = followed = Followed(self, request_id, first)
        return followed

    def leave(self, followed: Followed) -> None:
        """The request has ended or was refused; news of it that nobody has read stays."""
        if self._live.get(followed.request_id) is followed:
            del self._live[followed.request_id]

    def note(self, followed: Followed, *, urgent: bool) -> None:
        """There is news of this request."""
        self._news[followed] = None
        self._pace.news(urgent=urgent)

    async def next(self, pause: float, *, reopened: bool = False, wait_s: float = POLL_S) -> list[Row]:
        """The next batch: one row for each request with news; empty when none comes within `wait_s` seconds.

        Args:
            pause: seconds from the end of this call that news waits for more, apart from first tokens and ends.
            reopened: the last batch may not have reached the reader: everything of what runs comes again, and a call
                that still waits gives nothing.
        """
        self._reader += 1
        mine = self._reader
        if self._silence is not None:
            self._silence.cancel()
        if reopened:
            for followed in self._live.values():
                followed.rewind()
        try:
            await asyncio.wait_for(self._pace.wait(), wait_s)
        except TimeoutError:
            return []
        finally:
            if mine == self._reader:
                self._expect_reader()
        if mine != self._reader:  # its reader has given it up
            return []
        self._pace.restart(pause)
        news, self._news = self._news, {}
        return [followed.row(self._info_of) for followed in news]

    def _expect_reader(self) -> None:
        self._silence = asyncio.get_running_loop().call_later(self._lease_s, self._fell_silent)

    def _fell_silent(self) -> None:
        self._on_silence(list(self._live))


def finish_reason(output: GenerationOutput) -> str | None:
    """As in an `Item`."""
    return str(output.finish_reason or "error") if output.is_finished() else None
