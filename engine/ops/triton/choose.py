"""Tokens drawn from the most likely ones on the device, without a word to the host: top-k, top-p, min-p.

Called by the sampler. The order is that of engine/sampling/processors.py (descending score, ties by id), and so is the
choice for the same random number. The few largest scores are found by bisection and put in order; rows whose ties or
nucleus run wider are bisected by their sums instead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.triton.tile import UNALIGNED
from engine.sampling.processors import Choice
from engine.sampling.scores import Scores

NUCLEUS_CANDIDATES = 1024  # for top-p alone
MOST_CANDIDATES = 4096
_LEAST_ROOM = 128  # each size is compiled on its own
_BLOCK = 4096
_ORDERED_AT_ONCE = 64


@triton.jit
def _magnitudes(logits, best, temperature, start, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Ids from `start` on, and int32 [BLOCK] the bits of their scores' magnitudes: 0 is the best, 0x7F800000 infinity.

    So it is for NaN, so that exactly VOCAB are at most infinity. Where there is no score they are larger.
    """
    ids = start + tl.arange(0, BLOCK)
    there = ids < VOCAB
    line = tl.load(logits + ids, mask=there, other=0.0).to(tl.float32)
    magnitudes = tl.abs(tl.div_rn(line - best, temperature)).to(tl.int32, bitcast=True)
    return ids, tl.where(there, tl.minimum(magnitudes, 0x7F800000), 0x7FFFFFFF)


@triton.jit
def _weight(magnitudes):
    """exp(score) in float64."""
    return tl.exp(-magnitudes.to(tl.float32, bitcast=True).to(tl.float64))


