"""`num_return_sequences`: several answers to one prompt, each a request with a seed of its own."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig, PreTrainedModel

import engine
from engine import GenerationOutput, RequestStatus
from tests.conftest import wait_limit
from tests.harness import NO_EOS, collect, config, running, tokens
from tests.models import ref

SAMPLED = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1)


def names(request_id: str, n: int) -> list[str]:
    return [request_id, *(f"{request_id}__child#{i}" for i in range(n - 1))]


def test_the_ids_are_the_requests_and_its_children(tiny: PreTrainedModel) -> None:
    prompt = tokens(0, 40)
    with running(tiny) as manager:
        assert manager.add_request(prompt, "x", max_new_tokens=6, num_return_sequences=3) == "x"
        outputs = collect(manager, names("x", 3))
        assert [output.generated_tokens for output in outputs] == [ref(tiny, prompt, 6)] * 3
        assert all(output.prompt_ids == prompt for output in outputs)
        assert sum(output.cached_tokens > 0 for output in outputs) == 2, "the prompt is computed once"
        with pytest.raises(KeyError):
            manager.get_result("x__child#2")


def test_iteration_gives_each_sequence_once(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:
        ids = manager.add_requests([tokens(i, 6) for i in range(3)], max_new_tokens=4, num_return_sequences=2)
        assert ids == ["req_0", "req_1", "req_2"]
        found = [output.request_id for output in manager]
        assert sorted(found) == sorted(name for request_id in ids for name in names(request_id, 2))


def test_each_sequence_is_streamed_under_its_own_id(tiny: PreTrainedModel) -> None:
    with running(tiny, SAMPLED) as manager:
        manager.add_request(tokens(0, 6), "x", max_new_tokens=12, num_return_sequences=2, streaming=True, seed=1)
        streams = {name: list(manager.request_id_iter(name)) for name in names("x", 2)}
        for name, stream in streams.items():
            assert [output.request_id for output in stream] == [name] * 12
            assert [output.num_generated_tokens for output in stream] == list(range(1, 13))
        first, second = (stream[-1].generated_tokens for stream in streams.values())
        assert first != second


def test_O13_two_sequences_of_one_seed_differ_and_repeat(tiny: PreTrainedModel) -> None:
    prompt = tokens(13, 12)
    with running(tiny, SAMPLED, per_request_processors=True, max_batch_tokens=64) as manager:

        def generate(**arguments: Any) -> list[list[int]]:
            request_id = str(manager.add_request(prompt, max_new_tokens=32, **arguments))
            found = collect(manager, names(request_id, arguments.get("num_return_sequences", 1)))
            return [output.generated_tokens for output in found]

        (alone,) = generate(seed=7)
        pair = generate(seed=7, num_return_sequences=2)
        assert pair[0] == alone != pair[1]
        others = manager.add_requests([tokens(i, 20 + i) for i in range(6)], max_new_tokens=20, temperature=2.0)
        assert generate(seed=7, num_return_sequences=2) == pair
        assert generate(seed=7, num_return_sequences=4)[:2] == pair
        unseeded = generate(num_return_sequences=2)
        assert unseeded[0] != unseeded[1]
        collect(manager, others or [])


def test_generate_batch_gives_the_first_sequence_then_its_siblings(tiny: PreTrainedModel) -> None:
    prompts = [tokens(0, 9), [], tokens(1, 12)]
    counted = GenerationConfig(do_sample=True, top_k=1, eos_token_id=-1, num_return_sequences=2)
    for generation_config, arguments in ((counted, {}), (NO_EOS, {"num_return_sequences": 2})):
        outputs = engine.generate_batch(
            tiny, prompts, generation_config, continuous_batching_config=config(), max_new_tokens=5, **arguments
        )
        assert list(outputs) == names("req_0", 2) + names("req_1", 2) + names("req_2", 2)
        for i, prompt in enumerate(prompts):
            for name in names(f"req_{i}", 2):
                if prompt:
                    assert outputs[name].generated_tokens == ref(tiny, prompt, 5)
                else:
                    assert outputs[name].status == RequestStatus.FAILED and "empty" in (outputs[name].error or "")
    outputs = engine.generate_batch(
        tiny, prompts[:1], counted, continuous_batching_config=config(), max_new_tokens=5, num_return_sequences=1
    )
    assert list(outputs) == ["req_0"]


@pytest.mark.parametrize("state", ["waiting", "running", "first finished"])
def test_O25_cancelling_the_request_cancels_every_sequence(tiny: PreTrainedModel, state: str) -> None:
    with running(tiny, max_requests_per_batch=3 if state == "waiting" else 8, max_batch_tokens=8) as manager:
        others = [str(manager.add_request(tokens(i, 6), max_new_tokens=60)) for i in range(3)]
        first, second = names("x", 2)
        plain = ref(tiny, tokens(25, 30), 150)
        manager.add_request(tokens(25, 30), "x", max_new_tokens=150, streaming=True, num_return_sequences=2)
        done: list[GenerationOutput] = []
        if state == "running":
            for name in (first, second):
                assert next(manager.request_id_iter(name)).generated_tokens == plain[:1]
        if state == "first finished":
            manager.cancel_request(second)
            done = collect(manager, [second])
        for _ in range(2):
            manager.cancel_request("x")
        for output in [*done, *collect(manager, [first] if done else [first, second])]:
            assert output.status == RequestStatus.CANCELLED
            assert output.generated_tokens == plain[: output.num_generated_tokens]
        for i, output in enumerate(collect(manager, others)):
            assert output.generated_tokens == ref(tiny, tokens(i, 6), 60)
        manager.cancel_request("x")
        for name in (first, second):
            with pytest.raises(KeyError):
                manager.get_result(name, timeout=0)


def test_O25_cancelling_one_sequence_leaves_the_others(tiny: PreTrainedModel) -> None:
    prompt = tokens(3, 10)
    with running(tiny) as manager:
        manager.add_request(prompt, "x", max_new_tokens=100, num_return_sequences=3)
        manager.cancel_request("x__child#0")
        first, child, other = collect(manager, names("x", 3))
        assert child.status == RequestStatus.CANCELLED
        assert first.generated_tokens == other.generated_tokens == ref(tiny, prompt, 100)


def test_siblings_that_outlive_the_first_end_with_its_id(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:
        manager.add_request(tokens(0, 8), "x", max_new_tokens=200, num_return_sequences=2)
        manager.add_request(tokens(0, 8), "y", max_new_tokens=200)
        with manager.pause():
            first = next(r for r in manager._build().scheduler.live() if r.request_id == "x")
            manager._loop._publish([manager._build().cancel(first.request_id)])  # type: ignore[list-item]
            with pytest.raises(ValueError, match="'x' is in use"):
                manager.add_request([1], "x")
        manager.cancel_request("x")
        (child,) = collect(manager, ["x__child#0"])
        assert child.status == RequestStatus.CANCELLED
        collect(manager, ["x", "y"])
        manager.add_request([1, 2], "x", max_new_tokens=1)
        collect(manager, ["x"])


@pytest.mark.parametrize("bad", [0, -1, 1.5, "2", True])
def test_a_number_of_sequences_that_is_none_is_refused(tiny: PreTrainedModel, bad: Any) -> None:
    with running(tiny) as manager, pytest.raises(ValueError, match="num_return_sequences is"):
        manager.add_request([1, 2], num_return_sequences=bad)
    with pytest.raises(ValueError, match="num_return_sequences is"):
        engine.generate_batch(tiny, [[1, 2]], NO_EOS, continuous_batching_config=config(), num_return_sequences=bad)


def test_sequences_share_an_output_prefix_when_resumed(tiny: PreTrainedModel) -> None:
    prompt = tokens(0, 8)
    whole = ref(tiny, prompt, 20)
    with running(tiny) as manager:
        manager.add_request(prompt, "x", max_new_tokens=20, output_ids=whole[:7], num_return_sequences=2)
        for output in collect(manager, names("x", 2), seconds=wait_limit(10)):
            assert output.generated_tokens == whole


@pytest.mark.parametrize("length", [1, 16, 17, 33])
def test_sequences_whose_prompt_leaves_one_token_to_compute(tiny: PreTrainedModel, length: int) -> None:
    """A prompt of one token, and prompts of which all but one token are cached the second time."""
    prompt = tokens(7, length)
    with running(tiny) as manager:
        for _ in range(2):
            first = manager.add_request(prompt, max_new_tokens=6, num_return_sequences=3)
            ids = [first, f"{first}__child#0", f"{first}__child#1"]
            for output in collect(manager, ids):
                assert output.generated_tokens == ref(tiny, prompt, 6)
