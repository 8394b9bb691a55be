"""From projections to attention in one kernel: norms of heads, rotary positions, and K and V into the cache.

Called by the fused decoder of GPUs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.triton.plan import Slots
from engine.ops.triton.tile import UNALIGNED

_BLOCK_HEADS = 4


@triton.jit
def _rotate(
    source,
    head_stride,
    to,
    to_head_stride,
    heads,
    is_head,
    weight,
    table,
    epsilon,
    HAS_NORM: tl.constexpr,
    PAIRS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Heads of one token: the halves of the first 2 * PAIRS numbers are turned together, the rest stays."""
    dims = tl.arange(0, BLOCK_PAIRS)
    pairs = dims < PAIRS
    mask = is_head[:, None] & pairs[None, :]
    at = source + heads.to(tl.int64)[:, None] * head_stride
    left = tl.load(at + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    right = tl.load(at + PAIRS + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    rest_dims = 2 * PAIRS + tl.arange(0, BLOCK_REST)
    rest_mask = is_head[:, None] & (rest_dims < DIM)[None, :]
    rest = tl.load(at + rest_dims[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1) + tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / DIM + epsilon)[:, None]
        left = left * scale * tl.load(weight + dims, mask=pairs, other=0.0)[None, :]
        right = right * scale * tl.load(weight + PAIRS + dims, mask=pairs, other=0.0)[None, :]
        rest = rest * scale * tl.load(weight + rest_dims, mask=rest_dims < DIM, other=0.0)[None, :]
    cosines = tl.load(table + dims, mask=pairs, other=0.0)[None, :]
    sines = tl.load(table + PAIRS + dims, mask=pairs, other=0.0)[None, :]
    dtype = to.dtype.element_ty
    to += heads.to(tl.int64)[:, None] * to_head_stride
    tl.store(to + dims[None, :], (left * cosines - right * sines).to(dtype), mask=mask)
    tl.store(to + PAIRS + dims[None, :], (right * cosines + left * sines).to(dtype), mask=mask)
    tl.store(to + rest_dims[None, :], rest.to(dtype), mask=rest_mask)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _rotary_kernel(
    query,
    key,
    value,
    query_out,
    keys,
    values,
    slots,
    positions,
    table,
    query_weight,
    key_weight,
    epsilon,
    query_stride,
    key_stride,
    value_stride,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    line = table + tl.load(positions + token) * (2 * PAIRS)
    if part < query_parts:
        heads = part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        source = query + token * query_stride
        out = query_out + token * (HEADS * DIM)
        _rotate(
            source, DIM, out, DIM, heads, heads < HEADS, query_weight, line, epsilon,
            HAS_NORM, PAIRS, DIM, BLOCK_PAIRS, BLOCK_REST,
        )  # fmt: skip
    else:
        heads = (part - query_parts) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        is_head = heads < KV_HEADS
        slot = token
        if PAGE > 0:
            slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            if PAGE > 0:
                to = (slot // PAGE * (KV_HEADS * PAGE) + slot % PAGE) * DIM
                head_stride = PAGE * DIM
            else:
                to = slot * (KV_HEADS * DIM)
                head_stride = DIM
            source = key + token * key_stride
            _rotate(
                source, DIM, keys + to, head_stride, heads, is_head, key_weight, line, epsilon,
                HAS_NORM, PAIRS, DIM, BLOCK_PAIRS, BLOCK_REST,
            )  # fmt: skip
            dims = tl.arange(0, BLOCK_DIM)[None, :]
            mask = is_head[:, None] & (dims < DIM)
            lines = heads.to(tl.int64)[:, None]
            new = tl.load(value + token * value_stride + lines * DIM + dims, mask=mask, other=0.0)
            tl.store(values + to + lines * head_stride + dims, new.to(values.dtype.element_ty), mask=mask)


def rotate_and_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    plan: Slots,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    epsilon: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norms and rotates heads, and stores K and V in the blocks of their rows.

    Args:
        query: floating [tokens, heads * dim], the last dimension contiguous; `key` and `value`: [tokens,
            kv_heads * dim] likewise, in the same dtype.
        positions: int64 [tokens], all of them in `table`.
        table: float32 [positions, 2, pairs], cosines and sines; the first 2 * pairs numbers of a head are turned.
        cache: K and V of the layer, [blocks, kv_heads, page, dim], contiguous.
        plan: of the layer's group; without a cache K and V go to new tensors.
        norms: weights of the norms of each head, float32 [dim], of queries and of keys.

    Returns:
        Queries [tokens, heads, dim]; K and V as `prefill` wants them: the cache's, or [kv_heads, tokens, dim].
    """
    tokens, width = query.shape
    (_, kv_heads, page, dim), pairs = cache[0].shape, table.shape[2]
    heads = width // dim
    out = query.new_empty((tokens, heads, dim))
    keys, values = cache
    if not plan.paged:
        page = 0
        keys, values = keys.new_empty((2, tokens, kv_heads, dim))
    weights = (table, table) if norms is None else norms
    if tokens:
        _rotary_kernel[(tokens, triton.cdiv(heads, _BLOCK_HEADS) + triton.cdiv(kv_heads, _BLOCK_HEADS))](
            query,
            key,
            value,
            out,
            keys,
            values,
            plan.slots,
            positions,
            table,
            *weights,
            epsilon,
            query.stride(0),
            key.stride(0),
            value.stride(0),
            HAS_NORM=norms is not None,
            HEADS=heads,
            KV_HEADS=kv_heads,
            PAGE=page,
            DIM=dim,
            PAIRS=pairs,
            BLOCK_HEADS=_BLOCK_HEADS,
            BLOCK_PAIRS=triton.next_power_of_2(pairs),
            BLOCK_REST=triton.next_power_of_2(max(1, dim - 2 * pairs)),
            BLOCK_DIM=triton.next_power_of_2(dim),
            num_warps=1,
        )
    if not plan.paged:
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    return out, keys, values