@triton.jit
def _counts(logits, best, temperature, first, second, third, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """How many magnitudes are at most each of the three."""
    counts = tl.zeros([BLOCK], tl.int32)  # of 10 bits each
    for start in range(0, VOCAB, BLOCK):
        _, magnitudes = _magnitudes(logits, best, temperature, start, VOCAB, BLOCK)
        counts += tl.where(magnitudes <= first, 1, 0)
        counts += tl.where(magnitudes <= second, 1 << 10, 0)
        counts += tl.where(magnitudes <= third, 1 << 20, 0)
    return tl.sum(counts & 0x3FF, axis=0), tl.sum((counts >> 10) & 0x3FF, axis=0), tl.sum(counts >> 20, axis=0)


@triton.jit
def _least_with(logits, best, temperature, want, room, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest magnitude that `want` are at most as large as, or one that no more than `room` are; how many are."""
    low = tl.minimum(want, 0)  # 0, which the compiler must not know: Triton 3.6 fails where no loop is left
    high = low + 0x7F800000
    count = low + VOCAB
    while (low < high) & (count > room):
        quarter = (high - low) // 4
        first = low + quarter
        second = first + quarter
        third = second + quarter
        to_first, to_second, to_third = _counts(logits, best, temperature, first, second, third, VOCAB, BLOCK)
        at_first = to_first >= want
        at_second = to_second >= want
        at_third = to_third >= want
        beyond = tl.where(at_second, first, tl.where(at_third, second, third)) + 1
        low = tl.where(at_first, low, beyond)
        high = tl.where(at_first, first, tl.where(at_second, second, tl.where(at_third, third, high)))
        count = tl.where(at_first, to_first, tl.where(at_second, to_second, tl.where(at_third, to_third, count)))
    return high, count


@triton.jit
def _mass(logits, best, temperature, most, least, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """How many magnitudes are at most `most`, with weights of at least `least`, and the sum of these."""
    counts = tl.zeros([BLOCK], tl.int32)
    masses = tl.zeros([BLOCK], tl.float64)
    for start in range(0, VOCAB, BLOCK):
        _, magnitudes = _magnitudes(logits, best, temperature, start, VOCAB, BLOCK)
        weights = _weight(magnitudes)
        among = (magnitudes <= most) & (weights >= least)
        masses += tl.where(among, weights, 0.0)
        counts += among.to(tl.int32)
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _gather_kernel(
    candidates, counts, masses, logits, rows, bests, temperatures, wanted,
    WITH_MASS: tl.constexpr, VOCAB: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each row the ids and magnitudes of at least `wanted` of the largest scores, with all ties of the last one.

    A count beyond ROOM says that there are too many.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += tl.load(rows + row) * VOCAB
    best = tl.load(bests + row)
    temperature = tl.load(temperatures + row)
    want = tl.minimum(tl.load(wanted + row), VOCAB).to(tl.int32)
    if WITH_MASS:
        _, mass = _mass(logits, best, temperature, 0x7F800000, 0.0, VOCAB, BLOCK)
        tl.store(masses + row, mass)
    most, count = _least_with(logits, best, temperature, want, ROOM, VOCAB, BLOCK)
    tl.store(counts + row, count)
    if count <= ROOM:
        candidates += row * ROOM
        for start in range(0, VOCAB, BLOCK // 2):  # of more the keys take too many registers
            ids, magnitudes = _magnitudes(logits, best, temperature, start, VOCAB, BLOCK // 2)
            among = magnitudes <= most
            places = tl.cumsum(among.to(tl.int32), axis=0) - 1
            keys = (magnitudes.to(tl.int64) << 32) | ids
            tl.store(candidates + places, keys, mask=among)
            candidates += tl.sum(among.to(tl.int32), axis=0)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _order_kernel(ordered, candidates, counts, ROOM: tl.constexpr, BLOCK: tl.constexpr):
    """Puts each candidate at its place: as far back as there are better ones."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row)
    begin = tl.program_id(1) * BLOCK
    if (count <= ROOM) & (begin < count):
        own = begin + tl.arange(0, BLOCK)
        candidates += row * ROOM
        keys = tl.load(candidates + own, mask=own < count, other=0)
        places = tl.zeros([BLOCK], tl.int32)
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            others = tl.load(candidates + at, mask=at < count, other=0x7FFFFFFFFFFFFFFF)
            places += tl.sum((others[None, :] < keys[:, None]).to(tl.int32), axis=1)
        tl.store(ordered + row * ROOM + places, keys, mask=own < count)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _choose_kernel(
    tokens, sums, kepts, wide, ordered, counts, masses, top_ks, top_ps, min_ps, uniforms,
    BY_COUNT: tl.constexpr, VOCAB: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Chooses from the ordered candidates of a row; `wide` where they do not suffice."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    at = tl.arange(0, ROOM)
    keys = tl.load(ordered + row * ROOM + at, mask=at < count, other=0)
    magnitudes = (keys >> 32).to(tl.int32)
    there = at < count
    if BY_COUNT:
        last = tl.sum(tl.where(at == tl.load(top_ks + row) - 1, magnitudes, 0), axis=0)
        there &= magnitudes <= last
    weights = tl.where(there, _weight(tl.where(there, magnitudes, 0)), 0.0)
    cumulative = tl.cumsum(weights, axis=0)
    total = tl.max(cumulative, axis=0)
    if BY_COUNT:
        limit = top_p * total
    else:
        limit = top_p * tl.load(masses + row)
    below = 1 + tl.sum((there & (cumulative < limit)).to(tl.int32), axis=0)
    likely = tl.sum((there & (weights >= min_p)).to(tl.int32), axis=0)
    spills = count > ROOM
    if not BY_COUNT:
        spills |= (below > count) & (likely == count) & (count < VOCAB)
    kept = tl.maximum(1, tl.minimum(tl.minimum(below, likely), tl.sum(there.to(tl.int32), axis=0)))
    kept_sum = tl.sum(tl.where(at == kept - 1, cumulative, 0.0), axis=0)
    target = tl.load(uniforms + row) * kept_sum
    column = tl.minimum(tl.sum((there & (cumulative < target)).to(tl.int32), axis=0), kept - 1)
    token = tl.sum(tl.where(at == column, keys & 0xFFFFFFFF, 0), axis=0)
    tl.store(tokens + row, token)
    tl.store(sums + row, kept_sum)
    tl.store(kepts + row, kept.to(tl.int64))
    tl.store(wide + row, spills.to(tl.int32))


@triton.jit
def _reach(logits, best, temperature, mass, last, least, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest magnitude up to which weights sum up to `mass`, or `last`; count and sum of what comes before."""
    low = last * 0
    high = last
    while low < high:
        middle = low + (high - low) // 2
        _, found = _mass(logits, best, temperature, middle, least, VOCAB, BLOCK)
        enough = found >= mass
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    count, before = _mass(logits, best, temperature, high - 1, least, VOCAB, BLOCK)
    return high, count, before


@triton.jit
def _ties_up_to(mass, before, weight):
    """How many equal weights behind the sum `before` it takes to reach `mass`, at least 1."""
    return tl.maximum(1, tl.ceil((mass - before) / weight).to(tl.int64))


@triton.jit
def _tied(logits, best, temperature, magnitude, number, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The id of the `number`-th token, from 1 on, that has this magnitude."""
    seen = number * 0
    token = number * 0
    for start in range(0, VOCAB, BLOCK):
        ids, magnitudes = _magnitudes(logits, best, temperature, start, VOCAB, BLOCK)
        tied = magnitudes == magnitude
        rank = seen + tl.cumsum(tied.to(tl.int32), axis=0)
        token += tl.sum(tl.where(tied & (rank == number), ids, 0), axis=0)
        seen += tl.sum(tied.to(tl.int32), axis=0)
    return token


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _wide_kernel(
    tokens, sums, kepts, wide, logits, rows, bests, temperatures, top_ks, top_ps, min_ps, uniforms,
    BY_COUNT: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Chooses in the rows marked as wide, from sums over the whole vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(wide + row) != 0:
        logits += tl.load(rows + row) * VOCAB
        best = tl.load(bests + row)
        temperature = tl.load(temperatures + row)
        least = tl.load(min_ps + row)
        last = tl.load(wide + row) * 0 + 0x7F800000
        if BY_COUNT:
            last, _ = _least_with(logits, best, temperature, tl.load(top_ks + row).to(tl.int32), 0, VOCAB, BLOCK)
        _, total = _mass(logits, best, temperature, last, 0.0, VOCAB, BLOCK)
        limit = tl.load(top_ps + row) * total
        end, kept, before = _reach(logits, best, temperature, limit, last, least, VOCAB, BLOCK)
        weight = _weight(end)
        most, _ = _mass(logits, best, temperature, end, least, VOCAB, BLOCK)
        ties = tl.maximum(tl.minimum(_ties_up_to(limit, before, weight), (most - kept).to(tl.int64)), 0)
        kept_sum = before + ties.to(tl.float64) * weight
        tl.store(kepts + row, tl.maximum(kept + ties, 1))
        tl.store(sums + row, kept_sum)
        target = tl.load(uniforms + row) * kept_sum
        at, _, before = _reach(logits, best, temperature, target, end, least, VOCAB, BLOCK)
        number = _ties_up_to(target, before, _weight(at))
        tl.store(tokens + row, _tied(logits, best, temperature, at, number, VOCAB, BLOCK))


def choose_most_likely(
    scores: Scores,
    top_k: torch.Tensor | None,
    most: int,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> Choice:
    """See `SamplingKernels.choose_most_likely`."""
    n, vocab, device = len(scores), scores.vocab, scores.logits.device
    by_count = top_k is not None
    most = most if by_count else NUCLEUS_CANDIDATES
    room = min(max(_LEAST_ROOM, triton.next_power_of_2(2 * most)), triton.next_power_of_2(vocab))
    wanted = torch.full((n,), most, device=device) if top_k is None else top_k
    numbers = (top_p, min_p, uniform)
    source = (scores.logits, scores.rows, scores.best, scores.temperature)
    tokens, kept = torch.empty((2, n), dtype=torch.int64, device=device)
    sums, masses = torch.empty((2, n), dtype=torch.float64, device=device)
    counts, wide = torch.ones((2, n), dtype=torch.int32, device=device)
    if room <= MOST_CANDIDATES:
        candidates, ordered = torch.empty((2, n, room), dtype=torch.int64, device=device)
        _gather_kernel[(n,)](
            candidates, counts, masses, *source, wanted,
            WITH_MASS=not by_count, VOCAB=vocab, ROOM=room, BLOCK=_BLOCK, num_warps=16,
        )  # fmt: skip
        block = min(_ORDERED_AT_ONCE, room)
        _order_kernel[(n, room // block)](ordered, candidates, counts, ROOM=room, BLOCK=block, num_warps=8)
        _choose_kernel[(n,)](
            tokens, sums, kept, wide, ordered, counts, masses, wanted, *numbers,
            BY_COUNT=by_count, VOCAB=vocab, ROOM=room, num_warps=8,
        )  # fmt: skip
    _wide_kernel[(n,)](
        tokens, sums, kept, wide, *source, wanted, *numbers,
        BY_COUNT=by_count, VOCAB=vocab, BLOCK=_BLOCK, num_warps=16,
    )  # fmt: skip
    return Choice(tokens, sums.log(), kept)
