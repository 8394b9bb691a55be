"""The engine's own copy of a model's modules over the same tensors, and the facts of a model that the engine needs.

Called when an engine is built. The user's model is only read, unless it gives its weights up: its config, its attention
implementation and its mode stay as they are, and what is written in place into its weights is seen by the copy.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from engine.distributed.sharding import local_kv_heads, rebind_forwards, shared_parts
from engine.facts import ModelFacts
from engine.model.attention import ATTENTION_NAME, register_attention
from engine.ops.flash.kernels import AttentionNeeds

logger = logging.getLogger(__name__)

_FULL, _SLIDING = "full_attention", "sliding_attention"
# What keeps layers of other types from running on pages of K and V.
_REASONS = {
    "chunked_attention": "attend within chunks of fixed borders",
    "compressed_sparse_attention": "attend to compressed keys",
    "heavily_compressed_attention": "attend to compressed keys",
    "indexed_attention": "choose their keys by an index",
    "minimax_m3_sparse": "choose their keys by an index",
    "linear_attention": "keep a recurrent state",
    "conv": "keep a state of their convolution",
    "hybrid": "keep a recurrent state beside K and V",
    "hybrid_sliding": "keep a recurrent state beside K and V",
}
_GIVEN_UP = (
    "the model has given up its weights to an engine (release_weights=True), which alone has them: load it again, and "
    "leave release_weights False to change weights or to share the model"
)
_ASKED = "_attention_asked_for"


def make_shadow(model: PreTrainedModel) -> nn.Module:
    """Copies the modules and the config of `model`; parameters and buffers stay the same tensors.

    A parameter of `model` that is replaced by another object (not: written into) is seen through `ParameterSource`.

    Returns:
        The copy in eval mode, whose layers call the engine's attention function.
    """
    register_attention()
    _log_cut_context(model)
    shared = [*model.parameters(), *_shared_buffers(model), *shared_parts(model)]
    copies: dict[int, Any] = {id(part): part for part in shared}
    shadow: nn.Module = copy.deepcopy(model, copies)
    rebind_forwards(shadow, copies)
    setattr(shadow, _ASKED, attention_of(model))
    for module in shadow.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and config._attn_implementation != ATTENTION_NAME:
            config._attn_implementation = ATTENTION_NAME
    return shadow.eval()


def attention_of(model: nn.Module) -> str:
    """The attention implementation that the user's model was loaded with, also for its shadow."""
    return getattr(model, _ASKED, None) or str(_text_config(model)._attn_implementation)


def _shared_buffers(model: nn.Module) -> Iterator[torch.Tensor]:
    """All buffers but rotary frequencies that a forward pass writes into."""
    for module in model.modules():
        if not _adapts(getattr(module, "rope_type", None)):
            yield from module.buffers(recurse=False)


class ParameterSource:
    """Keeps the parameters of a shadow those of the model it was made from.

    What is written into a parameter needs nothing; a parameter that was replaced by another object does
    (`load_state_dict(assign=True)`, `module.weight = ...`, another module in the place of one), or that was given other
    memory (`parameter.data = ...`).
    """

    def __init__(self, model: nn.Module, shadow: nn.Module) -> None:
        self._model, self._shadow = model, shadow
        self._versions: dict[str, int] = {}
        self._remember()

    def weights_are_given_up(self) -> None:
        """From now on there must be none in their place, and others lie where they are now.

        A model without weights says so when it is used or saved.
        """
        self._remember()
        self._versions = _versions_of_empty(self._model)
        if self._versions:
            _refuse_use(self._model)

    def _remember(self) -> None:
        self._shapes, self._places = _shapes(self._model), _places(self._model)

    def check(self) -> None:
        """Changes nothing.

        Raises:
            RuntimeError: the parameters differ from before in name, shape, dtype or device, or ones that were given up
                were written to.
        """
        shapes = _shapes(self._model)
        if shapes != self._shapes:
            if _are_empty(shapes) != _are_empty(self._shapes):
                raise RuntimeError(_GIVEN_UP)
            differing = [name for name in {**self._shapes, **shapes} if shapes.get(name) != self._shapes.get(name)]
            found, before = (each.get(differing[0], "not there") for each in (shapes, self._shapes))
            raise RuntimeError(
                f"{len(differing)} parameters of the model have another name, shape, dtype or device than when the "
                f"engine was built, the first of them {differing[0]!r}: {_said(found)}, and it was {_said(before)}; "
                "make a new manager"
            )
        if self._versions and _versions_of_empty(self._model) != self._versions:
            raise RuntimeError(_GIVEN_UP)

    def follow(self) -> bool:
        """Take over replaced parameters; whether any lie elsewhere than when the engine was built, or are new.

        Raises:
            RuntimeError: as `check`.
        """
        self.check()
        shadowed = dict(self._shadow.named_parameters(remove_duplicate=False))
        replaced = {
            name: parameter
            for name, parameter in self._model.named_parameters(remove_duplicate=False)
            if parameter is not shadowed[name]
        }
        for name, parameter in replaced.items():
            owner, _, own_name = name.rpartition(".")
            self._shadow.get_submodule(owner)._parameters[own_name] = parameter
        return bool(replaced) or _places(self._model) != self._places


