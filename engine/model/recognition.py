"""Tells whether a model is one of the known decoders, and reads off its modules what it computes.

`describe` is called by the fused decoder's maker, on a shadow. It recognises a model only if every module is of the
very class that the table names, with the children and attributes that were known when this was written; whatever else
a model may have changes what it computes, and leaves it to transformers' own forward.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig

from engine.distributed.sharding import tensor_parallel_mesh
from engine.model.families import FAMILIES, Decoder, Family, Layer, Norm, NotFusedError, Rows

_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh", "gelu"]] = {
    "SiLUActivation": "silu",
    "GELUTanh": "gelu_tanh",
    "GELUActivation": "gelu",
}
_NORM_NAMES = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "after": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
}
_ATTRIBUTES = {
    "attention": "config head_dim is_causal layer_idx layer_type num_key_value_groups num_key_value_heads scaling "
    "sliding_window is_sliding attn_logit_softcapping use_rope attention_dropout",
    "layer": "config hidden_size layer_idx",
    "mlp": "config hidden_size intermediate_size",
    "norm": "eps variance_epsilon",
    "rotary": "attention_scaling config layer_types max_seq_len_cached original_max_seq_len rope_type "
    "sliding_attention_attention_scaling full_attention_attention_scaling",
    "embedding": "embedding_dim max_norm norm_type num_embeddings padding_idx scalar_embed_scale scale_grad_by_freq "
    "sparse",
}
# Fields of configs whose meaning the families know, or that mean nothing in a forward pass without a cache and dropout.
_FIELDS = """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    hidden_act hidden_activation max_position_embeddings original_max_position_embeddings initializer_range rms_norm_eps
    use_cache pad_token_id bos_token_id eos_token_id pretraining_tp tie_word_embeddings rope_parameters attention_bias
    attention_dropout mlp_bias sliding_window use_sliding_window max_window_layers layer_types no_rope_layers
    no_rope_layer_interval query_pre_attn_scalar final_logit_softcapping attn_logit_softcapping resid_pdrop
    embd_pdrop use_bidirectional_attention
