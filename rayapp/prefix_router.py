"""Picks the replica of a request: the prefix hint, the policy, and the request router that applies it.

Ray Serve runs `PrefixAffinityRouter` inside every process that holds a handle of the engine deployment and ships
this module by value, so it is one self-contained file: the standard library and ray only. `rayapp.router` computes
hints with `prefix_hint`; a caller that sends none gets the same one, computed here from its token ids. It knows
nothing of text, HTTP or the engine.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

logger = logging.getLogger("ray.serve")

# Depths, in tokens, whose hashes make up a hint: every HINT_STEP up to HINT_LINEAR_END, then doubling. They say what
# counts as "the same prefix" for routing and have nothing to do with the page size of any engine.
HINT_STEP = 64
HINT_LINEAR_END = 4096
# A prompt shorter than this goes by load alone; the hash of its first AFFINITY_TOKENS names a prompt's home.
AFFINITY_TOKENS = 128
HOME_INDEX = AFFINITY_TOKENS // HINT_STEP - 1

MIN_CAP = 3  # below this a sequential caller would be moved by its own request that has just ended
LOAD_FACTOR = 1.25
MEMORY_ENTRIES = 32768
REPLICAS_PER_ENTRY = 4


def prefix_hint(token_ids: Sequence[int], salt: str | None = None) -> list[int]:
    """Hashes of the salted token prefix at each hint depth the prompt reaches.

    Returns:
        Unsigned 64-bit ints, shallowest first; the same in every process; empty below HINT_STEP tokens.
    """
    parent = hashlib.blake2b(b"salt:" + (salt or "").encode(), digest_size=8).digest()
    hint: list[int] = []
    start, end = 0, HINT_STEP
    while end <= len(token_ids):
        parent = hashlib.blake2b(parent + array("q", token_ids[start:end]).tobytes(), digest_size=8).digest()
        hint.append(int.from_bytes(parent, "big"))
        start, end = end, (end + HINT_STEP if end < HINT_LINEAR_END else end * 2)
    return hint


def hint_of_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    """The hint of one call of the engine deployment: as given, else from the payload's token ids, else empty."""
    hint = kwargs.get("route_hint")
    if hint is None and len(args) > 1:
        hint = args[1]
    if hint is None:
        payload = args[0] if args else kwargs.get("payload")
        if not isinstance(payload, dict) or "prompt_ids" not in payload:
            return []
        return prefix_hint(payload["prompt_ids"], payload.get("cache_salt"))
    if not all(type(value) is int and 0 <= value < 2**64 for value in hint):
        raise ValueError("route_hint must be a list of unsigned 64-bit ints")
    return list(hint)


def rendezvous(key: int, replicas: Sequence[str]) -> list[str]:
    """Replicas in the order every process agrees on for `key`; a lost one moves only the keys it held."""
    prefix = key.to_bytes(8, "big")

    def weight(replica: str) -> bytes:
        return hashlib.blake2b(prefix + replica.encode(), digest_size=8).digest()

    return sorted(replicas, key=weight, reverse=True)


def by_load(loads: Mapping[str, int], replicas: Sequence[str], rng: random.Random) -> list[str]:
    """Two replicas drawn at random, the less loaded first; then the others, less loaded first."""
    shuffled = rng.sample(list(replicas), len(replicas))
    return sorted(shuffled[:2], key=lambda replica: loads.get(replica, 0)) + sorted(
        shuffled[2:], key=lambda replica: loads.get(replica, 0)
    )


class PrefixMemory:
    """A bounded LRU of prefix hash -> the replicas that lately served it, latest first."""

    def __init__(self, entries: int = MEMORY_ENTRIES) -> None:
        self._entries = entries
        self._replicas: OrderedDict[int, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replicas)

    def get(self, prefix: int) -> tuple[str, ...]:
        return self._replicas.get(prefix, ())

    def record(self, hint: Sequence[int], replica: str) -> None:
        """Remember that `replica` now holds every prefix of `hint`; the shallowest becomes the most recent."""
        for prefix in reversed(hint):
            others = tuple(other for other in self._replicas.get(prefix, ()) if other != replica)
            self._replicas[prefix] = (replica, *others)[:REPLICAS_PER_ENTRY]
            self._replicas.move_to_end(prefix)
        while len(self._replicas) > self._entries:
            self._replicas.popitem(last=False)

    def forget(self, gone: set[str]) -> None:
        """Drop replicas that no longer exist."""
        for prefix in [prefix for prefix, replicas in self._replicas.items() if not gone.isdisjoint(replicas)]:
            left = tuple(replica for replica in self._replicas[prefix] if replica not in gone)
            if left:
                self._replicas[prefix] = left
            else:
                del self._replicas[prefix]


