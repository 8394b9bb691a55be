"""The routing simulator, and with it what the routing policy is to reach."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.bench import routing
from rayapp.bench.routing_policies import POLICIES, Convoy
from rayapp.bench.routing_sim import SPEED, STREAMS, Cache, Churn, Replica, Result, Simulation
from rayapp.bench.routing_workloads import BLOCK, WORKLOADS
from rayapp.prefix_router import MAX_WALK, Call, Fleet, Memory, Traffic, choose


def simulate(workload: str, policy: str = "convoy", replicas: int = 8, **kwargs: Any) -> Result:
    return Simulation(WORKLOADS[workload], POLICIES[policy], replicas=replicas, **kwargs).run()


@given(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=30), st.integers(1, 8))
def test_cache_is_an_lru_of_blocks(sequences: list[list[int]], limit: int) -> None:
    cache, used = Cache(limit * BLOCK), []
    for blocks in sequences:
        held = set(list(dict.fromkeys(reversed(used)))[:limit])
        assert cache.match(blocks) == len(list(itertools.takewhile(held.__contains__, blocks)))
        cache.put(blocks)
        used += reversed(blocks)


def test_replica_shares_its_speed() -> None:
    replica = Replica("r")
    for name in "abcdefghij":  # two more than can go at their own speed
        replica.start(SPEED / STREAMS, name, now=1.0)
    assert replica.next_end() == pytest.approx(1 + 10 / STREAMS)
    assert [replica.end_one(1 + 10 / STREAMS) for _ in range(9)] == list("abcdefghi")
    replica.start(SPEED / STREAMS, "k", now=3.0)
    assert replica.end_one(3.0) == "j" and replica.next_end() == pytest.approx(4.0)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_conversations_are_chains(workload: str) -> None:
    """Each turn's prompt is the one before, its answer and something new; only what is to be shared is."""
    conversations = list(itertools.islice(WORKLOADS[workload].conversations(4, random.Random(0)), 50))
    for turns in conversations:
        for before, after in itertools.pairwise(turns):
            whole = [*before.blocks, *before.answer]
            assert after.blocks[: len(whole)] == whole and after.prompt > before.prompt + before.output
        assert all(len(turn.blocks) == turn.prompt // BLOCK and turn.limit >= turn.output for turn in turns)
    blocks = [set().union(*(turn.blocks for turn in turns)) for turns in conversations]
    shared = any(a & b for a, b in itertools.combinations(blocks, 2))
    assert shared == WORKLOADS[workload].sharing


def test_what_is_counted_adds_up() -> None:
    result = simulate("chat", replicas=1, routers=1, warm_up=0, measured=300)
    assert result.requests == 300
    assert result.hit == result.oracle > 0
    assert result.imbalance == 1 and sum(result.busy) > result.prompt - result.hit
    assert simulate("chat", measured=30) != simulate("chat", measured=30, seed=1)
    assert simulate("chat", measured=30).busy == simulate("chat", measured=30).busy


@pytest.mark.parametrize("workload", [name for name, one in WORKLOADS.items() if one.sharing])
def test_nine_tenths_of_the_oracles_hits_at_an_even_load(workload: str) -> None:
    result = simulate(workload)
    assert result.of_oracle >= 0.9
    assert result.imbalance <= 1.3


def test_without_sharing_the_load_lies_as_even_as_with_power_of_two() -> None:
    ours, theirs = (simulate("unshared", policy, measured=400).imbalance for policy in ("convoy", "power of two"))
    assert ours <= 1.02 * theirs


@pytest.mark.parametrize("policy", POLICIES)
def test_replicas_that_go_reset_and_come(policy: str) -> None:
    churn = [Churn(0.2, lost=2), Churn(0.4, reset=2), Churn(0.6, added=3)]
    result = simulate("chat", policy, measured=100, churn=churn)
    assert result.requests == 800 and len(result.busy) == 6
    assert 0.2 < result.of_oracle < 1


@pytest.mark.parametrize("policy", ["convoy", "session ring"])
def test_few_keys_move(policy: str) -> None:
    for replicas in (5, 50):
        come, gone = routing.moved_keys(policy, replicas, 1), routing.moved_keys(policy, replicas, -1)
        assert come is not None and 0.4 / replicas < come < 1.4 / (replicas + 1) + 0.01
        assert gone is not None and 0.4 / replicas < gone < 1.4 / replicas + 0.01
    assert routing.moved_keys("round robin", 5, 1) is None


class CountingDict(dict[str, int]):
    """Counts what is read of it."""

    reads = 0

    def __getitem__(self, key: str) -> int:
        self.reads += 1
        return super().__getitem__(key)


def test_a_decision_looks_at_few_of_a_thousand_replicas() -> None:
    fleet = Fleet(f"replica-{number}" for number in range(1000))
    fleet.load = CountingDict(fleet.load)
    memory, traffic, rng = Memory(), Traffic(), random.Random(0)
    for number in range(2000):
        blocks = [number % 7, number % 7 + 10, *(rng.getrandbits(64) for _ in range(30))]
        call = Call(blocks, 2048)
        fleet.load.reads = 0
        choice = choose(call, fleet, memory, traffic, rng=rng)
        assert fleet.load.reads <= 2 * MAX_WALK
        fleet.sent(choice.first or "", choice.cost)
        memory.record(call, choice.start, choice.first or "", fleet)
        traffic.record(call, choice, fleet)


def test_the_command_prints_rows_a_table_and_a_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, chart = tmp_path / "rows.jsonl", tmp_path / "chart.svg"
    few = ["--replicas", "4", "--warm-up", "20", "--measured", "30", "--policies", "convoy", "power of two"]
    routing.main([*few, "--workloads", "chat", "unshared", routing.CHURN, "--output", str(rows)])
    parsed = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(parsed) == 6 and all(row["requests"] == 120 for row in parsed)
    first = capsys.readouterr()
    routing.main(["--rows", str(rows), "--chart", str(chart)])
    again = capsys.readouterr()
    assert "| chat | 4 |" in first.out and first.out.strip() in again.err
    assert "% of keys move" in again.err
    drawn = ElementTree.parse(chart).getroot()
    assert len([one for one in drawn.iter() if one.tag.endswith("rect")]) == 2 + 2 * 2


def test_the_simulated_policy_is_the_served_one() -> None:
    """The same function, not a copy."""
    from rayapp.bench import routing_policies

    assert routing_policies.choose is choose and isinstance(POLICIES["convoy"](0), Convoy)
