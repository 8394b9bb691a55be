"""`pause()`: the engine parked between two steps, weights written meanwhile, and what happens around it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import engine
from engine import ContinuousBatchingManager, RequestStatus
from engine.request import Request
from tests.conftest import wait_limit
from tests.harness import NO_EOS, before_forward, collect, config, core_of, running, tokens
from tests.models import build_random, build_tiny, ref
from tests.serving import wait_until


class Steps:
    """Watches the forward passes of a manager; any that runs while `forbidden` is counted as a violation."""

    def __init__(self, manager: ContinuousBatchingManager) -> None:
        self.forbidden = False
        self.violations = 0
        before_forward(manager, self._hook)

    def _hook(self, input_ids: torch.Tensor) -> None:
        self.violations += self.forbidden

    @contextmanager
    def none(self) -> Iterator[None]:
        self.forbidden = True
        yield
        self.forbidden = False


def started(model: PreTrainedModel, **fields: Any) -> ContinuousBatchingManager:
    manager = engine.init_continuous_batching(model, NO_EOS, config(**fields))
    manager.start()
    return manager


def live(manager: ContinuousBatchingManager, request_id: str) -> Request:
    return next(request for request in core_of(manager).scheduler.live() if request.request_id == request_id)


def overwrite(model: PreTrainedModel, source: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), source.parameters(), strict=True):
            parameter.copy_(other)


@pytest.mark.parametrize("keep_cache", [True, False])
def test_no_step_runs_inside_and_tokens_do_not_change(tiny: PreTrainedModel, keep_cache: bool) -> None:
    with running(tiny) as manager:
        steps = Steps(manager)
        for i in range(3):
            manager.add_request(tokens(i, 20), f"r{i}", max_new_tokens=60, streaming=True)
        streams = [manager.request_id_iter(f"r{i}") for i in range(3)]
        for turn in range(5):
            for stream in streams:
                next(stream)
            with manager.pause(keep_cache), steps.none():
                manager.add_request(tokens(10 + turn, 9), f"late{turn}", max_new_tokens=3)
                wait_until(lambda: not manager._loop._inbox)
        wait_until(lambda: not manager.stats()["paused"])
        for i, output in enumerate(collect(manager, [f"r{i}" for i in range(3)])):
            assert output.generated_tokens == ref(tiny, tokens(i, 20), 60)
        for turn, output in enumerate(collect(manager, [f"late{turn}" for turn in range(5)])):
            assert output.generated_tokens == ref(tiny, tokens(10 + turn, 9), 3)
        assert steps.violations == 0


def test_several_threads_hold_it_and_the_last_one_ends_it(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:
        steps = Steps(manager)
        manager.add_request(tokens(0, 20), "r", max_new_tokens=120)
        together = threading.Barrier(3)
        leave = [threading.Event() for _ in range(2)]

        def hold(number: int) -> None:
            with manager.pause():
                together.wait(wait_limit(10))
                assert leave[number].wait(wait_limit(10))

        with ThreadPoolExecutor(2) as pool:
            holders = [pool.submit(hold, number) for number in range(2)]
            together.wait(wait_limit(10))
            with steps.none():
                leave[0].set()
                holders[0].result(wait_limit(10))
                with manager.pause():  # parked still: comes in at once
                    assert manager.stats()["paused"] == 1
            leave[1].set()
            holders[1].result(wait_limit(10))
        (output,) = collect(manager, ["r"])
        assert output.generated_tokens == ref(tiny, tokens(0, 20), 120)
        assert steps.violations == 0


def test_weights_written_inside_count_from_then_on() -> None:
    model, other = build_tiny(), build_tiny(seed=1)
    old = build_tiny()
    prompt = tokens(0, 40)
    with running(model) as manager:
        (before,) = collect(manager, [manager.add_request(prompt, max_new_tokens=10)])
        assert before.generated_tokens == ref(old, prompt, 10)
        manager.add_request(tokens(1, 20), "running", max_new_tokens=80, streaming=True)
        next(manager.request_id_iter("running"))
        with manager.pause():
            known = live(manager, "running").output_ids
            overwrite(model, other)
        ids = [manager.add_request(prompt, max_new_tokens=10) for _ in range(2)]
        (moved,) = collect(manager, ["running"])
        first, second = collect(manager, ids)
    assert 0 < len(known) < 80
    assert known == ref(old, tokens(1, 20), len(known))
    assert moved.generated_tokens == known + ref(other, tokens(1, 20) + known, 80 - len(known))
    for output in (first, second):
        assert output.generated_tokens == ref(other, prompt, 10) != before.generated_tokens
    assert first.cached_tokens == 0


def test_packed_weights_written_inside_count_from_then_on() -> None:
    fields: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    shape = LlamaConfig(vocab_size=512, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, **fields)
    model = build_random(LlamaForCausalLM, shape).to(torch.bfloat16)  # type: ignore[arg-type]
    other = build_random(LlamaForCausalLM, shape, seed=1).to(torch.bfloat16)  # type: ignore[arg-type]
    prompt = tokens(0, 20)

    with running(model) as manager:
        (before,) = collect(manager, [manager.add_request(prompt, max_new_tokens=20)])
        manager.add_request(prompt, "running", max_new_tokens=60, streaming=True)
        next(manager.request_id_iter("running"))
        with manager.pause():
            known = live(manager, "running").output_ids
            overwrite(model, other)
        (moved,) = collect(manager, ["running"])
        (after,) = collect(manager, [manager.add_request(prompt, max_new_tokens=20)])
    with running(other) as manager:
        (fresh,) = collect(manager, [manager.add_request(prompt, max_new_tokens=20)])
        (resumed,) = collect(manager, [manager.add_request(prompt, max_new_tokens=60, output_ids=known)])
    assert after.generated_tokens == fresh.generated_tokens != before.generated_tokens
    assert moved.generated_tokens == resumed.generated_tokens


def test_prefixes_are_kept_only_when_every_holder_says_so(tiny: PreTrainedModel) -> None:
    prompt = tokens(0, 40)

    def cached_after(*holders: bool) -> int:
        both = threading.Barrier(len(holders))

        def hold(keep_cache: bool) -> None:
            with manager.pause(keep_cache):
                both.wait(wait_limit(10))

        with ThreadPoolExecutor(len(holders)) as pool:
            list(pool.map(hold, holders, timeout=wait_limit(20)))
        (output,) = collect(manager, [manager.add_request(prompt, max_new_tokens=2)])
        assert output.generated_tokens == ref(tiny, prompt, 2)
        return output.cached_tokens

    with running(tiny) as manager:
        collect(manager, [manager.add_request(prompt, max_new_tokens=2)])
        epoch = manager.stats()["epoch"]
        assert cached_after(True) == 32
        assert cached_after(True, True) == 32
        assert manager.stats()["epoch"] == epoch
        assert cached_after(True, False) == 0
        assert manager.stats()["epoch"] == epoch + 1
        assert cached_after(False, True) == 0
        assert cached_after(False) == 0


def test_requests_are_cancelled_inside(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:
        manager.add_request(tokens(0, 8), "r", max_new_tokens=200)
        with manager.pause():
            manager.cancel_request("r")
            (output,) = collect(manager, ["r"])
            assert output.status == RequestStatus.CANCELLED


def test_an_error_inside_ends_it(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:
        with pytest.raises(ZeroDivisionError), manager.pause():
            raise ZeroDivisionError
        (output,) = collect(manager, [manager.add_request(tokens(0, 8), max_new_tokens=5)])
        assert output.generated_tokens == ref(tiny, tokens(0, 8), 5)


def test_without_a_running_engine_it_is_an_error(tiny: PreTrainedModel) -> None:
    manager = engine.init_continuous_batching(tiny, NO_EOS, config())
    with pytest.raises(RuntimeError, match="no engine thread runs"), manager.pause():
        pass
    manager.start()
    with manager.pause():
        pass
    manager.stop()
    with pytest.raises(RuntimeError, match="no engine thread runs"), manager.pause():
        pass
    manager.destroy()


def test_an_engine_that_dies_first_names_the_cause(tiny: PreTrainedModel) -> None:
    manager = engine.init_continuous_batching(tiny, NO_EOS, config())
    core, begun, die = core_of(manager), threading.Event(), threading.Event()

    def step() -> None:
        begun.set()
        assert die.wait(wait_limit(20))
        raise OSError("the device fell off the bus")

    core.step = step  # type: ignore[method-assign, assignment]
    manager.start()
    manager.add_request([1, 2, 3])
    assert begun.wait(wait_limit(10))

    def wait_for_pause() -> None:
        with manager.pause():
            pass

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for_pause)
        wait_until(lambda: manager._loop.is_held)
        die.set()
        error = waiting.exception(wait_limit(10))
    assert isinstance(error, RuntimeError) and "before it could pause" in str(error)
    assert isinstance(error.__cause__, OSError)
    with pytest.raises(RuntimeError, match="no engine thread runs") as later, manager.pause():
        pass
    assert later.value.__cause__ is manager.fatal_error is error.__cause__
    manager.destroy()


def test_an_interrupted_wait_withdraws(tiny: PreTrainedModel) -> None:
    manager = engine.init_continuous_batching(tiny, NO_EOS, config())
    core, begun, go_on = core_of(manager), threading.Event(), threading.Event()
    step = core.step

    def slow_step() -> Any:
        begun.set()
        assert go_on.wait(wait_limit(20))
        return step()

    core.step = slow_step  # type: ignore[method-assign]
    manager.start()
    request_id = manager.add_request(tokens(0, 8), max_new_tokens=20)
    assert begun.wait(wait_limit(10))

    def interrupt() -> None:
        wait_until(lambda: manager._loop.is_held)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt), manager.pause():
        pass
    assert not manager._loop.is_held
    go_on.set()
    (output,) = collect(manager, [str(request_id)])
    assert output.generated_tokens == ref(tiny, tokens(0, 8), 20)
    manager.destroy()


def test_ending_the_manager_from_inside_is_an_error(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:
        calls: list[Callable[[], object]] = [
            manager.stop,
            lambda: manager.stop(block=False),
            lambda: manager.stop(hard_stop=True),
            manager.join,
            manager.destroy,
        ]
        with manager.pause():
            for call in calls:
                with pytest.raises(RuntimeError, match="inside pause"):
                    call()
        assert manager.add_request([1, 2, 3], max_new_tokens=1) is not None


@pytest.mark.parametrize("hard_stop", [False, True])
def test_another_thread_may_stop_meanwhile(tiny: PreTrainedModel, hard_stop: bool) -> None:
    manager = started(tiny)
    steps = Steps(manager)
    request_id = str(manager.add_request(tokens(0, 8), max_new_tokens=100))
    with ThreadPoolExecutor(1) as pool:
        with manager.pause(), steps.none():
            stopping = pool.submit(manager.stop, hard_stop=hard_stop)
            wait_until(lambda: manager._loop.is_stopping)
            assert manager.add_request([1, 2, 3]) is None
            if hard_stop:
                stopping.result(wait_limit(10))
                with pytest.raises(RuntimeError, match="still in pause"):
                    manager.start()
        stopping.result(wait_limit(20))
    (output,) = collect(manager, [request_id])
    assert steps.violations == 0
    if hard_stop:
        assert (output.error or "").startswith("RuntimeError")
    else:
        assert output.generated_tokens == ref(tiny, tokens(0, 8), 100)
    manager.start()
    (output,) = collect(manager, [str(manager.add_request(tokens(1, 8), max_new_tokens=4))])
    assert output.generated_tokens == ref(tiny, tokens(1, 8), 4)
    manager.destroy()


def test_a_paused_engine_is_not_taken_for_a_stuck_one(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:
        manager.add_request(tokens(0, 8), "r", max_new_tokens=30)
        with manager.pause():
            manager._loop.last_step_time -= 1000
            assert manager.stats()["idle_s"] == 0
        collect(manager, ["r"])


def test_the_engine_goes_on_between_pauses_however_close(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:
        manager.add_request(tokens(0, 8), "r", max_new_tokens=20)
        pauses = 0
        while live_now(manager):
            with manager.pause(keep_cache=True):
                pauses += 1
            assert pauses < 100, "no step between two pauses"
        (output,) = collect(manager, ["r"])
        assert output.generated_tokens == ref(tiny, tokens(0, 8), 20)


def live_now(manager: ContinuousBatchingManager) -> bool:
    return bool(manager._loop._live)
