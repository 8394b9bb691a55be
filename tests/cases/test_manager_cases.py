"""Faults of other engines at the level of the manager: results, randomness, stopping, configs, errors of a batch."""

from __future__ import annotations

import asyncio
import copy
import logging
import random
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

import engine
import engine.core as engine_core
from engine import ContinuousBatchingManager, GenerationOutput, RequestStatus
from tests.conftest import wait_limit
from tests.harness import NO_EOS, check_whole, collect, config, core_of, running, tokens
from tests.models import build_tiny, ref
from tests.serving import wait_until


def test_results_that_came_after_stop_are_still_iterated(tiny: PreTrainedModel) -> None:
    manager = engine.init_continuous_batching(tiny, NO_EOS, config())
    manager.start()
    manager.add_requests([tokens(i, 8) for i in range(3)], max_new_tokens=20)
    manager.add_request(tokens(3, 8), "streamed", max_new_tokens=4, streaming=True)
    manager.stop()
    assert not manager.is_running()
    streamed = list(manager.request_id_iter("streamed"))
    assert [output.num_generated_tokens for output in streamed] == [1, 2, 3, 4]
    assert sorted(output.request_id for output in manager) == ["req_0", "req_1", "req_2"]
    manager.destroy()


def test_a_timeout_is_waited_out_and_loses_nothing(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:
        manager.add_request(tokens(1, 8), "other", max_new_tokens=2)
        with manager.pause():
            manager.add_request(tokens(0, 8), "slow", max_new_tokens=4)
            before = time.monotonic()
            assert manager.get_result("slow", timeout=0.1) is None
            assert time.monotonic() - before >= 0.1
        for name, seed, n in (("slow", 0, 4), ("other", 1, 2)):
            (output,) = collect(manager, [name])
            assert output.generated_tokens == ref(tiny, tokens(seed, 8), n)


def test_a_cancelled_request_ends_its_iterator_and_its_handler(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:

        async def main() -> list[RequestStatus]:
            done = asyncio.Event()
            seen: list[RequestStatus] = []

            def handler(output: GenerationOutput) -> None:
                seen.append(output.status)
                if output.is_finished():
                    done.set()

            request_id = manager.add_request(tokens(0, 8), max_new_tokens=240, result_handler=handler)
            manager.cancel_request(str(request_id))
            await asyncio.wait_for(done.wait(), wait_limit(10))
            return seen

        assert asyncio.run(main()) == [RequestStatus.CANCELLED]
        manager.add_request(tokens(0, 8), "r", max_new_tokens=240, streaming=True)
        stream = manager.request_id_iter("r")
        next(stream)
        manager.cancel_request("r")
        assert list(stream)[-1].status == RequestStatus.CANCELLED
        assert not manager._delivery._boxes


def test_O11_a_whole_number_is_a_temperature(tiny: PreTrainedModel) -> None:
    with running(tiny, per_request_processors=True) as manager:
        whole, fraction = (
            manager.add_request(tokens(0, 8), max_new_tokens=12, temperature=temperature, seed=3)
            for temperature in (1, 1.0)
        )
        first, second = collect(manager, [str(whole), str(fraction)])
        assert first.generated_tokens == second.generated_tokens


def test_O13_the_random_state_of_the_process_is_left_alone(tiny: PreTrainedModel) -> None:
    sampled = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1)
    before = torch.random.get_rng_state()
    for seed in (1, None):
        engine.generate_batch(
            tiny, [tokens(0, 8)], sampled, continuous_batching_config=config(seed=seed), max_new_tokens=8
        )
    assert torch.equal(torch.random.get_rng_state(), before)


def test_O13_the_seed_of_the_config_repeats_a_batch(tiny: PreTrainedModel) -> None:
    sampled = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1)

    def generate(seed: int | None, prompts: list[list[int]]) -> list[list[int]]:
        outputs = engine.generate_batch(
            tiny, prompts, sampled, continuous_batching_config=config(seed=seed), max_new_tokens=16
        )
        return [output.generated_tokens for output in outputs.values()]

    prompts = [tokens(i, 8) for i in range(3)]
    assert generate(5, prompts) == generate(5, prompts) != generate(6, prompts)
    assert generate(5, prompts)[:1] == generate(5, prompts[:1]), "a neighbour changed the tokens"
    assert generate(None, prompts) != generate(None, prompts)


