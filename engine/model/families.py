"""The decoders that the fused layer knows: how their architectures differ, and what describes one of them.

`recognition.py` makes a `Decoder` of a model, the fused decoder computes it. Knows no kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn


class NotFusedError(NotImplementedError):
    """The model is none of the known decoders; the text says what is unknown about it."""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm: its module, whose weight has `offset` added to it."""

    module: nn.Module
    offset: float

    def weight(self) -> torch.Tensor:
        """Float32 [width], of the parameter that the module has now."""
        weight: torch.Tensor = self.module.weight  # type: ignore[assignment]
        return weight.detach().float() + self.offset


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [first, last) of a linear layer: one projection of several that share a layer, or all of it."""

    linear: nn.Linear
    first: int
    last: int

    def weight(self) -> torch.Tensor:
        """[rows, in_features], of the parameter that the layer has now."""
        return self.linear.weight.detach()[self.first : self.last]

    def bias(self) -> torch.Tensor | None:
        """[rows] or None, likewise."""
        return None if self.linear.bias is None else self.linear.bias.detach()[self.first : self.last]


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer.

    Attributes:
        query, key, value, output, gate, up, down: the projections.
        before_attention, before_mlp: norms of what goes into a block; None: it goes in as it is.
        after_attention, after_mlp: norms of what comes out, before it is added to the residual stream; None: none.
        query_norm, key_norm: of each head, or of all heads at once, before positions are encoded; None: none.
        rope: which of the model's rotary tables encodes positions; None: none does.
        scaling, softcap, window: of attention.
        activation: of the gate.
    """

    query: Rows
    key: Rows
    value: Rows
    output: Rows
    gate: Rows
    up: Rows
    down: Rows
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    query_norm: Norm | None
    key_norm: Norm | None
    rope: str | None
    scaling: float
    softcap: float | None
    window: int | None
    activation: Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole model.

    Attributes:
        family: its name in the table.
        embedding: of tokens; its rows are multiplied by `embedding_scale`.
        head: of logits, whose weight may be the embedding's.
        logits_softcap: logits become softcap * tanh(logit / softcap).
        epsilon: of all norms.
        rotary: makes cosines and sines; see `rotary_lines`.
    """

    family: str
    embedding: nn.Embedding
    embedding_scale: float
    layers: tuple[Layer, ...]
    norm: Norm
    head: nn.Linear
    logits_softcap: float | None
    epsilon: float
    rotary: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def is_tied(self) -> bool:
        return self.head.weight is self.embedding.weight


def rotary_lines(decoder: Decoder, rope: str, positions: torch.Tensor) -> torch.Tensor:
    """Float32 [positions, 2, pairs], cosines and sines by the model's own rotary module; `rope` as `Layer.rope`.

    Raises:
        NotFusedError: not the two halves of a head are turned together.
    """
    like = torch.empty(1, dtype=torch.float32, device=positions.device)
    arguments = (rope,) if rope else ()
    lines = torch.stack(decoder.rotary(like, positions[None], *arguments))[:, 0].float().transpose(0, 1)
    pairs = lines.shape[2] // 2
    if not torch.equal(lines[..., :pairs], lines[..., pairs:]):
        raise NotFusedError(f"{type(decoder.rotary).__name__} does not turn halves of heads")
    return lines[..., :pairs]


# ---- The table


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture of transformers differs from the others.

    Attributes:
        prefix: of its class names; `model` is the class between the head and the layers.
        norms: on which side of attention and MLP they are.
        norm_offset: is added to the weights of all norms.
        head_norms: queries and keys are normed, each head or all heads at once.
        scales_embedding: the embedding is a class of its own, which multiplies.
        joined: queries, keys and values share a projection, and gate and up.
        window: where attention has it from: nowhere, an attribute of its own, or the config.
        softcaps_scores, softcaps_logits: the config says by how much.
        rope: one table for all layers, one for each type of layers, or one that some layers do not use.
    """

    prefix: str
    model: str = ""
    norms: Literal["before", "around", "after"] = "before"
    norm_offset: float = 0.0
    head_norms: bool = False
    scales_embedding: bool = False
    joined: bool = False
    window: Literal["none", "own", "config"] = "none"
    softcaps_scores: bool = False
    softcaps_logits: bool = False
    rope: Literal["one", "by type", "some"] = "one"


FAMILIES = {
    "llama": Family("Llama"),
    "mistral": Family("Mistral", window="config"),
    "qwen2": Family("Qwen2", window="own"),
    "qwen3": Family("Qwen3", window="own", head_norms=True),
    "smollm3": Family("SmolLM3", window="own", rope="some"),
    "gemma": Family("Gemma", norm_offset=1.0, scales_embedding=True),
    "gemma2": Family(
        "Gemma2",
        norms="around",
        norm_offset=1.0,
        scales_embedding=True,
        window="own",
        softcaps_scores=True,
        softcaps_logits=True,
    ),
    "gemma3": Family(
        "Gemma3",
        model="Gemma3TextModel",
        norms="around",
        norm_offset=1.0,
        head_norms=True,
        scales_embedding=True,
        window="own",
        softcaps_logits=True,
        rope="by type",
    ),
    "phi3": Family("Phi3", joined=True, window="config"),
    "olmo2": Family("Olmo2", norms="after", head_norms=True),
}