"""
_MODULE_ATTRIBUTES = frozenset({*vars(nn.Module()), "_is_hf_initialized"})


def describe(model: nn.Module, dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16)) -> Decoder:
    """What a model computes, if it is one of the known decoders, whole, on one device, in one of `dtypes`.

    Raises:
        NotFusedError: it is not.
    """
    name = type(model).__module__.rpartition(".modeling_")[2]
    family = FAMILIES.get(name)
    if family is None:
        raise NotFusedError(f"{type(model).__name__} is not among the decoders that are known")
    _check_parameters(model, dtypes)
    config: Any = model.config
    return _Reader(name, family, getattr(config, "rms_norm_eps", None)).decoder(model)


class _Reader:
    """Reads one model, and checks on the way that it has what its family has and nothing else."""

    def __init__(self, name: str, family: Family, epsilon: Any) -> None:
        self._name, self._family, self._epsilon = name, family, epsilon

    def decoder(self, model: nn.Module) -> Decoder:
        prefix, family = self._family.prefix, self._family
        self._check(model, f"{prefix}ForCausalLM", ("model", "lm_head"))
        config: Any = model.config
        _check_config(config)
        inner: Any = model.model
        self._check(inner, family.model or f"{prefix}Model", ("embed_tokens", "layers", "norm", "rotary_emb"))
        self._check(inner.rotary_emb, f"{prefix}RotaryEmbedding", (), "rotary")
        _check_plain(inner.layers, nn.ModuleList)
        if len(inner.layers) != config.num_hidden_layers:
            raise NotFusedError(f"the config counts {config.num_hidden_layers} layers of {len(inner.layers)}")
        layers = tuple(self._layer(layer, number) for number, layer in enumerate(inner.layers))
        head, embedding = inner.embed_tokens, inner.embed_tokens
        if family.scales_embedding:
            self._check(embedding, f"{prefix}TextScaledWordEmbedding", (), "embedding")
            scale = float(embedding.embed_scale.to(embedding.weight.dtype))
        else:
            _check_plain(embedding, nn.Embedding)
            scale = 1.0
        if embedding.max_norm is not None:
            raise NotFusedError("the embedding has a max_norm")
        head = self._linear(model.lm_head)
        if head.linear.bias is not None:
            raise NotFusedError("the head has a bias")
        attention = inner.layers[0].self_attn
        return Decoder(
            family=self._name,
            embedding=embedding,
            embedding_scale=scale,
            layers=layers,
            norm=self._norm(inner.norm),
            head=head.linear,
            logits_softcap=config.final_logit_softcapping if family.softcaps_logits else None,
            epsilon=self._epsilon,
            rotary=inner.rotary_emb,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
        )

    def _layer(self, layer: Any, number: int) -> Layer:
        prefix, family = self._family.prefix, self._family
        norm_names = _NORM_NAMES[family.norms]
        dropouts = ("resid_attn_dropout", "resid_mlp_dropout") if family.joined else ()
        children = ("self_attn", "mlp", *filter(None, norm_names), *dropouts)
        self._check(layer, f"{prefix}DecoderLayer", children, "layer")
        for name in dropouts:
            _check_plain(getattr(layer, name), nn.Dropout)
        norms = [None if name is None else self._norm(getattr(layer, name)) for name in norm_names]
        query, key, value, output = self._attention(layer.self_attn, number)
        gate, up, down, activation = self._mlp(layer.mlp)
        attention = layer.self_attn
        config = attention.config
        window = {"none": None, "own": getattr(attention, "sliding_window", None), "config": None}[family.window]
        if family.window == "config":
            window = getattr(config, "sliding_window", None)
        return Layer(
            query=query,
            key=key,
            value=value,
            output=output,
            gate=gate,
            up=up,
            down=down,
            before_attention=norms[0],
            after_attention=norms[1],
            before_mlp=norms[2],
            after_mlp=norms[3],
            query_norm=self._norm(attention.q_norm) if family.head_norms else None,
            key_norm=self._norm(attention.k_norm) if family.head_norms else None,
            rope=self._rope(attention),
            scaling=float(attention.scaling),
            softcap=attention.attn_logit_softcapping if family.softcaps_scores else None,
            window=window or None,
            activation=activation,
        )

    def _attention(self, attention: Any, number: int) -> list[Rows]:
        family, config = self._family, attention.config
        projections = ("qkv_proj",) if family.joined else ("q_proj", "k_proj", "v_proj")
        norms = ("q_norm", "k_norm") if family.head_norms else ()
        self._check(attention, f"{family.prefix}Attention", (*projections, "o_proj", *norms), "attention")
        if not attention.is_causal:
            raise NotFusedError("tokens see later ones")
        if attention.layer_idx != number:
            raise NotFusedError(f"layer {attention.layer_idx} stands where layer {number} should")
        width, kv_width = (n * attention.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        if family.joined:
            ends = (0, width, width + kv_width, width + 2 * kv_width)
            joined = attention.qkv_proj
            parts = [self._linear(joined, total=ends[3], rows=rows) for rows in itertools.pairwise(ends)]
        else:
            sizes = zip(projections, (width, kv_width, kv_width), strict=True)
            parts = [self._linear(getattr(attention, name), total=size) for name, size in sizes]
        return [*parts, self._linear(attention.o_proj)]

    def _mlp(self, mlp: Any) -> tuple[Rows, Rows, Rows, Literal["silu", "gelu_tanh", "gelu"]]:
        joined = self._family.joined
        names = (
            ("gate_up_proj", "down_proj", "activation_fn")
            if joined
            else ("gate_proj", "up_proj", "down_proj", "act_fn")
        )
        self._check(mlp, f"{self._family.prefix}MLP", names, "mlp")
        function = getattr(mlp, names[-1])
        activation = _ACTIVATIONS.get(type(function).__name__)
        if activation is None or type(function).__module__ != "transformers.activations" or _is_changed(function):
            raise NotFusedError(f"the activation {type(function).__name__} is not known")
        if joined:
            size = mlp.down_proj.in_features
            both = ((0, size), (size, 2 * size))
            gate, up = (self._linear(mlp.gate_up_proj, total=2 * size, rows=rows) for rows in both)
        else:
            gate, up = self._linear(mlp.gate_proj), self._linear(mlp.up_proj)
        return gate, up, self._linear(mlp.down_proj), activation

    def _rope(self, attention: Any) -> str | None:
        if self._family.rope == "some" and not attention.use_rope:
            return None
        return str(attention.layer_type) if self._family.rope == "by type" else ""

    def _norm(self, norm: Any) -> Norm:
        self._check(norm, f"{self._family.prefix}RMSNorm", (), "norm")
        if (norm.eps if hasattr(norm, "eps") else norm.variance_epsilon) != self._epsilon:
            raise NotFusedError("a norm's epsilon is not the config's")
        return Norm(norm, self._family.norm_offset)

    def _linear(self, linear: Any, *, total: int | None = None, rows: tuple[int, int] | None = None) -> Rows:
        """`total`: rows that the layer must have; `rows`: which of them are meant."""
        _check_plain(linear, nn.Linear)
        if linear.weight.shape[0] != (total or linear.out_features):
            raise NotFusedError(f"a projection has {linear.weight.shape[0]} rows instead of {total}")
        return Rows(linear, *(rows or (0, linear.out_features)))

    def _check(self, module: nn.Module, name: str, children: Iterable[str], kind: str | None = None) -> None:
        """
        Raises:
            NotFusedError: it is not of this very class of the family's file, or has more or less than is known.
        """
        source = f"transformers.models.{self._name}.modeling_{self._name}"
        if type(module).__module__ != source or type(module) is not getattr(sys.modules[source], name, None):
            raise NotFusedError(f"{type(module).__name__} is not {name} of transformers")
        if _is_changed(module):
            raise NotFusedError(f"{name} has hooks or another forward than transformers'")
        own = {child for child, there in module._modules.items() if there is not None}
        unknown = own ^ set(children)
        if kind is not None:
            unknown |= vars(module).keys() - _MODULE_ATTRIBUTES - set(_ATTRIBUTES[kind].split())
        if unknown:
            raise NotFusedError(f"{name} is another one than is known: {', '.join(sorted(unknown))}")


def _check_plain(module: nn.Module, kind: type[nn.Module]) -> None:
    if type(module) is not kind:
        raise NotFusedError(f"{type(module).__name__} stands where a {kind.__name__} should")
    if _is_changed(module):
        raise NotFusedError(f"a {kind.__name__} has hooks or a forward of its own")


def _is_changed(module: nn.Module) -> bool:
    """Whether calling it is more, or something else, than the forward of its class as it was written."""
    own: Any = type(module).forward
    written_here = own.__module__ in (type(module).__module__, nn.Module.__module__)
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return "forward" in vars(module) or any(hooks) or not written_here


def _check_parameters(model: nn.Module, known: Sequence[torch.dtype]) -> None:
    if tensor_parallel_mesh(model) is not None:
        raise NotFusedError("the model is shared with other processes")
    if nn.modules.module._has_any_global_hook():
        raise NotFusedError("there are hooks on all modules")
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) != 1 or not dtypes.issubset(known):
        raise NotFusedError(f"parameters are {', '.join(sorted(map(str, dtypes)))}")
    for parameter in model.parameters():
        is_known = type(parameter) is nn.Parameter and parameter.device.type in ("cpu", "cuda")
        if not is_known or not parameter.is_contiguous():
            raise NotFusedError("parameters are not plain, contiguous tensors on CPU or CUDA")
    if len({parameter.device for parameter in model.parameters()}) != 1:
        raise NotFusedError("parameters are on several devices")


def _check_config(config: PreTrainedConfig) -> None:
    """
    Raises:
        NotFusedError: a field that is not known is not what it is by default.
    """
    kind = type(config)
    for name in set(_declared(kind)) - set(_FIELDS.split()):
        if getattr(config, name, None) != getattr(kind, name, None):
            raise NotFusedError(f"the config's {name} is not known")
    if getattr(config, "use_bidirectional_attention", None):
        raise NotFusedError("tokens see later ones")


def _declared(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        if base is PreTrainedConfig:
            return
        yield from (name for name in vars(base).get("__annotations__", {}) if not name.startswith("_"))
