"""Replicas of two ranks each, on a real Ray: their tokens, and what is left when one of the processes ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from ray import serve
from transformers import PreTrainedModel

from rayapp.client import Client
from rayapp.failures import EngineUnavailable
from tests.conftest import wait_limit
from tests.models import build_tiny, ref
from tests.rayapp.conftest import App, tiny_model
from tests.rayapp.mixed import mixed
from tests.serving import wait_until


def model(source: Path, **fields: Any) -> dict[str, Any]:
    """Two ranks on CPU; the GPUs of the session belong to others."""
    return tiny_model(source, num_gpus=None, num_cpus=0.2, tensor_parallel_size=2, **fields)


NUMBERS = count(1)


@pytest.fixture
def app(deploy: Callable[..., App], tiny_http_path: Path) -> Iterator[App]:
    app = deploy(f"ranks-{next(NUMBERS)}", models=[model(tiny_http_path, stall_timeout_s=4)])
    yield app
    serve.delete(app.name, _blocking=False)


def processes(app: App) -> dict[str, psutil.Process]:
    """Of the one replica: the replica, rank 0 and rank 1. Empty while there is none that serves."""
    try:
        (facts,) = app.facts()
        (health,) = app.health().values()
    except Exception:
        return {}
    if health["error"] is not None:
        return {}
    pids = {"replica": facts["pid"], "rank 0": facts["engine"]["pid"], "rank 1": facts["engine"]["ranks"][0]}
    return {name: psutil.Process(pid) for name, pid in pids.items()}


def rank_processes() -> list[psutil.Process]:
    """On this host, with those whose parents have ended."""
    return [one for one in psutil.process_iter(["cmdline"]) if "rayapp.rank" in (one.info["cmdline"] or ())]


def all_gone(former: dict[str, psutil.Process]) -> bool:
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in former.values())


@pytest.mark.slow
def test_two_ranks_give_the_tokens_of_one_process_and_share_one_fate(app: App, tiny_http: PreTrainedModel) -> None:
    former = processes(app)
    prompts = [[5, 6, 7, 8 + number] * (1 + 3 * number) for number in range(3)]
    client = Client(app.name, max_migrations=0)
    asks = mixed(6, tokens=(8, 16))  # streamed, sampled, with a grammar: the same at once and one by one
    with ThreadPoolExecutor(len(asks)) as pool:
        answers = list(pool.map(lambda ids: client.generate_ids("tiny", ids, max_new_tokens=16), prompts))
        assert [one["token_ids"] for one in answers] == [ref(tiny_http, ids, 16) for ids in prompts]
        assert list(pool.map(lambda ask: ask.run(app), asks)) == [ask.run(app) for ask in asks]

        lost = [pool.submit(client.generate_ids, "tiny", ids, max_new_tokens=4000) for ids in prompts]
        wait_until(lambda: next(iter(app.health().values()))["running"] == len(prompts), every=0.02)
        former["rank 1"].kill()
        killed = time.monotonic()
        for one in lost:
            with pytest.raises(EngineUnavailable):
                one.result(wait_limit(30))
        wait_until(lambda: all_gone(former), every=0.02)
        print(f"all processes of the replica gone {time.monotonic() - killed:.2f} s after rank 1 was killed")


@pytest.mark.slow
def test_a_replica_that_lost_a_rank_is_replaced_and_its_streams_go_on(app: App) -> None:
    """Ranks that are killed, both ways round, and one that is stuck while the engine is idle; then an orderly end."""
    asks = mixed(6, seed=1, tokens=(100, 200))
    with ThreadPoolExecutor(len(asks)) as pool:
        alone = list(pool.map(lambda ask: ask.run(app), asks))
        for victim in ("rank 1", "rank 0"):
            former = wait_until(lambda: processes(app), 120, every=0.2)
            running = [pool.submit(ask.run, app) for ask in asks]
            wait_until(lambda: sum(len(ask.times) > 5 for ask in asks) >= 2, 60, every=0.01)
            former[victim].kill()
            wait_until(lambda former=former: all_gone(former), 10, every=0.02)
            assert [one.result(wait_limit(240)) for one in running] == alone
    former = wait_until(lambda: processes(app), 120, every=0.2)
    os.kill(former["rank 1"].pid, signal.SIGSTOP)
    wait_until(lambda: all_gone(former), 30)
    former = wait_until(lambda: processes(app), 120, every=0.2)
    assert httpx.get(f"{app.url}/health").status_code == 200
    serve.delete(app.name)
    wait_until(lambda: all_gone(former), 10)


@pytest.mark.slow
def test_heads_that_the_ranks_cannot_share_are_refused_by_name(
    deploy: Callable[..., App], smol_path: Path, tmp_path: Path
) -> None:
    """In every attempt of Serve; what they started is gone."""
    from tests.models import SMOL_VOCAB, save

    three = build_tiny(SMOL_VOCAB, 4096, hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    source = save(three, tmp_path / "three", smol_path)
    with pytest.raises(RuntimeError):
        deploy("uneven", models=[model(source)])
    details = serve.status().applications["uneven"]
    message = " ".join([details.message, *(one.message for one in details.deployments.values())])
    assert "with tensor_parallel_size 2: the model has 3 KV heads" in message and "one of 1, 3" in message
    serve.delete("uneven")
    wait_until(lambda: not rank_processes())
