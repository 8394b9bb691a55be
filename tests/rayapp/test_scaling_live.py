"""Replicas and Routers that come and go with the load on a real Ray, and a model at zero: what clients see of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve

from rayapp.client import Client
from rayapp.failures import DeadlineExceeded
from tests.conftest import wait_limit
from tests.rayapp.conftest import App, tiny_model
from tests.rayapp.mixed import Ask, mixed
from tests.serving import wait_until

pytestmark = pytest.mark.slow

FAST = {"upscale_delay_s": 0.5, "downscale_delay_s": 2, "look_back_period_s": 2}
MOST = 3


@pytest.fixture(scope="module")
def elastic(deploy: Callable[..., App], tiny_http_path: Path) -> Iterator[App]:
    """TINY on none to three replicas, each for four requests. Tests find it and leave it at zero."""
    scaling = {"min_replicas": 0, "max_replicas": MOST, "target_ongoing_requests": 4, **FAST}
    model = tiny_model(tiny_http_path, num_gpus=None, num_cpus=0.2, autoscaling=scaling)
    app = deploy("elastic", models=[model], router={"max_migrations": 20})
    yield app
    serve.delete(app.name, _blocking=False)


def health(app: App) -> dict[str, Any]:
    """What it says of the model; it never says that the application should get no requests."""
    answer = httpx.get(f"{app.url}/health", timeout=wait_limit(10))
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()["models"]["tiny"]
    return said


def at(app: App, replicas: int) -> Callable[[], bool]:
    return lambda: health(app)["replicas"] == replicas


class Clients:
    """As many as asked for at the moment, each with one request after the other."""

    def __init__(self, app: App, asks: list[Ask], expected: list[Any]) -> None:
        self._app, self._asks, self._expected = app, asks, expected
        self._wanted = 0
        self._pool = ThreadPoolExecutor(len(asks))
        self._running: list[Future[None]] = []
        self._changed = threading.Condition()
        self.answers = 0

    def set(self, count: int) -> None:
        """From now on so many clients; those beyond leave when they have their answer."""
        there, self._wanted = self._wanted, count
        self._running += [self._pool.submit(self._keep_asking, number) for number in range(there, count)]

    def _keep_asking(self, number: int) -> None:
        while number < self._wanted:
            assert self._asks[number].run(self._app) == self._expected[number]
            with self._changed:
                self.answers += 1

    def end(self) -> None:
        """Raises what any client met."""
        self._wanted = 0
        for one in self._running:
            one.result(wait_limit(120))
        self._pool.shutdown()


@contextmanager
def trace(app: App, load: Callable[[], int], answers: Callable[[], int]) -> Iterator[list[int]]:
    """Prints load and replicas over time; the numbers of replicas that were seen, one after the other."""
    seen: list[int] = []
    stop = threading.Event()

    def watch() -> None:
        started = time.monotonic()
        last: tuple[int, int] | None = None
        while not stop.wait(0.25):
            said = health(app)
            now = load(), said["replicas"]
            if not seen or seen[-1] != now[1]:
                seen.append(now[1])
            if now != last:
                print(f"{time.monotonic() - started:5.1f} s {now[0]:3} clients {now[1]} replicas  {said['state']}, "
                      f"{said['running']} running, {said['held']} held, {answers()} answers")  # fmt: skip
                last = now

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            yield seen
        finally:
            stop.set()
            watching.result(wait_limit(30))


def test_a_model_at_zero_is_there_for_who_asks(elastic: App) -> None:
    """Requests are held until a replica has loaded; a deadline counts meanwhile, and hanging up takes one back."""
    wait_until(at(elastic, 0), 60)
    assert health(elastic)["state"] == "asleep"
    assert [model["id"] for model in httpx.get(f"{elastic.url}/v1/models").json()["data"]] == ["tiny"]
    url, body = f"{elastic.url}/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 3000}
    asks = mixed(12, seed=30, tokens=(20, 40))
    states = set()
    with ThreadPoolExecutor(len(asks) + 1) as pool:
        started = time.monotonic()
        late = pool.submit(httpx.post, url, json=body | {"timeout": 0.3}, timeout=wait_limit(30))
        with pytest.raises(httpx.TimeoutException):
            httpx.post(url, json=body, timeout=0.2)
        with pytest.raises(DeadlineExceeded):
            Client(elastic.name).generate_ids("tiny", [1, 2], timeout_s=0.2)
        held = [pool.submit(ask.run, elastic) for ask in asks]
        answer = late.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        while not any(one.done() for one in held):
            states.add(health(elastic)["state"])
            time.sleep(0.05)
        print(f"from zero to the first answer: {time.monotonic() - started:.1f} s")
        answers = [one.result(wait_limit(120)) for one in held]
    assert "starting" in states
    assert answers == [ask.run(elastic) for ask in asks]
    wait_until(lambda: (said := health(elastic))["running"] + said["waiting"] + said["held"] == 0, 10)
    wait_until(at(elastic, 0), 60)
    assert health(elastic)["state"] == "asleep"


def test_from_zero_to_one_to_three_to_one_to_zero(elastic: App) -> None:
    asks = mixed(24, seed=31, tokens=(60, 120))
    with ThreadPoolExecutor(4) as pool:
        expected = list(pool.map(lambda ask: ask.run(elastic), asks))
    wait_until(at(elastic, 0), 60)
    clients, load = Clients(elastic, asks, expected), 0
    with trace(elastic, lambda: load, lambda: clients.answers) as seen:
        for load, replicas in ((1, 1), (24, MOST), (1, 1), (0, 0)):
            time.sleep(1)
            clients.set(load)
            wait_until(at(elastic, replicas), 120, every=0.25)
            time.sleep(2)
        clients.end()
    assert seen[0] == seen[-1] == 0
    assert max(seen) == MOST
    assert clients.answers > 0
    said = health(elastic)
    assert said["running"] + said["waiting"] + said["held"] == 0


def test_routers_come_and_go_with_the_load(deploy: Callable[..., App], tiny_http_path: Path) -> None:
    """From one to two and back while clients stream, every answer whole."""
    scaling = {"max_replicas": 2, "target_ongoing_requests": 8, **FAST}
    app = deploy(
        "routers", models=[tiny_model(tiny_http_path, num_gpus=None, num_cpus=0.2)], router={"autoscaling": scaling}
    )

    def routers() -> int:
        states = serve.status().applications[app.name].deployments["Router"].replica_states
        return int(states.get("RUNNING", 0))

    asks = mixed(16, seed=32, tokens=(60, 120))
    asks = [ask for ask in asks if ask.kind not in ("penalties", "grammar")]  # these do not pass the Router
    with ThreadPoolExecutor(2) as pool:
        expected = list(pool.map(lambda ask: ask.run(app), asks))
    clients = Clients(app, asks, expected)
    assert routers() == 1
    clients.set(len(asks))
    wait_until(lambda: routers() == 2, 60, every=0.25)
    with_two = clients.answers
    wait_until(lambda: clients.answers >= with_two + 2 * len(asks), 60)
    clients.set(2)
    wait_until(lambda: routers() == 1, 60, every=0.25)
    with_one = clients.answers
    wait_until(lambda: clients.answers >= with_one + 4, 60)
    clients.end()
    serve.delete(app.name, _blocking=False)
