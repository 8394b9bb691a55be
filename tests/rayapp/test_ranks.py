"""The ranks of a tensor parallel engine without Ray: how they end, who hears of it, and what never outlives what."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import rayapp.engine_actor
from engine.distributed import joining
from rayapp.child import Child
from rayapp.config import ModelConfig
from rayapp.engine_actor import EngineActor
from rayapp.loading import Place, load_engine
from rayapp.ranks import portable
from tests.conftest import wait_limit
from tests.serving import ROOT, wait_until

GRAPH_MIXING = "NCCL_GRAPH_MIXING_SUPPORT"
SLEEP = "import time; time.sleep(600)"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def ended(child: Child) -> str:
    return str(wait_until(lambda: child.error, 30, every=0.01))


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (python("print('OSError: disk on fire'); raise SystemExit(1)"), "rank 1 failed: OSError: disk on fire"),
        (python("raise SystemExit(3)"), "rank 1 ended with exit status 3"),
        (python("raise SystemExit(0)"), "rank 1 ended with exit status 0"),
        (python("import os; os.kill(os.getpid(), 9)"), "rank 1 was ended by SIGKILL"),
        (["/nowhere/python"], "rank 1 could not be watched: FileNotFoundError"),
    ],
)
def test_a_rank_that_ends_says_why(command: list[str], error: str) -> None:
    assert ended(Child("rank 1", command)).startswith(error)


def test_a_rank_that_lives_has_no_error_and_reads_what_it_is_to_do() -> None:
    child = Child("rank 1", python("import sys; sys.stdin.read() == 'work' and sys.stdin.close(); " + SLEEP), b"work")
    pid = wait_until(lambda: child.pid)
    assert child.error is None
    os.kill(pid, signal.SIGTERM)
    assert ended(child) == "rank 1 was ended by SIGTERM"


TIED = f"""
import sys
from rayapp.child import end_with_parent
end_with_parent(int(sys.argv[1]))
print("tied", file=sys.stderr, flush=True)
{SLEEP}
"""
PARENT = f"""
import os, sys, time
from rayapp.child import Child
child = Child("rank 1", [sys.executable, "-c", {TIED!r}, sys.argv[1] if sys.argv[1:] else str(os.getpid())])
while child.pid is None:
    time.sleep(0.01)
print(child.pid, flush=True)
while child.error is None:
    time.sleep(0.01)
print(child.error, flush=True)
"""
PIPES: dict[str, Any] = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


@pytest.mark.parametrize("stopped", [False, True])
def test_no_rank_outlives_a_parent_that_is_killed(stopped: bool) -> None:
    """Not even one that is stopped."""
    with subprocess.Popen(python(PARENT), **PIPES) as parent:
        assert parent.stdout is not None and parent.stderr is not None
        rank = psutil.Process(int(parent.stdout.readline()))
        try:
            assert parent.stderr.readline() == "tied\n"
            if stopped:
                rank.suspend()
            parent.kill()
            rank.wait(wait_limit(30))
        finally:
            if rank.is_running():
                rank.kill()


def test_a_rank_whose_parent_is_gone_before_it_looks_ends() -> None:
    with subprocess.Popen([*python(PARENT), "1"], **PIPES) as parent:
        told, _ = parent.communicate(timeout=wait_limit(30))
    assert told.splitlines()[1:] == ["rank 1 ended with exit status 1"]


def test_constraints_of_a_class_that_has_no_name_elsewhere_reach_the_other_ranks() -> None:
    class Even:
        def allowed(self, output_ids: list[int]) -> int:
            return 2 * len(output_ids)

    sampling = {"max_new_tokens": 3, "constraint": Even()}
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(sampling)
    for _ in range(2):  # and on from there
        sampling = pickle.loads(pickle.dumps(portable(sampling)))
    assert sampling["constraint"].allowed([1, 2]) == 4 and sampling["max_new_tokens"] == 3
    assert portable({"max_new_tokens": 3}) == {"max_new_tokens": 3}


def test_a_process_is_declared_as_torchrun_would(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "before")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    joining.declare(1, 2, "cuda")
    assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["1", "1", "2"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "eth0")
    joining.declare(1, 2, "cpu")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_nccl_is_told_that_graphs_do_not_mix_before_the_ranks_connect(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", GRAPH_MIXING):
        monkeypatch.setenv(name, "before")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    seen: list[str | None] = []

    def connect(*arguments: Any) -> None:
        seen.append(os.environ.get(GRAPH_MIXING))
        raise ConnectionError("far enough")

    monkeypatch.setattr(joining, "join_processes", connect)
    config = ModelConfig(name="m", source="a/b", device="cpu", tensor_parallel_size=2)
    monkeypatch.setattr("rayapp.models.resolve", lambda source: ROOT)
    with pytest.raises(ConnectionError):
        load_engine(config, Place(rank, 1))
    assert seen == ["0"]


def test_ranks_meet_where_no_other_host_can_reach_them() -> None:
    with joining.listen() as first, joining.listen() as second:
        assert first.getsockname()[0] == second.getsockname()[0] == "127.0.0.1"
        assert first.getsockname()[1] != second.getsockname()[1]


class FakeRanks:
    """Ranks whose fate is the test's."""

    place = None
    pids = (1,)
    error: str | None = None

    def __init__(self, config: ModelConfig) -> None:
        pass


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> EngineActor:
    monkeypatch.setattr(rayapp.engine_actor, "Ranks", FakeRanks)
    monkeypatch.setattr(rayapp.engine_actor, "log_to_terminal", lambda *names: None)
    return EngineActor(ModelConfig(name="m", device="cpu", tensor_parallel_size=2))


