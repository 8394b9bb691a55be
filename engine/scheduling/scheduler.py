"""Which tokens of which requests the next step computes.

Owns every live request's place: waiting, running or suspect. The core calls it, from one thread; it asks `KVCache`
for blocks. Knows nothing of models, sampling or results: the core appends tokens and says when a request ends.
"""

from __future__ import annotations

import heapq
import math
import time
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from engine.cache.kv_cache import KVCache
from engine.request import Request, RequestStatus
from engine.scheduling.batch import ScheduledBatch
from engine.scheduling.policies import POLICIES

_LEAST_STEP = 256  # tokens
_PROMPT_LOGPROBS_CHUNK = 128  # tokens of a prompt whose logits a step keeps: a row of the vocabulary each


def _order(request: Request) -> tuple[int, int]:
    """First served, last preempted."""
    return request.priority, request.arrival


class Load(NamedTuple):
    """Tokens of all live requests: to be computed yet, known so far, and of those that wait, known and not computed."""

    tokens_left: int
    tokens_in_flight: int
    waiting_prefill_tokens: int


class Scheduler:
    """Hands out `max_batch_tokens` a step so that every request's computed tokens catch up with its known ones.

    Args:
        cache: where blocks come from; nobody else may admit requests to it.
        max_batch_tokens: tokens in one step; see `shrink_steps`.
        max_requests: running requests at once; at most `max_batch_tokens`, so that decodes never starve.
        safety_margin: share of all blocks that an admission must leave free, in [0, 1]; it does not hold back a
            request while nothing runs.
        policy: a key of `POLICIES`.

    A step that failed makes its requests suspects, and so do unusable scores: each runs alone until it has its next
    token, before anything else runs. Every mention of order means (priority, arrival), the lower first.
    """

    def __init__(
        self, cache: KVCache, *, max_batch_tokens: int, max_requests: int, safety_margin: float, policy: str = "fifo"
    ) -> None:
        if not 1 <= max_requests <= max_batch_tokens:
            raise ValueError(
                f"max_requests is {max_requests}; it must lie between 1 and max_batch_tokens, {max_batch_tokens}, "
                "so that every running request can get a token in each step"
            )
        if not 0.0 <= safety_margin <= 1.0:
            raise ValueError(f"safety_margin is {safety_margin}, it must lie between 0 and 1")
        if policy not in POLICIES:
            raise ValueError(f"unknown scheduling policy {policy!r}; known: {', '.join(POLICIES)}")
        self.cache = cache
        self.max_batch_tokens = max_batch_tokens
        self.max_requests = max_requests
        self.num_preemptions = 0
        self._reserve = math.ceil(round(safety_margin * cache.num_blocks, 6))
        self._policy = POLICIES[policy]
        self._live: dict[str, Request] = {}
        self._running: list[Request] = []
        self._waiting: dict[str, Request] = {}
        self._queue: list[tuple[int, int, Request]] = []
        self._suspects: dict[str, Request] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks: new, preempted, or suspects whose turn has not come."""
        return len(self._live) - len(self._running)

    def load(self, most_output: int) -> Load:
        """How much there is to do, by a look at every live request; for any thread.

        Args:
            most_output: caps what each may still generate, since few reach their limit.
        """
        left = in_flight = waiting = 0
        for request in list(self._live.values()):
            left += request.remaining + max(
                0, min(request.params.max_new_tokens, most_output) - request.num_output_tokens
            )
            in_flight += request.num_tokens
            waiting += request.remaining if request.status == RequestStatus.PENDING else 0
        return Load(left, in_flight, waiting)

    def live(self) -> Iterator[Request]:
        """Every request that was added and has not left."""
        return iter(list(self._live.values()))

    def add(self, request: Request) -> None:
        """Puts a new request, or one resumed with generated tokens, among the waiting.

        Raises:
            ValueError: no tokens, more than the whole cache holds, or the id of a live request.
        """
        if request.num_tokens == 0:
            raise ValueError(f"request {request.request_id!r} has no tokens")
        if request.num_tokens > self.cache.max_tokens:
            raise ValueError(
                f"request {request.request_id!r} has {request.num_tokens} tokens, the KV cache holds "
                f"{self.cache.max_tokens} ({self.cache.num_blocks} blocks of {self.cache.page_size}), "
                f"{request.num_tokens - self.cache.max_tokens} too few; raise num_blocks or max_memory_percent"
            )
        if request.request_id in self._live:
            raise ValueError(f"a request with the id {request.request_id!r} is live already")
        self._live[request.request_id] = request
        self._enqueue(request)

    def cancel(self, request_id: str) -> Request | None:
        """Removes a live request in whatever state; None when there is none of this id."""
        request = self._live.get(request_id)
        if request is not None:
            self._remove(request)
        return request

    def finish(self, request: Request) -> None:
        """Removes a request that has ended and gives its blocks back. Does nothing if it has left already."""
        if self.is_live(request):
            self._remove(request)

    def fail(self, request: Request) -> None:
        """`finish` for a request whose pages cannot be trusted: nobody will hit a block that it has written."""
        if self.is_live(request):
            self.cache.unhash_own(request)
            self._remove(request)

    def schedule(self) -> ScheduledBatch:
        """The rows of the next step; `computed` of each is advanced as if the step had run.

        No rows when nothing is left to do, or all that runs waits for a token that is being sampled. Costs
        O(running + tokens admitted / page_size), whatever waits.
        """
        batch = ScheduledBatch()
        if self._suspects:
            self._schedule_suspect(batch)
        else:
            awaiting, asking = self._uneasy()
            preempted = self._secure_blocks(batch, asking)
            if preempted or batch.outgrown:
                awaiting, asking = self._uneasy()
            budget = self.max_batch_tokens
            for requests in self._policy(*self._split(awaiting, asking)):
                budget -= self._add_rows(batch, requests, budget)
            if not preempted:
                self._admit_waiting(batch, budget)
        if batch:
            batch.block_tables = self.cache.block_tables
            batch.copies = self.cache.take_copies()
        return batch

    def clear(self, request: Request) -> None:
        """It has got its next token: if it was a suspect, it is none any more."""
        self._suspects.pop(request.request_id, None)

    def mistrust(self, request: Request) -> None:
        """Its scores cannot be used, perhaps through a prefix that another has written: it becomes a suspect, and what
        is cached of its tokens is forgotten."""
        self.cache.unhash_all(request)
        self._suspect(request)

    def on_step_failed(self, batch: ScheduledBatch) -> None:
        """After a step that raised: what it was to write is unhashed, and its requests become suspects.

        A suspect whose lone step this was is then to blame: the core calls `fail`.
        """
        self.cache.unhash(batch.hashed)
        if batch.copies is not None:
            self.cache.copies_failed(batch.copies)
        for request in sorted(batch.requests, key=_order):
            if self.is_live(request):
                self._suspect(request)

    def shrink_steps(self, tokens: int) -> bool:
        """A step of so many tokens was too large: those to come have at most half as many.

        Never fewer than 256, nor than requests may run. False: the step was no larger than that.
        """
        least = max(_LEAST_STEP, self.max_requests)
        if tokens <= least:
            return False
        self.max_batch_tokens = min(self.max_batch_tokens, max(least, tokens // 2))
        return True

    def preempt_all(self) -> None:
        """Takes the blocks of everything that runs; all of it resumes in its order."""
        for request in list(self._running):
            if request.request_id in self._suspects:
                self._stop_running(request)
            else:
                self._preempt(request)

    def is_live(self, request: Request) -> bool:
        """Whether this very request was added and has not left."""
        return self._live.get(request.request_id) is request

    @property
    def has_suspects(self) -> bool:
        return bool(self._suspects)

    def is_suspect(self, request: Request) -> bool:
        """Whether a step with this live request failed and it has not got a token since."""
        return self._suspects.get(request.request_id) is request

    def _suspect(self, request: Request) -> None:
        self._stop_running(request)
        self._waiting.pop(request.request_id, None)
        request.unknown = 0
        self._suspects[request.request_id] = request

    def _schedule_suspect(self, batch: ScheduledBatch) -> None:
        """The first suspect alone. It may take blocks from others: alone it has enough, or has outgrown the cache."""
        suspect = next(iter(self._suspects.values()))
        if suspect.num_tokens > self.cache.max_tokens:
            self._outgrow(batch, suspect)
            return
        others = [request for request in self._running if request is not suspect]
        if self.cache.holds(suspect):
            while not self.cache.grow(suspect):
                self._preempt(others.pop())
        else:
            while not self.cache.admit(suspect):
                self._preempt(others.pop())
            insort(self._running, suspect, key=_order)
        self._add_row(batch, suspect, self.max_batch_tokens)

    def _uneasy(self) -> tuple[list[Request], list[Request]]:
        """Running requests in their order: those that wait for a token, and the others, but for decodes of which only
        the number of tokens must be looked at."""
        awaiting: list[Request] = []
        asking: list[Request] = []
        for request in self._running:
            if request.computed >= request.calm_until:
                (awaiting if self._awaits_token(request) else asking).append(request)
        return awaiting, asking

    def _secure_blocks(self, batch: ScheduledBatch, asking: list[Request]) -> bool:
        """Makes sure that these running requests have blocks for their known tokens; whether that took a preemption.

        Where there is not enough for all, the last in order gives way first, down to the request that asks. The first
        always finds room, or has outgrown the cache.
        """
        if self.cache.grow_all(asking):
            return False
        preempted = False
        for request in asking:
            if preempted and not self.cache.holds(request):
                break  # it has given way, and so have all after it
            if request.num_tokens > self.cache.max_tokens:
                self._outgrow(batch, request)
                continue
            while not self.cache.grow(request):
                preempted = True
                victim = self._running[-1]
                self._preempt(victim)
                if victim is request:
                    return True
        return preempted

    def _split(self, awaiting: list[Request], asking: list[Request]) -> tuple[list[Request], list[Request]]:
        """Running requests with one token to compute, and those with more, without those that wait for a token."""
        for request in awaiting:
            request.skipped_steps += 1
        prefilling = [request for request in asking if request.remaining > 1]
        others = {*awaiting, *prefilling}
        if not others:
            return self._running, prefilling
        return [request for request in self._running if request not in others], prefilling

    def _admit_waiting(self, batch: ScheduledBatch, budget: int) -> None:
        """Admits waiting requests in order until one does not fit. Each may hit blocks of rows before it."""
        while budget > 0 and len(self._running) < self.max_requests:
            request = self._first_waiting()
            if request is None or self._awaits_token(request):
                return
            if request.num_tokens > self.cache.max_tokens:
                self._outgrow(batch, request)
                continue
            if not self.cache.admit(request, reserve=self._reserve if self._running else 0):
                return
            heapq.heappop(self._queue)
            del self._waiting[request.request_id]
            insort(self._running, request, key=_order)
            budget -= self._add_row(batch, request, budget)

    def _add_rows(self, batch: ScheduledBatch, requests: list[Request], budget: int) -> int:
        """Gives these running requests, in this order, up to `budget` tokens of the step; how many they took."""
        if requests and requests[0].remaining == 1 and len(requests) <= budget:
            self._add_decodes(batch, requests)
            return len(requests)
        left = budget
        for request in requests:
            left -= self._add_row(batch, request, left)
        return budget - left

    def _add_decodes(self, batch: ScheduledBatch, requests: list[Request]) -> None:
        """`_add_row` for requests with one token to compute each, all of which get it."""
        starts, table_of = batch.starts, batch.table_of
        for request in requests:
            start = request.computed
            if start >= request.calm_until:
                self._note_scheduled(batch, request, start + 1)
            starts.append(start)
            table_of.append(request.table_line)
            request.computed = start + 1
            request.unknown += 1
        first = len(batch.requests)
        batch.requests += requests
        batch.counts += [1] * len(requests)
        batch.sampled += range(first, len(batch.requests))

    def _add_row(self, batch: ScheduledBatch, request: Request, budget: int) -> int:
        """Gives a running request up to `budget` tokens of the step; how many it took."""
        start = request.computed
        count = min(request.num_tokens - start, budget)
        if request.needs_prompt_logprobs:
            count = min(count, _PROMPT_LOGPROBS_CHUNK)
        if count == 0 or self._awaits_token(request):
            request.skipped_steps += 1
            request.calm_until = 0
            return 0
        end = start + count
        self._note_scheduled(batch, request, end)
        if end == request.num_tokens:
            batch.sampled.append(len(batch.requests))
            request.unknown += 1
        batch.requests.append(request)
        batch.starts.append(start)
        batch.counts.append(count)
        batch.table_of.append(request.table_line)
        request.computed = end
        return count

    def _note_scheduled(self, batch: ScheduledBatch, request: Request, end: int) -> None:
        """What a row changes beside its tokens; `end` is where these end."""
        batch.hashed += self.cache.mark_scheduled(request, end)
        request.skipped_steps = 0
        if end == request.num_tokens:
            request.status = RequestStatus.DECODING
            request.calm_until = self._calm_until(request)
        else:
            request.status = RequestStatus.PREFILLING
        if request.first_scheduled_time < 0:
            request.first_scheduled_time = time.perf_counter()

    def _calm_until(self, request: Request) -> int:
        """How many tokens a request that decodes can have so that a step need not look at more than their number: it
        has their blocks, completes none and is not at its end."""
        end = request.num_prompt_tokens + request.params.max_new_tokens
        return min(self.cache.calm_until(request), self.cache.max_tokens, end - 1)

    def _awaits_token(self, request: Request) -> bool:
        """Whether the last token that is being sampled decides if the request goes on at all."""
        if not request.unknown:
            return False
        limit = request.params.max_new_tokens
        return request.num_output_tokens + request.unknown >= limit or request.num_tokens > self.cache.max_tokens

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self._stop_running(request)
        self._enqueue(request)

    def _stop_running(self, request: Request) -> None:
        self._drop_running(request)
        self.cache.release(request)
        request.computed = request.calm_until = 0
        request.status = RequestStatus.PENDING

    def _outgrow(self, batch: ScheduledBatch, request: Request) -> None:
        self._remove(request)
        batch.outgrown.append(request)

    def _remove(self, request: Request) -> None:
        """Takes a live request out of every state. Its entry in the queue goes when it comes up."""
        del self._live[request.request_id]
        self._suspects.pop(request.request_id, None)
        if self._waiting.pop(request.request_id, None) is None:
            self._drop_running(request)
        self.cache.free(request)

    def _drop_running(self, request: Request) -> None:
        index = bisect_left(self._running, _order(request), key=_order)
        if index < len(self._running) and self._running[index] is request:
            del self._running[index]

    def _enqueue(self, request: Request) -> None:
        self._waiting[request.request_id] = request
        if len(self._queue) > 2 * len(self._waiting) + 64:
            self._queue = [(*_order(waiting), waiting) for waiting in self._waiting.values()]
            heapq.heapify(self._queue)
        else:
            heapq.heappush(self._queue, (*_order(request), request))

    def _first_waiting(self) -> Request | None:
        while self._queue:
            request = self._queue[0][2]
            if self._waiting.get(request.request_id) is request:
                return request
            heapq.heappop(self._queue)
        return None
