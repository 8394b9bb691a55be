"""A flash kernel is tried on its device before it is taken: three small steps, compared with plain torch.

Called by `choice.py`. Knows what a model needs, not the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from engine.cache.groups import LayerGroup
from engine.execution.kv_tensors import allocate
from engine.execution.staging import to_device
from engine.ops.flash.kernels import AttentionNeeds, FlashKernel, NotUsableError
from engine.ops.flash.loading import first_line
from engine.ops.flash.ops import FlashOps
from engine.ops.interface import PackedRows
from engine.ops.torch_ops import TorchOps

_WINDOW = 3
_PAGE = 256
_TOLERANCE = 0.05  # of numbers around 1, in bfloat16
_SOFTCAP = 2.0


def try_out(kernel: FlashKernel, needs: AttentionNeeds) -> None:
    """Raises NotUsableError where the kernel fails, or gives other numbers than plain torch does in float32."""
    try:
        error = max(_error(kernel, needs, window) for window in _windows(needs))
    except Exception as failure:  # whatever a foreign package raises
        raise NotUsableError(f"failed when it was tried: {first_line(failure)}") from failure
    if error > _TOLERANCE:
        raise NotUsableError(f"was tried and gave other numbers than plain torch, by {error:.3g}")


def _windows(needs: AttentionNeeds) -> list[int | None]:
    return [None, _WINDOW] if "window" in needs.features else [None]


@torch.inference_mode()
def _error(kernel: FlashKernel, needs: AttentionNeeds, window: int | None) -> float:
    groups = [LayerGroup((0,), window)]
    page = needs.page_size or _PAGE
    expected, given = (
        allocate(1, 3, needs.kv_heads, page, needs.head_dim, dtype, needs.device, trash=True)
        for dtype in (torch.float32, needs.dtype)
    )
    plain, flash = TorchOps(expected, groups), FlashOps(kernel, given, groups)
    worst = 0.0
    for rows in _steps(page):
        tokens = int(rows.counts.sum())
        wanted = _attend(plain, to_device(plain.plan(rows), needs.device), needs, tokens)
        plans = [flash.plan(rows)]
        if rows.num_single == len(rows.starts):
            plans.append(flash.plan_decode(rows, len(rows.starts), 2))
        for plan in plans:
            out = _attend(flash, to_device(plan, needs.device), needs, tokens)
            worst = max(worst, (out - wanted).abs().nan_to_num(torch.inf).max().item())
    return worst


def _steps(page: int) -> Iterator[PackedRows]:
    """Of two requests: a prompt in two chunks, the second one over a page's end, beside single tokens; then both."""
    tables = [np.array([[3, 0], [1, 2]], dtype=np.int32)]
    for starts, counts in ([0, 0], [1, page - 2]), ([1, page - 2], [1, 4]), ([2, page + 2], [1, 1]):
        count = np.array(counts)
        yield PackedRows(np.array(starts), count, count.cumsum() - count, tables, np.arange(2), counts.count(1))


def _attend(ops: TorchOps, plan: Any, needs: AttentionNeeds, tokens: int) -> torch.Tensor:
    """[tokens, heads, head_dim] in float32, for queries, keys and values that depend on `tokens` alone."""
    generator = torch.Generator().manual_seed(tokens)
    query, key, value = (
        torch.randn(tokens, heads, needs.head_dim, generator=generator).to(needs.device, needs.dtype)
        for heads in (needs.heads, needs.kv_heads, needs.kv_heads)
    )
    key, value = key.transpose(0, 1), value.transpose(0, 1)
    softcap = _SOFTCAP if "softcap" in needs.features else None
    sinks = torch.linspace(-1, 1, needs.heads, device=needs.device) if "sinks" in needs.features else None
    ops.write_kv(0, key, value, plan)
    return ops.attend(0, query, key, value, plan, None, softcap, sinks).float()