def test_a_stop_that_times_out_lets_the_work_go_on(tiny: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    manager = engine.init_continuous_batching(tiny, NO_EOS, config())
    core, go_on = core_of(manager), threading.Event()
    step = core.step

    def slow_step() -> list[GenerationOutput]:
        assert go_on.wait(wait_limit(20))
        return step()

    core.step = slow_step  # type: ignore[method-assign]
    ids = [str(manager.add_request(tokens(i, 8), max_new_tokens=10)) for i in range(2)]
    manager.start()
    with caplog.at_level(logging.WARNING):
        manager.stop(timeout=0.05)
    assert "still runs" in caplog.text and manager.is_running()
    go_on.set()
    for i, output in enumerate(collect(manager, ids)):
        assert output.generated_tokens == ref(tiny, tokens(i, 8), 10)
    manager.destroy()
    assert manager.fatal_error is None


def test_a_context_whose_stop_times_out_returns(tiny: PreTrainedModel) -> None:
    go_on = threading.Event()
    with engine.continuous_batching_context_manager(
        tiny, NO_EOS, timeout=0.05, continuous_batching_config=config()
    ) as manager:
        core = core_of(manager)
        step = core.step

        def slow_step() -> list[GenerationOutput]:
            assert go_on.wait(wait_limit(20))
            return step()

        core.step = slow_step  # type: ignore[method-assign]
        manager.add_request(tokens(0, 8), "r", max_new_tokens=5)
    assert manager.is_running()
    go_on.set()
    (output,) = collect(manager, ["r"])
    assert output.generated_tokens == ref(tiny, tokens(0, 8), 5)
    manager.destroy()


def test_an_engine_that_dies_gives_a_whole_batch_of_failed_outputs(
    tiny: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0
    step = engine_core.EngineCore.step

    def dying(self: engine_core.EngineCore) -> list[GenerationOutput]:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise OSError("out of order")
        return step(self)

    monkeypatch.setattr(engine_core.EngineCore, "step", dying)
    for size in (0, 1):
        steps = 0
        outputs = engine.generate_batch(
            tiny,
            [tokens(i, 8) for i in range(4)],
            NO_EOS,
            continuous_batching_config=config(max_requests_per_batch=2, max_queue_size=size),
            max_new_tokens=20,
            num_return_sequences=1,
        )
        assert list(outputs) == [f"req_{i}" for i in range(4)]
        assert all(output.status == RequestStatus.FAILED for output in outputs.values())
        assert all("out of order" in (output.error or "") for output in outputs.values())


def test_what_interrupts_a_batch_is_raised(tiny: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> Any:
        yield from ()
        raise KeyboardInterrupt

    before = {thread for thread in threading.enumerate() if thread.name == "engine"}
    monkeypatch.setattr(ContinuousBatchingManager, "run_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate_batch(tiny, [[1, 2]], NO_EOS, continuous_batching_config=config())
    assert {thread for thread in threading.enumerate() if thread.name == "engine"} <= before


def test_a_plain_forward_is_the_same_while_an_engine_lives(tiny: PreTrainedModel) -> None:
    input_ids = torch.tensor([tokens(0, 24)])
    model = build_tiny(attn_implementation="eager")
    with torch.inference_mode():
        before = model(input_ids).logits
    with running(model) as manager:
        collect(manager, [str(manager.add_request(tokens(1, 8), max_new_tokens=4))])
        with torch.inference_mode():
            during = model(input_ids).logits
            causal = model(input_ids[:, :12]).logits
    assert torch.equal(before, during)
    torch.testing.assert_close(during[:, :12], causal)


def test_only_the_same_salt_shares_a_prefix(tiny: PreTrainedModel) -> None:
    prompt = tokens(0, 40)
    with running(tiny) as manager:

        def cached_tokens(salt: str | None) -> int:
            (output,) = collect(manager, [str(manager.add_request(prompt, max_new_tokens=2, cache_salt=salt))])
            assert output.generated_tokens == ref(tiny, prompt, 2)
            return output.cached_tokens

        assert [cached_tokens(salt) for salt in ("a", "b", None, "a", "b", None)] == [0, 0, 0, 32, 32, 32]
        with pytest.raises(ValueError, match="cache_salt is 5"):
            manager.add_request(prompt, cache_salt=5)  # type: ignore[arg-type]


def test_a_lower_priority_number_runs_first(tiny: PreTrainedModel) -> None:
    manager = engine.init_continuous_batching(tiny, NO_EOS, config(max_requests_per_batch=1))
    order = [("late", 5), ("normal", 0), ("first", -1)]
    for name, priority in order:
        manager.add_request(tokens(0, 8), name, max_new_tokens=3, priority=priority)
    for bad in (1.5, "1", True, None):
        with pytest.raises(ValueError, match="priority is"):
            manager.add_request([1], priority=bad)  # type: ignore[arg-type]
    manager.start()
    assert [output.request_id for output in manager] == ["first", "normal", "late"]
    manager.destroy()
    outputs = engine.generate_batch(
        tiny, [[1, 2]], NO_EOS, continuous_batching_config=config(), max_new_tokens=1, priority=3, cache_salt="s"
    )
    assert outputs["req_0"].num_generated_tokens == 1
    with pytest.raises(ValueError, match="priority is"):
        engine.generate_batch(tiny, [[1, 2]], NO_EOS, continuous_batching_config=config(), priority="high")


def test_a_config_inside_the_generation_config_counts_with_one_warning(tiny: PreTrainedModel) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, when the object is made
        carrying = GenerationConfig(
            do_sample=False, eos_token_id=-1, max_new_tokens=5, continuous_batching_config=config(page_size=8)
        )
    for argument, page_size in ((None, 8), (config(page_size=32), 32)):
        with pytest.warns(FutureWarning, match="argument continuous_batching_config") as caught:
            manager = engine.init_continuous_batching(tiny, carrying, argument)
        assert len(caught) == 1
        assert manager.settings.page_size == page_size
        with pytest.warns(FutureWarning) as caught:
            outputs = engine.generate_batch(tiny, [tokens(0, 8)], carrying, argument)
        assert len(caught) == 1
        assert outputs["req_0"].generated_tokens == ref(tiny, tokens(0, 8), 5)
    assert carrying.continuous_batching_config.page_size == 8
    model = copy.copy(tiny)
    model.generation_config = carrying
    with pytest.warns(FutureWarning):
        assert engine.init_continuous_batching(model).settings.page_size == 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.init_continuous_batching(model, NO_EOS, config()).settings.page_size == 16


def test_without_an_eos_nothing_ends_early_and_no_config_is_changed(tiny: PreTrainedModel) -> None:
    generation_config = GenerationConfig(max_new_tokens=30, do_sample=False)
    outputs = engine.generate_batch(tiny, [tokens(0, 8)], generation_config, continuous_batching_config=config())
    assert outputs["req_0"].generated_tokens == ref(tiny, tokens(0, 8), 30)
    assert generation_config.eos_token_id is None
    model = copy.copy(tiny)
    model.generation_config = GenerationConfig(eos_token_id=ref(tiny, tokens(0, 8), 30)[5])
    outputs = engine.generate_batch(model, [tokens(0, 8)], generation_config, continuous_batching_config=config())
    assert outputs["req_0"].finish_reason == "stop"


def test_the_hints_of_a_batch_size_its_engine(tiny: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    hints: list[engine.WorkloadHints] = []
    init = ContinuousBatchingManager.__init__

    def watched(self: Any, model: Any, generation_config: Any, config: Any, workload_hints: Any) -> None:
        hints.append(workload_hints)
        init(self, model, generation_config, config, workload_hints)

    monkeypatch.setattr(ContinuousBatchingManager, "__init__", watched)
    prompts = [tokens(i, 5 + i) for i in range(3)]
    settings = {"continuous_batching_config": config()}
    engine.generate_batch(tiny, prompts, NO_EOS, max_new_tokens=4, num_return_sequences=2, **settings)  # type: ignore[arg-type]
    engine.generate_batch(tiny, prompts, GenerationConfig(max_new_tokens=2), **settings)  # type: ignore[arg-type]
    assert hints == [engine.WorkloadHints(7, 4, 6), engine.WorkloadHints(7, 2, 3)]
    manager = engine.init_continuous_batching(tiny, NO_EOS, None, engine.WorkloadHints(num_requests=3))
    assert manager.settings.max_requests == 3


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_the_progress_bar_gives_way_to_debug_output(
    tiny: PreTrainedModel, level: int, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("engine")
    before = logger.level
    logger.setLevel(level)
    bars_before = transformers_logging.is_progress_bar_enabled()
    transformers_logging.enable_progress_bar()
    try:
        for asked in (True, False):
            engine.generate_batch(
                tiny, [[1, 2]] * 3, NO_EOS, config(), progress_bar=asked, max_new_tokens=2, warmup=False
            )
            shown = capsys.readouterr().err
            assert ("3/3" in shown) == (asked and level > logging.DEBUG)
    finally:
        logger.setLevel(before)
        if not bars_before:
            transformers_logging.disable_progress_bar()


def test_an_engine_is_warmed_up_once_and_never_while_it_runs(tiny: PreTrainedModel) -> None:
    manager = engine.init_continuous_batching(tiny, NO_EOS, config())
    runs = 0

    def warmup() -> None:
        nonlocal runs
        runs += 1

    core_of(manager).runner.warmup = warmup  # type: ignore[method-assign]
    manager.start()
    manager.warmup()
    assert runs == 0
    manager.stop()
    manager.warmup()
    manager.warmup()
    assert runs == 1
    manager.destroy()


def test_what_the_scheduler_refuses_fails_alone(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:
        scheduler = core_of(manager).scheduler
        add = scheduler.add

        def picky(request: Any) -> None:
            if request.request_id == "bad":
                raise ValueError("no room for this one")
            add(request)

        scheduler.add = picky  # type: ignore[method-assign]
        for name in ("bad", "good"):
            manager.add_request(tokens(0, 8), name, max_new_tokens=3)
        bad, good = collect(manager, ["bad", "good"])
        assert bad.status == RequestStatus.FAILED and bad.error == "ValueError: no room for this one"
        assert good.generated_tokens == ref(tiny, tokens(0, 8), 3)


@pytest.mark.parametrize("size", [0, 3])
def test_every_accepted_request_ends_once_whatever_happens_around_it(tiny: PreTrainedModel, size: int) -> None:
    manager = engine.init_continuous_batching(tiny, NO_EOS, config(max_requests_per_batch=4, max_queue_size=size))
    ended: list[GenerationOutput] = []
    publish = manager._delivery.publish

    def watched(outputs: list[GenerationOutput]) -> None:
        ended.extend(output for output in outputs if output.is_finished())
        publish(outputs)

    manager._delivery.publish = watched  # type: ignore[method-assign, assignment]
    accepted: list[str] = []
    finished = threading.Event()

    def submit(worker: int) -> None:
        rng = random.Random(worker)
        for number in range(25):
            name, n = f"{worker}-{number}", rng.choice([1, 1, 2, 3])
            prompt, cancelled = tokens(rng.randrange(5), 8 + rng.randrange(30)), rng.random() < 0.3
            arguments = {"max_new_tokens": rng.randrange(1, 12), "streaming": rng.random() < 0.3}
            while manager.add_request(prompt, name, num_return_sequences=n, **arguments) is None:
                time.sleep(0.001)  # between two sessions
            accepted.extend([name, *(f"{name}__child#{i}" for i in range(n - 1))])
            if cancelled:
                manager.cancel_request(name)

    def pause() -> None:
        while not finished.is_set():
            try:
                with manager.pause(keep_cache=len(ended) % 2 == 0):
                    time.sleep(0.001)
            except RuntimeError:  # between two sessions
                time.sleep(0.001)

    def restart(hard_stop: bool) -> None:
        manager.stop(hard_stop=hard_stop, timeout=wait_limit(30))
        while not manager.is_running():
            with suppress(RuntimeError):  # the pause of the session before is not left yet
                manager.start()

    manager.start()
    with ThreadPoolExecutor(5) as pool:
        pauser = pool.submit(pause)
        workers = [pool.submit(submit, worker) for worker in range(4)]
        try:
            for count, hard_stop in ((20, False), (60, True), (100, False)):
                wait_until(lambda count=count: len(accepted) >= count)
                restart(hard_stop)
            for each in workers:
                each.result(wait_limit(60))
        finally:
            finished.set()
        pauser.result(wait_limit(10))
    manager.stop(timeout=wait_limit(30))
    assert manager.fatal_error is None
    assert sorted(output.request_id for output in ended) == sorted(accepted)
    wrong = {output.error for output in ended if output.status == RequestStatus.FAILED}
    assert wrong <= {"RuntimeError: the engine was stopped"}
    check_whole(core_of(manager))
    manager.destroy()