def _places(model: nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters(remove_duplicate=False)}


def _said(shape: Any) -> str:
    return ", ".join(map(str, shape)) if isinstance(shape, tuple) else str(shape)


def _versions_of_empty(model: nn.Module) -> dict[str, int]:
    """How often parameters without numbers were written to, which changes nothing else in them."""
    return {
        name: parameter._version
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.numel() and not parameter.is_inference()
    }


def _refuse_use(model: nn.Module) -> None:
    for name in ("forward", "save_pretrained"):
        if (method := getattr(model, name, None)) is not None:
            setattr(model, name, _refusing(method))


def _refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(_GIVEN_UP)

    return refuse


def _are_empty(shapes: dict[str, tuple[Any, ...]]) -> dict[str, bool]:
    return {name: 0 in shape for name, (shape, *_) in shapes.items()}


def _shapes(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {
        name: (tuple(parameter.shape), parameter.dtype, parameter.device)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def model_facts(model: nn.Module) -> ModelFacts:
    """What sizes and plans depend on.

    Raises:
        NotImplementedError: an attention type, a position encoding or a placement that the engine cannot run.
        ValueError: the weights are not loaded.
    """
    config = _text_config(model)
    if getattr(config, "is_encoder_decoder", False):
        raise NotImplementedError(f"{type(model).__name__} is an encoder-decoder model; only decoders are supported")
    _check_forward(model)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise NotImplementedError(f"the model lies on {len(devices)} devices ({devices}); it must lie on one")
    (device,) = devices
    if device.type == "meta":
        raise ValueError("the model's weights are not loaded (device meta)")
    if not model.get_input_embeddings().weight.numel():  # type: ignore[operator]
        raise ValueError(_GIVEN_UP)
    dtype: torch.dtype = model.dtype  # type: ignore[assignment]
    num_heads = _uniform(config, "num_attention_heads")
    return ModelFacts(
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=local_kv_heads(model, _uniform(config, "num_key_value_heads") or num_heads),
        head_dim=_uniform(config, "head_dim") or config.hidden_size // num_heads,
        dtype_bytes=dtype.itemsize,
        context_length=_context_length(model, config),
        vocab_size=model.get_input_embeddings().weight.shape[0],  # type: ignore[operator]
        device_type=device.type,
        windows=_windows(model, config),
        device_index=device.index,
    )


def attention_needs(model: nn.Module, facts: ModelFacts, page_size: int | None) -> AttentionNeeds:
    """What a model's attention asks of a kernel that is to replace it.

    Args:
        page_size: tokens, if it is given.
    """
    config = _text_config(model)
    wanted = {
        "window": any(window is not None for window in facts.windows),
        "softcap": getattr(config, "attn_logit_softcapping", None) is not None,
        "sinks": any(getattr(module, "sinks", None) is not None for module in model.modules()),
    }
    return AttentionNeeds(
        device=next(model.parameters()).device,
        dtype=model.dtype,  # type: ignore[arg-type]
        heads=facts.num_heads,
        kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        features=frozenset(name for name, is_wanted in wanted.items() if is_wanted),
        page_size=page_size,
        supports_flash=bool(getattr(model, "_supports_flash_attn", True)),
    )


def _text_config(model: nn.Module) -> Any:
    return model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]


def _check_forward(model: nn.Module) -> None:
    """
    Raises:
        NotImplementedError: the engine's input would not reach the model, or not mean what it should.
    """
    for name in ("position_ids", "logits_to_keep"):
        if isinstance(model, PreTrainedModel) and name not in inspect.signature(model.forward).parameters:
            raise NotImplementedError(f"the forward of {type(model).__name__} does not take {name}")
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            raise NotImplementedError(f"{type(module).__name__} counts positions from the padding token's id on")


def _uniform(config: Any, name: str) -> Any:
    """A size that all layers have; None where the config does not tell.

    Raises:
        NotImplementedError: it differs from layer to layer.
    """
    try:
        return getattr(config, name, None)
    except RuntimeError as error:  # so transformers says that it differs
        raise NotImplementedError(f"{name} differs between layers; K and V of every layer must be alike") from error


def _windows(model: nn.Module, config: Any) -> tuple[int | None, ...]:
    """The attention window of each layer.

    Raises:
        NotImplementedError: another type than full and sliding attention, named.
    """
    window = getattr(config, "sliding_window", None) or None
    types = getattr(config, "layer_types", None)
    if types is None:
        # A field that the config's class does not know came with the checkpoint, and the model ignores it.
        is_used = window is not None and getattr(config, "use_sliding_window", True) and _declares_window(config)
        types = [_SLIDING if is_used else _FULL] * config.num_hidden_layers
    for layer_type in types:
        if layer_type not in (_FULL, _SLIDING):
            reason = _REASONS.get(layer_type, "are not known to the engine")
            raise NotImplementedError(
                f"{type(model).__name__} has layers of type {layer_type}, which {reason}; "
                f"{_FULL} and {_SLIDING} are supported"
            )
    if _SLIDING in types and window is None:
        raise NotImplementedError(f"{type(model).__name__} has layers of type {_SLIDING}, but no sliding_window")
    return tuple(window if layer_type == _SLIDING else None for layer_type in types)


def _declares_window(config: Any) -> bool:
    kind = type(config)
    return hasattr(kind, "sliding_window") or "sliding_window" in inspect.signature(kind.__init__).parameters


# Rotary frequencies of these types change when a forward pass holds a position beyond a limit. Below it they are
# constant, so that no request can change another's.


def _context_length(model: nn.Module, config: Any) -> int | None:
    """Positions that the model knows and computes with the same rotary frequencies.

    Raises:
        NotImplementedError: the frequencies change at a length that is not known.
    """
    length: int | None = getattr(config, "max_position_embeddings", None)
    for rope in _ropes(config):
        rope_type = rope.get("rope_type", rope.get("type"))
        if not _adapts(rope_type):
            continue
        limit = rope.get("original_max_position_embeddings") if rope_type == "longrope" else length
        if limit is None:
            raise NotImplementedError(f"{type(model).__name__} has rope_type {rope_type!r} without a known limit")
        length = limit if length is None else min(limit, length)
    return length


def _log_cut_context(model: nn.Module) -> None:
    config = _text_config(model)
    whole, length = getattr(config, "max_position_embeddings", None), _context_length(model, config)
    if whole is not None and length is not None and length < whole:
        logger.warning(
            "the context is limited to %d positions instead of %d: beyond them this model's rotary frequencies depend "
            "on the longest request of a step",
            length,
            whole,
        )


def _adapts(rope_type: Any) -> bool:
    """Whether a module's rope type, or one of those that it has by layer type, is one of them."""
    names = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return any(isinstance(name, str) and ("dynamic" in name or name == "longrope") for name in names)


def _ropes(config: Any) -> Iterator[dict[str, Any]]:
    """The rope parameters that a config names, in one dict or in one dict a layer type."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(config, name, None) or {}
        yield from (rope, *(value for value in rope.values() if isinstance(value, dict)))
