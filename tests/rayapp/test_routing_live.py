"""Three replicas behind Ray Serve: their prefix hits follow the simulator, sessions stay, a reset is noticed."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from rayapp.bench.routing_policies import POLICIES
from rayapp.bench.routing_sim import Simulation
from rayapp.bench.routing_workloads import BLOCK, WORKLOADS, Turn, Workload
from rayapp.client import Client
from rayapp.link import wire_request
from rayapp.prefix_router import prefix_hint
from tests.conftest import wait_limit
from tests.models import SMOL_VOCAB
from tests.rayapp.conftest import App, tiny_model
from tests.serving import wait_until

DOCUMENTS, BLOCKS, PAGE = 40, 6, 16
CACHE_TOKENS = 20 * (BLOCKS + 1) * BLOCK  # half of the documents: one replica alone cannot keep them all
WARM_UP, MEASURED, AT_ONCE = 40, 80, 4  # requests a replica


@pytest.fixture(scope="module")
def app(deploy: Callable[..., App], tiny_http_path: Path) -> App:
    engine = {"page_size": PAGE, "num_blocks": CACHE_TOKENS // PAGE, "max_batch_tokens": 512}
    model = tiny_model(tiny_http_path, num_replicas=3, num_gpus=0.5, engine=engine)
    return deploy("routing-live", models=[model], router={"digest_period_s": 0.5})


def questions(_: int, rng: random.Random) -> Iterator[list[Turn]]:
    """One question of a block on one of the documents."""
    documents = [[rng.getrandbits(64) for _ in range(BLOCKS)] for _ in range(DOCUMENTS)]
    weights = [1 / (rank + 1) for rank in range(DOCUMENTS)]
    while True:
        (document,) = rng.choices(documents, weights)
        blocks = [*document, rng.getrandbits(64)]
        yield [Turn(blocks, [], len(blocks) * BLOCK + 1, 2, 2, 0.0)]


def simulated(policy: str) -> float:
    workload = replace(WORKLOADS["rag"], conversations=questions)
    assert isinstance(workload, Workload)
    return (
        Simulation(
            workload, POLICIES[policy], replicas=3, routers=1, warm_up=WARM_UP, measured=MEASURED,
            cache_tokens=CACHE_TOKENS, load=0.3,
        )
        .run()
        .hit_rate
    )  # fmt: skip


def tokens_of(turn: Turn) -> list[int]:
    tokens = [token for block in turn.blocks for token in random.Random(block).choices(range(SMOL_VOCAB), k=BLOCK)]
    return [*tokens, 7]


@pytest.mark.slow
def test_the_hit_rate_follows_the_simulator(app: App) -> None:
    client, turns = Client(app.name), questions(3, random.Random(5))
    hits = prompt = 0
    lock = threading.Lock()

    def ask(number: int) -> None:
        nonlocal hits, prompt
        with lock:
            turn = next(turns)[0]
        answer = client.generate_ids("tiny", tokens_of(turn), max_new_tokens=2)
        if number >= 3 * WARM_UP:
            with lock:
                hits += answer["cached_tokens"]
                prompt += answer["prompt_tokens"]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(ask, range(3 * (WARM_UP + MEASURED))))
    ours, blind = simulated("convoy"), simulated("round robin")
    print(f"hit rate: live {hits / prompt:.3f}, simulated {ours:.3f}, round robin simulated {blind:.3f}")
    assert ours - blind > 0.15
    assert abs(hits / prompt - ours) < 0.08


@pytest.mark.slow
def test_a_session_stays_on_its_replica_from_any_handle(app: App) -> None:
    used: dict[str, set[str]] = {}
    for number, session in itertools.product(range(3), ("alice", "bob", "carol", "dave")):
        handle = app.engines().options(method_name="generate", stream=True, session_id=session)
        request = wire_request([number, *map(ord, session)], {"max_new_tokens": 1})
        items = list(handle.remote(request, route_hint=prefix_hint(request["prompt_ids"])))
        used.setdefault(session, set()).add(items[-1][2]["replica"])
    assert all(len(replicas) == 1 for replicas in used.values())


@pytest.mark.slow
def test_digests_reach_the_request_router(app: App) -> None:
    from ray.serve._private.client import ServeControllerClient  # noqa: F401  # Serve runs in this process

    handle = app.engines()
    list(handle.options(method_name="generate", stream=True).remote(wire_request([1, 2, 3], {"max_new_tokens": 1})))
    router = handle._router._asyncio_router.request_router
    stats = wait_until(lambda: [one.routing_stats for one in router._replicas.values() if one.routing_stats], 20)
    wait_until(lambda: len([one for one in router._replicas.values() if one.routing_stats]) == 3, wait_limit(20))
    assert stats[0] == {"state": "ok", "kv": 0, "epoch": 1, "tokens": 0}
