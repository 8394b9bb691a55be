"""Picks the replica of a request: the prefix hint, the policy, and the request router that applies it.

Ray Serve runs `PrefixAffinityRouter` inside every process that holds a handle of the engine deployment and ships
this module by value, so it is one self-contained file: the standard library and ray only. `rayapp.router` computes
hints with `prefix_hint`; a caller that sends none gets the same one, computed here from its token ids. The simulator
(`rayapp.bench.routing`) drives `choose` and its state. It knows nothing of text, HTTP or the engine.

The policy: `Traffic` says how many replicas the load of each prefix needs. While a prefix needs several, it narrows
the ring of replicas to as many, the same in every process; the first prefix that one replica can carry picks its home
in that ring. What `Memory` knows to be cached somewhere goes there instead. Nobody may be far above the mean load.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
import math
import random
import struct
import time
from array import array
from bisect import bisect_left
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from ray.util import metrics

logger = logging.getLogger("ray.serve")

# Depths, in tokens, whose hashes make up a hint: every HINT_STEP up to HINT_LINEAR_END, then doubling. They say what
# counts as "the same prefix" for routing and have nothing to do with the page size of any engine.
HINT_STEP = 64
HINT_LINEAR_END = 4096
# A prompt shorter than this goes by load alone; the hash of its first AFFINITY_TOKENS is the first that names a home.
AFFINITY_TOKENS = 128
HOME_INDEX = AFFINITY_TOKENS // HINT_STEP - 1

# A replica is passed over while it holds more than MIN_CAP usual requests and LOAD_FACTOR times the mean load. Below
# three, a sequential caller would be moved by its own request that has just ended.
MIN_CAP = 3
LOAD_FACTOR = 1.75
# What is thought to be cached on a replica excuses so much more load on it for each token.
CACHED_CREDIT = 0.75
# With less than this of what may be at its home, a remembered replica has missed what other processes sent since.
BEHIND = 0.6
# While fewer prompts than this find anything, there is nothing to gain from a home: the others go by load.
MIN_REUSE = 0.05
MAX_WALK = 16  # replicas looked at before the least loaded of them is taken

DEFAULT_OUTPUT_TOKENS = 256  # of a call that states no limit
MAX_OUTPUT_TOKENS = 1024  # a limit is seldom reached: beyond this it says nothing of the load

MEMORY_ENTRIES = 65536  # of about 250 bytes
REPLICAS_PER_ENTRY = 4
MEMORY_STRIDE = 8  # hints are remembered where they begin to differ, at every so many depths, and at their end

HOME, SPILLED, FALLBACK = "home", "spilled", "fallback"


class Call(NamedTuple):
    """What the policy knows of one request.

    Attributes:
        hint: see `prefix_hint`.
        prompt_tokens, output_tokens: its length and the limit of what is generated.
        session: hash of the session that it says it belongs to.
    """

    hint: Sequence[int]
    prompt_tokens: int = 0
    output_tokens: int = DEFAULT_OUTPUT_TOKENS
    session: int | None = None


class Choice(NamedTuple):
    """An answer of `choose`.

    Attributes:
        first: the replica to send to; None when there is none at all.
        others: every other replica once, best first; made as it is read.
        decision: HOME, SPILLED (the home is above its cap) or FALLBACK (by load alone).
        cost: tokens that the first replica will have to compute, as far as one can tell.
        start: index in the hint of the first prefix that one replica can carry.
        known: whether that or a deeper one is remembered of any replica.
    """

    first: str | None
    others: Iterator[str]
    decision: str
    cost: int
    start: int = HOME_INDEX
    known: bool = False

    @property
    def order(self) -> Iterator[str]:
        """Every replica, best first."""
        return self.others if self.first is None else chain((self.first,), self.others)


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


def depth_of(index: int) -> int:
    """Tokens of the prefix that `hint[index]` stands for."""
    linear = HINT_LINEAR_END // HINT_STEP
    return (index + 1) * HINT_STEP if index < linear else HINT_LINEAR_END << (index + 1 - linear)


def session_key(session_id: str) -> int:
    """The key of a session, of the same kind as the hashes of a hint."""
    digest = hashlib.blake2b(b"session:" + session_id.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


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


def call_of(args: Sequence[Any], kwargs: Mapping[str, Any], session_id: str = "") -> Call:
    """One call of the engine deployment as the policy sees it.

    Args:
        session_id: of the handle's options; the payload may name one too.

    Raises:
        Exception: whatever a malformed call leads to.
    """
    payload = args[0] if args else kwargs.get("payload")
    payload = payload if isinstance(payload, dict) else {}
    session_id = session_id or payload.get("session_id") or ""
    prompt = len(payload.get("prompt_ids") or ()) + len(payload.get("output_ids") or ())
    limit = int((payload.get("sampling") or {}).get("max_new_tokens") or DEFAULT_OUTPUT_TOKENS)
    return Call(
        hint_of_call(args, kwargs),
        prompt,
        max(0, min(limit, MAX_OUTPUT_TOKENS)) if prompt else 0,
        session_key(str(session_id)) if session_id else None,
    )


def digest_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """What a replica tells all request routers, made from `EngineReplica.health`.

    Serve sends the whole set of replicas to every process whenever one's digest has changed, so the values are coarse.

    Returns:
        state: "ok", "paused" or "unhealthy"; kv: percent of the KV cache that running requests hold, in steps of 5;
        epoch: changes when everything cached was forgotten; tokens: still to be computed, in steps of up to a half.
    """
    if report.get("error") is not None:
        return {"state": "unhealthy"}
    blocks = max(1, int(report.get("kv_total_blocks", 1)))
    return {
        "state": "paused" if report.get("paused") else "ok",
        "kv": 5 * round(20 * int(report.get("kv_used_blocks", 0)) / blocks),
        "epoch": int(report.get("epoch", 0)),
        "tokens": quantised(int(report.get("tokens_left", 0))),
    }


def quantised(tokens: int) -> int:
    """Down to 0, or a power of two or one and a half times one."""
    if tokens <= 1:
        return max(0, tokens)
    power = 1 << (tokens.bit_length() - 1)
    return power + power // 2 if tokens >= power + power // 2 else power


class Ring:
    """Some replicas, and for each key an order of them that every process agrees on.

    Rendezvous hashing: each replica has a weight for each key, so a lost one moves only the keys that it held, and
    a new one only those that it gets. The weight is the distance on a circle from the nearest of the key's PROBES
    to a point of the replica, so the first of a thousand is found by bisection ("multi-probe consistent hashing").

    Attributes:
        members: the replicas.
    """

    PROBES = 16
    POINTS = 16  # of each replica
    _MASK = 2**64 - 1

    def __init__(self, replicas: Iterable[str] = (), points: Sequence[tuple[int, str]] | None = None) -> None:
        pairs = sorted(self._points_of(replicas)) if points is None else points
        self._points = [point for point, _ in pairs]
        self._owners = [owner for _, owner in pairs]
        self.members = list(dict.fromkeys(self._owners))

    def __len__(self) -> int:
        return len(self.members)

    def subset(self, replicas: Iterable[str]) -> Ring:
        """The ring of some of these replicas."""
        kept = set(replicas)
        pairs = zip(self._points, self._owners, strict=True)
        return Ring(points=[(point, owner) for point, owner in pairs if owner in kept])

    def order(self, key: int) -> Iterator[str]:
        """Every replica once, in the order of its weight for `key`."""
        points, owners, mask, total = self._points, self._owners, self._MASK, len(self._points)
        if not total:
            return
        nearest = []
        for probe in self._probes(key):
            place = bisect_left(points, probe) % total
            nearest.append(((points[place] - probe) & mask, place, probe))
        first = owners[min(nearest)[1]]
        yield first
        seen = {first}
        heapq.heapify(nearest)
        while len(seen) < len(self.members):
            _, place, probe = nearest[0]
            if owners[place] not in seen:
                seen.add(owners[place])
                yield owners[place]
            place = (place + 1) % total
            heapq.heapreplace(nearest, ((points[place] - probe) & mask, place, probe))

    def _probes(self, key: int) -> Iterator[int]:
        return self._hashes(key.to_bytes(8, "big"), self.PROBES)

    def _points_of(self, replicas: Iterable[str]) -> Iterator[tuple[int, str]]:
        return ((point, name) for name in replicas for point in self._hashes(name.encode(), self.POINTS))

    @staticmethod
    def _hashes(data: bytes, count: int) -> Iterator[int]:
        for part in range(count // 8):
            yield from struct.unpack(">8Q", hashlib.blake2b(data, digest_size=64, salt=bytes([part])).digest())


class Fleet:
    """The replicas as one process knows them: the ring, the tokens in flight on each, what they say of themselves.

    Every method but the constructor and `update` costs O(1): the state follows what happens, request by request.

    Attributes:
        names: of all replicas.
        ring: of them.
        load: tokens in flight on each: those of this process's own calls, and what is known of others'.
        total: sum of `load`.
        avoided: those that say they are paused, unhealthy, leaving, or out of KV cache.
    """

    HEARD_S = 3.0  # so long the count that came with an answer is newer than a digest
    KV_FULL = 95  # percent

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names: list[str] = []
        self.ring = Ring()
        self.load: dict[str, int] = {}
        self.total = 0
        self.avoided: set[str] = set()
        self._lives: dict[str, int] = {}
        self._names_of_lives: dict[int, str] = {}
        self._born = 0
        self._epochs: dict[str, Any] = {}
        self._own: dict[str, list[int]] = {}  # calls, tokens
        self._others: dict[str, int] = {}
        self._said: dict[str, int] = {}
        self._heard: deque[tuple[float, str]] = deque()
        self._heard_at: dict[str, float] = {}
        self.update(names)

    def update(self, names: Iterable[str]) -> None:
        """The replicas that exist from now on."""
        names = list(dict.fromkeys(names))
        if set(names) == set(self.names):
            return
        gone, new = set(self.names) - set(names), [name for name in names if name not in self.load]
        for name in gone:
            self._names_of_lives.pop(self._lives.pop(name), None)
            self.total -= self.load.pop(name)
            self.avoided.discard(name)
            for table in (self._epochs, self._own, self._others, self._said, self._heard_at):
                table.pop(name, None)
        for name in new:
            self.load[name] = self._others[name] = self._said[name] = 0
            self._own[name] = [0, 0]
            self._reborn(name)
        self.names = names
        self.ring = Ring(names)

    def life(self, name: str) -> int | None:
        """A number for a replica's cache as it is: a new one once the replica has lost what it had cached."""
        return self._lives.get(name)

    def replica_of(self, life: int) -> str | None:
        """The replica that still has this cache."""
        return self._names_of_lives.get(life)

    def rank(self, name: str) -> tuple[bool, int]:
        """Sorts replicas: those to avoid last, less loaded ones first."""
        return name in self.avoided, self.load[name]

    def sent(self, name: str, tokens: int) -> None:
        """This process sends a call that will take so many tokens."""
        self._count_own(name, 1, tokens)

    def done(self, name: str, tokens: int) -> None:
        """A call counted by `sent` has ended."""
        self._count_own(name, -1, -tokens)

    def heard(self, name: str, calls: int, usual: float, now: float) -> None:
        """A replica says how many calls it holds, this process's and others'.

        Args:
            usual: tokens that a call takes, about.
        """
        if name not in self.load:
            return
        self._set_others(name, int(max(0, calls - self._own[name][0]) * usual))
        self._heard_at[name] = now
        self._heard.append((now, name))

    def forget_heard(self, now: float) -> None:
        """Go back to the digests where nothing was heard for HEARD_S."""
        while self._heard and self._heard[0][0] < now - self.HEARD_S:
            then, name = self._heard.popleft()
            if self._heard_at.get(name) == then:
                self._set_others(name, self._said[name])

    def digest(self, name: str, stats: Mapping[str, Any]) -> None:
        """Takes what a replica says, as `digest_of` makes it. Fields that are missing or odd say nothing."""
        if name not in self.load or not isinstance(stats, Mapping) or not stats:
            return
        if "epoch" in stats and self._epochs.setdefault(name, stats["epoch"]) != stats["epoch"]:
            self._epochs[name] = stats["epoch"]
            self._reborn(name)
        tokens, kv = stats.get("tokens"), stats.get("kv")
        if isinstance(tokens, int):
            self._said[name] = max(0, tokens - self._own[name][1])
            self._set_others(name, self._said[name])
        bad = stats.get("state", "ok") != "ok" or (isinstance(kv, int | float) and kv >= self.KV_FULL)
        (self.avoided.add if bad else self.avoided.discard)(name)

    def _count_own(self, name: str, calls: int, tokens: int) -> None:
        if name in self.load:
            own = self._own[name]
            own[0] += calls
            own[1] += tokens
            self.load[name] += tokens
            self.total += tokens

    def _set_others(self, name: str, tokens: int) -> None:
        change = tokens - self._others[name]
        self._others[name] = tokens
        self.load[name] += change
        self.total += change

    def _reborn(self, name: str) -> None:
        self._names_of_lives.pop(self._lives.get(name, 0), None)
        self._born += 1
        self._lives[name] = self._born
        self._names_of_lives[self._born] = name


