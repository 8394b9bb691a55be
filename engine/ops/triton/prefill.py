"""Attention of rows of several tokens over what is cached of them and what the step adds.

Called by `TritonOps`, for mixed steps: rows of one token in them, and rows without any, are left alone. The query
heads of a KV head share its tiles of keys. What a query gets does not depend on which others share its tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.triton.plan import GroupPlan
from engine.ops.triton.tile import UNALIGNED, ScoreRule, attend_span, tile_sizes

_LINES = 128  # of one tile: queries times the heads of a group
_QUERIES_BYTES = 1 << 15  # of one tile
_FLOAT32_LINES = 32  # without tensor cores, sums of more would not fit the registers


@triton.jit
def _row_of(tile, offsets, num_rows, QUERIES: tl.constexpr):
    """The last row whose tiles begin at or before this one: row r's begin at offsets[r] // QUERIES + r."""
    low = tile * 0
    high = low + num_rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(offsets + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=UNALIGNED)
def _prefill_kernel(
    out,
    query,
    keys,
    values,
    sinks,
    starts,
    counts,
    offsets,
    firsts,
    tables,
    num_rows,
    out_stride,
    query_stride,
    query_head_stride,
    token_stride,
    head_stride,
    block_stride,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_LINES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles of a row see most: they begin first
    kv_head = tl.program_id(1)
    row = _row_of(tile, offsets, num_rows, QUERIES)
    offset = tl.load(offsets + row)
    begin = (tile - (offset // QUERIES + row)) * QUERIES
    count = tl.load(counts + row)
    if begin < count:
        lines = tl.arange(0, BLOCK_LINES)
        dims = tl.arange(0, BLOCK_DIM)
        queries = begin + lines // GROUP
        is_query = (lines < QUERIES * GROUP) & (queries < count)
        heads = kv_head * GROUP + lines % GROUP
        inside = is_query[:, None] & (dims < DIM)[None, :]
        tokens = (offset + queries).to(tl.int64)
        at = tokens[:, None] * query_stride + heads[:, None] * query_head_stride + dims[None, :]
        q = tl.load(query + at, mask=inside, other=0.0).to(keys.dtype.element_ty)
        start = tl.load(starts + row)
        last = start + tl.minimum(begin + QUERIES, count)
        base = kv_head.to(tl.int64) * head_stride
        if PAGE == 0:
            base += offset.to(tl.int64) * token_stride
        acc, peak, total = attend_span(
            tl.zeros([BLOCK_LINES, BLOCK_DIM], tl.float32),
            tl.full([BLOCK_LINES], float("-inf"), tl.float32),
            tl.zeros([BLOCK_LINES], tl.float32),
            q,
            start + queries,
            start + begin,
            last - 1,
            start * 0,
            last,
            keys + base,
            values + base,
            tables + tl.load(firsts + row),
            token_stride,
            block_stride,
            scale,
            softcap,
            HAS_SOFTCAP,
            WINDOW,
            PAGE,
            DIM,
            BLOCK_DIM,
            BLOCK_KEYS,
        )
        if HAS_SINKS:
            sink = tl.load(sinks + heads, mask=is_query, other=0.0).to(tl.float32) * 1.4426950408889634
            higher = tl.maximum(peak, sink)
            total = total * tl.exp2(peak - higher) + tl.exp2(sink - higher)
            acc = acc * tl.exp2(peak - higher)[:, None]
        result = (acc / tl.where(is_query, total, 1.0)[:, None]).to(out.dtype.element_ty)
        tl.store(out + tokens[:, None] * out_stride + heads[:, None] * DIM + dims[None, :], result, mask=inside)


def prefill(
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
    """Attention of the rows of several tokens; other tokens of `out` are left alone.

    Args:
        query, out, window, rule, sinks: as of `decode`.
        keys: [blocks, kv_heads, page, dim] of the layer, contiguous. Where the plan has no cache: the step's own
            [kv_heads, tokens, dim], `dim` contiguous. `values` likewise, with the same strides.

    Raises:
        ValueError: the heads are no multiple of kv_heads, or more than 128 times as many.
    """
    _, heads, dim = query.shape
    if plan.paged:
        _, kv_heads, page, _ = keys.shape
        block_stride, head_stride, token_stride, _ = keys.stride()
    else:
        (kv_heads, _, _), page = keys.shape, 0
        (head_stride, token_stride, _), block_stride = keys.stride(), 0
    if heads % kv_heads or heads > kv_heads * _LINES:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads")
    group, sizes = heads // kv_heads, tile_sizes(dim, keys.dtype)
    most = _FLOAT32_LINES if keys.dtype == torch.float32 else min(_LINES, _QUERIES_BYTES // (2 * sizes.dim))
    block_lines = max(most, triton.next_power_of_2(group))
    queries = block_lines // group
    _prefill_kernel[(plan.capacity.tokens // queries + plan.capacity.rows, kv_heads)](
        out,
        query,
        keys,
        values,
        sinks if sinks is not None else query,
        plan.starts,
        plan.counts,
        plan.offsets,
        plan.firsts,
        plan.tables,
        plan.capacity.rows,
        out.stride(0),
        query.stride(0),
        query.stride(1),
        token_stride,
        head_stride,
        block_stride,
        rule.scale,
        rule.softcap,
        HAS_SOFTCAP=rule.has_softcap,
        HAS_SINKS=sinks is not None,
        WINDOW=window or 0,
        GROUP=group,
        PAGE=page,
        DIM=dim,
        QUERIES=queries,
        BLOCK_LINES=block_lines,
        BLOCK_DIM=sizes.dim,
        BLOCK_KEYS=sizes.keys,
        num_warps=8,
        num_stages=2,
    )
