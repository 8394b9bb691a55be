"""What is measured: each event under its name, once; and a real exporter whose figures add up."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import ray

from rayapp.failures import (
    DeadlineExceeded,
    EngineUnavailable,
    GenerationError,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
)
from rayapp.instruments import EngineInstruments, Recorder, RouterInstruments, ray_metric
from rayapp.telemetry import METRICS, Metric
from tests.conftest import wait_limit
from tests.rayapp.conftest import App, tiny_model
from tests.serving import wait_until


class Kept:
    """Stands for Ray's metrics: keeps what is recorded, and knows which calls a kind of metric has."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], list[float]] = {}

    def make(self, metric: Metric) -> Any:
        def record(value: float, tags: dict[str, str]) -> None:
            assert set(tags) == set(metric.tags)
            rest = [tags[name] for name in metric.tags if name != "model"]
            self.values.setdefault((metric.name, *rest), []).append(value)

        return SimpleNamespace(**{{"counter": "inc", "gauge": "set", "histogram": "observe"}[metric.kind]: record})

    def __getitem__(self, name: str | tuple[str, ...]) -> list[float]:
        return self.values.get((name,) if isinstance(name, str) else name, [])


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def router(kept: Kept) -> RouterInstruments:
    return RouterInstruments("m", Recorder("m", kept.make))


@pytest.fixture
def engine(kept: Kept) -> EngineInstruments:
    return EngineInstruments("m", Recorder("m", kept.make))


def info(migrations: int = 0, engine_s: float | None = 0.0) -> dict[str, Any]:
    return {"migrations": migrations, "engine_s": engine_s, "replica": "r"}


def test_a_generation_that_moves_is_one(router: RouterInstruments, kept: Kept) -> None:
    with router.generation(7) as watch:
        watch.submitted("id")
        watch.saw(0, None, info())
        watch.saw(1, None, None)
        watch.saw(3, None, info(migrations=1))
        watch.saw(4, "length", info(migrations=3))
    assert kept["convoy_migrations"] == [1, 2]
    assert kept["convoy_requests", "length"] == [1]
    for name in ("convoy_time_to_first_token_s", "convoy_serve_overhead_s", "convoy_request_time_s"):
        assert len(kept[name]) == 1
    assert kept["convoy_time_to_first_token_s"] <= kept["convoy_request_time_s"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (InvalidRequest("x"), "refused"),
        (Overloaded("x"), "overloaded"),
        (EngineUnavailable("x"), "unavailable"),
        (DeadlineExceeded("x"), "deadline"),
        (GenerationFailed("x"), "error"),
        (RuntimeError("x"), "error"),
        (GeneratorExit(), "cancelled"),
        (asyncio.CancelledError(), "cancelled"),
    ],
)
def test_every_end_is_counted_once(router: RouterInstruments, kept: Kept, error: BaseException, reason: str) -> None:
    with pytest.raises(type(error)), router.generation(7):
        raise error
    assert {key: values for key, values in kept.values.items() if key[0] == "convoy_requests"} == {
        ("convoy_requests", reason): [1]
    }
    assert not kept["convoy_time_to_first_token_s"]


def test_every_failure_has_a_reason_of_its_own_or_is_an_error(router: RouterInstruments, kept: Kept) -> None:
    for kind in GenerationError.__subclasses__():
        with contextlib.suppress(GenerationError), router.generation(1):
            raise kind("x")
    assert sum(len(values) for key, values in kept.values.items() if key[0] == "convoy_requests") == len(
        GenerationError.__subclasses__()
    )


def output(**fields: Any) -> Any:
    return SimpleNamespace(
        **{
            "num_prompt_tokens": 10,
            "cached_tokens": 4,
            "num_generated_tokens": 3,
            "lifespan": (2.0, 5.5),
            "timestamps": [3.0, 4.0, 5.0],
            "created_time": 1.0,
        }
        | fields
    )


def test_the_engine_s_times_are_parts_of_a_whole(engine: EngineInstruments, kept: Kept) -> None:
    engine.ended(output(), 0)
    assert (kept["convoy_queue_time_s"], kept["convoy_prefill_time_s"], kept["convoy_decode_time_s"]) == (
        [1.0],
        [1.0],
        [2.0],
    )
    assert kept["convoy_inter_token_s"] == [1.0]
    assert kept["convoy_generation_tokens"] == [3]


