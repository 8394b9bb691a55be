"""How one step's outputs are spread over event loops: in order, each to its own, one call a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.delivery import Delivery
from engine.outputs import GenerationOutput
from engine.request import Request, RequestStatus
from engine.sampling.params import SamplingParams


class Loop:
    """Keeps what it is asked to call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def call_soon_threadsafe(self, handler: Callable[..., None], *arguments: Any) -> None:
        self.calls.append((handler, arguments))


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20))
def test_each_loop_gets_its_outputs_in_one_call(rows: list[tuple[int, bool]]) -> None:
    delivery, loops = Delivery(), [Loop(), Loop()]
    received: list[list[str]] = [[], [], []]
    outputs, expected = [], [[], [], [], []]
    for row, (target, ends) in enumerate(rows):  # two loops, the engine's thread, and whoever asks
        request = Request(f"r{row}", [1], 1, SamplingParams(max_new_tokens=3))
        request.status = RequestStatus.CANCELLED if ends else RequestStatus.DECODING
        loop: Any = loops[target] if target < 2 else None
        receiver = (lambda output, target=target: received[target].append(output.request_id)), loop
        delivery.open(request.request_id, receiver if target < 3 else None)
        outputs.append(GenerationOutput(request))
        expected[target].append(request.request_id)
    delivery.publish(outputs)
    assert received == [[], [], expected[2]]
    for loop, ids in zip(loops, expected, strict=False):
        assert len(loop.calls) == bool(ids)
        for handler, arguments in loop.calls:
            handler(*arguments)
    assert received == expected[:3]
    taken = [delivery.take_next(timeout=0) for _ in expected[3]]
    assert [output.request_id for output in taken if output is not None] == expected[3]
    for row, (_, ends) in enumerate(rows):
        assert delivery.knows(f"r{row}") == (not ends)
