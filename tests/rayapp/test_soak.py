"""An application at saturation for minutes, with clients that hang up, ask wrong things and run out of time: what its
processes hold afterwards is what they held before. SOAK_SECONDS sets how long (600)."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import ray
from ray import serve

from rayapp.client import Client
from rayapp.failures import GenerationFailed, InvalidRequest, Overloaded
from tests.conftest import wait_limit
from tests.rayapp.conftest import App, tiny_model
from tests.rayapp.constraints import After
from tests.rayapp.mixed import Answer, Ask, mixed

SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))
WARM_UP_S = min(90.0, SECONDS)
SAMPLE_S = 2.0
CLIENTS = 44  # the replica has 40 places, of which 32 run, and requests of several choices take several
FLAT_MIB = 25.0  # a process may grow by so much in ten minutes, by the line through its samples
SPARE = 2  # file descriptors and threads that may come and go

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * (SECONDS + WARM_UP_S) + 600)]


@pytest.fixture(scope="module")
def app(deploy: Callable[..., App], tiny_http_path: Path) -> Iterator[App]:
    """One replica whose KV cache holds less than what runs wants, and bounds that are reached while it warms up."""
    engine = {"page_size": 16, "num_blocks": 300, "max_batch_tokens": 256}
    model = tiny_model(tiny_http_path, num_gpus=None, num_cpus=0.2, engine=engine, max_queued_requests=16)
    app = deploy("soak", models=[model], router={"memory_entries": 256})
    yield app
    serve.delete(app.name, _blocking=False)


class Crowd:
    """What one client after the other does, and what has come of it."""

    def __init__(self, app: App, asks: list[Ask], expected: list[Answer]) -> None:
        self._app, self._asks, self._expected = app, asks, expected
        self._url = f"{app.url}/v1/completions"
        self._lock = threading.Lock()
        self.seen: Counter[str] = Counter()

    def act(self, rng: random.Random) -> None:
        deeds = [
            self.whole,
            self.hang_up,
            self.never_wait,
            self.run_out_of_time,
            self.ask_wrongly,
            self.burst,
            self.fail,
        ]
        deed = rng.choices(deeds, weights=[60, 10, 6, 8, 10, 1, 1])[0]
        outcome = deed(rng)
        with self._lock:
            self.seen[outcome] += 1

    def whole(self, rng: random.Random) -> str:
        number = rng.randrange(len(self._asks))
        given = self._asks[number]
        try:
            answer = Ask(given.kind, given.prompt, given.tokens).run(self._app)
        except Overloaded:
            return "refused"
        except AssertionError as error:
            if '"overloaded"' in str(error):
                return "refused"
            raise
        assert answer == self._expected[number]
        return given.kind

    def hang_up(self, rng: random.Random) -> str:
        """Somewhere in a stream."""
        body = self._body(rng, stream=True, n=rng.choice([1, 1, 3]))
        with httpx.stream("POST", self._url, json=body, timeout=wait_limit(60)) as response:
            for _ in zip(range(rng.randrange(40)), response.iter_lines(), strict=False):
                pass
        return "hung up"

    def never_wait(self, rng: random.Random) -> str:
        """For the first byte."""
        with suppress(httpx.TimeoutException):
            httpx.post(self._url, json=self._body(rng, n=2), timeout=rng.uniform(0.02, 0.3))
        return "did not wait"

    def run_out_of_time(self, rng: random.Random) -> str:
        answer = httpx.post(self._url, json=self._body(rng, timeout=rng.uniform(0.05, 0.5)), timeout=wait_limit(60))
        assert answer.json()["error"]["code"] in ("timeout", "overloaded"), answer.text
        return "ran out of time"

    def ask_wrongly(self, rng: random.Random) -> str:
        wrong = rng.choice([{"model": "nobody"}, {"temperature": 9}, {"prompt": "x " * 6000}, {"n": 500}, {"stop": 7}])
        answer = httpx.post(self._url, json=self._body(rng) | wrong, timeout=wait_limit(60))
        assert answer.status_code in (400, 404), answer.text
        with suppress(InvalidRequest, Overloaded):
            Client(self._app.name).generate_ids("tiny", [1, 2], do_sample=True, top_p=7.0)
            raise AssertionError("taken in")
        return "was told so"

    def burst(self, rng: random.Random) -> str:
        """More than there is room for."""
        answer = httpx.post(self._url, json=self._body(rng, n=100, max_tokens=4), timeout=wait_limit(60))
        assert answer.status_code in (200, 503)
        return "burst"

    def fail(self, rng: random.Random) -> str:
        """In a step, alone."""
        with suppress(GenerationFailed, Overloaded):
            Client(self._app.name).generate_ids("tiny", [1, 2], max_new_tokens=20, constraint=After(3, "raise"))
            raise AssertionError("did not fail")
        return "failed a step"

    def _body(self, rng: random.Random, **fields: Any) -> dict[str, Any]:
        return {"model": "tiny", "prompt": f"{rng.random()}", "max_tokens": 3000, "temperature": 1, **fields}


@contextmanager
def crowd(seen: Crowd) -> Iterator[Callable[[], None]]:
    """All clients at once, until the block ends; what any met is raised, there and by the function given."""
    stop = threading.Event()

    def keep_on(number: int) -> None:
        rng = random.Random(number)
        while not stop.is_set():
            seen.act(rng)

    with ThreadPoolExecutor(CLIENTS) as pool:
        running = [pool.submit(keep_on, number) for number in range(CLIENTS)]

        def check() -> None:
            for one in running:
                if one.done():
                    one.result()

        try:
            yield check
        finally:
            stop.set()
        for one in running:
            one.result(wait_limit(240))


@dataclass
class Watched:
    """One process. Samples of its resident memory, in MiB, at their times."""

    process: psutil.Process
    times: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)

    def sample(self) -> None:
        self.times.append(time.monotonic())
        self.memory.append(self.process.memory_info().rss / 2**20)

    def counts(self) -> tuple[int, int]:
        """File descriptors and threads."""
        return self.process.num_fds(), self.process.num_threads()

    def growth(self) -> float:
        """MiB in ten minutes, by the line through the samples."""
        return float(np.polyfit(self.times, self.memory, 1)[0]) * 600


def watched(app: App) -> dict[str, Watched]:
    router = router_facts(app)["pid"]
    (facts,) = app.facts()
    pids = {"router": router, "replica": facts["pid"], "engine": facts["engine"]["pid"]}
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            title = " ".join(child.cmdline())
            for name, words in (("proxy", "ProxyActor"), ("controller", "ServeController")):
                if f"ray::{words}" in title:
                    pids[name] = child.pid
    assert len(pids) == 5
    return {name: Watched(psutil.Process(pid)) for name, pid in pids.items()}


def router_facts(app: App) -> dict[str, Any]:
    facts: dict[str, Any] = serve.get_app_handle(app.name).facts.remote().result(timeout_s=wait_limit(30))
    return facts


def ongoing(app: App) -> dict[str, int]:
    """Requests that Serve counts at each replica of the application."""
    names = [
        one for one in ray.util.list_named_actors(all_namespaces=True) if f"SERVE_REPLICA::{app.name}#" in one["name"]
    ]
    actors = [ray.get_actor(one["name"], one["namespace"]) for one in names]
    counts = ray.get([actor.get_num_ongoing_requests.remote() for actor in actors], timeout=wait_limit(30))
    return {one["name"].split("#")[1]: count for one, count in zip(names, counts, strict=True)}


def left(app: App) -> dict[str, int]:
    """Of everything that must be 0 when nobody asks, what is not."""
    (health,) = app.health().values()
    said = httpx.get(f"{app.url}/health", timeout=wait_limit(10)).json()["models"]["tiny"]
    counts = {
        **{name: health[name] for name in ("running", "waiting", "streams", "kv_used_blocks", "tokens_in_flight")},
        **{name: health[name] for name in ("waiting_prefill_tokens", "tokens_left")},
        "held": said["held"],
        **router_facts(app)["open"]["tiny"],
        "serve": sum(ongoing(app).values()),
    }
    return {name: count for name, count in counts.items() if count}


def test_nothing_grows_at_saturation(app: App) -> None:
    asks = mixed(24, seed=40, tokens=(20, 100))
    with ThreadPoolExecutor(4) as pool:
        expected = list(pool.map(lambda ask: ask.run(app), asks))
    one = watched(app)
    seen = Crowd(app, asks, expected)

    def rest() -> dict[str, tuple[int, int]]:
        deadline = time.monotonic() + wait_limit(30)
        while remaining := left(app):
            assert time.monotonic() < deadline, remaining
            time.sleep(0.5)
        time.sleep(2)  # until the last connections are closed
        return {name: watch.counts() for name, watch in one.items()}

    with crowd(seen) as check:
        warm_at = time.monotonic() + WARM_UP_S
        while time.monotonic() < warm_at:
            time.sleep(SAMPLE_S)
            check()
    before = rest()
    print(f"warm: {dict(seen.seen)}")
    began = seen.seen.copy()
    with crowd(seen) as check:
        started = time.monotonic()
        busy = []
        while time.monotonic() < started + SECONDS:
            time.sleep(SAMPLE_S)
            check()
            busy.append(sum(report["running"] for report in app.health().values()))
            for watch in one.values():
                watch.sample()
    after = rest()
    print(f"{SECONDS:g} s, median {np.median(busy):g} running: {dict(seen.seen - began)}")
    for name, watch in one.items():
        print(f"{name:10} {watch.memory[0]:6.1f} -> {watch.memory[-1]:6.1f} MiB, most {max(watch.memory):6.1f}, "
              f"{watch.growth():+6.2f} MiB in ten minutes; descriptors {before[name][0]} -> {after[name][0]}, "
              f"threads {before[name][1]} -> {after[name][1]}")  # fmt: skip
    assert all(one.process.is_running() for one in one.values())
    for name in one:
        assert all(now <= then + SPARE for now, then in zip(after[name], before[name], strict=True)), name
    if SECONDS >= 300:
        assert {name: watch.growth() for name, watch in one.items() if watch.growth() > FLAT_MIB} == {}
    assert min(seen.seen[kind] for kind in {ask.kind for ask in asks}) > 0
