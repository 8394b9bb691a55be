"""Cases O27-O29: failing steps, results by id, duplicate ids; and the manager's life from start to a forgotten stop."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

import engine
from engine import ContinuousBatchingManager, GenerationOutput, RequestStatus
from tests.conftest import wait_limit
from tests.harness import NO_EOS, Stepper, before_forward, collect, config, running, tokens, wait_idle
from tests.models import build_tiny, ref
from tests.serving import wait_until


class Failing:
    """Makes the model's forward raise from its `first` call on, for `times` calls."""

    def __init__(self, manager: ContinuousBatchingManager, first: int, times: float) -> None:
        self.calls = 0
        self.first, self.times = first, times
        before_forward(manager, self._hook)

    def _hook(self, input_ids: torch.Tensor) -> None:
        self.calls += 1
        if self.first <= self.calls < self.first + self.times:
            raise RuntimeError("the device fell over")


def five_requests(manager: ContinuousBatchingManager) -> list[str]:
    """Three that run and two that queue, under max_requests_per_batch=3."""
    ids = [manager.add_request(tokens(i, 10 + i), max_new_tokens=12) for i in range(5)]
    assert all(ids)
    return [request_id for request_id in ids if request_id]


def fresh(**fields: Any) -> ContinuousBatchingManager:
    return engine.init_continuous_batching(build_tiny(), NO_EOS, config(**fields))


def test_O27_one_failing_step_changes_no_tokens(tiny: PreTrainedModel) -> None:
    manager = fresh(max_requests_per_batch=3)
    failing = Failing(manager, 5, 1)
    ids = five_requests(manager)
    manager.start()
    for i, output in enumerate(collect(manager, ids)):
        assert output.status == RequestStatus.FINISHED, output.error
        assert output.generated_tokens == ref(tiny, tokens(i, 10 + i), 12)
    assert failing.calls > 6
    manager.destroy()


def test_O27_a_request_that_fails_alone_is_failed_alone(tiny: PreTrainedModel) -> None:
    manager = fresh(max_requests_per_batch=3)
    poison = tokens(1, 11)

    def hook(input_ids: torch.Tensor) -> None:
        if poison[5] in input_ids.tolist():
            raise RuntimeError("cannot digest this token")

    before_forward(manager, hook)
    assert all(poison[5] not in tokens(i, 10 + i) + ref(tiny, tokens(i, 10 + i), 12) for i in (0, 2, 3, 4))
    ids = five_requests(manager)
    manager.start()
    outputs = collect(manager, ids)
    assert outputs[1].status == RequestStatus.FAILED
    assert outputs[1].error == "RuntimeError: cannot digest this token"
    for i in (0, 2, 3, 4):
        assert outputs[i].generated_tokens == ref(tiny, tokens(i, 10 + i), 12)
    assert manager.fatal_error is None
    manager.destroy()


def test_O27_when_every_step_fails_all_are_told_and_adds_refused() -> None:
    manager = fresh(max_requests_per_batch=3)
    Failing(manager, 5, float("inf"))
    ids = five_requests(manager)
    with ThreadPoolExecutor() as pool:
        blocked_result = pool.submit(manager.get_result, ids[3], wait_limit(20))
        blocked_iterator = pool.submit(lambda: list(manager.request_id_iter(ids[4])))
        manager.start()
        outputs = [
            *collect(manager, ids[:3]),
            blocked_result.result(wait_limit(20)),
            *blocked_iterator.result(wait_limit(20)),
        ]
    assert len(outputs) == 5
    for output in outputs:
        assert output is not None
        assert output.status == RequestStatus.FAILED
        assert output.error is not None and "the device fell over" in output.error
    wait_until(lambda: not manager.is_running())
    for refused in (lambda: manager.add_request([1, 2]), lambda: manager.add_requests([[1, 2]])):
        with pytest.raises(RuntimeError, match="the device fell over"):
            refused()
    assert list(manager) == [] and manager.get_result(timeout=wait_limit(5)) is None
    manager.destroy()


