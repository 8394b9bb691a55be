"""What the guide says in words and no code block shows, and what upstream's own tests look at, for the whole engine.

Only what has no better place: table rows and sections whose tests are elsewhere are not repeated here.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

import engine
from engine import GenerationOutput, RequestStatus
from engine.execution import model_runner
from engine.execution.kv_tensors import KVTensors, allocate
from engine.request import Request
from engine.sizing import RESERVED_BLOCKS, STAGINGS, staging_blocks
from tests.architectures import ARCHITECTURES, WINDOW
from tests.harness import NO_EOS, Stepper, collect, config, running, tokens
from tests.models import build_tiny, ref, reference
from tests.serving import wait_until


@pytest.fixture(scope="module")
def gemma2() -> PreTrainedModel:
    """Every second layer has a window of 16 tokens."""
    return ARCHITECTURES["gemma2"]()


def test_a_place_that_comes_free_is_taken_in_the_next_step(tiny: PreTrainedModel) -> None:
    stepper = Stepper(tiny, max_requests_per_batch=2)
    requests = [stepper.add(tokens(n, 5), length) for n, length in enumerate((3, 9, 4, 5))]
    steps = []
    while stepper.core.has_work:
        stepper.step()
        steps.append([request.num_output_tokens for request in requests])
    assert steps == [
        [1, 1, 0, 0],
        [2, 2, 0, 0],
        [3, 3, 0, 0],
        [3, 4, 1, 0],
        [3, 5, 2, 0],
        [3, 6, 3, 0],
        [3, 7, 4, 0],
        [3, 8, 4, 1],
        [3, 9, 4, 2],
        [3, 9, 4, 3],
        [3, 9, 4, 4],
        [3, 9, 4, 5],
    ]


def test_a_long_text() -> None:
    """Over some hundred tokens an error of position, page or rounding would add up."""
    model = build_tiny(max_position_embeddings=2048)
    wanted = reference(model, tokens(0, 33), 600)
    assert min(wanted.gaps) > 1e-3
    outputs = engine.generate_batch(model, [tokens(0, 33)], NO_EOS, config(), max_new_tokens=600)
    assert outputs["req_0"].generated_tokens == wanted.token_ids


def test_a_window_bounds_what_a_text_of_any_length_holds() -> None:
    model = ARCHITECTURES["mistral"]()
    wanted = reference(model, tokens(0, 30, 256), 200)
    stepper = Stepper(model, page_size=4, num_blocks=12, max_batch_tokens=16)
    request = stepper.add(tokens(0, 30, 256), 200)
    most = 0
    while stepper.core.has_work:
        stepper.step()
        most = max(most, stepper.core.scheduler.cache.num_used_blocks)
    tie = next((i for i, gap in enumerate(wanted.gaps) if gap < 1e-3), 200)
    output = stepper.results()[request.request_id]
    assert output.generated_tokens[:tie] == wanted.token_ids[:tie] and output.num_generated_tokens == 200
    assert tie > 2 * WINDOW
    assert most <= (WINDOW + 16) // 4 + 1


def test_layers_with_windows_share_prefixes(gemma2: PreTrainedModel) -> None:
    """The guide's engine switches prefix caching off here; this one does not."""
    prefix = tokens(1, 48, 256)
    prompts = [prefix + tokens(n, 6, 256) for n in range(2, 5)]
    with running(gemma2) as manager:
        outputs = [collect(manager, [manager.add_request(prompt, max_new_tokens=12)])[0] for prompt in prompts]
    assert [output.cached_tokens for output in outputs] == [0, 48, 48]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.generated_tokens == ref(gemma2, prompt, 12)


