"""The routing policy as pure functions, and the request router around it with replicas that are not there."""

from __future__ import annotations

import asyncio
import math
import random
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.request_router.common import PendingRequest

from rayapp.prefix_router import (
    AFFINITY_TOKENS,
    CACHED_CREDIT,
    FALLBACK,
    HINT_LINEAR_END,
    HINT_STEP,
    HOME,
    HOME_INDEX,
    LOAD_FACTOR,
    MIN_CAP,
    SPILLED,
    Call,
    Choice,
    Fleet,
    Memory,
    PrefixAffinityRouter,
    Ring,
    Traffic,
    call_of,
    choose,
    depth_of,
    digest_of,
    hint_of_call,
    prefix_hint,
    quantised,
    session_key,
)
from tests.conftest import wait_limit

REPLICAS = ["a", "b", "c"]


def prompt(seed: int, length: int = 200) -> list[int]:
    return random.Random(seed).choices(range(49152), k=length)


def call_for(ids: list[int], output: int = 50, session: int | None = None) -> Call:
    return Call(prefix_hint(ids), len(ids), output, session)


class Process:
    """The policy with the state of one process."""

    def __init__(self, replicas: list[str] = REPLICAS, entries: int = 1000, seed: int = 0) -> None:
        self.fleet, self.memory, self.traffic = Fleet(replicas), Memory(entries), Traffic()
        self.rng = random.Random(seed)

    def choose(self, call: Call, **kwargs: Any) -> Choice:
        return choose(call, self.fleet, self.memory, self.traffic, rng=self.rng, **kwargs)

    def pick(self, call: Call) -> str:
        """The replica that would be taken if no load were known."""
        return choose(call, Fleet(self.fleet.names), self.memory, self.traffic, rng=self.rng).first or ""

    def send(self, call: Call) -> tuple[str, int]:
        choice = self.choose(call)
        name = choice.first or ""
        self.fleet.sent(name, choice.cost)
        self.memory.record(call, choice.start, name, self.fleet)
        self.traffic.record(call, choice, self.fleet)
        return name, choice.cost


# The hint


def test_hint_depths() -> None:
    """Every 64 tokens up to 4096, then at 8192, 16384, ...; nothing between."""
    linear = HINT_LINEAR_END // HINT_STEP
    for length, depths in ((63, 0), (64, 1), (127, 1), (128, 2), (4096, linear), (8191, linear), (8192, linear + 1)):
        assert len(prefix_hint([7] * length)) == depths
        assert depths == 0 or depth_of(depths - 1) <= length < depth_of(depths)


@given(st.integers(0, 300), st.integers(1, 200), st.integers(1, 200))
def test_hints_of_prompts_share_exactly_their_common_prefix(common: int, first: int, second: int) -> None:
    stem = prompt(1, common)
    a, b = prefix_hint([*stem, *prompt(2, first)]), prefix_hint([*stem, *prompt(3, second)])
    shared = common // HINT_STEP
    assert a[:shared] == b[:shared]
    assert all(x != y for x, y in zip(a[shared:], b[shared:], strict=False))


def test_hint_is_salted_and_the_same_in_another_process() -> None:
    ids = prompt(5)
    assert set(prefix_hint(ids)).isdisjoint(prefix_hint(ids, "tenant"))
    code = f"from rayapp.prefix_router import prefix_hint; print(prefix_hint({ids}, 'tenant'))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(prefix_hint(ids, "tenant"))


def test_hint_of_call_is_the_given_one_or_made_from_the_payload() -> None:
    ids = prompt(6)
    payload = {"prompt_ids": ids, "cache_salt": "s"}
    assert hint_of_call([payload], {"route_hint": [1, 2]}) == [1, 2]
    assert hint_of_call([payload, [1, 2]], {}) == [1, 2]
    assert hint_of_call([payload], {}) == hint_of_call([], {"payload": payload}) == prefix_hint(ids, "s")
    assert hint_of_call([], {}) == hint_of_call(["text"], {}) == []
    with pytest.raises(ValueError):
        hint_of_call([payload], {"route_hint": ["x"]})


