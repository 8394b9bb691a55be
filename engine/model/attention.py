"""The attention function that the shadow's layers call, and the step context that reaches it.

Registered with transformers under `ATTENTION_NAME`. A layer's call writes its K/V to the cache, then attends; both are
the device's ops. The context travels as a keyword argument through the model's forward, so nothing here is global.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from engine.ops.interface import Ops

ATTENTION_NAME = "convoy"
CONTEXT_ARGUMENT = "convoy_step"

# What some models' forward hands through to attention and what has no meaning there.
_MEANINGLESS = {
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "use_cache",
}
# Models whose layers do not pass the window that their mask has.
_WINDOW_IN_THE_MASK_ALONE = ("phimoe", "qwen2_moe")


@dataclass(slots=True)
class StepContext:
    """What one forward pass needs in every attention layer.

    Attributes:
        ops: the device's operations, bound to its cache.
        plan: what `ops.plan` made of the step's rows.
        layers: attention layers that ran so far.
    """

    ops: Ops
    plan: Any
    layers: int = 0


def register_attention() -> None:
    """Makes `ATTENTION_NAME` known to transformers; harmless when repeated."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    convoy_step: StepContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of packed rows over the paged cache.

    Args:
        query: [1, heads, tokens, head_dim]; `key` and `value`: [1, kv_heads, tokens, head_dim].
        attention_mask: must be None; rows are kept apart by the plan.
        scaling: factor of the scores; None means head_dim ** -0.5.
        dropout: ignored, the shadow never trains.
        softcap: scaled scores become softcap * tanh(score / softcap).
        s_aux: [heads], one more score per head in the softmax.
        sliding_window: must be the window that the engine planned for the layer.
        is_causal: must not be False.

    Returns:
        [1, tokens, heads, head_dim] and None in the place of attention weights.

    Raises:
        NotImplementedError: the layer asks for something that the ops do not compute.
    """
    if convoy_step is None:
        raise NotImplementedError(
            f"{type(module).__name__} does not hand the forward's keyword arguments to its attention function, "
            "so the engine cannot run this architecture"
        )
    for name, given in kwargs.items():
        if given is not None and name not in _MEANINGLESS:
            raise NotImplementedError(f"{type(module).__name__} wants attention with {name}; this is not supported")
    if attention_mask is not None:
        raise NotImplementedError(f"{type(module).__name__} makes an attention mask of its own; this is not supported")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise NotImplementedError(f"{type(module).__name__} lets tokens see later ones; this is not supported")
    ops, plan = convoy_step.ops, convoy_step.plan
    if (key.shape[1], key.shape[3]) != ops.kv_shape or value.shape != key.shape:
        raise NotImplementedError(
            f"{type(module).__name__} has K of {key.shape[1]} heads x {key.shape[3]} and V of {value.shape[1]} x "
            f"{value.shape[3]}; K and V of every layer must be {ops.kv_shape[0]} x {ops.kv_shape[1]}"
        )
    layer = getattr(module, "layer_idx", None)
    if layer != convoy_step.layers:
        raise NotImplementedError(
            f"{type(module).__name__} number {layer} runs where layer {convoy_step.layers} should; every layer must "
            "run once and in order"
        )
    convoy_step.layers += 1
    if (sliding_window or None) != ops.window(layer) and not _is_silent(module):
        raise NotImplementedError(
            f"layer {layer} of {type(module).__name__} has sliding_window={sliding_window}, but {ops.window(layer)} by "
            "the model's config; the engine cannot tell which of them holds"
        )
    ops.write_kv(layer, key[0], value[0], plan)
    out = ops.attend(layer, query[0].transpose(0, 1), key[0], value[0], plan, scaling, softcap, s_aux)
    return out.unsqueeze(0), None


def _is_silent(module: nn.Module) -> bool:
    return getattr(getattr(module, "config", None), "model_type", None) in _WINDOW_IN_THE_MASK_ALONE