def test_tokens_made_elsewhere_are_not_counted_again(engine: EngineInstruments, kept: Kept) -> None:
    engine.ended(output(timestamps=[4.0]), 2)
    assert kept["convoy_generation_tokens"] == [1]
    assert not kept["convoy_inter_token_s"]


def test_a_request_that_never_ran_has_no_times(engine: EngineInstruments, kept: Kept) -> None:
    engine.ended(output(lifespan=(-1.0, 5.5), timestamps=[], num_generated_tokens=0, cached_tokens=0), 0)
    assert not [name for (name, *_) in kept.values if name.endswith("_s")]


def test_preemptions_are_counted_as_they_come(engine: EngineInstruments, kept: Kept) -> None:
    for total in (0, 3, 3, 4):
        engine.level({"running": 1, "waiting": 2, "kv_used_blocks": 1, "kv_total_blocks": 4, "preemptions": total})
    assert kept["convoy_preemptions"] == [3, 1]
    assert kept["convoy_kv_usage"] == [0.25] * 4


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_ray_takes_every_metric_of_the_table(metric: Metric) -> None:
    assert ray_metric(metric).info["name"] == metric.name


def exported(model: str) -> Counter[str]:
    """Convoy's counters and the counts of its histograms as the exporter of the one node shows them."""
    (node,) = ray.nodes()
    text = httpx.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=10).text
    found: Counter[str] = Counter()
    for name, tags, value in re.findall(r"^ray_(convoy_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', tags))
        if labels.get("model") == model and not name.endswith("_bucket"):
            found[name + (f":{labels['reason']}" if "reason" in labels else "")] += float(value)  # type: ignore[assignment]
    return found


def test_the_exporter_s_figures_add_up(deploy: Callable[..., App], tiny_http_path: Path) -> None:
    from ray import serve

    model = tiny_model(tiny_http_path, num_gpus=None) | {"name": "counted"}
    app = deploy("counted", models=[model])
    prompt = "one two three four five six seven eight nine ten " * 20
    usages = []
    with httpx.Client(base_url=f"{app.url}/v1", timeout=wait_limit(60)) as client:
        for tokens in (1, 5, 9):
            body = {"model": "counted", "prompt": prompt, "max_tokens": tokens, "n": 2, "ignore_eos": True}
            usages.append(client.post("/completions", json=body).raise_for_status().json()["usage"])
        body = {"model": "counted", "prompt": prompt, "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/completions", json=body) as response:
            next(response.iter_lines())  # and hang up
    asked = 7
    generated = sum(usage["completion_tokens"] for usage in usages)

    def settled() -> Counter[str] | None:
        found = exported("counted")
        return (
            found
            if found["convoy_requests_total:cancelled"] and found["convoy_request_time_s_count"] == asked
            else None
        )

    wait_until(settled, 60)
    time.sleep(2.5)  # what is still on its way: nothing may come on top
    found = exported("counted")
    try:
        assert found["convoy_requests_total:length"] == 6
        assert found["convoy_requests_total:cancelled"] == 1
        assert found["convoy_request_time_s_count"] == found["convoy_time_to_first_token_s_count"] == asked
        assert found["convoy_serve_overhead_s_count"] == found["convoy_queue_time_s_count"] == asked
        assert found["convoy_decode_time_s_count"] == found["convoy_prefill_time_s_count"] == asked
        assert found["convoy_inter_token_s_count"] in (4, 5)  # of those with more than one token
        prompt_tokens = usages[0]["prompt_tokens"]
        assert found["convoy_prompt_tokens_total"] == asked * prompt_tokens
        assert generated < found["convoy_generation_tokens_total"] < generated + 4000
        assert 0 < found["convoy_prefix_hit_tokens_total"] <= 6 * prompt_tokens
        assert found["convoy_running_requests"] == found["convoy_waiting_requests"] == found["convoy_kv_usage"] == 0
        assert not found["convoy_migrations_total"]
    finally:
        serve.delete("counted")
