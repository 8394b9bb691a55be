"""What callers do to a manager by mistake: interrupt it, hand it the wrong things, swap its weights."""

from __future__ import annotations

import asyncio
import math
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import engine
from engine import ContinuousBatchingConfig, ContinuousBatchingManager, RequestStatus
from tests.conftest import wait_limit
from tests.harness import NO_EOS, collect, config, core_of, running, tokens
from tests.models import build_tiny, ref
from tests.serving import wait_until


def test_an_interrupted_stop_can_be_waited_for_again(tiny: PreTrainedModel) -> None:
    """Python 3.11 takes a thread for dead whose join() was interrupted: no second thread may drive the engine then."""
    manager = engine.init_continuous_batching(tiny, NO_EOS, config())
    core, go_on = core_of(manager), threading.Event()
    step = core.step

    def slow_step() -> Any:
        assert go_on.wait(wait_limit(20))
        return step()

    core.step = slow_step  # type: ignore[method-assign]
    manager.start()
    request_id = str(manager.add_request(tokens(0, 8), max_new_tokens=20))

    def interrupt() -> None:
        wait_until(lambda: manager._loop.is_stopping)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        manager.stop()
    assert manager.is_running()
    go_on.set()
    manager.stop()
    assert not manager.is_running()
    (output,) = collect(manager, [request_id])
    assert output.generated_tokens == ref(tiny, tokens(0, 8), 20)
    manager.start()
    (output,) = collect(manager, [str(manager.add_request(tokens(1, 8), max_new_tokens=5))])
    assert output.generated_tokens == ref(tiny, tokens(1, 8), 5)
    manager.destroy()


@pytest.mark.parametrize("value", [np.array([1, 2]), "x", 1, None, math.nan, object()])
@pytest.mark.parametrize("name", ["streaming", "record_timestamps"])
def test_flags_are_true_or_false(tiny: PreTrainedModel, name: str, value: object) -> None:
    with running(tiny) as manager, pytest.raises(ValueError, match=f"{name} is .*True or False"):
        manager.add_request([1, 2], **{name: value})  # type: ignore[arg-type]


HUGE = 10**400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, HUGE) for name in ("temperature", "repetition_penalty", "frequency_penalty", "presence_penalty")),
        *((name, HUGE) for name in ("top_p", "min_p", "top_k", "max_new_tokens", "num_return_sequences")),
        ("num_return_sequences", 200_000),
        ("queue_timeout", "x"),
        ("queue_timeout", math.nan),
        ("queue_timeout", -1),
    ],
)
def test_numbers_beyond_all_bounds_are_refused_by_name(tiny: PreTrainedModel, name: str, value: object) -> None:
    with running(tiny, per_request_processors=True) as manager:
        if name in ("max_new_tokens", "top_k"):  # any large one means no limit
            (output,) = collect(manager, [str(manager.add_request([1, 2], max_new_tokens=2, top_k=HUGE))])
            assert output.status is RequestStatus.FINISHED
            return
        with pytest.raises(ValueError, match=name):
            manager.add_request([1, 2], **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [HUGE, -HUGE, math.inf, math.nan])
@pytest.mark.parametrize(
    "name",
    ["num_blocks", "page_size", "max_batch_tokens", "safety_margin", "cpu_offload_space", "cpu_group_timeout",
     "max_memory_percent", "cpu_offload_space_safety_threshold"],
)  # fmt: skip
def test_settings_beyond_all_bounds_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        ContinuousBatchingConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout", ["x", math.nan, -1.0, True])
def test_timeouts_are_numbers_of_seconds(tiny: PreTrainedModel, timeout: Any) -> None:
    with running(tiny) as manager:
        for call in (manager.get_result, manager.stop, lambda timeout: manager.get_result("x", timeout)):
            with pytest.raises(ValueError, match="timeout is"):
                call(timeout=timeout)


@pytest.mark.parametrize("timeout", [math.inf, 1e300])
def test_endless_timeouts_wait(tiny: PreTrainedModel, timeout: float) -> None:
    with running(tiny) as manager:
        output = manager.get_result(manager.add_request([1, 2], max_new_tokens=2), timeout=timeout)
        assert output is not None
        manager.stop(timeout=timeout)


@pytest.mark.parametrize("handler", [5, "x", asyncio.sleep])
def test_a_result_handler_is_a_plain_function(tiny: PreTrainedModel, handler: Any) -> None:
    async def submit(manager: ContinuousBatchingManager) -> None:
        manager.add_request([1, 2], result_handler=handler)

    with running(tiny) as manager:
        with pytest.raises(TypeError, match="result handler is .* plain function"):
            asyncio.run(submit(manager))
        with pytest.raises(RuntimeError, match="result handler runs on an event loop"):
            manager.add_request([1, 2], result_handler=print)