def start(actor: EngineActor) -> str:
    """The error of a start that fails."""
    with pytest.raises(Exception) as error:
        asyncio.run(asyncio.wait_for(actor.start(), wait_limit(30)))
    return f"{type(error.value).__name__}: {error.value}"


def loading(monkeypatch: pytest.MonkeyPatch, load: Callable[[], Any]) -> None:
    monkeypatch.setattr(rayapp.engine_actor, "load_engine", lambda config, place: load())


def test_a_rank_that_fails_to_load_fails_the_start(actor: EngineActor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for rank 0, which waits for that rank."""
    released = threading.Event()

    def load() -> None:
        FakeRanks.error = "rank 1 failed: MemoryError: too little"
        released.wait(wait_limit(60))

    monkeypatch.setattr(FakeRanks, "error", None)
    loading(monkeypatch, load)

    async def scenario() -> None:
        with pytest.raises(RuntimeError, match="^rank 1 failed: MemoryError: too little$"):
            await actor.start()
        released.set()

    asyncio.run(asyncio.wait_for(scenario(), wait_limit(30)))


@pytest.mark.parametrize("told", [None, "rank 1 failed: MemoryError: too little"])
def test_an_error_of_rank_0_comes_with_that_of_another(
    actor: EngineActor, monkeypatch: pytest.MonkeyPatch, told: str | None
) -> None:
    monkeypatch.setattr(FakeRanks, "error", None)
    monkeypatch.setattr(rayapp.engine_actor, "LAST_WORDS_S", 0.2 if told is None else wait_limit(30))

    def load() -> None:
        threading.Timer(0.1, lambda: setattr(FakeRanks, "error", told)).start()
        raise ConnectionError("closed by peer")

    loading(monkeypatch, load)
    both = "RuntimeError: ConnectionError: closed by peer; rank 1 failed: MemoryError: too little"
    assert start(actor) == ("ConnectionError: closed by peer" if told is None else both)


def test_a_rank_that_ends_or_is_stuck_ends_the_engine(actor: EngineActor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one without requests: its ranks take turns all the same."""
    stats = {"running": 0, "waiting": 0, "idle_s": 0.5}
    alive = SimpleNamespace(fatal_error=None, is_running=lambda: True, stats=lambda: stats)
    monkeypatch.setattr(FakeRanks, "error", None)
    monkeypatch.setattr(actor, "_manager", alive)
    monkeypatch.setattr(actor, "_ranks", FakeRanks(actor._config))
    assert actor._error() is None
    stats["idle_s"] = 121.0
    assert "stall_timeout_s: 120" in (actor._error() or "")
    stats["idle_s"] = 0.5
    FakeRanks.error = "rank 1 was ended by SIGKILL"
    failure = asyncio.run(asyncio.wait_for(actor.failure(), wait_limit(10)))
    assert failure == "rank 1 was ended by SIGKILL"
