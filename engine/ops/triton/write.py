"""Stores a step's K and V in the blocks of its rows.

Called by `TritonOps` for models whose layers rotate keys themselves; rotary.py does both at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.triton.plan import Slots
from engine.ops.triton.tile import UNALIGNED


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _write_kernel(
    key,
    value,
    keys,
    values,
    slots,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        heads = tl.arange(0, BLOCK_HEADS)[:, None]
        dims = tl.arange(0, BLOCK_DIM)[None, :]
        mask = (heads < KV_HEADS) & (dims < DIM)
        to = ((slot // PAGE * KV_HEADS + heads) * PAGE + slot % PAGE) * DIM + dims
        k = tl.load(key + token * key_stride + heads.to(tl.int64) * key_head_stride + dims, mask=mask)
        tl.store(keys + to, k.to(keys.dtype.element_ty), mask=mask)
        v = tl.load(value + token * value_stride + heads.to(tl.int64) * value_head_stride + dims, mask=mask)
        tl.store(values + to, v.to(values.dtype.element_ty), mask=mask)


def write(key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: Slots) -> None:
    """
    Args:
        key: floating [kv_heads, tokens, dim], `dim` contiguous; `value` likewise.
        keys: [blocks, kv_heads, page, dim] of the layer, contiguous; `values` likewise.
        plan: of the layer's group, for at least as many tokens; those without a slot are written nowhere.
    """
    kv_heads, tokens, dim = key.shape
    _write_kernel[(tokens,)](
        key,
        value,
        keys,
        values,
        plan.slots,
        key.stride(1),
        key.stride(0),
        value.stride(1),
        value.stride(0),
        KV_HEADS=kv_heads,
        PAGE=keys.shape[2],
        DIM=dim,
        BLOCK_HEADS=triton.next_power_of_2(kv_heads),
        BLOCK_DIM=triton.next_power_of_2(dim),
        num_warps=4,
    )
