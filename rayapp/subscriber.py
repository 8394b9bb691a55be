"""Reads the tokens of one process's requests from the engine actors that make them, and sorts them by request.

Kept by `Link`, which says where a request was accepted. Each engine actor that has requests of this process is asked
for one batch after the other; when it has had none for a while it is not asked any more. What decides over a request
is its held call, whose end has all tokens: these batches only show them earlier.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from contextvars import Context
from typing import Any

from ray.exceptions import ActorDiedError, RayError

from rayapp.failures import GenerationError
from rayapp.subscription import Row

logger = logging.getLogger(__name__)

REOPEN_S = 0.1  # pause before a broken subscription is opened again

Item = tuple[list[int], str | None, dict[str, Any] | None]


class Inbox:
    """What has come of one request and was not read yet: at most all of its tokens, however slow the reader is."""

    def __init__(self) -> None:
        self._received = 0
        self._tokens: list[int] = []
        self._info: dict[str, Any] | None = None
        self._reason: str | None = None
        self._error: GenerationError | None = None
        self._changed = asyncio.Event()
        self.replica: str | None = None

    @property
    def complete(self) -> bool:
        """The end has come from the engine."""
        return self._reason is not None

    @property
    def ended(self) -> bool:
        """Nothing will come any more."""
        return self._reason is not None or self._error is not None

    def put(self, offset: int, tokens: list[int], reason: str | None, info: dict[str, Any] | None) -> None:
        """Tokens of which `offset` others come before. Those that are known already are dropped, all behind a gap are
        left to come again."""
        if self.ended or offset > self._received:
            return
        fresh = tokens[self._received - offset :]
        self._tokens += fresh
        self._received += len(fresh)
        self._reason = reason
        self._info = info or self._info
        if fresh or reason is not None:
            self._changed.set()

    def fail(self, error: GenerationError) -> None:
        """No end will come. What has come can still be read."""
        if not self.ended:
            self._error = error
            self._changed.set()

    async def next(self) -> Item:
        """All that has come since the last item.

        Raises:
            GenerationError: the request failed.
        """
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            if not self._tokens:
                raise self._error
            self._changed.set()
        item = self._tokens, self._reason, self._info
        self._tokens, self._info = [], None
        return item


class Subscriber:
    """The requests of this process at the replicas of one deployment."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self._inboxes: dict[str, Inbox] = {}
        self._feeds: dict[str, _Feed] = {}

    @property
    def num_feeds(self) -> int:
        """Engine actors that are being asked."""
        return len(self._feeds)

    @property
    def num_requests(self) -> int:
        """Requests that are read here."""
        return len(self._inboxes)

    @property
    def num_unplaced(self) -> int:
        """Requests that no replica has accepted yet."""
        return sum(inbox.replica is None for inbox in self._inboxes.values())

    def open(self, request_id: str) -> Inbox:
        """Where the tokens of a request will be; to be closed by `close`."""
        self._inboxes[request_id] = inbox = Inbox()
        return inbox

    def close(self, request_id: str) -> None:
        """What still comes of the request is dropped."""
        inbox = self._inboxes.pop(request_id, None)
        if inbox is not None and inbox.replica in self._feeds:
            self._feeds[inbox.replica].outstanding.discard(request_id)

    def follow(self, request_id: str, replica: str, engine: Any) -> None:
        """The request was accepted by a replica.

        Args:
            engine: handle of the replica's engine actor.
        """
        inbox = self._inboxes.get(request_id)
        if inbox is None or inbox.ended:
            return
        inbox.replica = replica
        feed = self._feeds.get(replica)
        if feed is None:
            feed = self._feeds[replica] = _Feed(self.id, replica, engine, self._deliver, self._forget)
        feed.outstanding.add(request_id)

    def _deliver(self, replica: str, rows: list[Row]) -> None:
        for request_id, offset, tokens, reason, info in rows:
            inbox = self._inboxes.get(request_id)
            if inbox is not None:
                inbox.put(offset, tokens, reason, {**info, "replica": replica} if info is not None else None)

    def _forget(self, replica: str) -> None:
        del self._feeds[replica]


class _Feed:
    """Asks one engine actor for batches, from now until there is nothing to be had."""

    def __init__(
        self,
        subscriber: str,
        replica: str,
        engine: Any,
        deliver: Callable[[str, list[Row]], None],
        forget: Callable[[str], None],
    ) -> None:
        self.outstanding: set[str] = set()
        self._subscriber = subscriber
        self._replica = replica
        self._engine = engine
        self._deliver = deliver
        self._forget = forget
        # In a context of its own: Ray cancels the calls of a cancelled request, and these serve others too.
        self._task = asyncio.get_running_loop().create_task(self._run(), context=Context())

    async def _run(self) -> None:
        reopened = False
        try:
            while True:
                try:
                    rows = await self._engine.poll.remote(self._subscriber, reopened)
                except ActorDiedError:
                    return  # the held calls say so to everyone
                except RayError as error:
                    logger.warning(
                        "reading the tokens of replica %s broke off and begins again: %s", self._replica, error
                    )
                    reopened = True
                    await asyncio.sleep(REOPEN_S)
                    continue
                reopened = False
                self._deliver(self._replica, rows)
                if not rows and not self.outstanding:
                    return
        finally:
            self._forget(self._replica)
