"""Tiny random models of many architectures, for tests that compare the engine with plain transformers.

`ARCHITECTURES` maps a name to a function that builds the model anew, in float32, always with the same weights. Windows
are 16 tokens, so that short tests cross them. Seeds are chosen so that greedy outputs vary and have no near ties.
Knows nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tests.models import build_random

WINDOW = 16
VOCAB = 256

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_HEADS: dict[str, Any] = {"head_dim": 16}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}


def build(model_type: str, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """A small random model of a type that transformers knows; `fields` override those of its config."""
    config = AutoConfig.for_model(model_type, **_SIZES | fields)
    model = build_random(AutoModelForCausalLM._model_mapping[type(config)], config, seed)
    if getattr(config, "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # up to transformers 5.17 sdpa leaves it out
    return model


ARCHITECTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": partial(build, "llama", seed=3),
    "mistral": partial(build, "mistral", sliding_window=WINDOW),
    "qwen2": partial(build, "qwen2", seed=4, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
    "qwen2_moe": partial(
        build,
        "qwen2_moe",
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=3,
        shared_expert_intermediate_size=32,
        **_EXPERTS,
    ),
    "qwen3": partial(build, "qwen3", **_HEADS),
    "qwen3_moe": partial(build, "qwen3_moe", **_HEADS, **_EXPERTS),
    "mixtral": partial(build, "mixtral", sliding_window=WINDOW, **_LOCAL_EXPERTS),
    "gemma2": partial(build, "gemma2", seed=4, sliding_window=WINDOW, attn_logit_softcapping=5.0, **_HEADS),
    "gemma3": partial(build, "gemma3_text", seed=2, sliding_window=WINDOW, num_hidden_layers=6, **_HEADS),
    "phi3": partial(build, "phi3", sliding_window=WINDOW),
    "phi3_partial": partial(build, "phi3", seed=4, sliding_window=None, partial_rotary_factor=0.5),
    "olmo2": partial(build, "olmo2", seed=4),
    "olmo3": partial(build, "olmo3", sliding_window=WINDOW),
    "gpt_neox": partial(build, "gpt_neox", num_key_value_heads=4, rotary_pct=0.5),
    "gpt_oss": partial(build, "gpt_oss", sliding_window=WINDOW, **_HEADS, **_LOCAL_EXPERTS),
    "starcoder2": partial(build, "starcoder2", sliding_window=WINDOW),
    "cohere2": partial(build, "cohere2", seed=1, sliding_window=WINDOW, logit_scale=1.0),
    "granite": partial(build, "granite", attention_multiplier=0.25),
    "glm": partial(build, "glm", seed=2, **_HEADS),
}


def _build_vision(model_type: str, text: dict[str, Any], vision: dict[str, Any]) -> PreTrainedModel:
    """A small model that takes images too; ids of images are outside of what tests use as text."""
    tokens = {"image_token_id": VOCAB - 1, "image_token_index": VOCAB - 1, "video_token_id": VOCAB - 2}
    config = AutoConfig.for_model(model_type, text_config=_SIZES | text, vision_config=vision, **tokens)
    return build_random(AutoModelForImageTextToText._model_mapping[type(config)], config)


_SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_PATCHES: dict[str, Any] = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}

VISION: dict[str, Callable[[], PreTrainedModel]] = {
    "gemma3_vision": partial(
        _build_vision, "gemma3", {"sliding_window": WINDOW, "num_hidden_layers": 6, **_HEADS}, _SIGLIP
    ),
    "llava": partial(_build_vision, "llava", {"model_type": "llama"}, _SIGLIP),
    "qwen2_5_vl": partial(
        _build_vision,
        "qwen2_5_vl",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
        _PATCHES | {"out_hidden_size": 64, "fullatt_block_indexes": [0]},
    ),
}
