"""The engine's own copy of a model's modules over the same tensors, and the facts of a model that the engine needs.

Called when an engine is built. The user's model is only read: its config, its attention implementation and its mode
stay as they are, and what is written in place into its weights is seen by the copy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from engine.distributed.sharding import local_kv_heads, rebind_forwards, shared_parts
from engine.model.attention import ATTENTION_NAME, register_attention
from engine.settings import ModelFacts

_FULL_ATTENTION = "full_attention"
# Their frequencies depend on the longest position of a forward pass, so that one request would change another's.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


def make_shadow(model: PreTrainedModel) -> nn.Module:
    """Copies the modules and the config of `model`; parameters and buffers stay the same tensors.

    Replacing a parameter of `model` by another object (not: writing into it) is not seen by the copy.

    Returns:
        The copy in eval mode, whose layers call the engine's attention function.
    """
    register_attention()
    shared = [*model.parameters(), *model.buffers(), *shared_parts(model)]
    copies: dict[int, Any] = {id(part): part for part in shared}
    shadow: nn.Module = copy.deepcopy(model, copies)
    rebind_forwards(shadow, copies)
    for module in shadow.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and config._attn_implementation != ATTENTION_NAME:
            config._attn_implementation = ATTENTION_NAME
    return shadow.eval()


def model_facts(model: nn.Module) -> ModelFacts:
    """What sizes and plans depend on.

    Raises:
        NotImplementedError: an attention type, a position encoding or a placement that the engine cannot run.
        ValueError: the weights are not loaded.
    """
    config: Any = model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
    if getattr(config, "is_encoder_decoder", False):
        raise NotImplementedError(f"{type(model).__name__} is an encoder-decoder model; only decoders are supported")
    for rope_type in _rope_types(config):
        if rope_type in _BATCH_DEPENDENT_ROPE:
            raise NotImplementedError(f"rope_type {rope_type!r} of {type(model).__name__} is not supported yet")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise NotImplementedError(f"the model lies on {len(devices)} devices ({devices}); it must lie on one")
    (device,) = devices
    if device.type == "meta":
        raise ValueError("the model's weights are not loaded (device meta)")
    dtype: torch.dtype = model.dtype  # type: ignore[assignment]
    num_heads = config.num_attention_heads
    return ModelFacts(
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=local_kv_heads(model, getattr(config, "num_key_value_heads", None) or num_heads),
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        dtype_bytes=dtype.itemsize,
        context_length=getattr(config, "max_position_embeddings", None),
        vocab_size=model.get_input_embeddings().weight.shape[0],  # type: ignore[operator]
        device_type=device.type,
        windows=_windows(model, config),
        device_index=device.index,
    )


def _windows(model: nn.Module, config: Any) -> tuple[int | None, ...]:
    """The attention window of each layer.

    Raises:
        NotImplementedError: another type than full attention, named.
    """
    types = getattr(config, "layer_types", None)
    if types is None:
        windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        types = ["sliding_attention" if windowed else _FULL_ATTENTION] * config.num_hidden_layers
    others = sorted(set(types) - {_FULL_ATTENTION})
    if others:
        raise NotImplementedError(
            f"{type(model).__name__} has layers of type {', '.join(others)}; only {_FULL_ATTENTION} is supported yet"
        )
    return (None,) * len(types)


def _rope_types(config: Any) -> Iterator[str]:
    """The rope types that a config names, in one dict or in one dict a layer type."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(config, name, None) or {}
        for entry in (rope, *(value for value in rope.values() if isinstance(value, dict))):
            yield str(entry.get("rope_type", entry.get("type", "default")))
