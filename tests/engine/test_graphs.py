"""Recorded steps: which recording serves which step, and that nothing but speed depends on them.

The recorder is a fake on CPU that refuses whatever a device could not replay.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.cache.kv_cache import KVCache
from engine.core import EngineCore
from engine.execution import graphs
from engine.execution.forward import Forward, StepInputs
from engine.execution.graphs import decode_sizes, powers_of_two, round_up
from engine.execution.kv_tensors import KVTensors
from engine.execution.model_runner import ModelRunner, Pending
from engine.ops.torch_ops import TorchOps
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from tests.engine.fixed_ops import FakeGraphs, FixedOps
from tests.engine.rows import PAGE, Rows, expected, make_runner
from tests.harness import tokens
from tests.models import ref

MAX_ROWS = 6
PROMPTS = [3, 20, 9, 33, 14]


@dataclass
class Recorded:
    """A runner that records, and what it records with."""

    runner: ModelRunner
    backend: FakeGraphs
    ops: FixedOps


def recorded(
    model: PreTrainedModel, *, which: tuple[bool, bool] = (True, True), asynchronous: bool = False, **fields: Any
) -> Recorded:
    backend, made = FakeGraphs(), []

    def ops_for(kv: KVTensors) -> FixedOps:
        made.append(FixedOps(kv))
        return made[0]

    fields = {"q_padding": 16, "kv_padding": 64, "max_blocks_per_request": 4, "max_requests": MAX_ROWS} | fields
    runner = make_runner(
        model,
        ops=ops_for,
        graph_backend=backend,
        graphs=which,
        async_batching=asynchronous,
        **fields,
    )
    return Recorded(runner, backend, made[0])


def run_prompts(rows: Rows) -> None:
    rows.step({0: 3, 1: 20, 2: 9})
    rows.step({0: 1, 1: 1, 2: 1, 3: 33, 4: 7})
    rows.step({0: 1, 1: 1, 2: 1, 3: 1, 4: 7})


def check_tokens(model: PreTrainedModel, rows: Rows) -> None:
    for request in rows.requests:
        for position in range(request.num_prompt_tokens, len(request.token_ids)):
            assert request.token_ids[position] == expected(model, request, position).argmax().item()


def test_sizes_of_decode_steps() -> None:
    assert decode_sizes(1) == powers_of_two(1) == [1]
    assert decode_sizes(6) == powers_of_two(6) == [1, 2, 4, 6]
    assert decode_sizes(8) == powers_of_two(8) == [1, 2, 4, 8]
    assert powers_of_two(1000) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]
    assert decode_sizes(70) == [1, 2, 4, 8, 16, 32, 40, 48, 56, 64, 70]
    assert decode_sizes(1000)[10:] == [
        *(80, 96, 112, 128, 160, 192, 224, 256),
        *(320, 384, 448, 512, 640, 768, 896, 1000),
    ]
    for most in range(1, 600):
        sizes = decode_sizes(most)
        assert sizes[-1] == most and set(powers_of_two(most)) <= set(sizes)
        assert all(later <= 1.25 * size for size, later in itertools.pairwise(sizes) if size >= 32)
    assert [round_up(count, 64) for count in (1, 64, 65)] == [64, 64, 128]


@pytest.mark.parametrize("ops", [FixedOps, TorchOps])
def test_same_logits_as_the_plain_forward(tiny: PreTrainedModel, ops: Callable[[KVTensors], Any]) -> None:
    backend = FakeGraphs()
    runner = make_runner(
        tiny,
        ops=ops,
        graph_backend=backend,
        graphs=(ops is FixedOps, True),
        max_blocks_per_request=4,
        max_requests=MAX_ROWS,
        q_padding=16,
        kv_padding=64,
    )
    rows = Rows(runner, 512, PROMPTS)
    run_prompts(rows)
    for _ in range(5):
        for request_id, logits in rows.step(dict.fromkeys(range(5), 1)).items():
            request = rows.requests[int(request_id)]
            torch.testing.assert_close(logits, expected(tiny, request, request.computed), rtol=1e-4, atol=1e-4)
    assert any(graph.replays > 3 for graph in backend.graphs)


def test_decode_steps_share_a_recording_a_size(tiny: PreTrainedModel) -> None:
    case = recorded(tiny, which=(False, True))
    rows = Rows(case.runner, 512, PROMPTS)
    run_prompts(rows)
    assert not case.backend.graphs
    for counts in ([0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [1, 2, 3], [4], [2, 3, 4]):
        rows.step(dict.fromkeys(counts, 1))
    assert case.ops.decode_sizes == [1, 2, 4, 4, 6, 4, 1, 4]
    assert [graph.replays for graph in case.backend.graphs] == [2, 1, 4, 1]  # of 1, 2, 4 and 6 rows
    check_tokens(tiny, rows)


def test_mixed_steps_are_padded_to_intervals(tiny: PreTrainedModel) -> None:
    case = recorded(tiny, which=(True, False), max_blocks_per_request=0)
    rows = Rows(case.runner, 512, PROMPTS)
    run_prompts(rows)
    rows.step({0: 1})
    assert case.ops.mixed_shapes == [(32, 64, 7), (48, 128, 7), (16, 128, 7), (16, 64, 7)]
    assert len(case.backend.graphs) == 4 and not case.ops.decode_sizes
    rows.step({1: 1})
    assert len(case.backend.graphs) == 4
    check_tokens(tiny, rows)


def test_padding_stops_at_the_largest_step(tiny: PreTrainedModel) -> None:
    case = recorded(tiny, which=(True, False), max_batch_tokens=40)
    rows = Rows(case.runner, 512, [33])
    rows.step({0: 33})
    assert case.ops.mixed_shapes[-1][0] == 40
    check_tokens(tiny, rows)


def test_mixed_steps_of_many_tokens_run_directly(tiny: PreTrainedModel) -> None:
    case = recorded(tiny, recorded_tokens=32)
    case.runner.warmup()
    assert case.ops.mixed_shapes == [(32, 64, 7), (16, 64, 7)]
    rows = Rows(case.runner, 512, PROMPTS)
    rows.step({0: 3, 1: 20, 3: 33})
    assert len(case.ops.mixed_shapes) == 2
    rows.step({0: 1, 1: 1, 2: 9, 4: 14})
    assert case.ops.mixed_shapes[2:] == [(32, 64, 7)] and case.backend.graphs[0].replays == 2
    check_tokens(tiny, rows)


def test_a_row_that_outgrows_the_block_table_takes_the_other_path(tiny: PreTrainedModel) -> None:
    case = recorded(tiny, which=(False, True), max_blocks_per_request=2)
    rows = Rows(case.runner, 512, [31, 5])
    rows.step({0: 31, 1: 5})
    rows.step({0: 1, 1: 1})
    assert case.ops.decode_sizes == [2]
    rows.step({0: 1, 1: 1})  # row 0 begins its third block
    assert case.ops.decode_sizes == [2]
    rows.step({1: 1})
    assert case.ops.decode_sizes == [2, 1]
    check_tokens(tiny, rows)


def test_a_last_prompt_token_alone_and_a_row_that_is_not_sampled(tiny: PreTrainedModel) -> None:
    case = recorded(tiny)
    rows = Rows(case.runner, 512, [6, 9])
    rows.step({0: 5, 1: 4})
    assert rows.step({0: 1, 1: 1}).keys() == {"0"}
    rows.step({1: 4, 0: 1})
    check_tokens(tiny, rows)


def test_steps_of_one_token_rows_that_are_all_unsampled(tiny: PreTrainedModel) -> None:
    case = recorded(tiny)
    rows = Rows(case.runner, 512, [6])
    for _ in range(5):
        assert rows.step({0: 1}) == {}
    rows.step({0: 1})
    check_tokens(tiny, rows)


def test_prompts_that_are_scored_keep_more_logits_than_a_recording_has(tiny: PreTrainedModel) -> None:
    case = recorded(tiny)
    rows = Rows(case.runner, 512, [20, 4])
    rows.requests[0].params = SamplingParams(max_new_tokens=1, prompt_logprobs=0)
    pending = case.runner.launch(rows.batch({0: 20, 1: 4}))
    case.runner.sample(pending)
    assert len(pending.result().prompt_logprobs[0]) == 19
    assert not case.backend.graphs


class Flight:
    """Steps of which two are launched before the first one's tokens are read."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.pending: Pending | None = None

    def step(self, counts: dict[int, int]) -> None:
        pending = self.rows.runner.launch(self.rows.batch(counts), self.pending)
        self.land()
        self.rows.runner.sample(pending)
        self.pending = pending

    def land(self) -> None:
        if self.pending is not None:
            self.rows.finish(self.pending)


