"""Greedy tokens in float32 equal those of a plain `generate()`, request by request, whatever runs beside them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from transformers import LlamaConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import engine
from engine import GenerationOutput
from tests.harness import NO_EOS, Stepper, config
from tests.models import COUNT, COUNT_IDS, build_random, build_tiny, reference

# Two numerically different paths may part where the runner-up's logit is closer than this; float32 noise is ~1e-4.
TIE = 2e-3


def assert_same(output: GenerationOutput, model: PreTrainedModel, prompt: list[int], n: int) -> int:
    """The output equals the reference up to its first near tie; how many tokens were compared."""
    wanted = reference(model, prompt, n)
    tie = next((i for i, gap in enumerate(wanted.gaps) if gap < TIE), n)
    assert output.error is None
    assert output.num_generated_tokens == n
    assert output.generated_tokens[:tie] == wanted.token_ids[:tie]
    return tie


def mixed(seed: int, count: int, vocab: int, longest: int, most_new: int) -> list[tuple[list[int], int]]:
    """Prompts of 1 to `longest` tokens, a third of them sharing a prefix with others, and 1 to `most_new` new ones."""
    rng = random.Random(seed)
    heads = [[rng.randrange(vocab) for _ in range(longest // 2)] for _ in range(2)]
    requests = []
    for i in range(count):
        length = rng.choice([1, 2, longest, rng.randint(1, longest)])
        prompt = [rng.randrange(vocab) for _ in range(length)]
        if i % 3 == 0 and length > longest // 2:
            prompt[: longest // 2] = rng.choice(heads)
        requests.append((prompt, rng.choice([1, most_new, rng.randint(1, most_new)])))
    return requests


CONFIGS: dict[str, dict[str, Any]] = {
    "plenty": {"page_size": 16, "num_blocks": 1024, "max_batch_tokens": 512},
    "small budget": {"page_size": 32, "num_blocks": 512, "max_batch_tokens": 19},
    "few blocks": {"page_size": 16, "num_blocks": 20, "max_batch_tokens": 64, "safety_margin": 0.0},
    "tiny pages, no sharing": {"page_size": 4, "num_blocks": 100, "max_batch_tokens": 33, "allow_block_sharing": False},
    "huge pages": {"page_size": 256, "num_blocks": 12, "max_batch_tokens": 100},
}


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_random_models(family: str, settings: dict[str, Any]) -> None:
    model = MODELS[family]
    requests = mixed(1, 24, 512, 200, 40)
    stepper = Stepper(model, **settings)
    added = [stepper.add(prompt, n) for prompt, n in requests]
    stepper.drain()
    if settings["num_blocks"] == 20:
        assert stepper.core.scheduler.num_preemptions > 0, "nothing was preempted, so this shows less than it should"
    compared = sum(
        assert_same(stepper.results()[request.request_id], model, prompt, n)
        for request, (prompt, n) in zip(added, requests, strict=True)
    )
    assert compared > 0.9 * sum(n for _, n in requests)


def _shared(**fields: Any) -> dict[str, Any]:
    llama: LlamaConfig = build_tiny().config  # type: ignore[assignment]
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "max_position_embeddings", "initializer_range", "tie_word_embeddings")
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return {name: getattr(llama, name) for name in names} | ids | fields


MODELS: dict[str, PreTrainedModel] = {
    "llama": build_tiny(),
    "qwen2": build_random(Qwen2ForCausalLM, Qwen2Config(**_shared())),
    "qwen3": build_random(Qwen3ForCausalLM, Qwen3Config(**_shared(head_dim=32))),
}


@pytest.mark.parametrize("num_blocks", [400, 40])
def test_smollm2_mixed_requests(smol: PreTrainedModel, num_blocks: int) -> None:
    requests = mixed(2, 7, 49152, 500, 64)
    outputs: dict[str, GenerationOutput] = {}
    stepper = Stepper(smol, page_size=16, num_blocks=num_blocks, max_batch_tokens=256, safety_margin=0.0)
    added = [stepper.add(prompt, n) for prompt, n in requests]
    stepper.drain()
    outputs = stepper.results()
    if num_blocks == 40:
        assert stepper.core.scheduler.num_preemptions > 0
    compared = sum(
        assert_same(outputs[request.request_id], smol, prompt, n)
        for request, (prompt, n) in zip(added, requests, strict=True)
    )
    assert compared > 0.8 * sum(n for _, n in requests)


def test_smollm2_generate_batch(smol: PreTrainedModel, smol_tokenizer: Any) -> None:
    prompt = smol_tokenizer.encode(COUNT)
    outputs = engine.generate_batch(
        smol, [prompt] * 3, NO_EOS, continuous_batching_config=config(), max_new_tokens=len(COUNT_IDS)
    )
    assert [output.generated_tokens for output in outputs.values()] == [COUNT_IDS] * 3