def choose(
    hint: Sequence[int],
    memory: PrefixMemory,
    loads: Mapping[str, int],
    replicas: Sequence[str],
    *,
    min_cap: int = MIN_CAP,
    load_factor: float = LOAD_FACTOR,
    rng: random.Random,
) -> list[str]:
    """Every replica, best first. Pure but for `rng`, which is used only when the prompt is too short for affinity.

    First comes the replica remembered for the deepest prefix, else the first in rendezvous order for the prompt's
    home, of those below the load cap. The others follow in rendezvous order, those at the cap last, less loaded first.

    Args:
        loads: requests that each replica is believed to hold; a missing one counts as 0.
    """
    if len(hint) <= HOME_INDEX:
        return by_load(loads, replicas, rng)
    total = sum(loads.get(replica, 0) for replica in replicas)
    cap = max(min_cap, math.ceil(load_factor * (total + 1) / max(1, len(replicas))))
    home_order = rendezvous(hint[HOME_INDEX], replicas)
    below = [replica for replica in home_order if loads.get(replica, 0) < cap]
    above = sorted(
        (replica for replica in home_order if loads.get(replica, 0) >= cap), key=lambda replica: loads.get(replica, 0)
    )
    for prefix in reversed(hint):
        remembered = memory.get(prefix)
        usable = [replica for replica in below if replica in remembered]
        if usable:
            best = min(usable, key=lambda replica: loads.get(replica, 0))
            return [best, *(replica for replica in below if replica != best), *above]
    return below + above


class PrefixAffinityRouter(RequestRouter):
    """Applies `choose` to the calls of one process.

    It answers in the caller's own coroutine instead of the base class's routing tasks. Those index waiting calls by
    the id of the HTTP request that made them, so that several calls of one request wait for ever, and turn an error
    of the policy into a call that never returns.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rng = random.Random()
        self._surprises = 0
        self.initialize_state()

    def initialize_state(
        self,
        min_cap: int = MIN_CAP,
        load_factor: float = LOAD_FACTOR,
        memory_entries: int = MEMORY_ENTRIES,
        **_: Any,
    ) -> None:
        """Settings from the application's `router:` section, validated there; an error here would hang callers."""
        self._memory = PrefixMemory(memory_entries)
        self._min_cap = min_cap
        self._load_factor = load_factor

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """The replica to send to; waits while there is none or all are full. Safe to cancel: it holds nothing."""
        attempt = 0
        while True:
            while not self._replicas:
                self._replicas_updated_event.clear()
                await self._replicas_updated_event.wait()
            replica = await self._first_with_room(self._order(pending_request), attempt)
            if replica is not None:
                self._record_queue_wait_time(pending_request)
                return replica
            await self._backoff(attempt)
            attempt += 1

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The same order as ranks of one, for whatever part of Serve asks the base class."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        allowed = {replica.replica_id for replica in candidate_replicas}
        return [[replica] for replica in self._order(pending_request) if replica.replica_id in allowed]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """The replica accepted the call: only now does it hold the prefix."""
        try:
            hint = hint_of_call(pending_request.args, pending_request.kwargs)
            if len(hint) > HOME_INDEX:
                self._memory.record(hint, replica_id.unique_id)
        except Exception:
            self._log_surprise("remembering a prefix")

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        before = {replica_id.unique_id for replica_id in self._replicas}
        super().update_replicas(replicas)
        self._forget(before - {replica_id.unique_id for replica_id in self._replicas})

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget({replica_id.unique_id})

    def _forget(self, gone: set[str]) -> None:
        if gone:
            self._memory.forget(gone)

    def _order(self, pending_request: PendingRequest | None) -> list[RunningReplica]:
        """All current replicas, best first; whatever goes wrong, by load."""
        replicas = {replica_id.unique_id: replica for replica_id, replica in self._replicas.items()}
        loads = {name: self._cached_load(replica) or 0 for name, replica in replicas.items()}
        try:
            hint = [] if pending_request is None else hint_of_call(pending_request.args, pending_request.kwargs)
            names = choose(
                hint, self._memory, loads, list(replicas),
                min_cap=self._min_cap, load_factor=self._load_factor, rng=self._rng,
            )  # fmt: skip
        except Exception:
            self._log_surprise("choosing a replica by prefix")
            names = by_load(loads, list(replicas), self._rng)
        return [replicas[name] for name in names]

    async def _first_with_room(self, order: list[RunningReplica], attempt: int) -> RunningReplica | None:
        """The first replica with room. Asks one whose load is unknown, and all the full ones when no other is left."""
        full = []
        for replica in order:
            load = self._cached_load(replica)
            if load is None:
                load = (await self._probe_queue_lens([replica], attempt))[0][1]
                if load is None:
                    continue
            if load < replica.max_ongoing_requests:
                return self._if_alive(replica)
            full.append(replica)
        lengths = dict(await self._probe_by_id(full, attempt))
        for replica in full:
            load = lengths.get(replica.replica_id)
            if load is not None and load < replica.max_ongoing_requests:
                return self._if_alive(replica)
        return None

    async def _probe_by_id(self, replicas: list[RunningReplica], attempt: int) -> list[tuple[ReplicaID, int | None]]:
        answers = await self._probe_queue_lens(replicas, attempt)
        return [(replica.replica_id, load) for replica, load in answers]

    def _if_alive(self, replica: RunningReplica) -> RunningReplica | None:
        """The replica unless it went away while another one was being asked."""
        return self._replicas.get(replica.replica_id)

    def _cached_load(self, replica: RunningReplica) -> int | None:
        """Requests the replica holds as far as this process knows; None when it has not heard lately."""
        if not self._use_replica_queue_len_cache:
            return None
        return self._replica_queue_len_cache.get(replica.replica_id)

    def _log_surprise(self, doing: str) -> None:
        """Log the current exception, the first time and then rarely: the call goes on by load."""
        self._surprises += 1
        if self._surprises & (self._surprises - 1) == 0:
            logger.exception(f"Error {self._surprises} while {doing}; going by load instead.")
