"""What both attention kernels do: one tile of queries against a span of keys, read block by block of the cache.

Used by decode.py and prefill.py. Tiles of keys lie at fixed positions of a row's context, so that what a query gets
does not depend on what it is computed together with.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634
_KEYS_BYTES = 1 << 14  # of one tile of K
# Arguments that are parts of larger tensors, single numbers of which are read: where they begin varies from step to
# step, and a kernel must not be compiled again for it. A kernel need not have all of them.
UNALIGNED = (
    "starts",
    "counts",
    "offsets",
    "firsts",
    "first_splits",
    "num_splits",
    "tables",
    "splits",
    "all_splits",
    "slots",
    "positions",
    "totals",
    "tokens",
    "sums",
    "kepts",
    "wide",
    "masses",
    "top_ks",
    "top_ps",
    "min_ps",
    "uniforms",
    "rows",
    "bests",
    "temperatures",
    "wanted",
    "begun",
)


@triton.jit
def _attend_tile(
    acc,
    peak,
    total,
    query,
    positions,
    least,
    start,
    last,
    keys,
    values,
    table,
    token_stride,
    block_stride,
    scale,
    softcap,
    IS_WHOLE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """As `attend_span`, over the keys of one tile. IS_WHOLE: every query sees all of them.

    A tile gives the same bits either way: products that are added to something are fused by hand, or not at all.
    """
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < DIM
    at = start + tl.arange(0, BLOCK_KEYS)
    there = (at >= least) & (at < last)
    if PAGE == 0:
        lines = at.to(tl.int64) * token_stride
    elif PAGE % BLOCK_KEYS == 0:  # one block has the whole tile
        block = tl.load(table + start // PAGE).to(tl.int64)
        lines = block * block_stride + (start % PAGE + tl.arange(0, BLOCK_KEYS)) * token_stride
    else:
        blocks = tl.load(table + at // PAGE, mask=there, other=0).to(tl.int64)
        lines = blocks * block_stride + (at % PAGE) * token_stride
    if IS_WHOLE:
        key_mask, value_mask = is_dim[:, None], is_dim[None, :]
    else:
        key_mask, value_mask = there[None, :] & is_dim[:, None], there[:, None] & is_dim[None, :]
    key = tl.load(keys + lines[None, :] + dims[:, None], mask=key_mask, other=0.0).to(query.dtype)
    scores = tl.dot(query, key, input_precision="ieee")
    if HAS_SOFTCAP:
        scores *= scale
        falling = tl.exp2(-2 * 1.4426950408889634 * tl.abs(scores))
        scores = softcap * tl.where(scores < 0, -1.0, 1.0) * (1 - falling) / (1 + falling)
    if not IS_WHOLE:
        seen = (at[None, :] <= positions[:, None]) & there[None, :]
        if WINDOW > 0:
            seen &= at[None, :] > positions[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
    tile_peak = tl.max(scores, axis=1)
    if not HAS_SOFTCAP:
        tile_peak *= scale
    higher = tl.maximum(peak, tile_peak)
    base = tl.where(higher == float("-inf"), 0.0, higher)  # a query may see nothing of a tile
    if HAS_SOFTCAP:
        weights = tl.exp2(scores - base[:, None])
    else:
        weights = tl.exp2(tl.fma(scores, scale, -base[:, None]))
    fall = tl.exp2(peak - base)
    total = total * fall + tl.sum(weights, axis=1)
    value = tl.load(values + lines[:, None] + dims[None, :], mask=value_mask, other=0.0).to(query.dtype)
    acc = tl.dot(weights.to(query.dtype), value, acc * fall[:, None], input_precision="ieee")
    return acc, higher, total


@triton.jit
def attend_span(
    acc,
    peak,
    total,
    query,
    positions,
    lowest,
    highest,
    first,
    last,
    keys,
    values,
    table,
    token_stride,
    block_stride,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Goes on with an online softmax, in powers of 2, over the keys from `first` on that queries see, up to `last`.

    Args:
        acc: fp32 [m, BLOCK_DIM], the weighted sum of values so far; `peak` and `total`: fp32 [m], the largest score
            and the sum of weights.
        query: [m, BLOCK_DIM] in the dtype of the cache, 0 beyond DIM; `positions`: int [m].
        lowest, highest: of the positions, lines that are no queries left out.
        first: a multiple of BLOCK_KEYS.
        keys, values: pointers to the KV head's first line of block 0, or of the row where PAGE is 0.
        table: pointer to the row's blocks; not read where PAGE is 0.
        token_stride, block_stride: between tokens of a block, and between blocks.
        scale: of the products, positive; `softcap`: what tanh of them is multiplied with.
    """
    least = lowest * 0
    whole = first
    if WINDOW > 0:
        least = tl.maximum(lowest - WINDOW + 1, 0)
        first = tl.maximum(first, least // BLOCK_KEYS * BLOCK_KEYS)
        whole = tl.maximum(first, (tl.maximum(highest - WINDOW + 1, 0) + BLOCK_KEYS - 1) // BLOCK_KEYS * BLOCK_KEYS)
    whole_end = tl.minimum(lowest + 1, last) // BLOCK_KEYS * BLOCK_KEYS
    if WINDOW > 0:
        for start in range(first, tl.minimum(whole, last), BLOCK_KEYS):
            acc, peak, total = _attend_tile(
                acc, peak, total, query, positions, least, start, last, keys, values, table, token_stride,
                block_stride, scale, softcap, False, HAS_SOFTCAP, WINDOW, PAGE, DIM, BLOCK_DIM, BLOCK_KEYS,
            )  # fmt: skip
    for start in range(whole, whole_end, BLOCK_KEYS):
        acc, peak, total = _attend_tile(
            acc, peak, total, query, positions, least, start, last, keys, values, table, token_stride,
            block_stride, scale, softcap, True, HAS_SOFTCAP, WINDOW, PAGE, DIM, BLOCK_DIM, BLOCK_KEYS,
        )  # fmt: skip
    for start in range(tl.maximum(whole, whole_end), last, BLOCK_KEYS):
        acc, peak, total = _attend_tile(
            acc, peak, total, query, positions, least, start, last, keys, values, table, token_stride,
            block_stride, scale, softcap, False, HAS_SOFTCAP, WINDOW, PAGE, DIM, BLOCK_DIM, BLOCK_KEYS,
        )  # fmt: skip
    return acc, peak, total


class TileSizes(NamedTuple):
    """Of powers of 2: `dim` is at least the head's, and `keys` are read at once."""

    dim: int
    keys: int


def tile_sizes(dim: int, dtype: torch.dtype) -> TileSizes:
    """Tiles of keys that two or three stages of a pipeline hold in an SM's shared memory."""
    padded = max(16, triton.next_power_of_2(dim))
    return TileSizes(padded, max(16, min(64, _KEYS_BYTES // (padded * dtype.itemsize))))


class ScoreRule(NamedTuple):
    """Factors of the kernels, whose scores are in powers of 2."""

    scale: float
    softcap: float
    has_softcap: bool

    @classmethod
    def of(cls, dim: int, scaling: float | None, softcap: float | None) -> ScoreRule:
        """`scaling` and `softcap` as of `Ops.attend`."""
        factor = dim**-0.5 if scaling is None else scaling
        if softcap is None:
            return cls(factor * LOG2E, 0.0, False)
        return cls(factor / softcap, softcap * LOG2E, True)