def test_streams_beside_requests_that_do_not_stream(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:
        for n in range(1, 7):
            manager.add_request(tokens(n, 9), f"r{n}", max_new_tokens=(n + 1) // 2, streaming=n % 2 == 1)
        for n in range(1, 7):
            outputs = list(manager.request_id_iter(f"r{n}"))
            length = (n + 1) // 2
            seen = range(1, length + 1) if n % 2 else [length]
            expected = ref(tiny, tokens(n, 9), length)
            assert [output.generated_tokens for output in outputs] == [expected[:count] for count in seen]
            assert [output.status == RequestStatus.FINISHED for output in outputs[:-1]] == [False] * (len(outputs) - 1)
            assert outputs[-1].status == RequestStatus.FINISHED


def test_requests_added_together_are_queued_so_that_prefixes_meet(tiny: PreTrainedModel) -> None:
    """In the order of the inputs each would have evicted what the next but one needs."""
    one, two = tokens(1, 64), tokens(2, 64)
    inputs = [[*one, 1], [*two, 2], [*one, 3], [*two, 4]]
    with running(tiny, num_blocks=6) as manager:
        names = manager.add_requests(inputs, max_new_tokens=4)
        assert names is not None
        outputs = collect(manager, names)
    for prompt, output in zip(inputs, outputs, strict=True):
        assert output.generated_tokens == ref(tiny, prompt, 4)
    assert [output.cached_tokens for output in outputs] == [0, 0, 64, 64]


def test_requests_may_come_before_the_start(tiny: PreTrainedModel) -> None:
    manager = engine.init_continuous_batching(tiny, NO_EOS, config())
    early = manager.add_request(tokens(0, 9), max_new_tokens=6)
    manager.start()
    late = manager.add_request(tokens(1, 9), max_new_tokens=6)
    outputs = collect(manager, [str(early), str(late)])
    assert [output.generated_tokens for output in outputs] == [ref(tiny, tokens(n, 9), 6) for n in range(2)]
    manager.destroy()


def test_those_who_were_preempted_go_on_when_the_others_are_cancelled(tiny: PreTrainedModel) -> None:
    stepper = Stepper(tiny, num_blocks=10, safety_margin=0.0, cpu_offload_space=0.01)
    requests = [stepper.add(tokens(n, 30), 60) for n in range(4)]
    while not stepper.core.scheduler.num_preemptions:
        stepper.step()
    waiting = [request for request in requests if request.status == RequestStatus.PENDING]
    assert 0 < len(waiting) < 4
    for request in requests:
        if request not in waiting:
            stepper.cancel(request.request_id)
    stepper.drain()
    for request in waiting:
        output = stepper.results()[request.request_id]
        assert output.generated_tokens == ref(tiny, request.prompt_ids, 60)


def test_logprobs_of_several_sequences_that_lose_their_blocks(tiny: PreTrainedModel) -> None:
    sampled = GenerationConfig(do_sample=True, top_k=0, temperature=1.0, num_return_sequences=3, eos_token_id=-1)
    settings = config(num_blocks=14, safety_margin=0.0, return_logprobs=True, seed=1)
    prompts = [tokens(n, 20) for n in range(3)]
    outputs = engine.generate_batch(tiny, prompts, sampled, settings, max_new_tokens=50)
    assert len({tuple(output.generated_tokens) for output in outputs.values()}) == 9
    for output in outputs.values():
        with torch.inference_mode():
            logits = tiny(torch.tensor([output.prompt_ids + output.generated_tokens])).logits[0, 19:-1]
        wanted = logits.log_softmax(-1)[torch.arange(50), output.generated_tokens]
        torch.testing.assert_close(torch.tensor(output.logprobs), wanted, rtol=0, atol=1e-4)


# Memory


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[list[weakref.ref[torch.Tensor]]]:
    """The tensors of each KV cache that is made, as long as they live."""
    made = []

    def noting(*args: Any, **kwargs: Any) -> KVTensors:
        kv = allocate(*args, **kwargs)
        made.append([weakref.ref(tensor) for tensor in (*kv.keys, *kv.values)])
        return kv

    monkeypatch.setattr(model_runner, "allocate", noting)
    return made


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mistral"])
def test_what_is_planned_is_what_the_tensors_take(
    architecture: str, caches: list[list[weakref.ref[torch.Tensor]]]
) -> None:
    stepper = Stepper(ARCHITECTURES[architecture](), num_blocks=50, cpu_offload_space=0.01)
    settings = stepper.manager.settings
    tensors = [found for tensor in caches[0] if (found := tensor()) is not None]
    assert sum(tensor.nbytes for tensor in tensors) == (50 + RESERVED_BLOCKS) * settings.kv_bytes_per_block
    host: Any = stepper.core.runner._host  # type: ignore[attr-defined]
    assert sum(chunk.nbytes for chunk in host._chunks) == settings.host_slots * settings.kv_bytes_per_block
    staging = STAGINGS * staging_blocks(50 + RESERVED_BLOCKS, settings.host_slots)
    assert sum(each.blocks.nbytes for each in host._stagings) == staging * settings.kv_bytes_per_block
    assert 0.009 < settings.host_slots * settings.kv_bytes_per_block / 2**30 <= 0.01


def test_nothing_is_left_of_requests_that_ended(tiny: PreTrainedModel) -> None:
    def alive() -> int:
        gc.collect()
        return sum(type(each) in (Request, GenerationOutput) for each in gc.get_objects())

    before = alive()
    with running(tiny, num_blocks=40, cpu_offload_space=0.01) as manager:
        for n in range(60):
            manager.add_request(tokens(n, 12), f"r{n}", max_new_tokens=8, streaming=n % 3 == 0)
            if n % 5 == 0:
                manager.cancel_request(f"r{n}")
        outputs = list(manager)
        assert sum(output.is_finished() for output in outputs) == 60
        assert alive() >= before + len(outputs)
        del outputs
        wait_until(lambda: alive() == before)


def test_a_destroyed_manager_gives_its_memory_back(
    tiny: PreTrainedModel, caches: list[list[weakref.ref[torch.Tensor]]]
) -> None:
    manager = engine.init_continuous_batching(tiny, NO_EOS, config())
    manager.start()
    collect(manager, [manager.add_request(tokens(0, 9), max_new_tokens=2)])
    assert all(tensor() is not None for tensor in caches[0])
    manager.destroy()

    def is_gone() -> bool:
        gc.collect()
        return all(tensor() is None for tensor in caches[0])

    wait_until(is_gone)


# Beside others


def test_two_engines_at_once(tiny: PreTrainedModel) -> None:
    models = [tiny, build_tiny(seed=7), tiny]

    def generate(model: PreTrainedModel, seed: int) -> list[list[int]]:
        prompts = [tokens(seed + n, 20) for n in range(4)]
        outputs = engine.generate_batch(model, prompts, NO_EOS, config(), max_new_tokens=40)
        return [output.generated_tokens for output in outputs.values()]

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(generate, models, range(0, 30, 10)))
    for model, seed, generated in zip(models, range(0, 30, 10), found, strict=True):
        assert generated == [ref(model, tokens(seed + n, 20), 40) for n in range(4)]


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_the_callers_gradient_mode(mode: Callable[[], AbstractContextManager[None]], tiny: PreTrainedModel) -> None:
    with mode():
        outputs = engine.generate_batch(tiny, [tokens(0, 9)], NO_EOS, config(), max_new_tokens=6)
        assert torch.is_grad_enabled() == (mode is nullcontext)
    assert outputs["req_0"].generated_tokens == ref(tiny, tokens(0, 9), 6)


def test_a_model_is_trained_while_its_engine_runs(tiny: PreTrainedModel) -> None:
    batch = torch.tensor([tokens(1, 20)])

    def gradients(model: PreTrainedModel) -> list[torch.Tensor]:
        model.train()
        model.zero_grad()
        model(batch, labels=batch).loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    model, other = build_tiny().requires_grad_(True), build_tiny().requires_grad_(True)
    wanted = gradients(other)
    with running(model) as manager:
        manager.add_request(tokens(0, 9), "long", max_new_tokens=200)
        found = gradients(model)
        (output,) = collect(manager, ["long"])
    assert len(found) == len(wanted) == len(list(model.parameters()))
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two)
    assert output.generated_tokens == ref(tiny, tokens(0, 9), 200)
