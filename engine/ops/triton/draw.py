"""Tokens drawn in the order of their ids on the device: from everything, or from what min-p leaves.

Called by the sampler. Tiles of fixed places in the vocabulary are summed side by side, so that what a row draws depends
on nothing but the row; then the tile that the random number falls into is read once more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.triton.tile import UNALIGNED
from engine.sampling.processors import Choice
from engine.sampling.scores import Scores

_TILE = 2048


@triton.jit
def _weights(logits, at, best, temperature, least, VOCAB: tl.constexpr):
    """exp(score) in float32 of the ids `at`; 0 under `least` and where there is none."""
    line = tl.load(logits + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32)
    weights = tl.exp(tl.div_rn(line - best, temperature))
    return tl.where(weights >= least, weights, 0.0)


@triton.jit
def _first_reaching(at, cumulative, weights, target):
    """The first of `at` whose sum is at least the target, at the latest the last one with a weight; none without."""
    first = tl.min(tl.where((cumulative >= target) & (weights > 0), at, 0x7FFFFFFF), axis=0)
    return tl.minimum(first, tl.max(tl.where(weights > 0, at, 0), axis=0))


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _sum_kernel(
    tile_sums, logits, rows, bests, temperatures, min_ps, VOCAB: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr
):
    """The sum of the weights of one tile."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    logits += tl.load(rows + row) * VOCAB
    least = tl.load(min_ps + row).to(tl.float32)
    at = tile * TILE + tl.arange(0, TILE)
    weights = _weights(logits, at, tl.load(bests + row), tl.load(temperatures + row), least, VOCAB)
    tl.store(tile_sums + row * TILES + tile, tl.sum(weights, axis=0))


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _draw_kernel(
    tokens, sums, tile_sums, logits, rows, bests, temperatures, min_ps, uniforms,
    VOCAB: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The tile that the random number falls into, and there the token."""
    row = tl.program_id(0).to(tl.int64)
    logits += tl.load(rows + row) * VOCAB
    least = tl.load(min_ps + row).to(tl.float32)
    tiles = tl.arange(0, BLOCK)
    masses = tl.load(tile_sums + row * TILES + tiles, mask=tiles < TILES, other=0.0).to(tl.float64)
    cumulative = tl.cumsum(masses, axis=0)
    total = tl.max(cumulative, axis=0)
    target = tl.load(uniforms + row) * total
    tile = _first_reaching(tiles, cumulative, masses, target)
    before = tl.max(tl.where(tiles < tile, cumulative, 0.0), axis=0)
    at = tile * TILE + tl.arange(0, TILE)
    weights = _weights(logits, at, tl.load(bests + row), tl.load(temperatures + row), least, VOCAB)
    inside = tl.cumsum(weights.to(tl.float64), axis=0)
    tl.store(tokens + row, _first_reaching(at, inside, weights, target - before).to(tl.int64))
    tl.store(sums + row, total)


def choose_in_vocabulary_order(scores: Scores, min_p: torch.Tensor, uniform: torch.Tensor) -> Choice:
    """See `SamplingKernels.choose_in_vocabulary_order`."""
    n, vocab, device = len(scores), scores.vocab, scores.logits.device
    source = (scores.logits, scores.rows, scores.best, scores.temperature, min_p)
    tiles = triton.cdiv(vocab, _TILE)
    tile_sums = torch.empty((n, tiles), dtype=torch.float32, device=device)
    tokens = torch.empty(n, dtype=torch.int64, device=device)
    sums = torch.empty(n, dtype=torch.float64, device=device)
    _sum_kernel[(n, tiles)](tile_sums, *source, VOCAB=vocab, TILES=tiles, TILE=_TILE, num_warps=4)
    block = triton.next_power_of_2(tiles)
    _draw_kernel[(n,)](
        tokens, sums, tile_sums, *source, uniform, VOCAB=vocab, TILES=tiles, BLOCK=block, TILE=_TILE, num_warps=4
    )
    return Choice(tokens, sums.log(), torch.full_like(tokens, vocab), min_p.float())
