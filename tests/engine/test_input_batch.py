"""Steps packed one after another, under arrivals, cancels, preemptions and crashes: what one keeps from the last must
never show. Each packed step is held against its batch, row by row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.execution import input_batch
from engine.execution.input_batch import InputBatch, InputPacker
from engine.request import Request
from engine.scheduling.batch import ScheduledBatch
from tests.engine.scripted import Engine, Requests

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 9)),
        st.tuples(st.just("add"), st.integers(1, 14)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("crash"), st.just(0)),
        st.tuples(st.just("preempt all"), st.just(0)),
    ),
    max_size=14,
)


def check(inputs: InputBatch, batch: ScheduledBatch, previous: Sequence[Request]) -> None:
    """Against what the batch says."""
    rows, place_of = inputs.rows, {}
    for place, line in enumerate(rows.table_of.tolist()):
        place_of[line] = place
    assert len(place_of) == len(rows.table_of) == len(batch.requests)
    assert rows.offsets.tolist() == (np.cumsum(rows.counts) - rows.counts).tolist()
    assert (rows.counts == 1).tolist() == [place < rows.num_single for place in range(len(rows.counts))]
    carried = {} if inputs.carried is None else dict(zip(*map(np.ndarray.tolist, _carried(inputs)), strict=True))
    lasts = []
    for request, start, count, line in zip(batch.requests, batch.starts, batch.counts, batch.table_of, strict=True):
        place = place_of[line]
        assert (rows.starts[place], rows.counts[place]) == (start, count)
        offset = int(rows.offsets[place])
        assert inputs.position_ids[offset : offset + count].tolist() == list(range(start, start + count))
        for at, position in enumerate(range(start, start + count), offset):
            if position < len(request.token_ids):
                assert inputs.input_ids[at] == request.token_ids[position]
            else:
                assert inputs.input_ids[at] == 0
                assert previous[carried.pop(at)] is request
        lasts.append(offset + count - 1)
    assert not carried
    assert inputs.keep.tolist() == [lasts[row] for row in batch.sampled]


def _carried(inputs: InputBatch) -> tuple[np.ndarray, np.ndarray]:
    assert inputs.carried is not None
    return inputs.carried.at, inputs.carried.source


@settings(max_examples=100, deadline=None)
@given(
    EVENTS, st.integers(6, 30), st.sampled_from([1, 2, 4]), st.integers(4, 24), st.booleans(),
    st.sampled_from(["fifo", "prefill_first"]),
)  # fmt: skip
def test_every_step_is_packed_as_its_batch_says(
    events: list[tuple[str, int]], num_blocks: int, page_size: int, budget: int, overlap: bool, policy: str
) -> None:
    engine = Engine(num_blocks, page_size, budget=budget, max_requests=4, overlap=overlap, policy=policy)
    packer = InputPacker()

    def schedule() -> ScheduledBatch:
        batch = engine.schedule()
        if batch:
            previous = engine.flights[-1].sampled_requests if engine.flights else []
            check(packer.pack(batch, previous), batch, previous)
        return batch

    for event, number in [("add", 3), ("add", 5), *events, ("step", 30)]:
        live = list(engine.scheduler.live())
        if event == "add":
            engine.add([1, 2, 0, 0, 1, 2, 1, 0, 2, 2, 1, 0, 0, 1][: min(number, engine.cache.max_tokens)], 12)
        elif event == "cancel" and live:
            engine.scheduler.cancel(live[number % len(live)].request_id)
        elif event == "crash" and engine.scheduler.has_work:
            engine.crash(schedule())
        elif event == "preempt all":
            engine.land(0)
            engine.scheduler.preempt_all()
        elif event == "step":
            for _ in range(number):
                engine.complete(schedule())


def decodes(requests: list[Request], starts: list[int], lines: list[int], tables: list[list[int]]) -> ScheduledBatch:
    rows = len(requests)
    return ScheduledBatch(requests, starts, [1] * rows, lines, [np.array(tables, np.int32)], list(range(rows)))


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Every order that is worked out."""
    found: list[list[int]] = []

    def noted(*arguments: np.ndarray) -> np.ndarray:
        order = neighbours(*arguments)
        found.append(order.tolist())
        return order

    neighbours = input_batch.neighbours
    monkeypatch.setattr(input_batch, "neighbours", noted)
    return found


def test_rows_that_go_on_keep_their_order(orders: list[list[int]]) -> None:
    new, packer, tables = Requests(), InputPacker(), [[1, 2, 3], [4, 5, 6], [1, 7, 8]]
    requests = [new(list(range(20))) for _ in range(3)]
    for step in range(4):
        batch = decodes(requests, [4 + step, 5 + step, 6 + step], [0, 1, 2], tables)
        check(packer.pack(batch), batch, [])
    assert orders == [[0, 2, 1]], "those that share a block side by side"


@pytest.mark.parametrize(
    ("starts", "lines"),
    [([9, 6, 7], [0, 1, 2]), ([4, 5, 6], [0, 1, 2]), ([5, 6, 7], [2, 1, 0]), ([5, 6], [0, 1]), ([6, 7, 8], [0, 1, 2])],
)
def test_other_rows_do_not(starts: list[int], lines: list[int], orders: list[list[int]]) -> None:
    """One that came back elsewhere, a step that is repeated, lines that changed hands, a row that left."""
    new, packer, tables = Requests(), InputPacker(), [[1, 2, 3], [4, 5, 6], [1, 7, 8]]
    requests = [new(list(range(20))) for _ in range(3)]
    packer.pack(decodes(requests, [4, 5, 6], [0, 1, 2], tables))
    batch = decodes(requests[: len(starts)], starts, lines, tables)
    check(packer.pack(batch), batch, [])
    assert len(orders) == 2


def test_what_was_packed_before_stays_as_it_was() -> None:
    """With overlap a step is prepared while the one before still runs."""
    new, packer = Requests(), InputPacker()
    requests = [new(list(range(20))) for _ in range(2)]
    batches = [decodes(requests, [4 + step, 9 + step], [1, 0], [[1, 2], [3, 4]]) for step in range(3)]
    packed = [packer.pack(batch) for batch in batches]
    for inputs, batch in zip(packed, batches, strict=True):
        check(inputs, batch, [])


def test_a_token_that_nobody_samples() -> None:
    new, packer = Requests(), InputPacker()
    request, other = new([1, 2, 3]), new([1, 2, 3])
    with pytest.raises(RuntimeError, match="no step is sampling it"):
        packer.pack(decodes([request], [3], [0], [[1]]), [other])
    with pytest.raises(RuntimeError, match="beyond its tokens"):
        packer.pack(decodes([request], [4], [0], [[1]]), [request])
