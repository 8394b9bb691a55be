"""Replicas that die, fail, hang, leave and are replaced under load, on a real Ray: what their clients see of it."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve

from rayapp.app import build
from rayapp.client import Client
from rayapp.failures import EngineUnavailable, GenerationFailed
from tests.conftest import wait_limit
from tests.rayapp.conftest import App, tiny_model
from tests.rayapp.constraints import After
from tests.rayapp.mixed import Answer, Ask, mixed
from tests.serving import wait_until

GRACE_S = 5


def pair_args(source: Path, num_replicas: int, **router: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"num_gpus": None, "num_cpus": 0.2, "graceful_shutdown_timeout_s": GRACE_S}
    return {"models": [tiny_model(source, num_replicas=num_replicas, **fields)], "router": router}


@pytest.fixture(scope="module")
def pair(deploy: Callable[..., App], tiny_http_path: Path) -> Iterator[App]:
    """TINY on two replicas, for tests that leave two running ones behind, not always the same. The last one ends it."""
    app = deploy("pair", **pair_args(tiny_http_path, 2, max_migrations=20))
    yield app
    serve.delete(app.name, _blocking=False)


def replicas(app: App) -> set[str]:
    """Those that answer and whose engine works."""
    try:
        return {replica for replica, report in app.health().items() if report["error"] is None}
    except Exception:  # none does
        return set()


def whole_again(app: App, count: int) -> None:
    wait_until(lambda: len(replicas(app)) == count, 120, every=0.5)


def quiet(app: App) -> bool:
    return all(one["running"] + one["waiting"] + one["streams"] == 0 for one in app.health().values())


def kill(app: App, what: str, replica: str) -> float:
    """SIGKILL to a replica's process or to its engine's; the moment of it."""
    (facts,) = (one for one in app.facts() if one["replica"] == replica)
    os.kill((facts if what == "replica" else facts["engine"])["pid"], signal.SIGKILL)
    return time.monotonic()


def busiest(app: App) -> str:
    reports = app.health()
    return max(reports, key=lambda replica: reports[replica]["running"])


def gap_at(ask: Ask, moment: float) -> float:
    """The longest wait between two events of a stream after a moment, in seconds."""
    later = [time for time in ask.times if time > moment]
    return max((after - before for before, after in zip([moment, *later], later, strict=False)), default=0.0)


@pytest.mark.parametrize("what", [pytest.param("replica", marks=pytest.mark.slow), "engine"])  # chaos kills both
def test_O42_every_stream_of_a_killed_replica_goes_on(pair: App, what: str) -> None:
    """Twelve requests of all kinds on two replicas, one of which dies: all answers are those of undisturbed ones."""
    asks = mixed(12, seed=1, tokens=(100, 200))
    with ThreadPoolExecutor(len(asks)) as pool:
        alone = list(pool.map(lambda ask: ask.run(pair), asks))
        before = replicas(pair)
        running = [pool.submit(ask.run, pair) for ask in asks]
        wait_until(lambda: sum(len(ask.times) > 5 for ask in asks) >= 4, 60, every=0.01)
        killed = kill(pair, what, victim := busiest(pair))
        answers = [one.result(wait_limit(240)) for one in running]
    assert answers == alone
    gaps = sorted(gap_at(ask, killed) for ask in asks if ask.times)
    print(f"{what} killed: longest wait for a token behind it {gaps[-1]:.2f} s, median {gaps[len(gaps) // 2]:.2f} s")
    assert wait_until(lambda: len(now := replicas(pair)) == 2 and victim not in now, 120, every=0.5)
    assert len(replicas(pair) & before) == 1
    assert quiet(pair)
    assert httpx.get(f"{pair.url}/health").status_code == 200


def test_a_request_that_failed_a_step_is_not_sent_to_another_replica(pair: App) -> None:
    before = pair.served()
    with pytest.raises(GenerationFailed, match="a bad constraint"):
        Client(pair.name).generate_ids("tiny", [1, 2, 3], max_new_tokens=20, constraint=After(5, "raise"))
    after = pair.served()
    assert sum(after.values()) == sum(before.values()) + 1
    assert before.keys() == after.keys()


@pytest.mark.slow
def test_O39_hanging_up_while_a_generation_moves(pair: App) -> None:
    """Clients that leave just after their replica has died: nothing goes on for them elsewhere."""
    asks = mixed(8, seed=2, tokens=(3000, 3000))
    body = {"model": "tiny", "max_tokens": 3000, "temperature": 0, "stream": True}
    clients = [httpx.Client(timeout=wait_limit(60)) for _ in asks]
    requests = [
        client.build_request("POST", f"{pair.url}/v1/completions", json={"prompt": ask.prompt, **body})
        for client, ask in zip(clients, asks, strict=True)
    ]
    streams = [client.send(request, stream=True) for client, request in zip(clients, requests, strict=True)]
    for stream in streams:
        next(stream.iter_lines())
    kill(pair, "engine", busiest(pair))
    for number, client in enumerate(clients):
        time.sleep(0.02 * number)
        client.close()
    wait_until(lambda: quiet(pair), 5)
    whole_again(pair, 2)
    assert quiet(pair)


def disturbed(app: App, asks: list[Ask], seed: int, kills: int) -> list[Answer]:
    """The answers to all asks at once while engines and replicas are killed at random moments: at least one of each,
    and in the middle of something."""
    rng = random.Random(seed)
    killed: dict[str, str] = {}
    struck = 0
    kinds = ["replica", "engine"] if rng.random() < 0.5 else ["engine", "replica"]
    with ThreadPoolExecutor(len(asks)) as pool:
        running = [pool.submit(ask.run, app) for ask in asks]
        for number in range(kills):
            due = len(asks) * (number + rng.random()) / (kills + 1)
            while sum(one.done() for one in running) < due:
                time.sleep(0.02)
            victim = rng.choice(wait_until(lambda: sorted(replicas(app)), 120, every=0.2))
            streams = app.health()[victim]["streams"]
            kill(app, what := kinds[number % 2], victim)
            killed[victim] = what
            struck += streams
            print(f"{what} killed in {streams} requests, after {sum(one.done() for one in running)} of {len(asks)}")
        answers = [one.result(wait_limit(240)) for one in running]
    assert set(killed.values()) == {"replica", "engine"}
    assert not killed.keys() & replicas(app)
    assert struck
    return answers


def unequal(asks: list[Ask], answers: list[Answer], expected: list[Answer]) -> list[tuple[Ask, Answer, Answer]]:
    return [one for one in zip(asks, answers, expected, strict=True) if one[1] != one[2]]


SEEDS = [pytest.param(0), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))]


@pytest.mark.parametrize("seed", SEEDS)
def test_chaos_on_two_replicas(pair: App, seed: int) -> None:
    """Fifty requests at once, two kills: every answer is whole and equal to the undisturbed one."""
    asks = mixed(50, seed=10 + seed)
    with ThreadPoolExecutor(len(asks)) as pool:
        alone = list(pool.map(lambda ask: ask.run(pair), asks))
    assert unequal(asks, disturbed(pair, asks, seed, kills=2), alone) == []
    whole_again(pair, 2)
    assert quiet(pair)


@pytest.mark.slow
def test_a_rolling_redeploy_under_load_fails_no_request(pair: App, tiny_http_path: Path) -> None:
    """From two replicas to three: every engine and the Router are replaced while clients keep asking."""
    asks = mixed(6, seed=3, tokens=(20, 60))
    expected = [ask.run(pair) for ask in asks]
    before, stop, rounds = replicas(pair), threading.Event(), [0] * len(asks)

    def keep_asking(number: int) -> None:
        while not stop.is_set():
            assert asks[number].run(pair) == expected[number]
            rounds[number] += 1

    with ThreadPoolExecutor(len(asks)) as pool:
        running: list[Future[None]] = [pool.submit(keep_asking, number) for number in range(len(asks))]
        try:
            serve.run(
                build(pair_args(tiny_http_path, 3, max_migrations=20)), name=pair.name, route_prefix=f"/{pair.name}"
            )
            whole_again(pair, 3)
            after = list(rounds)
            wait_until(
                lambda: (
                    all(now > then for now, then in zip(rounds, after, strict=True))
                    or any(one.done() for one in running)
                ),
                60,
            )
        finally:
            stop.set()
        for one in running:
            one.result(wait_limit(240))
    assert not replicas(pair) & before
    print(f"{sum(rounds)} requests during the redeploy")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_chaos_on_three_replicas(pair: App, seed: int) -> None:
    """The same with three kills. Runs behind the redeploy to three."""
    asks = mixed(50, seed=20 + seed)
    with ThreadPoolExecutor(len(asks)) as pool:
        alone = list(pool.map(lambda ask: ask.run(pair), asks))
    assert unequal(asks, disturbed(pair, asks, seed, kills=3), alone) == []
    whole_again(pair, 3)
    assert quiet(pair)


def test_zz_an_application_that_goes_away_finishes_what_fits_its_grace(pair: App) -> None:
    """`serve.delete`, as `serve shutdown` and Ctrl-C do: short streams end whole, a long one with an error event."""
    short = Ask("greedy", "short", 60)
    expected = short.run(pair)
    body = {"model": "tiny", "prompt": "long", "max_tokens": 4000, "temperature": 0, "stream": True}
    rest: list[str] = []
    with ThreadPoolExecutor(1) as pool, httpx.Client(timeout=wait_limit(60)) as http:
        with http.stream("POST", f"{pair.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            running = pool.submit(short.run, pair)
            wait_until(lambda: len(short.times) > 1, 30, every=0.01)
            serve.delete(pair.name, _blocking=False)
            with pytest.raises(httpx.RemoteProtocolError):
                deque(map(rest.append, (line[6:] for line in lines if line.startswith("data: "))))
        assert running.result(wait_limit(60)) == expected
    assert rest[-1] != "[DONE]"
    assert json.loads(rest[-1])["error"]["code"] == "unavailable"


# Without migration


@pytest.mark.slow
def test_O42_without_migration_streams_of_a_dead_replica_end_with_an_error(
    deploy: Callable[..., App], tiny_http_path: Path
) -> None:
    """Eight streams and four other requests on two replicas, one of which is killed: what was there ends with an error,
    the rest as ever, and new requests succeed."""
    app = deploy("fixed-app", **pair_args(tiny_http_path, 2, max_migrations=0))
    asks = [Ask("whole" if number % 3 == 2 else "greedy", f"{number}: once upon a time", 150) for number in range(12)]
    alone = [ask.run(app) for ask in asks]
    with ThreadPoolExecutor(len(asks)) as pool:
        running = [pool.submit(ask.run, app) for ask in asks]
        wait_until(lambda: all(len(ask.times) > 5 for ask in asks if ask.kind == "greedy"), 60, every=0.01)
        on_victim = app.health()[victim := busiest(app)]["running"]
        kill(app, "replica", victim)
        ended = [one.exception(wait_limit(60)) for one in running]
    lost = [error for error in ended if error is not None]
    assert 0 < len(lost) <= on_victim
    for error in lost:
        assert isinstance(error, AssertionError)
        assert "unavailable" in str(error)
    for one, error, expected in zip(running, ended, alone, strict=True):
        if error is None:
            assert one.result() == expected
    assert asks[0].run(app) == alone[0]
    wait_until(lambda: len(now := replicas(app)) == 2 and victim not in now, 120, every=0.5)
    serve.delete(app.name, _blocking=False)


# Health


@pytest.mark.slow
def test_O43_health_tells_the_truth(deploy: Callable[..., App], serve_session: Any, tiny_http_path: Path) -> None:
    """While loading, idle, busy, stuck, being replaced, with its thread ended, and after that."""
    stall_s = 2.0
    model = tiny_model(tiny_http_path, num_gpus=None, num_cpus=0.2, stall_timeout_s=stall_s)
    url = f"{serve_session.url}/health-app"

    def status(limit_s: float = 1) -> int:
        return httpx.get(f"{url}/health", timeout=wait_limit(limit_s)).status_code

    with ThreadPoolExecutor(40) as pool:
        starting = pool.submit(deploy, "health-app", models=[model], router={"max_migrations": 0})
        seen = set()
        while not starting.done():
            seen.add(status(30))  # held until the Router runs, which takes less than loading a model
            time.sleep(0.05)
        app = starting.result()
        assert 503 in seen
        wait_until(lambda: status() == 200, 10)

        body = {"model": "tiny", "prompt": "x", "max_tokens": 300}
        busy = [pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=wait_limit(120)) for _ in range(36)]
        wait_until(lambda: next(iter(app.health().values()))["running"] == 32, 30, every=0.01)
        assert status() == 200
        assert {one.result().status_code for one in busy} == {200}

        for what, limit_s in (("stuck", stall_s + 3), ("end", 5)):
            (before,) = replicas(app)
            bad = pool.submit(
                Client(app.name, max_migrations=0).generate_ids,
                "tiny", [1, 2], max_new_tokens=100, constraint=After(5, what),
            )  # fmt: skip
            started = time.monotonic()
            wait_until(lambda: status() == 503, limit_s, every=0.05)
            print(f"{what}: 503 after {time.monotonic() - started:.2f} s")
            assert isinstance(bad.exception(wait_limit(30)), EngineUnavailable)
            wait_until(lambda: status() == 200, 120, every=0.5)
            (after,) = replicas(app)
            assert after != before
    serve.delete(app.name, _blocking=False)