def test_call_of_a_handle_call() -> None:
    payload = {"prompt_ids": prompt(1), "output_ids": [1, 2], "sampling": {"max_new_tokens": 30}, "session_id": "x"}
    assert call_of([payload], {}) == Call(prefix_hint(prompt(1)), 202, 30, session_key("x"))
    assert call_of([payload], {}, "y").session == session_key("y")
    assert call_of([], {}) == call_of(["facts"], {}) == Call([], 0, 0, None)


# The ring

names_of_replicas = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=12, unique=True)
keys = st.integers(0, 2**64 - 1)


@given(names_of_replicas, keys)
def test_a_lost_replica_moves_only_the_keys_it_held(replicas: list[str], key: int) -> None:
    order = list(Ring(replicas).order(key))
    assert sorted(order) == sorted(replicas)
    assert list(Ring(replicas[::-1]).order(key)) == order
    for lost in replicas:
        rest = [r for r in order if r != lost]
        assert list(Ring(replicas).subset(rest).order(key)) == list(Ring(rest).order(key)) == rest


@settings(max_examples=25)
@given(st.integers(1, 40), st.integers(0, 5))
def test_a_new_replica_takes_its_share_of_the_keys_and_no_other_key_moves(count: int, seed: int) -> None:
    rng = random.Random(seed)
    before, after = Ring(f"{seed}/{i}" for i in range(count)), Ring(f"{seed}/{i}" for i in range(count + 1))
    moved = 0
    for _ in range(300):
        key = rng.getrandbits(64)
        home = next(after.order(key))
        if home != next(before.order(key)):
            assert home == f"{seed}/{count}"
            moved += 1
    assert moved / 300 <= 1.5 / (count + 1) + 0.05


def test_the_order_is_the_same_in_another_process() -> None:
    replicas, key = [f"replica-{i}" for i in range(20)], 12345678901234567890
    code = f"from rayapp.prefix_router import Ring; print(list(Ring({replicas}).order({key})))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(list(Ring(replicas).order(key)))


def test_the_ring_spreads_keys() -> None:
    rng = random.Random(1)
    ring = Ring(f"replica-{i}" for i in range(50))
    homes = Counter(next(ring.order(rng.getrandbits(64))) for _ in range(10_000))
    assert max(homes.values()) < 1.35 * 200 and min(homes.values()) > 0.65 * 200


# The policy


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    """Replicas with any load, some to be avoided, some of them new or gone."""
    fleet = Fleet(draw(names_of_replicas))
    for name in list(fleet.names):
        fleet.sent(name, draw(st.integers(0, 5000)))
        fleet.heard(name, draw(st.integers(0, 9)), 300, now=0)
        fleet.digest(name, draw(st.sampled_from([{}, {"state": "paused"}, {"kv": 100}, {"tokens": 9000, "epoch": 1}])))
    fleet.update(draw(st.permutations([*fleet.names[: draw(st.integers(0, 12))], *draw(names_of_replicas)])))
    assert fleet.total == sum(fleet.load.values())
    return fleet


@given(fleets(), st.integers(0, 400), st.none() | keys, st.integers(0, 3))
def test_every_replica_is_in_the_order_once_and_no_other(
    fleet: Fleet, length: int, session: int | None, seed: int
) -> None:
    process = Process(["gone"], seed=seed)
    call = call_for(prompt(1, length), session=session)
    process.send(call)
    process.fleet = fleet
    for name in [*fleet.names, "gone"]:
        process.memory.record(call, HOME_INDEX, name, fleet)
    choice = process.choose(call)
    assert sorted(choice.order) == sorted(fleet.names)
    assert choice.decision in (HOME, SPILLED, FALLBACK)
    good = [name for name in fleet.names if name not in fleet.avoided]
    if length >= AFFINITY_TOKENS or session is not None:
        assert choice.first in good or not good or len(good) < len(fleet.names) - 15


def test_no_replica_no_choice() -> None:
    for call in (call_for(prompt(1)), call_for([]), call_for(prompt(1), session=5)):
        assert Process([]).choose(call).first is None


@given(st.lists(st.integers(0, 30), min_size=1, max_size=300), st.integers(2, 12))
def test_load_is_bounded(prompts: list[int], count: int) -> None:
    """Whatever is sent, and though nothing ever ends, nobody holds more than the cap and what one call may add."""
    process = Process([f"r{i}" for i in range(count)])
    for number in prompts:
        process.send(call_for(prompt(number, 150 + 20 * number)))
    load, usual = process.fleet.load, process.traffic.usual
    most_of_one = 150 + 20 * 30 + 50
    bound = max(MIN_CAP * max(usual, most_of_one), LOAD_FACTOR * process.fleet.total / count)
    assert max(load.values()) <= bound + most_of_one * (1 + CACHED_CREDIT)


