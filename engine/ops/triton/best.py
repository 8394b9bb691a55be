"""The most likely token of each row, in one read of the logits as they are.

Called by the sampler, for greedy rows and before others draw. Parts of the rows are searched side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_PART = 4096  # logits of one program


@triton.jit
def _best_of_part_kernel(values, ids, logits, VOCAB: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr):
    """The largest logit of one part of a row, +inf where it holds NaN, and the lowest id that has it."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * PART + tl.arange(0, PART)
    line = tl.load(logits + row * VOCAB + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32)
    line = tl.where(line == line, line, float("inf"))
    best = tl.max(line, axis=0)
    tl.store(values + row * PARTS + part, best)
    tl.store(ids + row * PARTS + part, tl.min(tl.where(line == best, at, VOCAB), axis=0))


@triton.jit(do_not_specialize=["num_rows"])
def _best_kernel(outcome, bests, values, ids, num_rows, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Of the parts of a row the best; see `find_best`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < PARTS
    found = tl.load(values + row * PARTS + at, mask=there, other=float("-inf"))
    firsts = tl.load(ids + row * PARTS + at, mask=there, other=0x7FFFFFFF)
    best = tl.max(found, axis=0)
    token = tl.min(tl.where(found == best, firsts, 0x7FFFFFFF), axis=0)
    bad = tl.abs(best) == float("inf")
    tl.store(bests + row, best)
    tl.store(outcome + row, tl.where(bad, 0, token).to(tl.int64))
    tl.store(outcome + num_rows + row, bad.to(tl.int64))


def find_best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `SamplingKernels.find_best`."""
    (rows, vocab), device = logits.shape, logits.device
    outcome = torch.empty((2, rows), dtype=torch.int64, device=device)
    bests = torch.empty(rows, dtype=torch.float32, device=device)
    if rows:
        parts = triton.cdiv(vocab, _PART)
        values = torch.empty((rows, parts), dtype=torch.float32, device=device)
        ids = torch.empty((rows, parts), dtype=torch.int32, device=device)
        _best_of_part_kernel[(rows, parts)](values, ids, logits, VOCAB=vocab, PARTS=parts, PART=_PART, num_warps=8)
        block = triton.next_power_of_2(parts)
        _best_kernel[(rows,)](outcome, bests, values, ids, rows, PARTS=parts, BLOCK=block, num_warps=1)
    return outcome, bests
