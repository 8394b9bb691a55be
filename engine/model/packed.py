"""Linear layers that compute with a copy of their weight in the order that the CPU's matrix multiplication wants.

`pack_linears` is called when an engine is built, on the shadow alone; `refresh_packed` when a session starts. Only
bfloat16 is packed: float32 keeps the very operations of transformers, and with them its tokens.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from engine.memory import available_memory

logger = logging.getLogger(__name__)

_MEMORY_SHARE = 4  # the copies may take 1/4 of the memory that is free


class PackedLinear(nn.Linear):
    """A linear layer with the same parameters as `linear`, and a packed copy of the weight that is computed with."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._packed: torch.Tensor | None = None
        self._stamp: tuple[Any, ...] | None = None
        self.train(linear.training)
        self.refresh()

    def refresh(self) -> None:
        """Packs the weight again if it is not what was packed."""
        weight = self.weight.detach()
        stamp = _stamp(weight)
        if stamp != self._stamp:
            self._packed = None  # its memory serves the next copy
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
            self._stamp = stamp

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self._packed is None or not input.numel() or input.dtype != self.weight.dtype:
            return functional.linear(input, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(input, self._packed, self.bias, "none", [], "")


def pack_linears(model: nn.Module) -> nn.Module:
    """Replaces the linear layers of `model` by packed ones, if it is bfloat16 on CPU and the copies fit the memory.

    Layers that are more than a plain `nn.Linear` (subclasses, hooks, a forward of their own) stay as they are.

    Returns:
        `model`.
    """
    linears = {module for module in model.modules() if _can_be_packed(module)}
    size = sum(linear.weight.nbytes for linear in linears)  # type: ignore[misc]
    if not linears or not _has_packed_bfloat16():
        return model
    memory = available_memory("cpu")
    if memory is not None and size > memory // _MEMORY_SHARE:
        logger.info(
            "weights are not packed: the copies take %.1f GiB, more than 1/%d of the %.1f GiB of memory that are free",
            size / 2**30,
            _MEMORY_SHARE,
            memory / 2**30,
        )
        return model
    packed = {linear: PackedLinear(linear) for linear in linears}  # type: ignore[arg-type]
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in packed:
                parent._modules[name] = packed[child]
    return model


@torch.no_grad()
def refresh_packed(model: nn.Module) -> None:
    """Packs again every weight that has changed. Cost: one read of the packed weights."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.refresh()


def _can_be_packed(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    weight = module.weight
    plain = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.is_contiguous()
    return plain and not (module._forward_hooks or module._forward_pre_hooks)


def _has_packed_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _stamp(weight: torch.Tensor) -> tuple[Any, ...]:
    """Changes with the weight [rows, columns]. Writes through `.data` are no versions, so its bits are summed too."""
    whole = weight.shape[1] % 4 == 0 and weight.storage_offset() % 4 == 0
    sums = weight.view(torch.int64 if whole else torch.int16).sum(dim=1)
    version = None if weight.is_inference() else weight._version
    return weight.data_ptr(), version, int((sums * torch.arange(1, 2 * len(sums), 2)).sum())
