"""What the host has computed for a step on its way to the device: one copy, from memory that is free again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from engine.execution.forward import StepInputs
from engine.execution.input_batch import Carried, InputBatch
from engine.execution.staging import Staging, check_alike, to_device
from tests.engine.tables import packed_rows

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Plan:
    one: torch.Tensor
    many: list[tuple[torch.Tensor, int]]
    nothing: None = None


class Copies(TorchDispatchMode):
    """The sizes of the copies between tensors, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.sizes.append(args[1].nbytes)
        return func(*args, **(kwargs or {}))


def leaves(step: Any) -> Iterator[Any]:
    """Tensors and values in the order of the step."""
    if isinstance(step, Plan):
        yield from leaves([step.one, step.many, step.nothing])
    elif isinstance(step, list | tuple):
        for part in step:
            yield from leaves(part)
    else:
        yield step


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip(leaves(one), leaves(other), strict=True):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        else:
            assert a == b


TENSORS = st.builds(
    lambda shape, dtype, start: (torch.arange(start, start + torch.Size(shape).numel()) % 2).to(dtype).view(shape),
    st.lists(st.integers(0, 5), max_size=3),
    st.sampled_from([torch.int64, torch.int32, torch.bool, torch.float32, torch.float64, torch.uint8]),
    st.integers(0, 9),
)
PLANS = st.builds(Plan, TENSORS, st.lists(st.tuples(TENSORS, st.integers()), max_size=2), st.none())
STEPS = st.recursive(
    TENSORS | PLANS | st.none() | st.integers(),
    lambda parts: st.lists(parts, max_size=4) | st.lists(parts, max_size=3).map(tuple),
    max_leaves=12,
)


@given(steps=st.lists(STEPS, min_size=1, max_size=4))
def test_steps_arrive_as_they_are_and_stay(steps: list[Any]) -> None:
    staging = Staging(CPU)
    sent = []
    for step in steps:
        with Copies() as copies:
            arrived, memory = staging.send(step)
        assert len(copies.sizes) == (1 if memory.numel() else 0)
        sent.append(arrived)
        for tensor in leaves(arrived):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                assert tensor.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
                assert (tensor.data_ptr() - memory.data_ptr()) % 16 == 0
    for step, arrived in zip(steps, sent, strict=True):
        assert_same(step, arrived)


@given(step=STEPS)
def test_a_step_is_written_where_an_earlier_one_was_sent_to(step: Any) -> None:
    staging = Staging(CPU)
    arrived, memory = staging.send(step)
    before = [part.data_ptr() for part in leaves(arrived) if isinstance(part, torch.Tensor)]
    other = _flipped(step)
    staging.send_again(arrived, memory, other)
    assert_same(arrived, other)
    assert [part.data_ptr() for part in leaves(arrived) if isinstance(part, torch.Tensor)] == before


def _flipped(step: Any) -> Any:
    """The same step with other numbers in it."""
    if isinstance(step, torch.Tensor):
        return (1 - step.to(torch.int64)).to(step.dtype)
    if isinstance(step, Plan):
        return Plan(_flipped(step.one), _flipped(step.many))
    if isinstance(step, list | tuple):
        return type(step)([_flipped(part) for part in step])
    return step


class Clock:
    """Copies from the host's memory that are not done until their event is waited for."""

    def __init__(self) -> None:
        self.recorded: list[Clock.Event] = []
        self.waited = 0

    class Event:
        def __init__(self, clock: Clock) -> None:
            self.clock, self.pending = clock, False

        def record(self) -> None:
            assert not self.pending, "memory that is still being read was written to"
            self.pending = True
            self.clock.recorded.append(self)

        def synchronize(self) -> None:
            self.clock.waited += self.pending
            self.pending = False

    def event(self) -> Clock.Event:
        return Clock.Event(self)


def test_memory_is_written_to_again_only_when_its_copy_is_done() -> None:
    clock = Clock()
    staging = Staging(CPU, clock.event)
    for number in range(7):
        staging.send([torch.full((3,), number)])
    assert len(clock.recorded) == 7 and len(set(map(id, clock.recorded))) == 2
    assert clock.waited == 5  # the two last copies may still run


def test_memory_grows_with_the_steps() -> None:
    staging = Staging(CPU)
    for size in (10, 100_000, 5, 1_000_000):
        sent, _ = staging.send([torch.arange(size)])
        assert torch.equal(sent[0], torch.arange(size))


def test_on_the_host_nothing_is_copied() -> None:
    step = Plan(torch.zeros(2), [])
    assert to_device(step, CPU) is step


@pytest.mark.parametrize(
    ("recorded", "step"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64)),
        ([torch.zeros(2)], []),
        ((), []),
        (3, 4),
        ("a", None),
        (torch.zeros(2), None),
        (Plan(torch.zeros(2), []), Plan(torch.zeros(3), [])),
        (Plan(torch.zeros(2), [(torch.zeros(1), 3)]), Plan(torch.zeros(2), [(torch.zeros(1), 4)])),
    ],
)
def test_what_differs_from_what_was_recorded_is_refused(recorded: Any, step: Any) -> None:
    with pytest.raises(RuntimeError, match="recorded"):
        check_alike(recorded, step)


def test_inputs_are_padded_and_what_is_carried_goes_where_it_belongs() -> None:
    places = np.arange(3)
    batch = InputBatch(
        input_ids=np.array([1, 0, 0]),
        position_ids=np.array([4, 9, 2]),
        keep=np.array([2, 0, 1]),
        rows=packed_rows(np.array([4, 9, 2]), np.ones(3, np.int64), places, None, 3),
        prompts=[],
        carried=Carried(np.array([2, 1]), np.array([0, 3])),
    )
    inputs = StepInputs.of(batch, 5, 4)
    inputs.carry(torch.tensor([70, 71, 72, 73]))
    assert inputs.input_ids.tolist() == [1, 73, 70, 0, 0]
    assert inputs.position_ids.tolist() == [4, 9, 2, 0, 0] and inputs.keep.tolist() == [2, 0, 1, 0]
