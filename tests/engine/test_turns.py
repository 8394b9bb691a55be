"""Two engines that agree on every turn, as tensor parallel processes do; here they are two threads of one process."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
from transformers import PreTrainedModel

from engine import ContinuousBatchingManager, FinishReason, RequestStatus
from engine.distributed.coordinator import Alone, Turn
from tests.conftest import wait_limit
from tests.harness import NO_EOS, check_whole, collect, config, core_of, tokens
from tests.models import ref
from tests.serving import wait_until

T = TypeVar("T")


class Meeting:
    """Where the two exchange their turns."""

    def __init__(self) -> None:
        self.turns = [Turn(), Turn()]
        self.barrier = threading.Barrier(2)
        self.count = 0


class Side(Alone):
    """The coordinator of one of the two."""

    heartbeat_s: float | None = 0.02

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank
        self.is_driver = rank == 0

    def agree(self, turn: Turn) -> Turn:
        meeting = self._meeting
        meeting.turns[self._rank] = turn
        try:
            meeting.barrier.wait(wait_limit(20))
            turns = list(meeting.turns)
            items = turns[0].items if self.is_driver else pickle.loads(pickle.dumps(turns[0].items))
            meeting.barrier.wait(wait_limit(20))
        except threading.BrokenBarrierError as error:
            raise RuntimeError("the other process is gone") from error
        meeting.count += self.is_driver
        return Turn(
            items,
            max(turn.stop for turn in turns),
            any(turn.pausing for turn in turns),
            any(turn.forget for turn in turns),
        )


class Ranks:
    """Two managers on one model that take the same turns."""

    def __init__(self, model: PreTrainedModel, **fields: Any) -> None:
        self.meeting = Meeting()
        self.managers = [
            ContinuousBatchingManager(model, NO_EOS, config(**fields), coordinator=Side(self.meeting, rank))
            for rank in range(2)
        ]

    def both(self, call: Callable[[ContinuousBatchingManager], T]) -> tuple[T, T]:
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(call, self.managers, timeout=wait_limit(30))
        return first, second


@pytest.fixture
def ranks(tiny: PreTrainedModel) -> Iterator[Ranks]:
    ranks = Ranks(tiny)
    for manager in ranks.managers:
        manager.start()
    yield ranks
    ranks.both(lambda manager: manager.stop(timeout=wait_limit(20)))
    for manager in ranks.managers:
        assert manager.fatal_error is None
        check_whole(core_of(manager))
        manager.destroy()


def test_both_give_every_result(ranks: Ranks, tiny: PreTrainedModel) -> None:
    prompts = [tokens(i, 10 + i) for i in range(4)]
    first, second = ranks.both(lambda manager: manager.add_requests(prompts, max_new_tokens=12))
    assert first == second == [f"req_{i}" for i in range(4)]
    for outputs in ranks.both(lambda manager: collect(manager, [f"req_{i}" for i in range(4)])):
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.generated_tokens == ref(tiny, prompt, 12)


def test_only_the_driver_takes_requests(ranks: Ranks, tiny: PreTrainedModel) -> None:
    driver, follower = ranks.managers
    assert follower.add_request([1, 2, 3], max_new_tokens=4) is None
    driver.add_request(tokens(0, 8), "long", max_new_tokens=150, streaming=True)
    driver.add_request(tokens(1, 8), "short", max_new_tokens=9)
    next(driver.request_id_iter("long"))
    driver.cancel_request("long")
    for manager in ranks.managers:
        cancelled, finished = collect(manager, ["long", "short"])
        assert cancelled.status == RequestStatus.CANCELLED
        assert finished.generated_tokens == ref(tiny, tokens(1, 8), 9)


def test_a_deadline_is_the_drivers_and_both_keep_it(ranks: Ranks, tiny: PreTrainedModel) -> None:
    driver = ranks.managers[0]
    driver.add_request(tokens(0, 8), "late", max_new_tokens=150, timeout_s=0.0)
    driver.add_request(tokens(1, 8), "other", max_new_tokens=9, timeout_s=3600)
    for manager in ranks.managers:
        late, other = collect(manager, ["late", "other"])
        assert (late.finish_reason, late.num_generated_tokens) == (FinishReason.TIMEOUT, 0)
        assert other.generated_tokens == ref(tiny, tokens(1, 8), 9)


def test_a_follower_that_asks_late_gets_the_whole_batch(ranks: Ranks, tiny: PreTrainedModel) -> None:
    prompts = [tokens(i, 6) for i in range(3)]

    def run(manager: ContinuousBatchingManager) -> dict[str, list[int]]:
        families, entries = manager.prepare_batch(prompts, max_new_tokens=7, num_return_sequences=2)
        found = {output.request_id: output.generated_tokens for output in manager.run_batch(families)}
        assert found.keys() == entries.keys()
        return found

    driver, follower = ranks.managers
    first = run(driver)
    assert run(follower) == first
    assert first["req_2"] == first["req_2__child#0"] == ref(tiny, prompts[2], 7)


def test_a_pause_of_one_parks_both_and_both_forget(ranks: Ranks, tiny: PreTrainedModel) -> None:
    driver, follower = ranks.managers
    prompt = tokens(0, 40)

    def cached_tokens() -> list[int]:
        driver.add_request(prompt, "p", max_new_tokens=2)
        return [output.cached_tokens for manager in ranks.managers for output in collect(manager, ["p"])]

    assert cached_tokens() == [0, 0]
    assert cached_tokens() == [32, 32]
    driver.add_request(tokens(1, 8), "running", max_new_tokens=100, streaming=True)
    next(driver.request_id_iter("running"))
    for manager in (follower, driver):
        with manager.pause():
            wait_until(lambda: all(each.stats()["paused"] for each in ranks.managers))
            steps = [each.stats()["steps"] for each in ranks.managers]
            turns = ranks.meeting.count
            wait_until(lambda turns=turns: ranks.meeting.count > turns + 3)  # they go on agreeing meanwhile
            assert [each.stats()["steps"] for each in ranks.managers] == steps
    for manager in ranks.managers:
        (output,) = collect(manager, ["running"])
        assert output.generated_tokens == ref(tiny, tokens(1, 8), 100)
    assert cached_tokens() == [0, 0]
    with follower.pause(keep_cache=True):
        pass
    assert cached_tokens() == [32, 32]
    with follower.pause():
        pass
    assert cached_tokens() == [0, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_stopping_one_stops_both_once_all_is_done(tiny: PreTrainedModel, rank: int) -> None:
    ranks = Ranks(tiny)
    for manager in ranks.managers:
        manager.start()
    ranks.managers[0].add_request(tokens(0, 8), "r", max_new_tokens=60)
    if rank == 1:
        collect(ranks.managers[0], ["r"])  # else the follower may stop both before it knows of the request
    ranks.managers[rank].stop(timeout=wait_limit(20))
    for manager in ranks.managers:
        manager.join(timeout=wait_limit(20))
        assert not manager.is_running() and manager.fatal_error is None
        assert manager.add_requests([[1, 2]]) is None
    (output,) = collect(ranks.managers[1], ["r"])
    assert output.generated_tokens == ref(tiny, tokens(0, 8), 60)


def test_the_death_of_one_fails_the_requests_of_the_other(tiny: PreTrainedModel) -> None:
    ranks = Ranks(tiny)
    driver, follower = ranks.managers

    def broken_step() -> Any:
        ranks.meeting.barrier.abort()
        raise OSError("gone")

    core_of(follower).step = broken_step  # type: ignore[method-assign]
    for manager in ranks.managers:
        manager.start()
    driver.add_request(tokens(0, 8), "r", max_new_tokens=60)
    (output,) = collect(driver, ["r"])
    assert output.status == RequestStatus.FAILED and "the other process is gone" in (output.error or "")
    for manager in ranks.managers:
        manager.join(timeout=wait_limit(10))
        with pytest.raises(RuntimeError, match="gone"):
            manager.add_request([1])


def test_requests_of_a_turn_that_was_not_agreed_on_fail(tiny: PreTrainedModel) -> None:
    class Refusing(Alone):
        left: BaseException | None = None
        closed = False

        def agree(self, turn: Turn) -> Turn:
            if turn.items:
                raise RuntimeError("another process is too late")
            return turn

        def leave(self, error: BaseException) -> None:
            self.left = error

        def close(self) -> None:
            self.closed = True

    refusing = Refusing()
    manager = ContinuousBatchingManager(tiny, NO_EOS, config(), coordinator=refusing)
    manager.start()
    ids = manager.add_requests([tokens(i, 8) for i in range(3)])
    for output in collect(manager, ids or []):
        assert output.status == RequestStatus.FAILED and "too late" in (output.error or "")
    manager.join(timeout=wait_limit(10))
    assert refusing.left is manager.fatal_error is not None
    manager.destroy()
    assert refusing.closed
