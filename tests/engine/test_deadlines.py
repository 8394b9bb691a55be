"""`timeout_s`: requests whose time is over end once, wherever they stand; others are not touched."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from transformers import PreTrainedModel

from engine import FinishReason, GenerationOutput, RequestStatus
from engine.deadlines import Deadlines
from engine.request import Request
from engine.sampling.params import SamplingParams
from tests.conftest import wait_limit
from tests.harness import collect, running, tokens
from tests.models import ref

LONG = 150


@pytest.fixture
def let_time_pass(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Puts the clock that deadlines are held against an hour forward."""
    import time

    def jump() -> None:
        monkeypatch.setattr("engine.deadlines.time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + 3600))

    return jump


def check_expired(output: GenerationOutput, expected: list[int]) -> None:
    """It ended for its deadline, and what it generated before is right."""
    assert (output.status, output.finish_reason) == (RequestStatus.FAILED, FinishReason.TIMEOUT)
    assert "did not end within" in (output.error or "")
    assert output.generated_tokens == expected[: output.num_generated_tokens]


def test_a_waiting_request_ends_and_the_running_one_goes_on(tiny: PreTrainedModel) -> None:
    with running(tiny, max_requests_per_batch=1) as manager:
        manager.add_request(tokens(0, 8), "running", max_new_tokens=LONG, timeout_s=3600)
        manager.add_request(tokens(1, 8), "late", max_new_tokens=5, timeout_s=0)
        manager.add_request(tokens(2, 8), "patient", max_new_tokens=5)
        late, done, patient = collect(manager, ["late", "running", "patient"])
        check_expired(late, [])
        assert late.num_generated_tokens == 0
        assert "0 s: 0 tokens were generated, 5 is the limit" in (late.error or "")
        assert done.generated_tokens == ref(tiny, tokens(0, 8), LONG)
        assert patient.generated_tokens == ref(tiny, tokens(2, 8), 5)
        with pytest.raises(KeyError):
            manager.get_result("late", timeout=0)


@pytest.mark.parametrize("overlap", [False, True])
def test_running_requests_end_with_what_they_have(
    tiny: PreTrainedModel, let_time_pass: Callable[[], None], overlap: bool
) -> None:
    with running(tiny, use_async_batching=overlap) as manager:
        for number in range(3):
            manager.add_request(tokens(number, 8), f"{number}", max_new_tokens=LONG, streaming=True, timeout_s=3600)
        manager.add_request(tokens(3, 8), "free", max_new_tokens=LONG)
        streams = [manager.request_id_iter(f"{number}") for number in range(3)]
        for stream in streams:
            next(stream)
        let_time_pass()
        for number, stream in enumerate(streams):
            *_, last = stream
            check_expired(last, ref(tiny, tokens(number, 8), LONG))
            assert 1 <= last.num_generated_tokens < LONG
        (free,) = collect(manager, ["free"])
        assert free.generated_tokens == ref(tiny, tokens(3, 8), LONG)


def test_time_runs_on_in_a_pause(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager, manager.pause():
        manager.add_request(tokens(0, 8), "short", max_new_tokens=5, timeout_s=0.05)
        output = manager.get_result("short", timeout=wait_limit(20))
        assert output is not None
        check_expired(output, [])


def test_every_sequence_of_a_request_has_its_deadline(tiny: PreTrainedModel, let_time_pass: Callable[[], None]) -> None:
    with running(tiny) as manager:
        manager.add_request(
            tokens(0, 8), "r", max_new_tokens=LONG, timeout_s=3600, num_return_sequences=3, streaming=True
        )
        next(manager.request_id_iter("r"))
        let_time_pass()
        outputs = collect(manager, ["r", "r__child#0", "r__child#1"])
        assert {output.finish_reason for output in outputs} == {FinishReason.TIMEOUT}


def test_a_batch_may_have_a_limit_and_values_are_checked(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:
        for bad in (-1, math.nan, "5", True):
            with pytest.raises(ValueError, match="timeout_s is"):
                manager.add_request([1, 2], timeout_s=bad)  # type: ignore[arg-type]
        ids = manager.add_requests([tokens(i, 8) for i in range(3)], max_new_tokens=5, timeout_s=0.0)
        for output in collect(manager, ids or []):
            check_expired(output, [])
        (endless,) = collect(manager, [str(manager.add_request([1, 2], max_new_tokens=3, timeout_s=math.inf))])
        assert endless.generated_tokens == ref(tiny, [1, 2], 3)


class DeadlinesMachine(RuleBasedStateMachine):
    """The heap against a plain list, under a clock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("engine.deadlines.time", SimpleNamespace(perf_counter=lambda: self.now))
        self.deadlines = Deadlines()
        self.watched: list[Request] = []
        self.made = 0

    def live(self) -> list[Request]:
        return [request for request in self.watched if not request.status.is_terminal]

    @rule(left=st.lists(st.sampled_from([-1.0, 0.0, 1.0, 2.0, 5.0, math.inf]), max_size=60))
    def add(self, left: list[float]) -> None:
        for seconds in left:
            self.made += 1
            params = SamplingParams(max_new_tokens=1)
            request = Request(str(self.made), [1], 1, params, self.made, deadline=self.now + seconds)
            self.deadlines.add(request)
            if seconds != math.inf:
                self.watched.append(request)

    @rule(indices=st.lists(st.integers(0, 99), max_size=30))
    def end(self, indices: list[int]) -> None:
        for index in indices:
            if live := self.live():
                live[index % len(live)].status = RequestStatus.FINISHED

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def take(self) -> None:
        due = [request for request in self.live() if request.deadline <= self.now]
        due.sort(key=lambda request: (request.deadline, request.arrival))
        assert [one.request_id for one in self.deadlines.take_due()] == [request.request_id for request in due]
        self.watched = [request for request in self.live() if request not in due]

    @invariant()
    def knows_the_next(self) -> None:
        left = [max(0.0, request.deadline - self.now) for request in self.live()]
        assert self.deadlines.seconds_left() == (min(left) if left else None)

    def teardown(self) -> None:
        self.patch.undo()


TestDeadlinesMachine = DeadlinesMachine.TestCase
TestDeadlinesMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_ended_requests_do_not_pile_up() -> None:
    deadlines = Deadlines()
    for number in range(5000):
        request = Request(str(number), [1], 1, SamplingParams(max_new_tokens=1), number, deadline=math.inf)
        request.deadline = 1e12
        deadlines.add(request)
        if number % 10:
            request.status = RequestStatus.FINISHED
    assert len(deadlines) <= 2 * 500 + 64