def test_a_home_that_is_far_above_the_mean_is_passed_over() -> None:
    call = call_for(prompt(1))
    process = Process()
    home, second, _ = process.fleet.ring.order(call.hint[1])
    process.fleet.sent(home, 100_000)
    choice = process.choose(call)
    assert (choice.first, choice.decision) == (second, SPILLED)
    for name in REPLICAS:
        process.fleet.sent(name, 100_000)
    process.fleet.done(home, 100_000)
    choice = process.choose(call)
    assert (choice.first, choice.decision) == (home, HOME)


def test_prompts_with_the_same_first_128_tokens_share_a_home() -> None:
    for seed in range(20):
        stem = prompt(seed, AFFINITY_TOKENS)
        calls = [call_for([*stem, *prompt(100 + i, 50 * i)]) for i in range(5)]
        assert len({Process(seed=i).pick(one) for i, one in enumerate(calls)}) == 1


def test_the_deepest_remembered_replica_wins() -> None:
    call = call_for(prompt(1, 256))
    process = Process()
    home, other, third = process.fleet.ring.order(call.hint[1])
    assert process.pick(call) == home
    process.memory.record(call._replace(hint=call.hint[:3]), HOME_INDEX, other, process.fleet)
    assert process.choose(call).first == other
    process.memory.record(call, HOME_INDEX, third, process.fleet)
    assert process.choose(call).first == third
    assert process.choose(call._replace(hint=call.hint[:3])).first == other


def test_a_conversation_that_went_on_elsewhere_goes_home() -> None:
    """What is remembered is far behind: another process has sent the turns since, most likely home."""
    call = call_for(prompt(1, 2000))
    process = Process()
    home, other, _ = process.fleet.ring.order(call.hint[1])
    process.memory.record(call._replace(hint=call.hint[:2]), HOME_INDEX, other, process.fleet)
    assert process.choose(call).first == home


def test_a_short_prompt_goes_by_load() -> None:
    process = Process()
    process.fleet.sent("a", 900)
    call = call_for(prompt(1, AFFINITY_TOKENS - 1))
    choices = [process.choose(call) for _ in range(300)]
    first = Counter(choice.first for choice in choices)
    assert first["a"] < 60 and first["b"] > 60 and first["c"] > 60
    assert {choice.decision for choice in choices} == {FALLBACK}


def test_where_nothing_is_shared_load_decides() -> None:
    """A home gains nothing then, and two drawn at random by load lie more evenly."""
    process = Process()
    for seed in range(250):
        process.send(call_for(prompt(seed)))
    assert process.choose(call_for(prompt(9999))).decision == FALLBACK


def test_a_sequential_caller_is_never_moved() -> None:
    """The count of its last call falls only after the answer has come, so it sees one or two at home."""
    process = Process()
    ids, homes = prompt(1), set()
    pending: list[tuple[str, int]] = []
    for turn in range(40):
        pending.append(process.send(call_for(ids)))
        homes.add(pending[-1][0])
        ids += prompt(100 + turn, 30)
        if len(pending) == 2:
            process.fleet.done(*pending.pop(0))
    assert len(homes) == 1


def test_O40_hot_prefix_spreads_and_the_load_stays_under_the_cap() -> None:
    process = Process()
    sent = Counter(process.send(call_for(prompt(1)))[0] for _ in range(60))
    assert min(sent.values()) >= 60 // 3 // 2
    assert max(sent.values()) <= 1.25 * 60 / 3 + 1