@pytest.mark.parametrize("which", [(True, True), (False, True), (False, False)])
def test_two_steps_in_flight_give_the_same_tokens(tiny: PreTrainedModel, which: tuple[bool, bool]) -> None:
    case = recorded(tiny, which=which, asynchronous=True)
    rows = Rows(case.runner, 512, PROMPTS)
    flight = Flight(rows)
    flight.step({0: 3, 1: 20, 2: 9})
    flight.step({2: 1, 0: 1, 3: 33})
    flight.step({1: 1, 2: 1, 3: 1, 4: 14})
    for _ in range(6):
        flight.step(dict.fromkeys([4, 0, 3, 1, 2], 1))
    flight.land()
    assert [len(request.output_ids) for request in rows.requests] == [8, 8, 9, 8, 7]
    check_tokens(tiny, rows)


def test_warmup_records_the_largest_first_and_leaves_the_cache_alone(
    tiny: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    case = recorded(tiny, asynchronous=True)
    rows = Rows(case.runner, 512, [20])
    rows.step({0: 20})
    made = len(case.backend.graphs)
    case.ops.decode_sizes.clear()
    case.ops.mixed_shapes.clear()
    with caplog.at_level(logging.INFO, "engine.execution.model_runner"):
        case.runner.warmup()
    assert case.ops.mixed_shapes == [(64, 64, 7)]
    assert case.ops.decode_sizes == [6, 4, 2, 1, 1]
    assert len(case.backend.graphs) - made == 1 + 4
    assert [record.message.split(", ")[0] for record in caplog.records] == [
        f"decode-only steps of up to {size} rows are set up ({number} of 4"
        for number, size in enumerate([6, 4, 2, 1], 1)
    ]
    made = len(case.backend.graphs)
    for _ in range(4):
        rows.step({0: 1})
    assert len(case.backend.graphs) == made
    check_tokens(tiny, rows)


def test_steps_for_recording_have_no_position_that_a_request_cannot_have(
    tiny: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels look them up in tables that end there."""
    highest, forward = [], Forward.__call__

    def noting(self: Forward, inputs: StepInputs, plan: Any) -> torch.Tensor:
        highest.append(int(inputs.position_ids.max()))
        return forward(self, inputs, plan)

    monkeypatch.setattr(Forward, "__call__", noting)
    case = recorded(tiny, recorded_tokens=64, context_length=20, max_requests=2, max_blocks_per_request=2)
    case.runner.warmup()
    assert {tokens for tokens, *_ in case.ops.mixed_shapes} == {16, 32, 48}
    assert max(highest) == 19


def test_the_number_of_recordings_is_bounded(tiny: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_RECORDINGS", 2)
    case = recorded(tiny, which=(False, True))
    rows = Rows(case.runner, 512, PROMPTS)
    run_prompts(rows)
    for counts in ([0], [0, 1], [0], [0, 1, 2], [0], [0, 1]):
        rows.step(dict.fromkeys(counts, 1))
    assert [graph.replays for graph in case.backend.graphs] == [3, 1, 1, 1]  # 1; 2; 3 rows, in the place of 2; 2 again
    check_tokens(tiny, rows)


def test_a_step_that_fails_while_it_is_recorded_leaves_the_runner_usable(tiny: PreTrainedModel) -> None:
    case = recorded(tiny)
    rows = Rows(case.runner, 512, [5, 7])
    rows.step({0: 5, 1: 7})
    attend, case.ops.attend = case.ops.attend, None  # type: ignore[assignment, method-assign]
    batch = rows.batch({0: 1, 1: 1})
    with pytest.raises(TypeError):
        case.runner.launch(batch)
    case.ops.attend = attend  # type: ignore[method-assign]
    pending = case.runner.launch(batch)
    case.runner.sample(pending)
    rows.finish(pending)
    check_tokens(tiny, rows)


def test_a_step_that_cannot_be_recorded_runs_directly(
    tiny: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case, tried = recorded(tiny, which=(False, True)), 0
    rows = Rows(case.runner, 512, [5, 7])
    rows.step({0: 5, 1: 7})

    def refuse(run: Callable[[], None]) -> None:
        nonlocal tried
        tried += 1
        raise torch.OutOfMemoryError("no memory for another graph")

    with monkeypatch.context() as patch:
        patch.setattr(case.backend, "capture", refuse)
        for _ in range(5):
            rows.step({0: 1, 1: 1})
    assert tried == 3 and not case.backend.graphs
    assert "StepShape(tokens=2, kept=2, kv=0) ran directly, since recording it failed (0 more tries)" in caplog.text
    rows.step({0: 1, 1: 1})
    assert not case.backend.graphs
    rows.step({0: 1})
    assert len(case.backend.graphs) == 1
    check_tokens(tiny, rows)


def test_operations_without_fixed_shapes_are_said(tiny: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    runner = make_runner(
        tiny,
        ops=TorchOps,
        graph_backend=FakeGraphs(),
        graphs=(True, True),
        max_blocks_per_request=4,
    )
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "mixed steps are not replayed" in caplog.text
    rows = Rows(runner, 512, [5])
    rows.step({0: 5})
    rows.step({0: 1})
    check_tokens(tiny, rows)


@pytest.mark.parametrize("which", [(True, True), (False, True)])
def test_an_engine_with_two_steps_in_flight(tiny: PreTrainedModel, which: tuple[bool, bool]) -> None:
    """Scheduler, cache and core on top: a cache too small for all, prompts that share a prefix, chunks."""
    case = recorded(tiny, which=which, asynchronous=True, num_blocks=12)
    cache = KVCache(12, PAGE)
    scheduler = Scheduler(cache, max_batch_tokens=32, max_requests=MAX_ROWS, safety_margin=0.0)
    core = EngineCore(scheduler, case.runner, overlap=True)
    prompts = [tokens(0, 20) + tokens(i, length) for i, length in enumerate([3, 30, 1, 17, 40, 8, 25])]
    requests = [
        Request(str(i), list(prompt), len(prompt), SamplingParams(max_new_tokens=12 + i), arrival=i)
        for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        core.add(request)
    ended: list[str] = []
    for _ in range(500):
        if not core.has_work:
            break
        ended += [output.request_id for output in core.step() if output.is_finished()]
        cache.check_integrity(list(scheduler.live()))
    assert sorted(ended) == [request.request_id for request in requests]
    assert scheduler.num_preemptions > 0
    assert any(graph.replays for graph in case.backend.graphs)
    for i, request in enumerate(requests):
        assert request.output_ids == ref(tiny, prompts[i], 12 + i)


class TestTheFake:
    """It refuses what a device could not replay."""

    def test_other_memory(self) -> None:
        tensors = [torch.zeros(3), torch.ones(3)]
        graph = FakeGraphs().capture(lambda: tensors[0].add_(1))  # type: ignore[arg-type, return-value]
        graph.replay()
        tensors.reverse()
        with pytest.raises(RuntimeError, match="cannot do"):
            graph.replay()

    def test_other_shapes_or_numbers(self) -> None:
        tensor, number = torch.zeros(8), [3]
        for run in (lambda: tensor[: number[0]].add_(1), lambda: tensor.add_(number[0])):
            graph = FakeGraphs().capture(run)  # type: ignore[arg-type]
            graph.replay()
            number[0] += 1
            with pytest.raises(RuntimeError, match="cannot do"):
                graph.replay()
