"""The shadow's forward pass through `torch.compile`.

Called by the model runner for the kinds of steps that settings name. Attention and packed linear layers stay outside
of what is compiled: they are kernels already, and work on memory that the compiler does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig

from engine.acceleration import CompileSettings
from engine.model.attention import ATTENTION_NAME, paged_attention
from engine.model.packed import PackedLinear

OPAQUE_ATTENTION_NAME = f"{ATTENTION_NAME}-opaque"


def compile_forward(model: nn.Module, settings: CompileSettings) -> Callable[..., Any]:
    """The model's forward, compiled when it is first called, for each shape or once, as `settings.dynamic` says.

    Raises:
        RuntimeError: `torch.compile` does not know the mode or the backend.
    """
    _make_opaque(model)
    compiled: Callable[..., Any] = torch.compile(
        model,
        fullgraph=False,
        dynamic=settings.dynamic,
        backend=settings.backend,
        mode=settings.mode,
        options=settings.options,
    )
    return compiled


def _make_opaque(model: nn.Module) -> None:
    """Lets the compiler break off at what it must not look into."""
    AttentionInterface.register(OPAQUE_ATTENTION_NAME, torch.compiler.disable(paged_attention))
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and config._attn_implementation == ATTENTION_NAME:
            config._attn_implementation = OPAQUE_ATTENTION_NAME
        if isinstance(module, PackedLinear) and "forward" not in vars(module):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
