"""How many requests may wait for their first step: `max_queue_size`.

Submitting threads and tasks take places here, first come first served; the engine thread says how many are free.
Knows numbers only, nothing of requests.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

QUEUE_TIMEOUT_S = 10.0  # how long submissions wait for a place unless they say


@dataclass(slots=True, eq=False)
class _Ticket:
    """Someone who waits for `count` places; `wake` is called once they are granted or will never be."""

    count: int
    wake: Callable[[], object]
    granted: bool = False


class WaitingRoom:
    """Places for requests that wait.

    Args:
        limit: how many there are; 0 is no bound, and then nobody needs to ask.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._line: deque[_Ticket] = deque()
        self._granted = 0  # places of requests that the engine has not taken in yet
        self._inside = 0  # requests that the engine has, and that wait
        self._closed = False

    def enter(self, count: int, timeout: float | None) -> bool:
        """Take places, waiting for them if need be. False when the session ended meanwhile.

        Args:
            timeout: seconds to wait at most; None waits as long as it takes.

        Raises:
            queue.Full: none came free in time.
            ValueError: there are not so many places at all.
        """
        woken = threading.Event()
        ticket = self._line_up(count, woken.set)
        try:
            woken.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
            return self._outcome(ticket, timeout)
        except BaseException:
            self._withdraw(ticket)
            raise

    async def enter_async(self, count: int, timeout: float | None) -> bool:
        """`enter` for a task; nothing but the task waits."""
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        ticket = self._line_up(count, lambda: loop.call_soon_threadsafe(woken.set))
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(woken.wait(), timeout)
            return self._outcome(ticket, timeout)
        except BaseException:
            self._withdraw(ticket)
            raise

    def give_back(self, count: int) -> None:
        """Places that were granted are not needed after all."""
        with self._lock:
            self._granted -= count
            self._grant()

    def update(self, taken_in: int, waiting: int) -> None:
        """After a step: the engine took in so many requests since the last call, and now so many wait in it."""
        with self._lock:
            self._granted -= taken_in
            self._inside = waiting
            self._grant()

    def close(self) -> None:
        """The session ends: nobody gets in any more."""
        with self._lock:
            self._closed = True
            while self._line:
                self._wake(self._line.popleft())

    def _line_up(self, count: int, wake: Callable[[], object]) -> _Ticket:
        if count > self.limit:
            raise ValueError(
                f"{count} sequences of one request can never wait at the same time, max_queue_size is {self.limit}: "
                "raise it or lower num_return_sequences"
            )
        ticket = _Ticket(count, wake)
        with self._lock:
            if self._closed:
                self._wake(ticket)
            else:
                self._line.append(ticket)
                self._grant()
        return ticket

    def _outcome(self, ticket: _Ticket, timeout: float | None) -> bool:
        with self._lock:
            if ticket.granted or self._closed:
                return ticket.granted
        raise queue.Full(
            f"{self.limit} requests wait already, max_queue_size allows no more, and none was started within "
            f"{timeout} s: submit later, wait longer (queue_timeout) or raise max_queue_size"
        )

    def _withdraw(self, ticket: _Ticket) -> None:
        with self._lock:
            if ticket.granted:
                self._granted -= ticket.count
            elif ticket in self._line:
                self._line.remove(ticket)
            self._grant()

    def _grant(self) -> None:
        """Let in whom there is room for, from the head of the line."""
        while self._line and self._granted + self._inside + self._line[0].count <= self.limit:
            ticket = self._line.popleft()
            ticket.granted = True
            if self._wake(ticket):
                self._granted += ticket.count

    def _wake(self, ticket: _Ticket) -> bool:
        try:
            ticket.wake()
        except RuntimeError:  # the event loop that it waited on is closed
            return False
        return True
