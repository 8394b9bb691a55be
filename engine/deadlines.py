"""When requests must have ended: a heap of their deadlines.

Kept by the engine loop where requests are taken. What is due becomes an item of the next turn, so that every process
that takes part ends it in the same one. Knows nothing of where a request stands but whether it has ended.
"""

from __future__ import annotations

import heapq
import math
import time
from typing import NamedTuple

from engine.request import Request


class Expired(NamedTuple):
    """The time of this request is over."""

    request_id: str


class Deadlines:
    """The deadlines of live requests, on the clock of `time.perf_counter()`. Costs O(log requests) each."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._sweep_at = 64

    def __len__(self) -> int:
        """Deadlines kept, those included of requests that ended lately."""
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Watch a request, if it has a deadline."""
        if request.deadline == math.inf:
            return
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if not entry[2].status.is_terminal]
            heapq.heapify(self._heap)
            self._sweep_at = 2 * len(self._heap) + 64
        heapq.heappush(self._heap, (request.deadline, request.arrival, request))

    def seconds_left(self) -> float | None:
        """Until the next deadline, at least 0; None when there is none."""
        while self._heap and self._heap[0][2].status.is_terminal:
            heapq.heappop(self._heap)
        return max(0.0, self._heap[0][0] - time.perf_counter()) if self._heap else None

    def take_due(self) -> list[Expired]:
        """The live requests whose time is over, each once, the longest over first."""
        due: list[Expired] = []
        while self._heap and self.seconds_left() == 0.0:
            due.append(Expired(heapq.heappop(self._heap)[2].request_id))
        return due