class Meddling:
    """A constraint that does something else than constrain."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def allowed(self, output_ids: Sequence[int]) -> np.ndarray | None:
        self.call()
        return None


def test_a_constraint_can_neither_end_the_engine_nor_wait_for_it(tiny: PreTrainedModel) -> None:
    def leave() -> None:
        raise SystemExit(1)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with running(tiny, per_request_processors=True) as manager:
        neighbour = str(manager.add_request(tokens(0, 8), max_new_tokens=60))

        def park() -> None:
            with manager.pause():
                pass

        calls: list[Callable[[], object]] = [leave, interrupt, park, manager.get_result, lambda: list(manager)]
        ids = [str(manager.add_request(tokens(1, 8), constraint=Meddling(call))) for call in calls]
        for output in collect(manager, ids):
            assert output.status is RequestStatus.FAILED
            assert "the constraint failed" in str(output.error)
        (output,) = collect(manager, [neighbour])
        assert output.generated_tokens == ref(tiny, tokens(0, 8), 60)


def test_a_text_that_the_cache_ends_is_said(tiny: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    with running(tiny, num_blocks=4) as manager:
        (output,) = collect(manager, [str(manager.add_request(tokens(0, 20), "long", max_new_tokens=100))])
        assert (output.finish_reason, output.num_generated_tokens) == ("length", 45)
    assert "'long' ends after 45 generated tokens: the whole KV cache holds 64 tokens; raise num_blocks" in caplog.text


def test_one_of_two_who_wait_for_a_result_is_told_that_it_is_gone(tiny: PreTrainedModel) -> None:
    found: list[object] = []
    with running(tiny) as manager:
        with manager.pause():
            request_id = str(manager.add_request(tokens(0, 8), max_new_tokens=3))

            def wait() -> None:
                try:
                    found.append(manager.get_result(request_id, timeout=wait_limit(20)))
                except KeyError as error:
                    found.append(error)

            threads = [threading.Thread(target=wait) for _ in range(2)]
            for thread in threads:
                thread.start()
            wait_until(lambda: manager._delivery._boxes[request_id].readers == 2)
        for thread in threads:
            thread.join(wait_limit(20))
    assert sorted(type(each).__name__ for each in found) == ["GenerationOutput", "KeyError"]


# Parameters that are replaced, not written into


def assign_state(model: Any, other: Any) -> None:
    model.load_state_dict(other.state_dict(), assign=True)


def new_parameters(model: Any, other: Any) -> None:
    for name, parameter in other.named_parameters():
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, torch.nn.Parameter(parameter.clone(), requires_grad=False))


def new_modules(model: Any, other: Any) -> None:
    model.model, model.lm_head = other.model, other.lm_head


@pytest.mark.parametrize("replace", [assign_state, new_parameters, new_modules])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("between_sessions", [False, True])
def test_replaced_parameters_count(
    replace: Callable[[Any, Any], None], dtype: torch.dtype, between_sessions: bool
) -> None:
    model, other = build_tiny(seed=1).to(dtype), build_tiny(seed=2).to(dtype)
    prompt = tokens(0, 20)
    wanted = engine.generate_batch(other, [prompt], NO_EOS, config(), max_new_tokens=6)["req_0"].generated_tokens
    with running(model) as manager:
        (before,) = collect(manager, [str(manager.add_request(prompt, max_new_tokens=6))])
        assert before.generated_tokens != wanted
        if between_sessions:
            manager.stop()
            replace(model, other)
            manager.start()
        else:
            with manager.pause():
                replace(model, other)
        (after,) = collect(manager, [str(manager.add_request(prompt, max_new_tokens=6))])
        assert after.generated_tokens == wanted


def test_parameters_that_no_longer_fit_are_named() -> None:
    model = build_tiny().to(torch.bfloat16)
    manager = engine.init_continuous_batching(model, NO_EOS, config())
    manager.start()
    named = r"parameters of the model have another .*dtype.*the first of them '.*': .*float32.*was .*bfloat16.*manager"
    with pytest.raises(RuntimeError, match=named), manager.pause():
        model.to(torch.float32)
    wait_until(lambda: not manager.is_running())
    with pytest.raises(RuntimeError, match=named):
        manager.add_request([1, 2])
    with pytest.raises(RuntimeError, match="make a new manager"):
        manager.start()
    manager.destroy()
