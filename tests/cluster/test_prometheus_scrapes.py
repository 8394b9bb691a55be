"""A real Prometheus with the shipped configuration scrapes a running application."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.cluster.prometheus import ROOT, program
from tests.conftest import wait_limit
from tests.serving import ServeRun, free_port, model_args, wait_until

pytestmark = pytest.mark.slow

DISCOVERY = "prom_metrics_service_discovery.json"


@pytest.fixture(scope="module")
def server(tiny_http_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeRun]:
    program("prometheus")
    with ServeRun(tmp_path_factory.mktemp("serve"), [model_args("tiny", tiny_http_path, num_threads=1)]) as run:
        yield run


@pytest.fixture(scope="module")
def prometheus(server: ServeRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a Prometheus with the shipped files; only the place of Ray's list of nodes and the intervals differ."""
    folder = tmp_path_factory.mktemp("prometheus")
    config: dict[str, Any] = yaml.safe_load((ROOT / "cluster" / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["file_sd_configs"][0]["files"] == [f"/tmp/ray/{DISCOVERY}"]
    found = server.folder / "ray" / DISCOVERY
    wait_until(found.exists, 30)
    job["file_sd_configs"][0]["files"] = [str(found)]
    config["global"] = {"scrape_interval": "3s", "evaluation_interval": "3s"}
    config["rule_files"] = [str(ROOT / "cluster" / "prometheus" / "rules.yml")]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [program("prometheus"), f"--config.file={folder / 'prometheus.yml'}", f"--web.listen-address={address}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--storage.tsdb.path={folder / 'data'}"], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        wait_until(lambda: process.poll() is None and _answers(f"http://{address}/-/ready"), 30)
        yield f"http://{address}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(wait_limit(30))


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def ask(prometheus: str, query: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": query}, timeout=10).json()
    assert answer["status"] == "success", answer
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


def test_the_node_is_found_and_scraped(prometheus: str) -> None:
    """Ray also lists its head's own processes, whose fixed ports another Ray of this host may have."""
    query = 'up{job="convoy"} == 1 and on (instance) ray_node_cpu_count'
    wait_until(lambda: len(ask(prometheus, query)) == 1, 60, every=0.5)


def test_serve_s_count_of_requests_arrives(server: ServeRun, prometheus: str) -> None:
    body = {"model": "tiny", "prompt": "One", "max_tokens": 4}
    for _ in range(3):
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=server.timeout).status_code == 200
    query = 'sum(ray_serve_num_http_requests_total{route=~"/v1/.*|/"})'
    wait_until(lambda: [one for one in ask(prometheus, query) if float(one["value"][1]) >= 3], 60, every=1)


def test_only_what_is_needed_is_kept(prometheus: str) -> None:
    names = httpx.get(f"{prometheus}/api/v1/label/__name__/values", timeout=10).json()["data"]
    ray = {name for name in names if name.startswith("ray_")}
    assert ray and all(name.startswith(("ray_serve_", "ray_node_", "ray_convoy_")) for name in ray)


def test_the_rules_are_loaded_and_healthy(prometheus: str) -> None:
    wait_until(lambda: ask(prometheus, "up"), 30, every=0.5)
    groups = httpx.get(f"{prometheus}/api/v1/rules", timeout=10).json()["data"]["groups"]
    assert [rule["health"] for group in groups for rule in group["rules"] if rule["health"] == "err"] == []
    assert sum(len(group["rules"]) for group in groups) == 11, json.dumps(groups)[:500]
