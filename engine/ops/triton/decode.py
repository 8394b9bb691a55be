"""Attention of rows of one token: contexts are cut into splits that programs read side by side, then merged.

Called by `TritonOps`. Splits lie at fixed positions of a row's context, so a row's result is the same to the bit
whatever rows it runs with, and however many programs there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.triton.plan import SPLIT, GroupPlan
from engine.ops.triton.tile import UNALIGNED, ScoreRule, attend_span, tile_sizes

_MERGED_AT_ONCE = 16
# Where a plan has room for more splits than it holds, programs take several. 6 for each of the 132 multiprocessors of
# an H100 or H200: the last programs fill them all, whether 1, 2, 3 or 6 run on one at a time.
_PROGRAMS = 6 * 132


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _split_kernel(
    query,
    keys,
    values,
    partial,
    peaks,
    totals,
    starts,
    firsts,
    tables,
    splits,
    all_splits,
    query_stride,
    query_head_stride,
    head_stride,
    block_stride,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    kv_head = tl.program_id(1)
    heads = tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, BLOCK_DIM)
    inside = (heads < GROUP)[:, None] & (dims < DIM)[None, :]
    key_of_head = keys + kv_head.to(tl.int64) * head_stride
    value_of_head = values + kv_head.to(tl.int64) * head_stride
    for item in range(tl.program_id(0), tl.load(all_splits), tl.num_programs(0)):
        row = tl.load(splits + 2 * item)
        split = tl.load(splits + 2 * item + 1)
        position = tl.load(starts + row)
        lines = (kv_head * GROUP + heads)[:, None] * query_head_stride + dims[None, :]
        q = tl.load(query + row.to(tl.int64) * query_stride + lines, mask=inside, other=0.0)
        q = q.to(keys.dtype.element_ty)
        last = tl.minimum((split + 1) * SPLIT_KEYS, position + 1)
        first = split * SPLIT_KEYS
        table = tables + tl.load(firsts + row)
        key_of_row = key_of_head
        value_of_row = value_of_head
        if PAGE % SPLIT_KEYS == 0:  # one block has the whole split: nothing to look up between tiles
            base = tl.load(table + first // PAGE).to(tl.int64) * block_stride - first // PAGE * PAGE * DIM
            key_of_row += base
            value_of_row += base
        acc, peak, total = attend_span(
            tl.zeros([BLOCK_HEADS, BLOCK_DIM], tl.float32),
            tl.full([BLOCK_HEADS], float("-inf"), tl.float32),
            tl.zeros([BLOCK_HEADS], tl.float32),
            q,
            tl.zeros([BLOCK_HEADS], tl.int32) + position,
            position,
            position,
            first,
            last,
            key_of_row,
            value_of_row,
            table,
            DIM,
            block_stride,
            scale,
            softcap,
            HAS_SOFTCAP,
            WINDOW,
            0 if PAGE % SPLIT_KEYS == 0 else PAGE,
            DIM,
            BLOCK_DIM,
            BLOCK_KEYS,
        )
        at = ((item * KV_HEADS + kv_head) * GROUP + heads).to(tl.int64)
        tl.store(partial + at[:, None] * DIM + dims[None, :], acc, mask=inside)
        tl.store(peaks + at, peak, mask=heads < GROUP)
        tl.store(totals + at, total, mask=heads < GROUP)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _merge_kernel(
    out,
    partial,
    peaks,
    totals,
    sinks,
    first_splits,
    num_splits,
    out_stride,
    HEADS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(first_splits + row)
    count = tl.load(num_splits + row)
    if count > 0:
        dims = tl.arange(0, BLOCK_DIM)
        each = tl.arange(0, AT_ONCE)
        acc = tl.zeros([BLOCK_DIM], tl.float32)
        peak = tl.load(peaks + first.to(tl.int64) * HEADS + head)
        total = peak * 0
        for start in range(0, count, AT_ONCE):
            there = start + each < count
            at = (first + start + each).to(tl.int64) * HEADS + head
            split_peaks = tl.load(peaks + at, mask=there, other=float("-inf"))
            higher = tl.maximum(peak, tl.max(split_peaks, axis=0))
            fall = tl.exp2(peak - higher)
            weights = tl.exp2(split_peaks - higher)
            total = total * fall + tl.sum(weights * tl.load(totals + at, mask=there, other=0.0), axis=0)
            mask = there[:, None] & (dims < DIM)[None, :]
            part = tl.load(partial + at[:, None] * DIM + dims[None, :], mask=mask, other=0.0)
            acc = acc * fall + tl.sum(weights[:, None] * part, axis=0)
            peak = higher
        if HAS_SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
            higher = tl.maximum(peak, sink)
            total = total * tl.exp2(peak - higher) + tl.exp2(sink - higher)
            acc = acc * tl.exp2(peak - higher)
        result = (acc / total).to(out.dtype.element_ty)
        tl.store(out + row.to(tl.int64) * out_stride + head * DIM + dims, result, mask=dims < DIM)


def decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: GroupPlan,
    out: torch.Tensor,
    *,
    window: int | None,
    rule: ScoreRule,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attention of the rows of one token, which lie first; other tokens of `out` are left alone.

    Args:
        query: fp16, bf16 or fp32 [tokens, heads, dim], `dim` contiguous; heads a multiple of kv_heads.
        keys: [blocks, kv_heads, page, dim] of the layer, contiguous; `values` likewise.
        plan: of the layer's group, with splits.
        out: [tokens, heads, dim], contiguous.
        window: tokens that a query sees, itself included; None: all.
        sinks: floating [heads], contiguous; see `Ops.attend`.

    Raises:
        ValueError: the heads are no multiple of kv_heads.
    """
    _, heads, dim = query.shape
    _, kv_heads, page, _ = keys.shape
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads evenly")
    group, sizes, room = heads // kv_heads, tile_sizes(dim, keys.dtype), plan.capacity.splits
    partial = query.new_empty((room, heads, dim), dtype=torch.float32)
    peaks, totals = query.new_empty((2, room, heads), dtype=torch.float32)
    _split_kernel[(min(room, max(1, _PROGRAMS // kv_heads)), kv_heads)](
        query,
        keys,
        values,
        partial,
        peaks,
        totals,
        plan.starts,
        plan.firsts,
        plan.tables,
        plan.splits,
        plan.all_splits,
        query.stride(0),
        query.stride(1),
        keys.stride(1),
        keys.stride(0),
        rule.scale,
        rule.softcap,
        HAS_SOFTCAP=rule.has_softcap,
        WINDOW=window or 0,
        GROUP=group,
        KV_HEADS=kv_heads,
        PAGE=page,
        DIM=dim,
        SPLIT_KEYS=SPLIT,
        BLOCK_HEADS=max(16, triton.next_power_of_2(group)),
        BLOCK_DIM=sizes.dim,
        BLOCK_KEYS=sizes.keys,
        num_warps=4,
        num_stages=3 if page % SPLIT == 0 else 5,  # two more where blocks are looked up before keys are read
    )
    _merge_kernel[(plan.capacity.rows, heads)](
        out,
        partial,
        peaks,
        totals,
        sinks if sinks is not None else peaks,
        plan.first_splits,
        plan.num_splits,
        out.stride(0),
        HEADS=heads,
        HAS_SINKS=sinks is not None,
        DIM=dim,
        BLOCK_DIM=sizes.dim,
        AT_ONCE=_MERGED_AT_ONCE,
        num_warps=2,
    )
