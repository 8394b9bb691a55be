"""The routing policies that the simulator compares: Convoy's own, as it is, and four that others use.

Each object is one router process. Called by the simulator.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from rayapp.bench.routing_sim import Router
from rayapp.bench.routing_workloads import Turn
from rayapp.prefix_router import Call, Fleet, Memory, Traffic, choose


class Convoy:
    """`rayapp.prefix_router.choose` with the state that the request router keeps around it."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._fleet = Fleet()
        self._memory = Memory()
        self._traffic = Traffic()
        self._costs: dict[tuple[int, int], int] = {}
        self.decisions: Counter[str] = Counter()

    def update(self, names: Sequence[str]) -> None:
        self._fleet.update(names)

    def home(self, key: int) -> str:
        """Where prompts go whose first 128 tokens have this hash, when nothing else is known of them."""
        return next(self._fleet.ring.order(key))

    def route(self, turn: Turn, session: int, now: float) -> str:
        call = Call(turn.blocks, turn.prompt, turn.limit)
        self._fleet.forget_heard(now)
        choice = choose(call, self._fleet, self._memory, self._traffic, rng=self._rng)
        name = choice.first or ""
        self._fleet.sent(name, choice.cost)
        self._memory.record(call, choice.start, name, self._fleet)
        self._traffic.record(call, choice, self._fleet)
        self._costs[session, turn.prompt] = choice.cost
        self.decisions[choice.decision] += 1
        return name

    def answered(self, name: str, calls: int, now: float) -> None:
        self._fleet.heard(name, calls, self._traffic.usual, now)

    def ended(self, name: str, turn: Turn, session: int) -> None:
        self._fleet.done(name, self._costs.pop((session, turn.prompt)))

    def digest(self, name: str, stats: dict[str, Any]) -> None:
        self._fleet.digest(name, stats)


class _Counting:
    """Knows the replicas and how many requests each holds, as Ray Serve's queue length cache does."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._names: list[str] = []
        self._calls: defaultdict[str, int] = defaultdict(int)

    def update(self, names: Sequence[str]) -> None:
        self._names = list(names)

    def answered(self, name: str, calls: int, now: float) -> None:
        self._calls[name] = calls

    def ended(self, name: str, turn: Turn, session: int) -> None:
        self._calls[name] = max(0, self._calls[name] - 1)

    def digest(self, name: str, stats: dict[str, Any]) -> None:
        pass

    def _less_loaded_of_two(self) -> str:
        return min(self._rng.sample(self._names, 2), key=self._calls.__getitem__)


class RoundRobin(_Counting):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._next = seed * 7

    def route(self, turn: Turn, session: int, now: float) -> str:
        self._next += 1
        return self._names[self._next % len(self._names)]


class PowerOfTwo(_Counting):
    """Ray Serve's default."""

    def route(self, turn: Turn, session: int, now: float) -> str:
        return self._less_loaded_of_two()


class SessionRing(_Counting):
    """A consistent hash of the session, 100 points a replica: Ray Serve's ConsistentHashRouter."""

    def update(self, names: Sequence[str]) -> None:
        super().update(names)
        self._ring = sorted((_hash(f"{name}#{number}"), name) for name in names for number in range(100))
        self._points = [point for point, _ in self._ring]

    def route(self, turn: Turn, session: int, now: float) -> str:
        return self.home(session)

    def home(self, key: int) -> str:
        return self._ring[bisect(self._points, _hash(str(key))) % len(self._ring)][1]


class PrefixTree(_Counting):
    """Each process remembers what it sent where: the replica with the longest match if half of the prompt matches,
    else the one least used; by queue length when that is far apart. SGLang's router and Ray's PrefixCacheAffinityRouter
    work like that."""

    ABSOLUTE, RELATIVE, MATCH = 32, 1.5, 0.5
    NODES = 1_000_000

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._nodes: OrderedDict[int, set[str]] = OrderedDict()
        self._sent: defaultdict[str, int] = defaultdict(int)

    def route(self, turn: Turn, session: int, now: float) -> str:
        name = self._pick(turn)
        for block in turn.blocks:
            self._nodes.setdefault(block, set()).add(name)
            self._nodes.move_to_end(block)
        while len(self._nodes) > self.NODES:
            self._nodes.popitem(last=False)
        self._sent[name] += turn.prompt
        return name

    def _pick(self, turn: Turn) -> str:
        calls = [self._calls[name] for name in self._names]
        if max(calls) - min(calls) > self.ABSOLUTE and max(calls) > self.RELATIVE * min(calls):
            return min(self._names, key=self._calls.__getitem__)
        living = set(self._names)
        for index in range(len(turn.blocks) - 1, -1, -1):
            holders = self._nodes.get(turn.blocks[index], set()) & living
            if holders:
                if index + 1 >= self.MATCH * len(turn.blocks):
                    return min(sorted(holders), key=self._calls.__getitem__)
                break
        return min(self._names, key=self._sent.__getitem__)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


POLICIES: dict[str, Callable[[int], Router]] = {
    "convoy": Convoy,
    "prefix tree": PrefixTree,
    "session ring": SessionRing,
    "power of two": PowerOfTwo,
    "round robin": RoundRobin,
}