class Memory:
    """A bounded LRU of prefix or session -> the replicas that lately served it, latest first.

    A replica stands in it with its `Fleet.life`, so one that is gone or lost its cache is forgotten at once.
    """

    def __init__(self, entries: int = MEMORY_ENTRIES) -> None:
        self._entries = entries
        self._lives: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lives)

    def get(self, key: int, fleet: Fleet) -> list[str]:
        """The replicas that hold it."""
        lives = self._lives.get(key, ())
        return [name for life in lives if (name := fleet.replica_of(life)) is not None]

    def deepest_first(self, keys: Sequence[int], start: int, fleet: Fleet) -> Iterator[tuple[int, list[str]]]:
        """The indices of `keys`, from the last down to `start`, that replicas hold, and which."""
        known = self._lives
        for index in range(len(keys) - 1, start - 1, -1):
            if keys[index] in known and (names := self.get(keys[index], fleet)):
                yield index, names

    def record(self, call: Call, start: int, name: str, fleet: Fleet) -> None:
        """Remember that a replica now holds the prompt of `call`, from `Choice.start` on."""
        life = fleet.life(name)
        if life is None:
            return
        if len(call.hint) > HOME_INDEX:
            last = len(call.hint) - 1
            strided = range(last - last % MEMORY_STRIDE - 1, start, -MEMORY_STRIDE)
            for index in {last, *strided, min(start, last)}:
                self._put(call.hint[index], life)
        if call.session is not None:
            self._put(call.session, life)
        while len(self._lives) > self._entries:
            self._lives.popitem(last=False)

    def _put(self, key: int, life: int) -> None:
        lives = self._lives.get(key, ())
        if not lives or lives[0] != life:
            self._lives[key] = (life, *(other for other in lives if other != life))[:REPLICAS_PER_ENTRY]
        self._lives.move_to_end(key)


