"""Managers that a model keeps for its next session: reuse, weights, configs, copies of the model, the end."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

import engine
from engine import ContinuousBatchingManager, RequestStatus, destroy_cached_continuous_batching_manager
from engine.persistent import kept
from tests.harness import NO_EOS, check_whole, collect, config, core_of, tokens
from tests.models import build_tiny, ref


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    model = build_tiny()
    yield model
    destroy_cached_continuous_batching_manager(model)
    assert kept(model) is None


def generate(model: PreTrainedModel, seed: int, n: int = 6, **arguments: Any) -> engine.GenerationOutput:
    arguments = {"generation_config": NO_EOS, "continuous_batching_config": config()} | arguments
    (output,) = engine.generate_batch(model, [tokens(seed, 20)], max_new_tokens=n, **arguments).values()
    return output


def persistent(model: PreTrainedModel) -> ContinuousBatchingManager:
    manager = kept(model)
    assert manager is not None
    return manager


def test_the_next_sessions_use_the_same_engine(model: PreTrainedModel, tiny: PreTrainedModel) -> None:
    assert generate(model, 0, persistent_manager=True).generated_tokens == ref(tiny, tokens(0, 20), 6)
    manager, core = persistent(model), core_of(persistent(model))
    assert not manager.is_running()
    for seed in (1, 0):
        output = generate(model, seed, persistent_manager=True)
        assert output.generated_tokens == ref(tiny, tokens(seed, 20), 6)
        assert output.cached_tokens == 0, "prefixes of an earlier session"
    with engine.continuous_batching_context_manager(model, persistent_manager=True) as reused:
        assert reused is manager and core_of(reused) is core
        (output,) = collect(reused, [str(reused.add_request(tokens(2, 20), max_new_tokens=6))])
        assert output.generated_tokens == ref(tiny, tokens(2, 20), 6)
    assert engine.init_continuous_batching(model) is manager
    check_whole(core)


def test_a_session_that_does_not_keep_it_destroys_it(model: PreTrainedModel, tiny: PreTrainedModel) -> None:
    generate(model, 0, persistent_manager=True)
    manager = persistent(model)
    assert generate(model, 1).generated_tokens == ref(tiny, tokens(1, 20), 6)
    assert kept(model) is None
    with pytest.raises(RuntimeError, match="destroyed"):
        manager.start()


def test_weights_written_between_sessions_count(model: PreTrainedModel) -> None:
    other = build_tiny(seed=1)
    generate(model, 0, persistent_manager=True)
    with torch.no_grad():
        for parameter, new in zip(model.parameters(), other.parameters(), strict=True):
            parameter.copy_(new)
    output = generate(model, 0, persistent_manager=True)
    assert output.generated_tokens == ref(other, tokens(0, 20), 6)


def test_another_generation_config_counts(model: PreTrainedModel, tiny: PreTrainedModel) -> None:
    prompt = tokens(0, 20)
    plain = ref(tiny, prompt, 20)
    generate(model, 0, persistent_manager=True)
    cut = next(i for i in range(3, 20) if plain[i] not in plain[:i])
    stopping = GenerationConfig(do_sample=False, eos_token_id=plain[cut])
    for generation_config in (stopping, None):  # None leaves it as it is
        output = generate(model, 0, 20, persistent_manager=True, generation_config=generation_config)
        assert output.generated_tokens == plain[: cut + 1]
    assert generate(model, 0, 20, persistent_manager=True).generated_tokens == plain


def test_another_engine_config_is_named_in_a_warning(
    model: PreTrainedModel, tiny: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        generate(model, 0, persistent_manager=True)
        assert "sized for the 1 requests of this call" in caplog.text
        caplog.clear()
        engine.init_continuous_batching(model, NO_EOS, config())
        engine.init_continuous_batching(model, NO_EOS)
        assert not caplog.records
        output = generate(
            model, 1, persistent_manager=True, continuous_batching_config=config(page_size=32, return_logprobs=True)
        )
    assert output.generated_tokens == ref(tiny, tokens(1, 20), 6)
    (record,) = (record for record in caplog.records if "keeps its own" in record.message)
    assert "page_size=16" in record.message and "return_logprobs=False" in record.message
    assert "num_blocks" not in record.message and "destroy_cached_continuous_batching_manager" in record.message


def test_copies_and_pickles_of_the_model_do_without_it(model: PreTrainedModel, tiny: PreTrainedModel) -> None:
    generate(model, 0, persistent_manager=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert kept(other) is None
        assert generate(other, 1).generated_tokens == ref(tiny, tokens(1, 20), 6)
    assert b"convoy_manager" not in pickle.dumps(model.state_dict()) and b"engine." not in pickle.dumps(model)
    assert model.state_dict().keys() == tiny.state_dict().keys()


def test_a_manager_that_runs_is_left_to_its_owner(model: PreTrainedModel, tiny: PreTrainedModel) -> None:
    generate(model, 0, persistent_manager=True)
    with engine.continuous_batching_context_manager(model, persistent_manager=True) as manager:
        manager.add_request(tokens(5, 20), "mine", max_new_tokens=4)
        assert generate(model, 1).generated_tokens == ref(tiny, tokens(1, 20), 6)
        assert manager.is_running()
        (mine,) = collect(manager, ["mine"])
        assert mine.generated_tokens == ref(tiny, tokens(5, 20), 4)
        assert generate(model, 2, persistent_manager=True).generated_tokens == ref(tiny, tokens(2, 20), 6)
        assert manager.is_running() and kept(model) is manager
    assert persistent(model) is manager


def test_results_left_from_a_session_are_not_mixed_into_a_batch(model: PreTrainedModel, tiny: PreTrainedModel) -> None:
    with engine.continuous_batching_context_manager(
        model, NO_EOS, continuous_batching_config=config(), persistent_manager=True
    ) as manager:
        left = str(manager.add_request(tokens(7, 9), max_new_tokens=3))
    prompts = [tokens(0, 20), tokens(1, 20)]
    outputs = engine.generate_batch(model, prompts, NO_EOS, max_new_tokens=6, persistent_manager=True)
    assert [output.generated_tokens for output in outputs.values()] == [ref(tiny, prompt, 6) for prompt in prompts]
    assert left not in outputs
    (output,) = collect(manager, [left])
    assert output.generated_tokens == ref(tiny, tokens(7, 9), 3)


def test_stop_keeps_it_and_destroy_lets_it_go(model: PreTrainedModel, tiny: PreTrainedModel) -> None:
    manager = engine.init_continuous_batching(model, NO_EOS, config())
    manager.start()
    manager.stop(keep_for_next_session=True)
    assert persistent(model) is manager
    second = ContinuousBatchingManager(model, NO_EOS, config())
    second.start()
    second.stop(keep_for_next_session=True)
    assert persistent(model) is second
    with pytest.raises(RuntimeError, match="destroyed"):
        manager.start()
    second.destroy()
    assert kept(model) is None
    destroy_cached_continuous_batching_manager(model)


def test_one_whose_engine_failed_is_not_used_again(model: PreTrainedModel, tiny: PreTrainedModel) -> None:
    generate(model, 0, persistent_manager=True)
    broken = persistent(model)

    def step() -> Any:
        raise OSError("out of order")

    core_of(broken).step = step  # type: ignore[method-assign]
    failed = generate(model, 1, persistent_manager=True)
    assert failed.status == RequestStatus.FAILED and "out of order" in (failed.error or "")
    assert generate(model, 1, persistent_manager=True).generated_tokens == ref(tiny, tokens(1, 20), 6)
    assert persistent(model) is not broken