def test_a_hot_prefix_has_the_copies_its_load_needs_and_the_same_ones_in_every_process() -> None:
    """A fiftieth of the load of 64 replicas is on some of them, about the same ones in two processes."""
    hot, others = [1, 2, 3, 4], [[1000 + number] * 4 for number in range(800)]
    used: list[set[str]] = []
    for seed in (0, 1):
        process, rng = Process([f"r{i}" for i in range(64)], seed=seed), random.Random(seed)
        held: list[tuple[str, int]] = []
        copies = set()
        for number in range(6000):
            stem = hot if rng.random() < 0.02 else rng.choice(others)
            held.append(process.send(Call([*stem, rng.getrandbits(64)], 5 * 64 + 10, 50)))
            if len(held) > 400:
                process.fleet.done(*held.pop(rng.randrange(400)))
            if number > 3000 and stem is hot:
                copies.add(held[-1][0])
        assert 2 <= process.traffic.copies(hot[1]) < 64
        assert sum(process.traffic.copies(stem[1]) for stem in others) < 1.5 * len(others)
        used.append(copies)
    assert len(used[0] & used[1]) >= 0.5 * max(map(len, used))
    assert max(map(len, used)) < 48


def test_a_session_stays_where_it_is_and_is_at_home_in_every_process() -> None:
    session = session_key("alice")
    homes = set()
    for seed in range(5):
        process = Process(seed=seed)
        process.send(call_for(prompt(100 + seed), session=session))
        homes |= {process.send(call_for(prompt(200 + 10 * seed + turn, 20), session=session))[0] for turn in range(2)}
    assert len(homes) == 1
    process.fleet.sent(*homes, 100_000)
    moved = process.choose(call_for(prompt(7), session=session))
    assert moved.decision == SPILLED and moved.first not in homes


@pytest.mark.parametrize("change", [{"epoch": 1}, {"state": "paused", "epoch": 1}])
def test_a_replica_that_was_reset_loses_its_affinity(change: dict[str, Any]) -> None:
    call = call_for(prompt(1))
    process = Process()
    home, other, _ = process.fleet.ring.order(call.hint[1])
    process.fleet.digest(other, {"epoch": 0, "state": "ok"})
    process.memory.record(call, HOME_INDEX, other, process.fleet)
    assert process.choose(call).first == other
    process.fleet.digest(other, {"epoch": 0, "state": "ok", "tokens": 5})
    assert process.choose(call).first == other
    process.fleet.digest(other, {"epoch": 0, "state": "ok"} | change)
    assert process.choose(call).first == home


def test_paused_full_and_failed_replicas_are_passed_over() -> None:
    call = call_for(prompt(1))
    for bad in ({"state": "unhealthy"}, {"state": "paused"}, {"state": "ok", "kv": 100}):
        process = Process()
        home = process.pick(call)
        process.fleet.digest(home, bad)
        assert process.choose(call).first != home and list(process.choose(call).order)[-1] == home
        process.fleet.digest(home, {"state": "ok", "kv": 10})
        assert process.choose(call).first == home


def test_others_load_comes_from_digests_and_newer_answers() -> None:
    fleet = Fleet(REPLICAS)
    fleet.sent("a", 100)
    fleet.digest("a", {"tokens": 350})
    assert fleet.load["a"] == 350
    fleet.heard("a", calls=3, usual=500, now=10)
    assert fleet.load["a"] == 100 + 2 * 500
    fleet.forget_heard(now=11)
    assert fleet.load["a"] == 1100
    fleet.forget_heard(now=14)
    assert fleet.load["a"] == 350
    fleet.done("a", 100)
    assert (fleet.load["a"], fleet.total) == (250, 250)
    fleet.update(["b"])
    assert (fleet.total, fleet.life("a"), list(fleet.load)) == (0, None, ["b"])


def test_digests_are_coarse() -> None:
    report = {"error": None, "paused": False, "kv_used_blocks": 333, "kv_total_blocks": 1000, "epoch": 2}
    assert digest_of(report | {"tokens_left": 1000}) == {"state": "ok", "kv": 35, "epoch": 2, "tokens": 768}
    assert digest_of(report | {"paused": True})["state"] == "paused"
    assert digest_of({"error": "dead"}) == {"state": "unhealthy"}
    values = {quantised(tokens) for tokens in range(10_000)}
    assert len(values) < 30 and all(tokens / 1.5 < quantised(tokens) <= tokens for tokens in range(1, 10_000))


@given(st.dictionaries(st.sampled_from(["state", "kv", "epoch", "tokens"]), st.none() | st.text() | st.integers()))
def test_odd_digests_do_no_harm(stats: dict[str, Any]) -> None:
    process = Process()
    process.fleet.digest("a", stats)
    assert sorted(process.choose(call_for(prompt(1))).order) == REPLICAS
    assert process.fleet.total == sum(process.fleet.load.values()) >= 0


