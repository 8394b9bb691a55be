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
def attend_span(
    acc,
    peak,
    total,
    query,
    positions,
    least,
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
    """Goes on with an online softmax, in powers of 2, over the keys at [max(least, first), last).

    Args:
        acc: fp32 [m, BLOCK_DIM], the weighted sum of values so far; `peak` and `total`: fp32 [m], the largest score
            and the sum of weights.
        query: [m, BLOCK_DIM] in the dtype of the cache, 0 beyond DIM; `positions`: int [m].
        first: a multiple of BLOCK_KEYS.
        keys, values: pointers to the KV head's first line of block 0, or of the row where PAGE is 0.
        table: pointer to the row's blocks; not read where PAGE is 0.
        token_stride, block_stride: between tokens of a block, and between blocks.
        scale: of the products; `softcap`: what tanh of them is multiplied with.
    """
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < DIM
    for start in range(first, last, BLOCK_KEYS):
        at = start + tl.arange(0, BLOCK_KEYS)
        there = (at >= least) & (at < last)
        if PAGE == 0:
            lines = at.to(tl.int64) * token_stride
        else:
            blocks = tl.load(table + at // PAGE, mask=there, other=0).to(tl.int64)
            lines = blocks * block_stride + (at % PAGE) * token_stride
        key = tl.load(keys + lines[None, :] + dims[:, None], mask=there[None, :] & is_dim[:, None], other=0.0)
        key = key.to(query.dtype)
        scores = tl.dot(query, key, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            falling = tl.exp2(-2 * 1.4426950408889634 * tl.abs(scores))
            scores = softcap * tl.where(scores < 0, -1.0, 1.0) * (1 - falling) / (1 + falling)
        seen = (at[None, :] <= positions[:, None]) & there[None, :]
        if WINDOW > 0:
            seen &= at[None, :] > positions[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a query may see nothing of a tile
        weights = tl.exp2(scores - base[:, None])
        fall = tl.exp2(peak - base)
        total = total * fall + tl.sum(weights, axis=1)
        value = tl.load(values + lines[:, None] + dims[None, :], mask=there[:, None] & is_dim[None, :], other=0.0)
        value = value.to(query.dtype)
        acc = tl.dot(weights.to(query.dtype), value, acc * fall[:, None], input_precision="ieee")
        peak = higher
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
