"""Replicas with finite prefix caches, and several router processes that see them late: the routing simulator.

Time is simulated. A replica works off tokens, prompt and output alike, and shares its speed among its requests; a
request cannot take more than a part of it, as a decoding one cannot in an engine. `rayapp.bench.routing` runs it.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rayapp.bench.routing_workloads import BLOCK, Turn, Workload
from rayapp.prefix_router import quantised

SPEED = 4000.0  # tokens a second of a replica
STREAMS = 8  # requests that it takes to reach that speed
CACHE_TOKENS = 96_000
DIGEST_S = 2.0
LOAD = 0.7  # of the fleet's speed, if all that the oracle hits is hit


class Router(Protocol):
    """A routing policy in one process."""

    def update(self, names: Sequence[str]) -> None:
        """These replicas exist from now on."""

    def route(self, turn: Turn, session: int, now: float) -> str:
        """The replica for a request that is sent at once."""

    def answered(self, name: str, calls: int, now: float) -> None:
        """The replica has taken the request, and says how many it holds."""

    def ended(self, name: str, turn: Turn, session: int) -> None:
        """A request of this process has ended."""

    def digest(self, name: str, stats: dict[str, Any]) -> None:
        """What a replica says of itself."""


class Cache:
    """An LRU of blocks. Of one prompt the last block goes first."""

    def __init__(self, tokens: int) -> None:
        self._limit = max(1, tokens // BLOCK)
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, blocks: Sequence[int]) -> int:
        """Blocks of the longest cached prefix."""
        for index, block in enumerate(blocks):
            if block not in self._blocks:
                return index
        return len(blocks)

    def put(self, blocks: Sequence[int]) -> None:
        """These blocks of one sequence are used now."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._limit:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()


class Replica:
    """Shares its speed among its requests; `clock` counts the tokens that each of them has got so far."""

    def __init__(self, name: str, cache_tokens: int = CACHE_TOKENS) -> None:
        self.name = name
        self.cache = Cache(cache_tokens)
        self.busy = 0  # tokens of measured requests
        self.tokens = 0.0  # of requests that it holds
        self.version = 0
        self._clock = 0.0
        self._now = 0.0
        self._ends: list[tuple[float, int, Any]] = []
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._ends)

    def start(self, work: float, request: Any, now: float) -> None:
        self._advance(now)
        heapq.heappush(self._ends, (self._clock + work, next(self._count), request))
        self.tokens += work

    def next_end(self) -> float | None:
        """When the next request ends if no other comes."""
        if not self._ends:
            return None
        return self._now + max(0.0, self._ends[0][0] - self._clock) * max(STREAMS, len(self._ends)) / SPEED

    def end_one(self, now: float) -> Any:
        self._advance(now)
        return heapq.heappop(self._ends)[2]

    def _advance(self, now: float) -> None:
        if self._ends:
            self._clock += (now - self._now) * SPEED / max(STREAMS, len(self._ends))
        self._now = now


@dataclass
class Result:
    """Figures of the measured part of a run.

    Attributes:
        requests: measured.
        hit, oracle: prompt tokens found cached, and those that one replica with all the caches would have found.
        busy: tokens that each replica computed that was there from the first to the last.
        latency_s: mean time from request to end.
    """

    requests: int = 0
    prompt: int = 0
    hit: int = 0
    oracle: int = 0
    busy: list[int] = field(default_factory=list)
    latency_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        return self.hit / max(1, self.prompt)

    @property
    def of_oracle(self) -> float:
        return self.hit / self.oracle if self.oracle else 1.0

    @property
    def imbalance(self) -> float:
        """Tokens computed by the busiest replica over the mean."""
        return max(self.busy) * len(self.busy) / max(1, sum(self.busy))


@dataclass(frozen=True)
class Churn:
    """At `at` of the measured part so many replicas go, lose their caches or come."""

    at: float
    lost: int = 0
    reset: int = 0
    added: int = 0