class Traffic:
    """How many replicas the load of each prefix needs, from what this process has lately sent.

    A prefix that one replica can carry has one copy. The share of the load that a prefix brings, times the load in
    flight, over the load that a replica is to hold, says how many it needs; all processes see about the same shares.
    Prefixes below one that needs several are counted on their own, so a common system prompt does not hide which
    documents or conversations below it are hot. Bounded in entries and rings.

    Attributes:
        usual: tokens that a call takes, about.
    """

    ENTRIES = 16384
    RINGS = 256
    WINDOW = 16  # calls of this process for each replica over which shares are taken
    PIECES = 16.0  # copies for each replica's worth of load: smaller pieces lie more evenly
    REUSE_CALLS = 64
    DOUBT = 3.0  # calls that a prefix must have had before they count

    def __init__(self) -> None:
        self.usual = 512.0
        self._reuse = 1.0
        self._busy = 0.0
        self._sent = 0.0
        self._calls = 0
        self._prefixes: OrderedDict[int, list[float]] = OrderedDict()  # weight, when, copies, reuse
        self._rings: OrderedDict[int, tuple[Ring, int, Ring]] = OrderedDict()

    def copies(self, prefix: int) -> int:
        """Replicas that a prefix is to be on."""
        entry = self._prefixes.get(prefix)
        return 1 if entry is None else int(entry[2])

    def reuse(self, hint: Sequence[int], start: int) -> float:
        """Share of calls with the same hot prefix, or without one, of which more than that was remembered."""
        entry = self._prefixes.get(hint[start - 1]) if start > HOME_INDEX else None
        return self._reuse if entry is None else entry[3]

    def descend(self, hint: Sequence[int], ring: Ring) -> tuple[int, Ring]:
        """Index of the first prefix of the hint that one replica can carry, and the ring to look for it in."""
        index = HOME_INDEX
        while index < len(hint) and (copies := self.copies(hint[index])) > 1:
            if copies < len(ring):
                ring = self._narrowed(hint[index], copies, ring)
            index += 1
        return index, ring

    def record(self, call: Call, choice: Choice, fleet: Fleet, min_cap: int = MIN_CAP) -> None:
        """Count a call that was sent as `choose` said."""
        replicas, cost = max(1, len(fleet.names)), choice.cost
        self._calls += 1
        self.usual += (cost - self.usual) / min(self._calls, 1000)
        self._busy += (fleet.total - self._busy) / min(self._calls, 4 * replicas)
        self._sent += cost
        window = self.WINDOW * replicas * self.usual
        counted = window * -math.expm1(-self._sent / window)
        fair = max(min_cap * self.usual, self._busy / replicas)
        if choice.start == HOME_INDEX < len(call.hint):
            self._reuse += (choice.known - self._reuse) / self.REUSE_CALLS
        for index in range(HOME_INDEX, len(call.hint)):
            prefix = call.hint[index]
            entry = self._prefixes.setdefault(prefix, [0.0, 0.0, 1, 1.0])
            self._prefixes.move_to_end(prefix)
            entry[0] = entry[0] * math.exp((entry[1] - self._sent) / window) + cost
            entry[1] = self._sent
            if index == choice.start - 1:
                entry[3] += (choice.known - entry[3]) / self.REUSE_CALLS
            share = max(0.0, entry[0] - self.DOUBT * self.usual) / counted
            wanted = self.PIECES * share * self._busy / fair
            if wanted > entry[2] or wanted < entry[2] / 2 or entry[2] > replicas:
                entry[2] = _grid(wanted, replicas)
            if entry[2] <= 1:
                break
        while len(self._prefixes) > self.ENTRIES:
            self._prefixes.popitem(last=False)

    def _narrowed(self, prefix: int, copies: int, ring: Ring) -> Ring:
        outer, size, inner = self._rings.get(prefix, (None, 0, ring))
        if outer is not ring or size != copies:
            order = ring.order(prefix)
            inner = ring.subset(next(order) for _ in range(copies))
            self._rings[prefix] = ring, copies, inner
            if len(self._rings) > self.RINGS:
                self._rings.popitem(last=False)
        self._rings.move_to_end(prefix)
        return inner


