"""Several processes that record their steps: what NCCL was told is kept, and all record the same. Without a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from engine import build
from engine.acceleration import Capabilities
from engine.config import ContinuousBatchingConfig
from engine.distributed.nccl import keep_graphs_apart
from engine.distributed.tensor_parallel import TensorParallel
from engine.execution.kv_tensors import KVTensors
from engine.facts import ModelFacts
from engine.settings import resolve
from tests.engine.fixed_ops import FakeGraphs, FixedOps
from tests.engine.rows import Rows, make_runner, make_settings


class Stream:
    """Of a device that is not there."""

    def __init__(self) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setenv("NCCL_GRAPH_MIXING_SUPPORT", "0")
    return made


def test_a_step_that_is_not_replayed_waits_for_graphs_that_run(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL was told that nothing is launched outside of a graph while one runs."""
    module = nn.Linear(2, 2)
    keep_graphs_apart(module)
    module(torch.zeros(1, 2))
    assert stream.waits == 1
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        module(torch.zeros(1, 2))
    assert stream.waits == 1, "what is being recorded must not"
    monkeypatch.setenv("NCCL_GRAPH_MIXING_SUPPORT", "1")
    module(torch.zeros(1, 2))
    assert stream.waits == 1, "NCCL was told otherwise"


@pytest.mark.parametrize(
    ("processes", "device", "graphs", "waits"),
    [(2, "cuda", (False, True), True), (2, "cuda", (False, False), False), (2, "cpu", (False, True), False),
     (1, "cuda", (False, True), False)],
)  # fmt: skip
def test_which_engines_keep_graphs_apart(
    processes: int, device: str, graphs: tuple[bool, bool], waits: bool, stream: Stream, tiny: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    mesh = None if processes == 1 else SimpleNamespace(size=lambda: processes)
    monkeypatch.setattr("engine.distributed.sharding.tensor_parallel_mesh", lambda model: mesh)
    settings = make_settings(tiny, device_type=device, graphs=graphs, max_blocks_per_request=4)
    shadows: list[nn.Module] = []
    monkeypatch.setattr("engine.execution.model_runner.ModelRunner", lambda shadow, *_, **__: shadows.append(shadow))
    build._make_runner(tiny, settings)
    shadows[0].config._attn_implementation = "eager"
    shadows[0](torch.tensor([[1]]))
    assert stream.waits == waits
    tiny(torch.tensor([[1]]))
    assert stream.waits == waits, "the user's model is left alone"


def test_processes_that_find_different_things_record_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each plans with what its own device has; the first one's word counts, and the least of every size."""
    facts = ModelFacts(4, 2, 4, 16, 2, 4096, 512, "cuda", (None,) * 4)
    own = [
        resolve(ContinuousBatchingConfig(seed=3), facts, memory=memory << 30, capabilities=capabilities)
        for memory, capabilities in [
            (8, Capabilities(True, True)),
            (2, Capabilities(True, True)),
            (8, Capabilities(True)),
        ]
    ]
    agreed = []
    for rank, settings in enumerate(own):
        coordinator = object.__new__(TensorParallel)
        monkeypatch.setattr(coordinator, "together", lambda make: make())
        monkeypatch.setattr(coordinator, "_gather", lambda item: own)
        agreed.append(coordinator.agree_settings(lambda settings=settings: settings))
        assert agreed[rank] == agreed[0]
    assert agreed[0].graphs == (False, True) and agreed[0].max_blocks_per_request == 0
    assert agreed[0].num_blocks == own[1].num_blocks


def recordings(model: PreTrainedModel) -> list[int]:
    """Rows of the decode-only steps of one process, in order."""
    made: list[FixedOps] = []

    def ops(kv: KVTensors) -> FixedOps:
        made.append(FixedOps(kv))
        return made[0]

    sizes: dict[str, Any] = {"max_blocks_per_request": 4, "max_requests": 6}
    runner = make_runner(model, ops=ops, graph_backend=FakeGraphs(), graphs=(False, True), **sizes)
    runner.warmup()
    rows = Rows(runner, 512, [3, 20, 9])
    for step in ({0: 3, 1: 20}, {0: 1, 1: 1, 2: 9}, {0: 1, 2: 1}, {1: 1}):
        rows.step(step)
    return made[0].decode_sizes


def test_processes_that_take_the_same_turns_record_the_same_shapes_in_the_same_order(tiny: PreTrainedModel) -> None:
    first = recordings(tiny)
    torch.manual_seed(7)
    assert recordings(tiny) == first
    assert first[0] == 6 and first[-2:] == [2, 1]