def test_O40_memory_is_bounded_and_forgets_the_oldest() -> None:
    process = Process(entries=1000)
    calls = [call_for([seed, *prompt(0, 199)]) for seed in range(10_000)]
    tracemalloc.start()
    for call in calls:
        process.send(call)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(process.memory) == 1000
    assert process.memory.get(calls[0].hint[-1], process.fleet) == []
    assert process.memory.get(calls[9999].hint[-1], process.fleet) != []
    assert size < 300 * (1000 + 10_000)  # bytes; the prefixes that are counted are bounded too, but by more than here


def test_counted_prefixes_and_rings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Traffic, "ENTRIES", 500)
    monkeypatch.setattr(Traffic, "RINGS", 10)
    process = Process([f"r{i}" for i in range(64)])
    for number in range(2000):
        process.send(Call([0, number % 40, number + 100], 200))
    assert len(process.traffic._prefixes) <= 500 and len(process.traffic._rings) <= 10


# The request router


class FakeReplica:
    """What the router sees of a replica: an id, a limit, and a queue length that can be asked for."""

    def __init__(self, name: str, limit: int = 4) -> None:
        self.replica_id = ReplicaID(name, DeploymentID(name="d"))
        self.max_ongoing_requests = limit
        self.ongoing = 0
        self.probes = 0
        self.node_id = self.availability_zone = "x"
        self.routing_stats: dict[str, Any] = {}

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.probes += 1
        return self.ongoing


async def make_router(replicas: list[FakeReplica], **kwargs: Any) -> PrefixAffinityRouter:
    router = PrefixAffinityRouter(
        deployment_id=DeploymentID(name="d"),
        handle_source=DeploymentHandleSource.REPLICA,
        use_replica_queue_len_cache=True,
        initial_backoff_s=0.005,
        max_backoff_s=0.02,
    )
    router.initialize_state(**kwargs)
    router.update_replicas(replicas)  # type: ignore[arg-type]
    while any(router._cached_load(replica) is None for replica in router._replicas.values()):
        await asyncio.sleep(0.001)  # it asks new replicas for their queue lengths
    return router


def call(ids: list[int] | None = None, **kwargs: Any) -> PendingRequest:
    """A call whose HTTP request is the same as that of every other call."""
    metadata = RequestMetadata(request_id="same", internal_request_id="same")
    return PendingRequest(args=[{"prompt_ids": ids or prompt(1)}], kwargs=kwargs, metadata=metadata)


async def route(router: PrefixAffinityRouter, request: PendingRequest) -> FakeReplica:
    """What Serve does around the choice: send, hear whether the replica accepted, choose again if not."""
    for attempt in range(1000):
        replica: Any = await router._choose_replica_for_request(request, is_retry=attempt > 0)
        router.on_send_request(replica.replica_id)
        accepted = replica.ongoing < replica.max_ongoing_requests
        replica.ongoing += accepted
        router.on_new_queue_len_info(replica.replica_id, replica.ongoing)
        if not accepted:
            router.on_request_completed(replica.replica_id, request.metadata.internal_request_id)
        else:
            router.on_request_routed(request, replica.replica_id, None)  # type: ignore[arg-type]
            return replica
    raise AssertionError("rejected a thousand times")


def finish(router: PrefixAffinityRouter, replica: FakeReplica) -> None:
    replica.ongoing -= 1
    router.on_request_completed(replica.replica_id, "same")
    router.decrement_queue_len_cache(replica.replica_id)


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, wait_limit(20)))


def test_O40_later_turns_land_on_the_first_turns_replica() -> None:
    async def scenario() -> None:
        router = await make_router([FakeReplica(name) for name in REPLICAS])
        at_home = 0
        conversations = [prompt(seed) for seed in range(10)]
        first: dict[int, FakeReplica] = {}
        for turn in range(5):
            for number, ids in enumerate(conversations):
                replica = await route(router, call(ids))
                at_home += first.setdefault(number, replica) is replica
                ids += prompt(100 * turn + number, 40)
                finish(router, replica)
        assert at_home == 50

    run(scenario())


