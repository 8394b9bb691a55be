"""The gate of an MLP: one read of both projections, one write of their product.

Called by the fused decoder of GPUs.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

_BLOCK = 1024
Activation = Literal["silu", "gelu_tanh", "gelu"]


@triton.jit
def _gate_kernel(
    out,
    gate,
    up,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < WIDTH
    x = tl.load(gate + row * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + at, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        x = x / (1 + tl.exp(-x))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 x (1 + tanh(z)) = x / (1 + exp(-2 z)), z = sqrt(2 / pi) (x + 0.044715 x^3)
        x = x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    tl.store(out + row * WIDTH + at, (x * y).to(out.dtype.element_ty), mask=mask)


def gated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(gate) * up, computed in float32.

    Args:
        gate: floating [rows, width], the last dimension contiguous; `up` likewise.

    Returns:
        [rows, width], contiguous, in the dtype of `gate`.
    """
    rows, width = gate.shape
    out = gate.new_empty(gate.shape)
    if rows:
        _gate_kernel[(rows, triton.cdiv(width, _BLOCK))](
            out,
            gate,
            up,
            gate.stride(0),
            up.stride(0),
            ACTIVATION=activation,
            WIDTH=width,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return out
