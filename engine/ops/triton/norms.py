"""RMS norms together with the additions around them: one read and one write of the residual stream.

Called by the fused decoder of GPUs. Sums are in float32, whatever the rows are in.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _norm_kernel(
    out,
    total,
    x,
    added,
    weight,
    added_weight,
    x_stride,
    added_stride,
    epsilon,
    HAS_ADDED: tl.constexpr,
    HAS_ADDED_WEIGHT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK_WIDTH)
    mask = at < WIDTH
    line = tl.load(x + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_ADDED:
        more = tl.load(added + row * added_stride + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_ADDED_WEIGHT:
            scale = tl.load(added_weight + at, mask=mask, other=0.0)
            more = more * tl.rsqrt(tl.sum(more * more, axis=0) / WIDTH + epsilon) * scale
        line = (line + more).to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + at, line, mask=mask)
        line = line.to(tl.float32)
    if HAS_WEIGHT:
        scale = tl.load(weight + at, mask=mask, other=0.0)
        line = line * tl.rsqrt(tl.sum(line * line, axis=0) / WIDTH + epsilon) * scale
        tl.store(out + row * WIDTH + at, line.to(out.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight, of each row.

    Args:
        x: floating [rows, width], the last dimension contiguous.
        weight: float32 [width], contiguous.

    Returns:
        As `x`, contiguous.
    """
    out = x.new_empty(x.shape)
    _launch(out, out, x, None, weight, None, epsilon)
    return out


def add_norm(
    x: torch.Tensor,
    added: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    added_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of `x` and `added`, where that has a weight its norm, and the norm of the sum.

    Args:
        x: floating [rows, width], the last dimension contiguous; `added` likewise.
        weight: float32 [width], contiguous, or None; `added_weight` likewise.

    Returns:
        Sum and norm in the dtype of `x`, contiguous, the norm of what the sum is rounded to. Without a weight the sum
        is both.
    """
    total = x.new_empty(x.shape)
    out = total if weight is None else torch.empty_like(total)
    _launch(out, total, x, added, weight, added_weight, epsilon)
    return total, out


def _launch(
    out: torch.Tensor,
    total: torch.Tensor,
    x: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor | None,
    added_weight: torch.Tensor | None,
    epsilon: float,
) -> None:
    rows, width = x.shape
    if not rows:
        return
    block = triton.next_power_of_2(width)
    _norm_kernel[(rows,)](
        out,
        total,
        x,
        x if added is None else added,
        out if weight is None else weight,
        out if added_weight is None else added_weight,
        x.stride(0),
        0 if added is None else added.stride(0),
        epsilon,
        HAS_ADDED=added is not None,
        HAS_ADDED_WEIGHT=added_weight is not None,
        HAS_WEIGHT=weight is not None,
        WIDTH=width,
        BLOCK_WIDTH=block,
        num_warps=min(16, max(1, block // 256)),
    )
