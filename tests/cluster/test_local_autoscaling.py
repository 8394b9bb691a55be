"""`cluster/local_autoscaling.py` as it is run by hand: nodes come with load, go with idleness, and nothing is left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import wait_limit
from tests.serving import ROOT

SEEN = re.compile(r"(\d+) GPU nodes, (\d+) replicas$", re.MULTILINE)


@pytest.fixture(scope="module")
def story(tiny_http_path: Path) -> str:
    """What it prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    limit = wait_limit(120)
    command = [sys.executable, "-u", "cluster/local_autoscaling.py", "--model", str(tiny_http_path)]
    done = subprocess.run(
        [*command, "--timeout", str(limit)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=3 * limit,
    )  # fmt: skip
    if done.returncode:
        end_cluster(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def end_cluster(told: str) -> None:
    """On a host so busy that Ray gives the driver up, it is gone before it can end what it started."""
    for process in of_cluster(told):
        process.kill()


def of_cluster(told: str) -> list[psutil.Process]:
    """The processes that are left of the cluster of a story."""
    folder = re.search(r"Ray in (\S+)", told)
    assert folder is not None
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if folder[1] in " ".join(process.info["cmdline"] or ())]


def test_load_adds_nodes_and_idleness_removes_them(story: str) -> None:
    seen = [(int(nodes), int(replicas)) for nodes, replicas in SEEN.findall(story)][:-1]  # the last line sums up
    assert seen[0] == (0, 0), "nothing runs before there is a request"
    assert max(seen) == (2, 2)
    assert seen[-1] == (0, 0)
    assert all(replicas <= nodes for nodes, replicas in seen), "each engine has a node of its own"


def test_no_request_is_lost_meanwhile(story: str) -> None:
    ended = re.search(r"(\d+) requests answered, (\d+) errors", story)
    assert ended is not None and int(ended[1]) > 0 and int(ended[2]) == 0


def test_a_cluster_that_can_grow_is_known_as_one_before_it_has(story: str) -> None:
    assert "adds nodes by itself: True" in story


def test_nothing_of_it_is_left(story: str) -> None:
    folder = re.search(r"Ray in (\S+)", story)
    assert folder is not None and not Path(folder[1]).exists()
    assert not of_cluster(story)
