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


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("architecture", "fields", "windows"),
    [
        ("mistral", {"sliding_window": 16}, (16,) * 4),
        ("mistral", {"sliding_window": None}, (None,) * 4),
        ("mixtral", {"sliding_window": 7}, (7,) * 4),
        ("phi3", {"sliding_window": 16}, (16,) * 4),
        ("starcoder2", {"sliding_window": 16}, (16,) * 4),
        ("qwen2", {"sliding_window": 16}, (None,) * 4),  # use_sliding_window is off by default
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 16)),
        ("qwen3", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}, (16,) * 4),
        ("gemma2", {"sliding_window": 16}, (16, None, 16, None)),
        ("gemma3_text", {"sliding_window": 16, "num_hidden_layers": 6}, (16,) * 5 + (None,)),
        ("gpt_oss", {"sliding_window": 16}, (16, None, 16, None)),
        ("cohere2", {"sliding_window": 16}, (16, 16, 16, None)),
        ("olmo3", {"sliding_window": 16}, (16, 16, 16, None)),
        ("exaone4", {"sliding_window": 16}, (16, 16, 16, None)),
        ("gemma2", {"sliding_window": 16, "layer_types": [FULL, FULL, FULL, SLIDING]}, (None, None, None, 16)),
        ("llama", {"sliding_window": 16}, (None,) * 4),  # a field that the architecture does not have
    ],
)
def test_windows(architecture: str, fields: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    fields = {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 8, **fields}
    assert model_facts(build(architecture, **fields)).windows == windows


def test_a_window_set_on_the_config_before_loading_counts() -> None:
    config = AutoConfig.for_model("gemma2", **SIZES, head_dim=8, num_key_value_heads=2)
    config.sliding_window = 24
    assert model_facts(AutoModelForCausalLM.from_config(config)).windows == (24, None)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("architecture", "fields", "length"),
    [
        ("llama", {}, 128),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, 128),
        ("phi3", {"original_max_position_embeddings": 96, "rope_parameters": LONGROPE}, 96),
    ],
)
def test_the_context_ends_where_rotary_frequencies_would_change(
    architecture: str, fields: dict[str, Any], length: int
) -> None:
    assert model_facts(build(architecture, **fields)).context_length == length


def test_rotary_frequencies_that_a_forward_writes_are_not_shared() -> None:
    model: Any = build("phi3", original_max_position_embeddings=96, rope_parameters=LONGROPE)
    shadow: Any = make_shadow(model)
    before = shadow.model.rotary_emb.inv_freq.clone()
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 100, dtype=torch.long))  # beyond 96: the long frequencies
    assert not torch.equal(model.model.rotary_emb.inv_freq, before)
    assert torch.equal(shadow.model.rotary_emb.inv_freq, before)


def test_a_context_that_is_cut_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    make_shadow(build("phi3", original_max_position_embeddings=96, rope_parameters=LONGROPE))
    (record,) = caplog.records
    assert "96 positions instead of 128" in record.getMessage()
    make_shadow(build("llama"))
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("architecture", "fields", "named"),
    [
        ("qwen3_5_text", {"num_hidden_layers": 4}, "linear_attention.*recurrent state"),
        ("lfm2", {"layer_types": ["conv", FULL], "num_key_value_heads": 2}, "conv.*convolution"),
        ("llama4_text", {"num_hidden_layers": 4, "num_local_experts": 2}, "chunked_attention.*fixed borders"),
        (
            "gemma4_text",
            {"num_key_value_heads": 2, "vocab_size_per_layer_input": 64},
            "head_dim differs between layers",
        ),
        ("bart", {"d_model": 32, "decoder_layers": 2}, "BartForCausalLM does not take position_ids"),
        ("roberta", {"is_decoder": True}, "from the padding token's id"),
    ],
)
def test_what_is_not_supported_is_named(architecture: str, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(NotImplementedError, match=named):
        model_facts(build(architecture, **fields))


def test_an_encoder_decoder_is_refused() -> None:
    model = build_tiny()
    model.config.is_encoder_decoder = True
    with pytest.raises(NotImplementedError, match="encoder-decoder"):
        model_facts(model)


def test_weights_that_are_not_loaded() -> None:
    with torch.device("meta"):
        model = build("llama")
    with pytest.raises(ValueError, match="not loaded"):
        model_facts(model)
