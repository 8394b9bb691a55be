"""The routing policy as pure functions, and the request router around it with replicas that are not there."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.request_router.common import PendingRequest

from rayapp.prefix_router import (
    AFFINITY_TOKENS,
    HINT_LINEAR_END,
    HINT_STEP,
    PrefixAffinityRouter,
    PrefixMemory,
    choose,
    hint_of_call,
    prefix_hint,
    rendezvous,
)
from tests.conftest import wait_limit

REPLICAS = ["a", "b", "c"]


def prompt(seed: int, length: int = 200) -> list[int]:
    return random.Random(seed).choices(range(49152), k=length)


def pick(
    hint: list[int], memory: PrefixMemory | None = None, loads: dict[str, int] | None = None, **kwargs: Any
) -> str:
    return choose(hint, memory or PrefixMemory(), loads or {}, REPLICAS, rng=random.Random(0), **kwargs)[0]


# The hint


def test_hint_depths() -> None:
    """Every 64 tokens up to 4096, then at 8192, 16384, ...; nothing between."""
    linear = HINT_LINEAR_END // HINT_STEP
    for length, depths in ((63, 0), (64, 1), (127, 1), (128, 2), (4096, linear), (8191, linear), (8192, linear + 1)):
        assert len(prefix_hint([7] * length)) == depths


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


# The policy


@given(st.lists(st.text(min_size=1), min_size=1, max_size=8, unique=True), st.integers(0, 2**64 - 1))
def test_rendezvous_moves_only_the_keys_of_a_lost_replica(replicas: list[str], key: int) -> None:
    order = rendezvous(key, replicas)
    assert sorted(order) == sorted(replicas)
    assert rendezvous(key, replicas[::-1]) == order
    for lost in replicas:
        assert rendezvous(key, [r for r in replicas if r != lost]) == [r for r in order if r != lost]


def test_rendezvous_spreads_keys() -> None:
    homes = Counter(rendezvous(prefix_hint(prompt(seed))[1], REPLICAS)[0] for seed in range(600))
    assert all(count > 140 for count in homes.values()), homes


def test_prompts_with_the_same_first_128_tokens_share_a_home() -> None:
    for seed in range(20):
        stem = prompt(seed, AFFINITY_TOKENS)
        assert len({pick(prefix_hint([*stem, *prompt(100 + i, 50 * i)])) for i in range(5)}) == 1


def test_the_deepest_remembered_replica_wins() -> None:
    ids = prompt(1, 256)
    hint = prefix_hint(ids)
    home, other, third = rendezvous(hint[1], REPLICAS)
    memory = PrefixMemory()
    memory.record(hint[:2], other)
    assert pick(hint, memory) == other
    memory.record(hint[:3], third)
    assert pick(hint, memory) == third
    assert pick(hint[:2], memory) in (other, third)
    assert pick(prefix_hint(prompt(1, 128)), PrefixMemory()) == home


def test_a_short_prompt_goes_by_load() -> None:
    hint = prefix_hint(prompt(1, AFFINITY_TOKENS - 1))
    first = Counter(choose(hint, PrefixMemory(), {"a": 9}, REPLICAS, rng=random.Random(i))[0] for i in range(300))
    assert first["a"] == 0 and first["b"] > 60 and first["c"] > 60


def test_a_sequential_caller_is_never_moved() -> None:
    """The count of its last call falls only after the answer has come, so it sees one or two at home."""
    hint = prefix_hint(prompt(1))
    home = pick(hint)
    for load in (0, 1, 2):
        assert pick(hint, loads={home: load}) == home


def test_O40_hot_prefix_spreads_and_the_load_stays_under_the_cap() -> None:
    hint = prefix_hint(prompt(1))
    memory, loads = PrefixMemory(), dict.fromkeys(REPLICAS, 0)
    for _ in range(60):
        replica = choose(hint, memory, loads, REPLICAS, rng=random.Random(0))[0]
        memory.record(hint, replica)
        loads[replica] += 1
    assert min(loads.values()) >= 60 // 3 // 2
    assert max(loads.values()) <= 1.25 * 60 / 3 + 1


@given(st.dictionaries(st.sampled_from([*REPLICAS, "gone"]), st.integers(0, 50)), st.integers(0, 400))
def test_every_replica_is_in_the_order_once(loads: dict[str, int], length: int) -> None:
    memory = PrefixMemory()
    hint = prefix_hint(prompt(1, length))
    memory.record(hint, "gone")
    assert sorted(choose(hint, memory, loads, REPLICAS, rng=random.Random(0))) == REPLICAS


def test_O40_memory_is_bounded_and_forgets_the_oldest() -> None:
    memory = PrefixMemory(entries=1000)
    for seed in range(10_000):
        memory.record(prefix_hint([seed, *prompt(0, 199)]), "a")
    assert len(memory) == 1000
    assert memory.get(prefix_hint([0, *prompt(0, 199)])[-1]) == ()
    assert memory.get(prefix_hint([9999, *prompt(0, 199)])[-1]) == ("a",)


def test_memory_forgets_lost_replicas() -> None:
    memory = PrefixMemory()
    memory.record([1, 2], "a")
    memory.record([1], "b")
    memory.forget({"a"})
    assert (memory.get(1), memory.get(2), len(memory)) == (("b",), (), 1)


# The request router


class FakeReplica:
    """What the router sees of a replica: an id, a limit, and a queue length that can be asked for."""

    def __init__(self, name: str, limit: int = 4) -> None:
        self.replica_id = ReplicaID(name, DeploymentID(name="d"))
        self.max_ongoing_requests = limit
        self.ongoing = 0
        self.probes = 0
        self.node_id = self.availability_zone = "x"

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
        if accepted:
            router.on_request_routed(request, replica.replica_id, None)  # type: ignore[arg-type]
            return replica
    raise AssertionError("rejected a thousand times")


def finish(router: PrefixAffinityRouter, replica: FakeReplica) -> None:
    replica.ongoing -= 1
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
        assert len(router._memory) == 0
        assert await route(router, call()) not in (first, second)

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
