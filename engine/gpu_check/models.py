"""Models of well-known shapes with random weights, made on the device: nothing is downloaded or copied there.

Used by the stages that run whole models. How long a step takes does not depend on what the weights are.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from engine.gpu_check.floors import ModelCosts

_NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
NAMES = ("qwen3-0.6b", "llama-8b")


def config_of(name: str, small: bool = False) -> PreTrainedConfig:
    """The shape of Qwen3-0.6B or of Llama-3.1-8B; `small`: of their kind, and tiny."""
    if name == "qwen3-0.6b":
        sizes: dict[str, Any] = {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
        }
        fixed: dict[str, Any] = {"max_position_embeddings": 40960, "tie_word_embeddings": True}
        return Qwen3Config(**_NO_TOKENS | fixed | sizes | (_TINY if small else {}))
    sizes = {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    fixed = {"max_position_embeddings": 131072, "tie_word_embeddings": False}
    return LlamaConfig(**_NO_TOKENS | fixed | sizes | (_TINY if small else {}))


def build(name: str, device: torch.device | str, small: bool = False) -> Any:
    """The model in bfloat16, with sdpa."""
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(
            config_of(name, small), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    return model.eval().requires_grad_(False)


def costs_of(model: Any) -> ModelCosts:
    """What a step of a model of `build` reads, counted from its parameters; on the device `meta` too."""
    config, head = model.config, model.get_output_embeddings().weight
    head_numbers = config.head_dim * config.num_hidden_layers
    inputs = model.get_input_embeddings().weight
    read = {id(each): each.numel() for each in model.parameters() if each is not inputs or each is head}
    return ModelCosts(
        weights=sum(read.values()),
        head=head.numel(),
        kv_bytes=2 * config.num_key_value_heads * head_numbers * head.dtype.itemsize,
        query_numbers=config.num_attention_heads * head_numbers,
        dtype_bytes=head.dtype.itemsize,
    )