def test_a_nan_row_fails_alone_and_its_pages_do_no_harm(tiny: PreTrainedModel) -> None:
    model = build_tiny()
    poison = 7
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = float("nan")
    clean = [[t if t != poison else 8 for t in tokens(i, 20)] for i in range(3)]
    assert all(poison not in ref(tiny, prompt, 16) for prompt in clean)
    stepper = Stepper(model, num_blocks=8)
    bad = stepper.add([1, 2, poison, 4] * 8, 5)
    good = [stepper.add(prompt, 16) for prompt in clean[:2]]
    stepper.drain()
    after = stepper.add(clean[2], 16)
    again = stepper.add([1, 2, poison, 4] * 8, 5)
    stepper.drain()
    results = stepper.results()
    for request in (bad, again):
        assert results[request.request_id].status == RequestStatus.FAILED
        assert "NaN" in (results[request.request_id].error or "")
    assert again.cached_tokens == 0, "pages of a failed request must not be found again"
    for request, prompt in zip([*good, after], clean, strict=True):
        assert results[request.request_id].generated_tokens == ref(tiny, prompt, 16)


def test_O28_a_result_by_id_waits_and_loses_no_other(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:
        manager.add_request(tokens(0, 8), "slow", max_new_tokens=60)
        manager.add_request(tokens(1, 8), "fast", max_new_tokens=2)
        for name, seed, n in (("slow", 0, 60), ("fast", 1, 2)):
            output = manager.get_result(name, timeout=wait_limit(10))
            assert output is not None and output.request_id == name
            assert output.generated_tokens == ref(tiny, tokens(seed, 8), n)
        for name in ("slow", "never"):
            with pytest.raises(KeyError, match=name):
                manager.get_result(name)
            with pytest.raises(KeyError, match=name):
                list(manager.request_id_iter(name))


def test_O28_ten_threads_each_iterate_their_own_stream(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:

        def read(request_id: str) -> list[GenerationOutput]:
            return list(manager.request_id_iter(request_id))

        manager.add_requests([tokens(i, 8) for i in range(10)], max_new_tokens=24, streaming=True)
        cpu = time.process_time()
        with ThreadPoolExecutor(10) as pool:
            streams = list(pool.map(read, [f"req_{i}" for i in range(10)], timeout=wait_limit(30)))
        assert time.process_time() - cpu < wait_limit(30)
        for i, stream in enumerate(streams):
            assert [len(output.generated_tokens) for output in stream] == list(range(1, 25))
            assert all(o.generated_tokens == ref(tiny, tokens(i, 8), 24)[: k + 1] for k, o in enumerate(stream))
            assert [output.is_finished() for output in stream] == [False] * 23 + [True]


def test_waiting_readers_do_not_spin(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:
        calls = 0
        take = manager._delivery._take_from

        def counting(*args: Any) -> GenerationOutput | None:
            nonlocal calls
            calls += 1
            return take(*args)

        manager._delivery._take_from = counting  # type: ignore[method-assign]
        manager.add_request(tokens(0, 8), "slow", max_new_tokens=200)
        collect(manager, ["slow"])
        assert calls == 1


def test_O29_duplicate_ids(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:
        manager.add_request(tokens(0, 8), "d", max_new_tokens=40)
        with pytest.raises(ValueError, match="'d' is in use"):
            manager.add_request(tokens(1, 8), "d", max_new_tokens=4)
        (first,) = collect(manager, ["d"])
        assert first.generated_tokens == ref(tiny, tokens(0, 8), 40)
        manager.add_request(tokens(1, 8), "d", max_new_tokens=4)
        (second,) = collect(manager, ["d"])
        assert second.generated_tokens == ref(tiny, tokens(1, 8), 4)
        manager.add_request(tokens(2, 8), "req_0", max_new_tokens=6)
        automatic = manager.add_request(tokens(3, 8), max_new_tokens=6)
        assert automatic not in (None, "req_0")
        for output, seed in zip(collect(manager, ["req_0", str(automatic)]), (2, 3), strict=True):
            assert output.generated_tokens == ref(tiny, tokens(seed, 8), 6)


def test_O29_an_id_used_again_before_its_result_was_taken(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:
        for seed in (0, 1):
            manager.add_request(tokens(seed, 8), "d", max_new_tokens=4)
            wait_idle(manager)
        for seed in (0, 1):
            (output,) = collect(manager, ["d"])
            assert output.generated_tokens == ref(tiny, tokens(seed, 8), 4)


def test_O08_an_empty_prompt_fails_alone(tiny: PreTrainedModel) -> None:
    prompt = tokens(8, 15)
    outputs = engine.generate_batch(
        tiny, [[], prompt, [512]], NO_EOS, continuous_batching_config=config(), max_new_tokens=12
    )
    assert list(outputs) == ["req_0", "req_1", "req_2"]
    assert outputs["req_0"].status == RequestStatus.FAILED
    assert "empty" in (outputs["req_0"].error or "")
    assert outputs["req_1"].generated_tokens == ref(tiny, prompt, 12)
    assert outputs["req_2"].status == RequestStatus.FAILED
    assert "0 to 511" in (outputs["req_2"].error or "")
    with running(tiny) as manager, pytest.raises(ValueError, match="empty"):
        manager.add_request([])


@pytest.mark.parametrize("length", [254, 255, 256, 257, 5000])
def test_O09_prompts_around_the_context(tiny: PreTrainedModel, length: int) -> None:
    prompt = tokens(9, length)
    with running(tiny) as manager:
        if length >= 256:
            with pytest.raises(ValueError, match=rf"{length} tokens.*context holds 256"):
                manager.add_request(prompt, max_new_tokens=1)
        else:
            for asked in (1, 100, None, 10**9, 2**63):
                (output,) = collect(manager, [manager.add_request(prompt, max_new_tokens=asked)])
                expected = min(asked or 10**9, 256 - length)
                assert output.generated_tokens == ref(tiny, prompt, expected)
                assert output.finish_reason == "length"
        (small,) = collect(manager, [manager.add_request(tokens(9, 5), max_new_tokens=6)])
        assert small.generated_tokens == ref(tiny, tokens(9, 5), 6)


def test_O10_limits_that_are_none(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:
        for bad in (0, -1, 1.5, "5", True):
            with pytest.raises(ValueError, match="max_new_tokens"):
                manager.add_request([1, 2, 3], max_new_tokens=bad)  # type: ignore[arg-type]


def test_O11_temperature_zero_and_nearly_zero(tiny: PreTrainedModel) -> None:
    prompt = tokens(11, 12)
    with running(
        tiny, GenerationConfig(do_sample=True, temperature=0.7, eos_token_id=-1), per_request_processors=True
    ) as manager:
        mixes: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 0, "top_p": 0.1},
            {"temperature": 0.0, "top_k": 3, "seed": 5},
        ]
        mixes += [{"temperature": t, "top_p": p} for t in (1e-6, 1e-10, 1e-45) for p in (0.1, 1.0)]
        ids = [manager.add_request(prompt, max_new_tokens=16, **mix) for mix in mixes]
        for output in collect(manager, ids):
            assert output.generated_tokens == ref(tiny, prompt, 16)


def test_O13_seeds(tiny: PreTrainedModel) -> None:
    prompt = tokens(13, 12)
    sampled = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1)
    with running(tiny, sampled, per_request_processors=True, max_batch_tokens=64) as manager:

        def generate(*seeds: int | None) -> list[list[int]]:
            ids = [manager.add_request(prompt, max_new_tokens=32, seed=seed) for seed in seeds]
            return [output.generated_tokens for output in collect(manager, ids)]

        (alone,) = generate(7)
        assert generate(7) == [alone]
        others = [manager.add_request(tokens(i, 20 + i), max_new_tokens=20, temperature=2.0, top_k=i) for i in range(7)]
        assert generate(7) == [alone]
        collect(manager, others)
        ids = manager.add_requests([tokens(i, 5) for i in range(100)], max_new_tokens=2)
        assert ids is not None
        collect(manager, ids)
        assert generate(7) == [alone]
        assert len({tuple(out) for out in generate(1, 2, 3, 4, 5)}) > 1
        first, second = generate(None, None)
        assert first != second


def test_O13_the_same_tokens_under_preemption(tiny: PreTrainedModel) -> None:
    sampled = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1)
    wanted = {}
    for num_blocks in (64, 8):
        stepper = Stepper(tiny, sampled, num_blocks=num_blocks, safety_margin=0.0)
        requests = [stepper.add(tokens(i, 40), 40, seed=i) for i in range(5)]
        stepper.drain()
        got = {i: request.output_ids for i, request in enumerate(requests)}
        assert wanted.setdefault("tokens", got) == got


def test_resuming_with_output_ids_goes_on_as_if_undisturbed(tiny: PreTrainedModel) -> None:
    prompt = tokens(3, 21)
    sampled = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1)
    with running(tiny, sampled) as manager:
        (whole,) = collect(manager, [manager.add_request(prompt, max_new_tokens=30, seed=9)])
        for cut in (1, 13, 29):
            request_id = manager.add_request(prompt, max_new_tokens=30, seed=9, output_ids=whole.generated_tokens[:cut])
            (resumed,) = collect(manager, [request_id])
            assert resumed.generated_tokens == whole.generated_tokens
            assert resumed.prompt_ids == prompt


def test_eos_lists_and_stop_tokens(tiny: PreTrainedModel) -> None:
    prompt = tokens(4, 10)
    plain = ref(tiny, prompt, 20)
    cut = next(i for i in range(5, 20) if plain[i] not in plain[:i])
    with running(tiny) as manager:
        for arguments in (
            {"eos_token_id": plain[cut]},
            {"eos_token_id": [plain[cut]]},
            {"stop_token_ids": [plain[cut]]},
        ):
            (output,) = collect(manager, [manager.add_request(prompt, max_new_tokens=20, **arguments)])
            assert output.generated_tokens == plain[: cut + 1]
            assert output.finish_reason == "stop"
        request_id = manager.add_request(prompt, max_new_tokens=20, eos_token_id=plain[cut], min_new_tokens=cut + 5)
        (longer,) = collect(manager, [request_id])
        assert longer.generated_tokens[:cut] == plain[:cut]
        assert plain[cut] not in longer.generated_tokens[: cut + 5]
        assert longer.num_generated_tokens >= cut + 5


def test_iteration_waits_for_the_first_request_and_ends(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:
        seen: list[str] = []
        reader = threading.Thread(target=lambda: seen.extend(output.request_id for output in manager))
        reader.start()
        ids = manager.add_requests([tokens(i, 6) for i in range(4)], max_new_tokens=3)
        reader.join(wait_limit(10))
        assert not reader.is_alive()
        assert sorted(seen) == ids
        assert list(manager) == []


def test_add_requests_is_all_or_nothing_and_keeps_input_order(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:
        with pytest.raises(ValueError, match="empty"):
            manager.add_requests([[1, 2], []], max_new_tokens=2)
        assert not manager._loop._live
        prompts = [tokens(9, 9), tokens(1, 40), tokens(5, 3), tokens(1, 40)]
        ids = manager.add_requests(prompts, max_new_tokens=5)
        assert ids is not None
        for prompt, output in zip(prompts, collect(manager, ids), strict=True):
            assert output.prompt_ids == prompt
            assert output.generated_tokens == ref(tiny, prompt, 5)


def test_handlers_run_each_on_its_own_event_loop(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:

        def serve(seed: int) -> tuple[list[int], set[int]]:
            async def main() -> tuple[list[int], set[int]]:
                done = asyncio.Event()
                lengths: list[int] = []
                threads: set[int] = set()

                def handler(output: GenerationOutput) -> None:
                    lengths.append(output.num_generated_tokens)
                    threads.add(threading.get_ident())
                    if output.is_finished():
                        done.set()

                request_id = manager.add_request(
                    tokens(seed, 8), max_new_tokens=12, streaming=True, result_handler=handler
                )
                await asyncio.wait_for(done.wait(), wait_limit(10))
                with pytest.raises(KeyError):
                    manager.register_result_handler(str(request_id), handler)
                return lengths, threads - {threading.get_ident()}

            return asyncio.run(main())

        with ThreadPoolExecutor(4) as pool:
            for lengths, strange_threads in pool.map(serve, range(4), timeout=wait_limit(20)):
                assert lengths == list(range(1, 13))
                assert not strange_threads
        with pytest.raises(RuntimeError, match="event loop"):
            manager.add_request([1], result_handler=print)


def test_a_handler_registered_late_gets_everything_in_order(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:

        async def main() -> list[int]:
            done = asyncio.Event()
            lengths: list[int] = []

            def handler(output: GenerationOutput) -> None:
                lengths.append(output.num_generated_tokens)
                if output.is_finished():
                    done.set()

            request_id = str(manager.add_request(tokens(0, 8), max_new_tokens=9, streaming=True))
            await asyncio.to_thread(wait_idle, manager)
            manager.register_result_handler(request_id, handler)
            await asyncio.wait_for(done.wait(), wait_limit(10))
            return lengths

        assert asyncio.run(main()) == list(range(1, 10))


def test_a_closed_event_loop_and_a_raising_handler_hurt_nobody(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:

        def broken(output: GenerationOutput) -> None:
            raise ValueError("a bug in the caller's code")

        async def add() -> None:
            manager.add_request(tokens(0, 8), max_new_tokens=120, streaming=True, result_handler=broken)

        asyncio.run(add())
        (output,) = collect(manager, [manager.add_request(tokens(1, 8), max_new_tokens=20)])
        assert output.generated_tokens == ref(tiny, tokens(1, 8), 20)


def test_stop_finishes_what_was_submitted_then_refuses(tiny: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    manager = engine.init_continuous_batching(tiny, NO_EOS, config())
    ids = [str(manager.add_request(tokens(i, 8), max_new_tokens=30)) for i in range(4)]
    manager.start()
    manager.stop(timeout=wait_limit(20))
    assert not manager.is_running()
    with caplog.at_level(logging.WARNING):
        assert manager.add_request([1, 2, 3]) is None
        assert manager.add_requests([[1, 2, 3]]) is None
    assert "refused" in caplog.text
    for i, output in enumerate(collect(manager, ids)):
        assert output.generated_tokens == ref(tiny, tokens(i, 8), 30)
    manager.start()
    (output,) = collect(manager, [manager.add_request(tokens(9, 8), max_new_tokens=5)])
    assert output.generated_tokens == ref(tiny, tokens(9, 8), 5)
    manager.destroy()
    manager.destroy()
    for use in (manager.start, manager.warmup, lambda: manager.add_request([1])):
        with pytest.raises(RuntimeError, match="destroyed"):
            use()


def test_hard_stop_fails_what_is_pending_and_frees_readers(tiny: PreTrainedModel) -> None:
    manager = engine.init_continuous_batching(tiny, NO_EOS, config(max_requests_per_batch=1))
    ids = [str(manager.add_request(tokens(i, 8), max_new_tokens=240, streaming=i == 0)) for i in range(3)]
    manager.start()
    with ThreadPoolExecutor() as pool:
        reader = pool.submit(manager.get_result, ids[2], None)
        assert next(manager.request_id_iter(ids[0])).num_generated_tokens == 1
        manager.stop(hard_stop=True, timeout=wait_limit(20))
        outputs = [*collect(manager, ids[:2]), reader.result(wait_limit(10))]
    for output in outputs:
        assert output is not None
        assert output.status == RequestStatus.FAILED
        assert (output.error or "").startswith("RuntimeError")
    manager.destroy()


@pytest.mark.parametrize("ending", ["forgotten", "deleted"])
def test_a_forgotten_stop_does_not_block_the_exit(ending: str) -> None:
    code = f"""
        import gc, engine
        from tests.models import build_tiny
        manager = engine.init_continuous_batching(build_tiny(), None, engine.ContinuousBatchingConfig(num_blocks=64))
        manager.start()
        manager.add_request([1, 2, 3], "long", max_new_tokens=250, streaming=True)
        print(next(manager.request_id_iter("long")).num_generated_tokens)
        if {ending!r} == "deleted":
            loop = manager._loop
            del manager
            gc.collect()
            assert loop.join(20)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=wait_limit(60)
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_snapshots_never_change(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:
        manager.add_request(tokens(0, 8), "s", max_new_tokens=20, streaming=True, record_timestamps=True)
        seen = [(output, list(output.generated_tokens)) for output in manager.request_id_iter("s")]
        for k, (output, then) in enumerate(seen, start=1):
            assert output.generated_tokens == then and len(then) == k
            assert output.timestamps is not None and len(output.timestamps) == k
            assert output.prompt_ids == tokens(0, 8)
            assert output.status == (RequestStatus.FINISHED if k == 20 else RequestStatus.DECODING)


def test_unknown_arguments_are_type_errors(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:
        calls: list[Callable[[], object]] = [
            lambda: manager.add_request([1], max_new_token=3),
            lambda: manager.add_requests([[1]], max_new_token=3),
            lambda: engine.generate_batch(tiny, [[1]], NO_EOS, max_new_token=3),
            lambda: engine.generate_batch(tiny, [], NO_EOS, max_new_token=3),
        ]
        for call in calls:
            with pytest.raises(TypeError, match="max_new_token"):
                call()
        with pytest.raises(ValueError, match="per_request_processors"):
            manager.add_request([1], temperature=0.5)
    assert engine.generate_batch(tiny, [], NO_EOS) == {}


@pytest.mark.parametrize("inputs", [[[]], [[1.5, 2]], [[5] * 300], ["hello"], [[], [512]]])
def test_O08_a_batch_of_which_nothing_can_be_served_ends(tiny: PreTrainedModel, inputs: Any) -> None:
    outputs = engine.generate_batch(tiny, inputs, NO_EOS, continuous_batching_config=config())
    assert list(outputs) == [f"req_{i}" for i in range(len(inputs))]
    assert all(output.status == RequestStatus.FAILED and output.error for output in outputs.values())


@pytest.mark.parametrize("inputs", [[1, 2, 3], None, 5, torch.tensor([1, 2])])
def test_inputs_that_are_no_prompts_are_type_errors(tiny: PreTrainedModel, inputs: Any) -> None:
    with pytest.raises(TypeError, match="collection of prompts"):
        engine.generate_batch(tiny, inputs, NO_EOS, continuous_batching_config=config())


def test_inputs_may_be_a_tensor_or_a_generator(tiny: PreTrainedModel) -> None:
    rows = [tokens(i, 6) for i in range(3)]
    for inputs in (torch.tensor(rows), iter(rows), [torch.tensor(row) for row in rows]):
        outputs = engine.generate_batch(
            tiny,
            inputs,  # type: ignore[arg-type]
            NO_EOS,
            continuous_batching_config=config(),
            max_new_tokens=4,
        )
        assert [output.generated_tokens for output in outputs.values()] == [ref(tiny, row, 4) for row in rows]


def test_start_waits_for_a_session_that_is_stopping(tiny: PreTrainedModel) -> None:
    manager = engine.init_continuous_batching(tiny, NO_EOS, config())
    first = str(manager.add_request(tokens(0, 8), max_new_tokens=60))
    manager.start()
    manager.stop(block=False)
    manager.start()
    second = str(manager.add_request(tokens(1, 8), max_new_tokens=5))
    for request_id, seed, n in ((first, 0, 60), (second, 1, 5)):
        (output,) = collect(manager, [request_id])
        assert output.generated_tokens == ref(tiny, tokens(seed, 8), n)
    manager.destroy()


def test_iterating_a_session_that_ended_without_requests_ends(tiny: PreTrainedModel) -> None:
    manager = engine.init_continuous_batching(tiny, NO_EOS, config())
    manager.start()
    manager.stop()
    assert list(manager) == []
    manager.destroy()