def mean_work(workload: Workload, replicas: int, seed: int, cache_tokens: int = CACHE_TOKENS) -> float:
    """Tokens that a request takes where all is cached that may be."""
    cache, work, count, sample = Cache(cache_tokens * replicas), 0, 0, max(4000, 200 * replicas)
    for turns in workload.conversations(replicas, random.Random(seed)):
        for turn in turns:
            if count >= sample // 2:
                work += turn.prompt - cache.match(turn.blocks) * BLOCK + turn.output
            cache.put([*turn.blocks, *turn.answer])
            count += 1
        if count >= sample:
            return work / (count - sample // 2)
    raise AssertionError("conversations never end")


class Simulation:
    """One run of a policy on a workload.

    Args:
        make_router: makes the policy of one process.
        routers: processes; each request comes to one of them at random.
        warm_up, measured: requests a replica.
        load: share of the fleet's speed that is asked for, if all that the oracle hits is hit.
    """

    def __init__(
        self, workload: Workload, make_router: Callable[[int], Router], *, replicas: int, routers: int = 4,
        warm_up: int = 200, measured: int = 200, churn: Sequence[Churn] = (), seed: int = 0, load: float = LOAD,
        cache_tokens: int = CACHE_TOKENS,
    ) -> None:  # fmt: skip
        self._rng = random.Random(seed)
        self._conversations = workload.conversations(replicas, random.Random(seed + 1))
        self._names = (f"replica-{seed}-{number}" for number in itertools.count())
        self._replicas = {name: Replica(name, cache_tokens) for name in itertools.islice(self._names, replicas)}
        self._residents = set(self._replicas)
        self._epochs = dict.fromkeys(self._replicas, 0)
        self._routers = [make_router(seed + number) for number in range(routers)]
        self._oracle = Cache(cache_tokens * replicas)
        self._cache_tokens = cache_tokens
        self._first, self._last = warm_up * replicas, (warm_up + measured) * replicas
        self._churn = [(self._first + int(one.at * measured * replicas), one) for one in churn]
        self._rate = load * SPEED * replicas / mean_work(workload, replicas, seed, cache_tokens)
        self._events: list[tuple[float, int, str, Any]] = []
        self._sequence = itertools.count()
        self._arrived = 0
        self._turns_each = float(len(next(self._conversations)))
        self._said: dict[str, dict[str, Any]] = {}
        self.result = Result()
        self._update()

    def run(self) -> Result:
        self._push(0.0, "conversation", None)
        self._push(DIGEST_S, "digest", None)
        handle: dict[str, Callable[[float, Any], None]] = {
            "conversation": self._conversation, "turn": self._turn, "end": self._end, "digest": self._digest,
        }  # fmt: skip
        while self._arrived < self._last:
            now, _, kind, what = heapq.heappop(self._events)
            handle[kind](now, what)
        for now, _, _, what in self._drain():
            self._end(now, what)
        result = self.result
        result.busy = [one.busy for name, one in self._replicas.items() if name in self._residents]
        result.latency_s /= max(1, result.requests)
        return result

    def _drain(self) -> Iterator[tuple[float, int, str, Any]]:
        """What is left of the requests that have come; nothing follows them."""
        self._events = [event for event in self._events if event[2] == "end"]
        heapq.heapify(self._events)
        while self._events:
            yield heapq.heappop(self._events)

    def _push(self, when: float, kind: str, what: Any) -> None:
        heapq.heappush(self._events, (when, next(self._sequence), kind, what))

    def _conversation(self, now: float, _: Any) -> None:
        """Conversations come as a Poisson process; their turns follow each other."""
        turns = next(self._conversations)
        self._push(now, "turn", (turns, 0, self._rng.getrandbits(64)))
        self._turns_each += (len(turns) - self._turns_each) / 50
        rate = self._rate * (0.5 if self._arrived < self._first / 2 else 1.0)  # caches are cold
        self._push(now + self._rng.expovariate(rate / self._turns_each), "conversation", None)

    def _turn(self, now: float, what: tuple[list[Turn], int, int]) -> None:
        turns, number, session = what
        turn, router = turns[number], self._rng.choice(self._routers)
        while self._churn and self._arrived >= self._churn[0][0]:
            self._change(self._churn.pop(0)[1])
        measured = self._arrived >= self._first
        self._arrived += 1
        name = router.route(turn, session, now)
        replica = self._replicas[name]
        hit = min(replica.cache.match(turn.blocks) * BLOCK, turn.prompt - 1)
        ideal = min(self._oracle.match(turn.blocks) * BLOCK, turn.prompt - 1)
        replica.cache.put(turn.blocks)
        self._oracle.put(turn.blocks)
        work = turn.prompt - hit + turn.output
        replica.start(work, (turns, number, session, router, now, work, measured), now)
        self._schedule(replica)
        router.answered(name, len(replica), now)
        if measured:
            self.result.requests += 1
            self.result.prompt += turn.prompt
            self.result.hit += hit
            self.result.oracle += ideal
            replica.busy += work

    def _end(self, now: float, what: tuple[Replica, int]) -> None:
        replica, version = what
        if version != replica.version:
            return
        turns, number, session, router, began, work, measured = replica.end_one(now)
        replica.tokens -= work
        self._schedule(replica)
        turn = turns[number]
        whole = [*turn.blocks, *turn.answer]
        replica.cache.put(whole)
        self._oracle.put(whole)
        router.ended(replica.name, turn, session)
        if measured:
            self.result.latency_s += now - began
        if number + 1 < len(turns) and self._arrived < self._last:
            self._push(now + turns[number + 1].think_s, "turn", (turns, number + 1, session))

    def _schedule(self, replica: Replica) -> None:
        replica.version += 1
        end = replica.next_end()
        if end is not None:
            self._push(end, "end", (replica, replica.version))

    def _digest(self, now: float, _: Any) -> None:
        """Serve sends everybody what has changed."""
        for name, replica in self._replicas.items():
            said = {"tokens": quantised(int(replica.tokens)), "epoch": self._epochs[name], "state": "ok"}
            if self._said.get(name) != said:
                self._said[name] = said
                for router in self._routers:
                    router.digest(name, said)
        self._push(now + DIGEST_S, "digest", None)

    def _change(self, churn: Churn) -> None:
        living = list(self._replicas)
        for name in self._rng.sample(living, churn.lost):
            replica = self._replicas.pop(name)  # its requests are lost with it
            replica.version += 1
            self._residents.discard(name)
        for name in self._rng.sample(list(self._replicas), churn.reset):
            self._replicas[name].cache.clear()
            self._epochs[name] += 1
        for name in itertools.islice(self._names, churn.added):
            self._replicas[name] = Replica(name, self._cache_tokens)
            self._epochs[name] = 0
        self._update()

    def _update(self) -> None:
        for router in self._routers:
            router.update(list(self._replicas))