def _grid(wanted: float, most: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, ... so that processes agree; all replicas rather than more than half."""
    if wanted > most / 2:
        return most
    size = 1
    while size < wanted:
        size += max(1, (1 << (size.bit_length() - 1)) // 2)
    return min(size, most)


def choose(
    call: Call,
    fleet: Fleet,
    memory: Memory,
    traffic: Traffic,
    *,
    min_cap: int = MIN_CAP,
    load_factor: float = LOAD_FACTOR,
    rng: random.Random,
) -> Choice:
    """Which replica a call is to go to. Changes nothing, and is pure but for `rng`, which settles ties by load.

    First comes the replica remembered for the session or the deepest prefix that one replica can carry, else the
    first in rendezvous order for that session or prefix, of those below the load cap.
    """
    whole = call.prompt_tokens + call.output_tokens
    keys: Sequence[int] = call.hint if len(call.hint) > HOME_INDEX else ()
    if call.session is not None:
        keys, start, ring, hot, reuse = (call.session,), 0, fleet.ring, 0, 1.0
    else:
        start, ring = traffic.descend(keys, fleet.ring)
        hot = min(depth_of(start - 1), call.prompt_tokens) if start > HOME_INDEX else 0
        reuse = traffic.reuse(keys, start) if start < len(keys) else 0.0
    if not keys or not fleet.names:
        return _by_load(fleet, fleet.names, rng, FALLBACK, whole)

    def room(cached: int, sure: int) -> float:
        """The load above which a replica is passed over that has so many tokens cached, `sure` of them its own."""
        cost, mean = whole - cached, (fleet.total + whole - cached) / len(fleet.names)
        return max(min_cap * max(traffic.usual, cost), load_factor * mean) - cost + CACHED_CREDIT * sure

    # Every replica of the ring will soon have what is hot; the rest may have come to its home from another process.
    at_home = hot + int(reuse * (call.prompt_tokens - hot))
    known = False
    for index, names in memory.deepest_first(keys, start, fleet):
        known = True
        cached = call.prompt_tokens if call.session is not None else min(depth_of(index), call.prompt_tokens)
        name = min(names, key=fleet.load.__getitem__)
        if cached < BEHIND * at_home:
            break
        if name not in fleet.avoided and fleet.load[name] <= room(cached, cached):
            return Choice(name, _rest(name, ring.order(keys[start]), fleet), HOME, whole - cached, start, True)
    if not known and reuse < MIN_REUSE:
        return _by_load(fleet, ring.members, rng, HOME if hot else FALLBACK, whole - hot, start)
    name, decision, order = _first_below(room(at_home, at_home - hot), ring.order(keys[start]), fleet)
    return Choice(name, _rest(name, order, fleet), decision, whole - at_home, start, known)


def _first_below(room: float, order: Iterator[str], fleet: Fleet) -> tuple[str, str, Iterator[str]]:
    """The first in `order` with no more than `room` tokens in flight, of MAX_WALK; else the least loaded of those.

    Returns:
        It, the decision that this is, and all in order.
    """
    passed: list[str] = []
    for name in order:
        if name not in fleet.avoided and fleet.load[name] <= room:
            return name, SPILLED if passed else HOME, chain(passed, order)
        passed.append(name)
        if len(passed) == MAX_WALK:
            break
    best = min(passed, key=fleet.rank)
    return best, HOME if best == passed[0] else SPILLED, chain(passed, order)


def _by_load(
    fleet: Fleet, names: Sequence[str], rng: random.Random, decision: str, cost: int, start: int = HOME_INDEX
) -> Choice:
    """The less loaded of two drawn at random."""
    if not names:
        return Choice(None, iter(()), decision, cost)
    drawn = (names[int(rng.random() * len(names))], names[int(rng.random() * len(names))])
    name = min(drawn, key=fleet.rank)
    return Choice(name, _rest(name, (), fleet), decision, cost, start)


def _rest(first: str, preferred: Iterable[str], fleet: Fleet) -> Iterator[str]:
    """All but `first`: a few of `preferred`, then the others, less loaded first. Skips those that have gone since."""
    seen = {first}
    for name in islice(preferred, MAX_WALK):
        if name not in seen and name in fleet.load and name not in fleet.avoided:
            seen.add(name)
            yield name
    yield from sorted((name for name in fleet.names if name not in seen), key=fleet.rank)


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
        self._fleet = Fleet()
        self._traffic = Traffic()
        self._digests: dict[str, Any] = {}
        # Of calls under way: by replica and HTTP request, which is all that Serve tells of one that ended.
        self._costs: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        self._decisions = metrics.Counter(
            "convoy_routing_decisions",
            description="Requests sent to the home of their prefix, past it because of its load, or by load alone.",
            tag_keys=("decision", "deployment"),
        )
        self._decisions.set_default_tags({"deployment": self._deployment_id.name})
        self.initialize_state()

    def initialize_state(
        self,
        min_cap: int = MIN_CAP,
        load_factor: float = LOAD_FACTOR,
        memory_entries: int = MEMORY_ENTRIES,
        **_: Any,
    ) -> None:
        """Settings from the application's `router:` section, validated there; an error here would hang callers."""
        self._memory = Memory(memory_entries)
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
            choice = self._choice(pending_request)
            replica = await self._first_with_room(self._known(choice.order), attempt)
            if replica is not None:
                self._count(pending_request, replica, choice)
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
        order = self._known(self._choice(pending_request).order)
        return [[replica] for replica in order if replica.replica_id in allowed]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """The replica accepted the call: only now does it hold the prefix."""
        try:
            start = getattr(pending_request, "_convoy_start", HOME_INDEX)
            self._memory.record(self._call(pending_request), start, replica_id.unique_id, self._fleet)
        except Exception:
            self._log_surprise("remembering a prefix")

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        key = replica_id.unique_id, internal_request_id
        costs = self._costs.get(key)
        if costs:
            self._fleet.done(key[0], costs.pop())
            if not costs:
                del self._costs[key]

    @property
    def num_outstanding(self) -> int:
        """Calls of this process that were sent and have not ended."""
        return sum(len(costs) for costs in self._costs.values())

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._fleet.heard(replica_id.unique_id, num_ongoing_requests, self._traffic.usual, time.monotonic())

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._sync()
        for replica_id, replica in self._replicas.items():
            stats, name = replica.routing_stats, replica_id.unique_id
            if stats is not self._digests.get(name):  # Serve sends all of them when one has changed
                self._digests[name] = stats
                self._fleet.digest(name, stats)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._sync()

    def _sync(self) -> None:
        """The policy's replicas are Serve's."""
        self._ids = {replica_id.unique_id: replica_id for replica_id in self._replicas}
        self._fleet.update(self._ids)
        self._digests = {name: stats for name, stats in self._digests.items() if name in self._ids}
        for key in [key for key in self._costs if key[0] not in self._ids]:
            del self._costs[key]

    def _call(self, pending_request: PendingRequest | None) -> Call:
        """What the call asks for; computed once, however often it is routed.

        Raises:
            Exception: whatever a malformed call leads to.
        """
        if pending_request is None:
            return Call(())
        call: Call | None = getattr(pending_request, "_convoy_call", None)
        if call is None:
            session_id = getattr(pending_request.metadata, "session_id", "")
            call = call_of(pending_request.args, pending_request.kwargs, session_id)
            pending_request._convoy_call = call  # type: ignore[attr-defined]
        return call

    def _choice(self, pending_request: PendingRequest | None) -> Choice:
        """What the policy says; whatever goes wrong, by load."""
        try:
            self._fleet.forget_heard(time.monotonic())
            return choose(
                self._call(pending_request), self._fleet, self._memory, self._traffic,
                min_cap=self._min_cap, load_factor=self._load_factor, rng=self._rng,
            )  # fmt: skip
        except Exception:
            self._log_surprise("choosing a replica by prefix")
            return _by_load(self._fleet, self._fleet.names, self._rng, FALLBACK, DEFAULT_OUTPUT_TOKENS)

    def _known(self, names: Iterable[str]) -> Iterator[RunningReplica]:
        for name in names:
            if name in self._ids and self._ids[name] in self._replicas:
                yield self._replicas[self._ids[name]]

    def _count(self, pending_request: PendingRequest, replica: RunningReplica, choice: Choice) -> None:
        """The call is about to be sent. Serve tells of its end, or that it was refused, in `on_request_completed`."""
        name = replica.replica_id.unique_id
        pending_request._convoy_start = choice.start  # type: ignore[attr-defined]
        self._costs[name, pending_request.metadata.internal_request_id].append(choice.cost)
        self._fleet.sent(name, choice.cost)
        if not choice.cost:  # no generation
            return
        try:
            moved = choice.decision == HOME and name != choice.first  # the home is full
            self._decisions.inc(tags={"decision": SPILLED if moved else choice.decision})
            self._traffic.record(self._call(pending_request), choice, self._fleet, self._min_cap)
        except Exception:
            self._log_surprise("counting a call")

    async def _first_with_room(self, order: Iterable[RunningReplica], attempt: int) -> RunningReplica | None:
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