def test_many_calls_of_one_http_request_all_get_a_replica() -> None:
    """They share an id. More of them than there are places: the last ones wait for a place, not for ever."""

    async def scenario() -> None:
        replicas = [FakeReplica(name) for name in REPLICAS]
        router = await make_router(replicas)

        async def one() -> str:
            replica = await route(router, call())
            await asyncio.sleep(0.01)
            finish(router, replica)
            return replica.replica_id.unique_id

        used = Counter(await asyncio.gather(*(one() for _ in range(24))))
        assert sum(used.values()) == 24 and len(used) == 3
        assert all(replica.ongoing == 0 for replica in replicas)
        router._fleet.forget_heard(math.inf)
        assert (router._fleet.total, len(router._costs)) == (0, 0)

    run(scenario())


def test_full_replicas_are_polled_with_backoff_and_a_cancelled_wait_leaves_nothing() -> None:
    async def scenario() -> None:
        replicas = [FakeReplica(name, limit=1) for name in REPLICAS]
        router = await make_router(replicas)
        for _ in replicas:
            await route(router, call())
        waiting = asyncio.create_task(route(router, call()))
        started = time.monotonic()
        await asyncio.sleep(0.3)
        probes = sum(replica.probes for replica in replicas)
        assert not waiting.done()
        assert 3 < probes < 3 * (time.monotonic() - started) / 0.005
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        finish(router, replicas[1])
        assert await route(router, call()) is replicas[1]

    run(scenario())


def test_a_call_waits_for_the_first_replica() -> None:
    async def scenario() -> None:
        router = await make_router([])
        waiting = asyncio.create_task(route(router, call()))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        replica = FakeReplica("late")
        router.update_replicas([replica])  # type: ignore[list-item]
        assert await waiting is replica

    run(scenario())


def test_replicas_that_left_are_forgotten() -> None:
    async def scenario() -> None:
        replicas = {name: FakeReplica(name) for name in REPLICAS}
        router = await make_router(list(replicas.values()))
        first = await route(router, call())
        finish(router, first)
        router.on_replica_actor_died(first.replica_id)
        second = await route(router, call())
        finish(router, second)
        assert second is not first
        router.update_replicas([r for r in replicas.values() if r not in (first, second)])  # type: ignore[arg-type]
        third = await route(router, call())
        assert third not in (first, second)
        assert router._memory.get(prefix_hint(prompt(1))[-1], router._fleet) == [third.replica_id.unique_id]

    run(scenario())


@pytest.mark.parametrize(
    "request_parts",
    [
        {"args": []},
        {"args": [None]},
        {"args": ["text"]},
        {"args": [{"prompt_ids": "not ids, though long enough to be hashed " * 9}]},
        {"args": [{"prompt_ids": [None] * 200}]},
        {"args": [{"prompt_ids": [2**70] * 200}]},
        {"args": [{"prompt_ids": 5}]},
        {"args": [{"prompt_ids": [1] * 200, "cache_salt": 5}]},
        {"args": [{}], "kwargs": {"route_hint": "hint"}},
        {"args": [{}], "kwargs": {"route_hint": [-1, 2**70]}},
        {"args": [{}], "kwargs": {"route_hint": 5}},
    ],
)
def test_O40_whatever_the_call_looks_like_it_is_routed(request_parts: dict[str, Any]) -> None:
    async def scenario() -> None:
        router = await make_router([FakeReplica(name) for name in REPLICAS])
        metadata = RequestMetadata(request_id="1", internal_request_id="1")
        replica = await route(router, PendingRequest(**{"kwargs": {}, "metadata": metadata} | request_parts))
        finish(router, replica)

    run(scenario())


def test_unknown_settings_do_not_stop_the_router() -> None:
    async def scenario() -> None:
        router = await make_router([FakeReplica("a")], min_cap=2, from_a_newer_version=True)
        assert (await route(router, call())).replica_id.unique_id == "a"

    run(scenario())


def test_the_module_needs_nothing_but_the_standard_library_and_ray() -> None:
    """Ray ships it by value to processes that may not have this package."""
    names = "[n for n in sys.modules if n.split('.')[0] in ('rayapp', 'engine', 'torch')]"
    code = f"import sys, rayapp.prefix_router as m; print({names})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "['rayapp', 'rayapp.prefix_router']"
