"""The shadow: the same tensors, another config, and a user's model that notices nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.model.shadow import make_shadow, model_facts
from tests.models import build_tiny

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def build(architecture: str, **fields: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(architecture, **SIZES | fields)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


@pytest.fixture
def fresh_tiny() -> PreTrainedModel:
    return build_tiny()


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def test_tensors_are_the_same_objects(fresh_tiny: PreTrainedModel) -> None:
    shadow = make_shadow(fresh_tiny)
    mine, theirs = tensors_of(shadow), tensors_of(fresh_tiny)
    assert mine.keys() == theirs.keys() and theirs
    assert all(mine[name] is theirs[name] for name in theirs)
    assert not {id(module) for module in shadow.modules()} & {id(module) for module in fresh_tiny.modules()}


def test_tied_weights_stay_tied() -> None:
    model = build_tiny(tie_word_embeddings=True)
    shadow: Any = make_shadow(model)
    assert shadow.lm_head.weight is shadow.model.embed_tokens.weight is model.lm_head.weight


def test_users_model_is_untouched(fresh_tiny: PreTrainedModel) -> None:
    """Its config, mode and plain forward with a padding mask are the same while the shadow lives."""
    fresh_tiny.train()
    ids = torch.randint(0, 512, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    config, logits = copy.deepcopy(fresh_tiny.config), fresh_tiny(input_ids=ids, attention_mask=mask).logits
    shadow = make_shadow(fresh_tiny)
    assert not shadow.training and all(not module.training for module in shadow.modules())
    assert all(module.training for module in fresh_tiny.modules())
    assert fresh_tiny.config.to_dict() == config.to_dict()
    assert {module.config._attn_implementation for module in fresh_tiny.modules() if hasattr(module, "config")} == {
        config._attn_implementation
    }
    assert torch.equal(fresh_tiny(input_ids=ids, attention_mask=mask).logits, logits)


def test_weight_updates_in_place_are_seen(fresh_tiny: PreTrainedModel) -> None:
    shadow: Any = make_shadow(fresh_tiny)
    with torch.no_grad():
        fresh_tiny.lm_head.weight.mul_(2)
    assert torch.equal(shadow.lm_head.weight, fresh_tiny.lm_head.weight)
    fresh_tiny.load_state_dict({name: torch.zeros_like(t) for name, t in fresh_tiny.state_dict().items()})
    assert not shadow.lm_head.weight.any()


def test_facts(tiny: PreTrainedModel) -> None:
    facts = model_facts(make_shadow(tiny))
    assert facts == model_facts(tiny)
    assert (facts.num_layers, facts.num_heads, facts.num_kv_heads, facts.head_dim) == (4, 4, 2, 16)
    assert (facts.dtype_bytes, facts.context_length, facts.vocab_size, facts.device_type) == (4, 256, 512, "cpu")
    assert facts.windows == (None,) * 4


def test_facts_of_a_model_with_more_embedding_rows_than_its_config_says() -> None:
    model = build_tiny()
    model.get_input_embeddings().weight = nn.Parameter(torch.zeros(640, 64))
    assert model_facts(model).vocab_size == 640


def test_facts_of_gpt2_which_names_its_sizes_differently() -> None:
    facts = model_facts(build("gpt2"))
    assert (facts.num_layers, facts.num_heads, facts.num_kv_heads, facts.head_dim) == (2, 4, 4, 8)
    assert facts.context_length == 128


@pytest.mark.parametrize(
    ("architecture", "fields", "named"),
    [
        ("mistral", {"sliding_window": 16}, "sliding_attention"),
        ("gemma2", {"head_dim": 8, "num_key_value_heads": 2}, "sliding_attention"),
        ("gpt_oss", {"head_dim": 8, "num_key_value_heads": 2}, "sliding_attention"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
    ],
)
def test_what_is_not_supported_is_named(architecture: str, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(NotImplementedError, match=named):
        model_facts(build(architecture, **fields))


def test_weights_that_are_not_loaded() -> None:
    with torch.device("meta"):
        model = build("llama")
    with pytest.raises(ValueError, match="not loaded"):
        model_facts(model)
