"""`max_queue_size`: how many requests may wait, and what submitting does meanwhile."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import PreTrainedModel

import engine
from engine import ContinuousBatchingManager, RequestStatus
from engine.waiting_room import WaitingRoom
from tests.conftest import wait_limit
from tests.harness import NO_EOS, before_forward, collect, config, core_of, running, tokens
from tests.models import ref
from tests.serving import wait_until

LONG = 200  # tokens of a request that holds the only running slot for the length of a test,
STEP_S = 0.01  # since no step takes less


def fill(manager: ContinuousBatchingManager, waiting: int) -> list[str]:
    """One request that runs, and `waiting` that do not get to."""
    ids = [str(manager.add_request(tokens(0, 8), "running", max_new_tokens=LONG))]
    wait_until(lambda: manager.stats()["running"] == 1)
    return ids + [str(manager.add_request(tokens(i + 1, 8), f"w{i}", max_new_tokens=2)) for i in range(waiting)]


def small(tiny: PreTrainedModel, size: int) -> ContinuousBatchingManager:
    manager = engine.init_continuous_batching(tiny, NO_EOS, config(max_requests_per_batch=1, max_queue_size=size))
    before_forward(manager, lambda ids: time.sleep(STEP_S))
    manager.start()
    return manager


def test_no_more_than_the_limit_ever_wait(tiny: PreTrainedModel) -> None:
    most = 0
    with running(tiny, max_requests_per_batch=2, max_queue_size=3) as manager:
        scheduler = core_of(manager).scheduler
        schedule = scheduler.schedule

        def watched() -> object:
            nonlocal most
            most = max(most, scheduler.num_waiting + len(manager._loop._inbox))
            return schedule()

        scheduler.schedule = watched  # type: ignore[method-assign, assignment]

        def submit(seed: int) -> str | None:
            return manager.add_request(tokens(seed, 6), str(seed), max_new_tokens=3, queue_timeout=None)

        with ThreadPoolExecutor(12) as pool:
            ids = list(pool.map(submit, range(40), timeout=wait_limit(60)))
        for seed, output in enumerate(collect(manager, [str(each) for each in ids])):
            assert output.generated_tokens == ref(tiny, tokens(seed, 6), 3)
    assert 0 < most <= 3


def test_a_full_queue_names_the_limit_and_the_setting(tiny: PreTrainedModel) -> None:
    manager = small(tiny, 2)
    fill(manager, 2)
    before = time.monotonic()
    with pytest.raises(queue.Full, match=r"2 requests wait already.*0\.05 s.*queue_timeout.*max_queue_size"):
        manager.add_request([1, 2, 3], "late", queue_timeout=0.05)
    assert time.monotonic() - before >= 0.05
    with pytest.raises(KeyError):
        manager.get_result("late", timeout=0)
    assert not manager._loop.room._line
    manager.stop(hard_stop=True)
    manager.destroy()


def test_a_place_that_comes_free_lets_in_who_waits_in_order(tiny: PreTrainedModel) -> None:
    manager = small(tiny, 1)
    fill(manager, 1)
    entered: list[str] = []
    with ThreadPoolExecutor(2) as pool:

        def add(name: str) -> None:
            entered.append(str(manager.add_request(tokens(5, 8), name, max_new_tokens=2, queue_timeout=None)))

        waits = []
        for place, name in enumerate(("a", "b"), 1):
            waits.append(pool.submit(add, name))
            wait_until(lambda place=place: len(manager._loop.room._line) == place)
        assert entered == []
        manager.cancel_request("w0")
        waits[0].result(wait_limit(10))
        assert entered == ["a"]
        manager.cancel_request("running")
        waits[1].result(wait_limit(10))
        assert entered == ["a", "b"]
    for output in collect(manager, ["a", "b"]):
        assert output.generated_tokens == ref(tiny, tokens(5, 8), 2)
    manager.stop()
    manager.destroy()


@pytest.mark.parametrize("hard_stop", [False, True])
def test_stopping_wakes_those_who_wait_for_a_place(tiny: PreTrainedModel, hard_stop: bool) -> None:
    manager = small(tiny, 1)
    ids = fill(manager, 1)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(manager.add_request, [1, 2, 3], queue_timeout=None)
        many = pool.submit(manager.add_requests, [[1, 2, 3]] * 3, queue_timeout=None)
        wait_until(lambda: len(manager._loop.room._line) == 2)
        manager.stop(block=False, hard_stop=hard_stop)
        assert one.result(wait_limit(10)) is None
        assert many.result(wait_limit(10)) is None
    statuses = {output.status for output in collect(manager, ids)}
    assert statuses == {RequestStatus.FAILED if hard_stop else RequestStatus.FINISHED}
    manager.destroy()


def test_a_dying_engine_wakes_those_who_wait_for_a_place(tiny: PreTrainedModel) -> None:
    manager = engine.init_continuous_batching(tiny, NO_EOS, config(max_queue_size=1))
    core, die = core_of(manager), threading.Event()

    def step() -> list[engine.GenerationOutput]:
        assert die.wait(wait_limit(20))
        raise OSError("out of order")

    core.step = step  # type: ignore[method-assign]
    manager.start()
    manager.add_request([1, 2], "first")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(manager.add_request, [1, 2], queue_timeout=None)
        wait_until(lambda: bool(manager._loop.room._line))
        die.set()
        error = waiting.exception(wait_limit(10))
    assert isinstance(error, RuntimeError) and "out of order" in str(error)
    manager.destroy()


def test_more_requests_than_places_are_let_in_one_by_one(tiny: PreTrainedModel) -> None:
    prompts = [tokens(i, 6 + i % 3) for i in range(12)]
    with running(tiny, max_requests_per_batch=2, max_queue_size=2) as manager:
        ids = manager.add_requests(prompts, max_new_tokens=3)
        assert ids == [f"req_{i}" for i in range(12)]
        for prompt, output in zip(prompts, collect(manager, ids), strict=True):
            assert output.generated_tokens == ref(tiny, prompt, 3)
    outputs = engine.generate_batch(
        tiny,
        [*prompts, []],
        NO_EOS,
        continuous_batching_config=config(max_requests_per_batch=2, max_queue_size=2),
        max_new_tokens=3,
    )
    assert [output.generated_tokens for output in outputs.values()] == [ref(tiny, p, 3) for p in prompts] + [[]]


def test_many_requests_that_do_not_all_get_in_are_cancelled(tiny: PreTrainedModel) -> None:
    manager = small(tiny, 2)
    fill(manager, 0)
    with pytest.raises(queue.Full):
        manager.add_requests([tokens(i, 4) for i in range(3)], max_new_tokens=2, queue_timeout=0.05)
    for output in collect(manager, ["req_0", "req_1"]):
        assert output.status == RequestStatus.CANCELLED
    manager.stop(hard_stop=True)
    manager.destroy()


def test_more_sequences_than_places_can_never_wait(tiny: PreTrainedModel) -> None:
    with running(tiny, max_queue_size=2) as manager:
        with pytest.raises(ValueError, match="3 sequences.*max_queue_size is 2"):
            manager.add_request([1, 2, 3], num_return_sequences=3)
        request_id = str(manager.add_request([1, 2, 3], num_return_sequences=2, max_new_tokens=2))
        collect(manager, [request_id, f"{request_id}__child#0"])
        manager.add_request([1, 2, 3], "d", max_new_tokens=100)
        with pytest.raises(ValueError, match="in use"):
            manager.add_request([1, 2, 3], "d")
        wait_until(lambda: manager._loop.room._granted == 0)  # the refused one gave its place back


def test_tasks_wait_without_holding_their_event_loop(tiny: PreTrainedModel) -> None:
    manager = small(tiny, 1)
    fill(manager, 1)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(queue.Full, match="max_queue_size"):
            await manager.generate([1, 2, 3], queue_timeout=0.02)
        given_up = loop.create_task(manager.generate([1, 2, 3], queue_timeout=None))
        waiting = loop.create_task(manager.generate(tokens(5, 8), max_new_tokens=4, queue_timeout=None))
        while len(manager._loop.room._line) < 2:
            await asyncio.sleep(0)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert len(manager._loop.room._line) == 1
        manager.cancel_request("running")
        output = await asyncio.wait_for(waiting, wait_limit(10))
        assert output.generated_tokens == ref(tiny, tokens(5, 8), 4)

    asyncio.run(main())
    manager.stop()
    manager.destroy()


def test_a_closed_event_loop_takes_no_place() -> None:
    room = WaitingRoom(1)
    assert room.enter(1, 0)

    async def wait() -> None:
        task = asyncio.get_running_loop().create_task(room.enter_async(1, None))
        await asyncio.sleep(0)
        assert room._line
        room._line[0].wake = lambda: closed.call_soon_threadsafe(task.cancel)
        with pytest.raises(RuntimeError):
            closed.call_soon_threadsafe(task.cancel)
        room.update(taken_in=1, waiting=0)
        assert not room._line and room._granted == 0
        task.cancel()

    closed = asyncio.new_event_loop()
    closed.close()
    asyncio.run(wait())
    assert room.enter(1, 0)
