"""Linear layers of transformers' own forward pass that compute with a packed copy of their weight.

`pack_linears` is called when an engine is built, on the shadow alone; `refresh_packed` when a session starts. Only
bfloat16 is packed: float32 keeps the very operations of transformers, and with them its tokens.
"""

from __future__ import annotations

import logging
import weakref

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.memory import available_memory
from engine.ops.cpu.build import BuildError
from engine.ops.cpu.library import Step, Tape
from engine.ops.cpu.linear import PackedWeight, activation_dtype, linear_op

logger = logging.getLogger(__name__)

_MEMORY_SHARE = 4  # the copies may take 1/4 of the memory that is free


class PackedLinear(nn.Linear):
    """A linear layer with the same parameters as `linear`, and a packed copy of the weight that is computed with.

    To be called from one thread at a time.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)
        layer = weakref.proxy(self)
        self._packed: PackedWeight | None = PackedWeight([lambda: layer.weight])
        rows = torch.empty(1, self.in_features, dtype=activation_dtype(self.weight.dtype))
        op = linear_op(self._packed, rows, torch.empty(1, self.out_features, dtype=rows.dtype))
        self._arguments, self._tape = op.arguments, Tape([op])
        self._dtype = rows.dtype

    def refresh(self) -> None:
        """Packs the weight again if it is not what was packed; for good no more if its shape or dtype has changed."""
        if self._packed is None:
            return
        try:
            self._packed.refresh()
        except ValueError:
            self._packed = None

    def forward(self, input: Tensor) -> Tensor:
        if self._packed is None or not input.numel() or input.dtype != self.weight.dtype:
            return functional.linear(input, self.weight, self.bias)
        rows = input.reshape(-1, self.in_features).to(self._dtype).contiguous()
        out = torch.empty(len(rows), self.out_features, dtype=self._dtype)
        bias = None if self.bias is None else self.bias.float()
        arguments = self._arguments
        arguments.x, arguments.out = rows.data_ptr(), out.data_ptr()
        arguments.bias = None if bias is None else bias.data_ptr()
        self._tape.run(Step(tokens=len(rows)), torch.get_num_threads())
        return out.to(input.dtype).view(*input.shape[:-1], self.out_features)


def pack_linears(model: nn.Module) -> nn.Module:
    """Replaces the linear layers of `model` by packed ones, if it is bfloat16 on CPU and the copies fit the memory.

    Layers that are more than a plain `nn.Linear` (subclasses, hooks, a forward of their own) stay as they are.

    Returns:
        `model`.
    """
    linears = {module for module in model.modules() if _can_be_packed(module)}
    size = sum(linear.weight.nbytes for linear in linears)  # type: ignore[misc]
    if not linears or not _can_build():
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
    return plain and weight.numel() > 0 and not (module._forward_hooks or module._forward_pre_hooks)


def _can_build() -> bool:
    """Whether the library can be built here. If not, the choice of the attention kernels has logged why."""
    try:
        activation_dtype(torch.bfloat16)
    except BuildError:
        return False
    return True
