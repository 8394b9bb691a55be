"""From scores to chosen tokens, for rows of one kind: in vocabulary order, or most likely first.

Called by the sampler. Scores here are (logits - largest logit of the row) / temperature: at most 0, so that no
temperature overflows. Each function treats its rows independently, so that a row gives the same token alone and in
any batch: nothing may depend on the number of rows or on how much padding other rows need. Semantics follow the
chain of warpers in transformers: temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

TIE_ROOM = 64  # candidates beyond top-k, for ties with the k-th one
NUCLEUS_CANDIDATES = (128, 1024)  # for top-p alone; more where these do not suffice
_CHUNK = 512  # weights that are summed at once
_SPREAD = 16  # scores that are compared at once in the search of the largest
_LEAST_SPREAD = 2  # below it whole rows are searched
_SORT_ROWS = 32  # rows of one full sort, which takes some 40 bytes of memory per score


class Choice(NamedTuple):
    """What was chosen in n rows, and from what; unspecified for rows that are not finite.

    A token's log-probability is its score minus `log_total`, if it is among the kept.

    Attributes:
        tokens: ids int64 [n].
        log_total: log of the summed exp(score) of the tokens that were kept, float64 [n].
        kept: how many of the most likely tokens were kept, int64 [n].
    """

    tokens: torch.Tensor
    log_total: torch.Tensor
    kept: torch.Tensor


def choose_in_vocabulary_order(
    scores: torch.Tensor, min_p: torch.Tensor | None, uniform: torch.Tensor, *, keep_scores: bool = False
) -> Choice:
    """Inverse CDF over all tokens in the order of their ids.

    Args:
        scores: float32 [n, vocab]; overwritten.
        min_p: float64 [n]; None when no row has any.
        uniform: float64 [n] in (0, 1].
        keep_scores: leave in `scores` those of the tokens that were kept, -inf for the others.
    """
    weights = scores.exp_()
    if min_p is not None:
        weights.masked_fill_(weights < min_p.to(weights.dtype)[:, None], 0.0)
    sums = _chunk_sums(weights)
    target = uniform * sums[:, -1]
    chunk = _first_reaching(sums, target)[:, None]
    before = F.pad(sums, (1, 0)).gather(1, chunk).squeeze(1)
    ids = chunk * _CHUNK + torch.arange(_CHUNK, device=scores.device)
    cumulative = weights.gather(1, ids.clamp(max=scores.shape[-1] - 1)).double()
    cumulative = cumulative.masked_fill_(ids >= scores.shape[-1], 0.0).cumsum_(-1)
    # The chunk's own sum may be rounded: what goes beyond it belongs to its last token with a weight.
    column = _first_reaching(cumulative, torch.minimum(target - before, cumulative[:, -1]))[:, None]
    tokens = (
        ids.gather(1, column).squeeze(1).clamp_(max=scores.shape[-1] - 1)
    )  # only rows that are not finite go beyond
    if keep_scores:
        scores.log_()
    return Choice(tokens, sums[:, -1].log(), torch.full_like(tokens, scores.shape[-1]))


def choose_from_top_k(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, uniform: torch.Tensor
) -> Choice:
    """Inverse CDF over the k most likely tokens, most likely first, ties by id; ties with the k-th are kept.

    As `choose_in_vocabulary_order`, with top_k int64 [n] in [1, vocab] and top_p float64 [n]; keeps the scores.
    """
    vocab = scores.shape[-1]
    width = min(int(top_k.max()) + TIE_ROOM, vocab)
    values, ids = _most_likely(scores, width)
    kth = values.gather(1, top_k[:, None] - 1)
    weights = values.double().exp_().masked_fill_(values < kth, 0.0)
    choice = _choose_sorted(weights, ids, None, top_p, min_p, uniform)
    if width < vocab:
        spilled = (values[:, -1:] == kth) & (kth > float("-inf"))  # further tokens may tie with the k-th
        _choose_again(spilled.squeeze(1), choice, scores, top_k, top_p, min_p, uniform)
    return choice


def choose_from_nucleus(
    scores: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, uniform: torch.Tensor
) -> Choice:
    """As `choose_from_top_k` without top-k. Whole vocabularies are sorted only for rows whose nucleus is large."""
    total = _chunk_sums(scores.exp())[:, -1]
    return _choose_from_nucleus(scores, total, top_p, min_p, uniform, NUCLEUS_CANDIDATES)


def _choose_from_nucleus(
    scores: torch.Tensor,
    total: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    candidates: tuple[int, ...],
) -> Choice:
    """With the first number of candidates, and with the next for rows whose nucleus may go beyond."""
    vocab = scores.shape[-1]
    width = min(candidates[0], vocab) if candidates else vocab
    values, ids = _most_likely(scores, width) if candidates else _sorted(scores)
    choice = _choose_sorted(values.double().exp_(), ids, total, top_p, min_p, uniform)
    if width == vocab:
        return choice
    spilled = values.gather(1, choice.kept[:, None] - 1).squeeze(1) <= values[:, -1]
    if bool(spilled.any()):
        for rows in spilled.nonzero().squeeze(1).split(_SORT_ROWS):
            narrowed = scores[rows], total[rows], top_p[rows], min_p[rows], uniform[rows]
            again = _choose_from_nucleus(*narrowed, candidates[1:])
            for old, new in zip(choice, again, strict=True):
                old[rows] = new
    return choice


def choose_from_all_sorted(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, uniform: torch.Tensor
) -> Choice:
    """As `choose_from_top_k`, sorting whole rows: for a large top_k, and where ties or the nucleus run wide."""
    values, ids = _sorted(scores)
    kth = values.gather(1, top_k[:, None] - 1)
    weights = values.double().exp_().masked_fill_(values < kth, 0.0)
    return _choose_sorted(weights, ids, None, top_p, min_p, uniform)


def most_likely(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest scores of each row, descending, ties by id: values [n, count] and ids int64 [n, count]."""
    vocab = scores.shape[-1]
    count = min(count, vocab)
    width = min(count + TIE_ROOM, vocab)
    values, ids = _most_likely(scores, width)
    if width < vocab:
        spilled = (values[:, -1] == values[:, count - 1]) & (values[:, -1] > float("-inf"))
        if bool(spilled.any()):
            for rows in spilled.nonzero().squeeze(1).split(_SORT_ROWS):
                in_order, order = _sorted(scores[rows])
                values[rows], ids[rows] = in_order[:, :width], order[:, :width]
    return values[:, :count], ids[:, :count]


def _choose_again(spilled: torch.Tensor, choice: Choice, *inputs: torch.Tensor) -> None:
    """Choose from all tokens for the rows marked in `spilled`; writes into the choice."""
    if not bool(spilled.any()):
        return
    for rows in spilled.nonzero().squeeze(1).split(_SORT_ROWS):
        scores, top_k, top_p, min_p, uniform = (each[rows] for each in inputs)
        again = choose_from_all_sorted(scores, top_k, top_p, min_p, uniform)
        for old, new in zip(choice, again, strict=True):
            old[rows] = new


def best_of(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest score of each row, floating [n], and its id int64 [n], of equal ones the lowest.

    Unspecified ids for rows that hold NaN. Faster than max(), which looks for the id while it reads.
    """
    spread = min(_SPREAD, scores.shape[-1])
    columns = scores.shape[-1] // spread
    if scores.device.type != "cpu":
        best, tokens = scores.max(dim=-1)
        return best, tokens
    maxima = _column_maxima(scores, spread)
    best, column = maxima.max(dim=-1)
    ids = column[:, None] + columns * torch.arange(spread)
    first = (scores.gather(1, ids) == best[:, None]).to(torch.int8).argmax(-1, keepdim=True)
    tokens = ids.gather(1, first).squeeze(1)
    rest = scores[:, spread * columns :]
    doubtful = (maxima == best[:, None]).sum(-1) > 1
    if rest.shape[1]:
        doubtful |= rest.amax(-1) > best
    if bool(doubtful.any()):
        best[doubtful], tokens[doubtful] = scores[doubtful].max(dim=-1)
    return best, tokens


def _column_maxima(scores: torch.Tensor, spread: int) -> torch.Tensor:
    """[n, columns]: the largest of the scores c, columns + c, 2 * columns + c, ... of each row, `spread` of them."""
    columns = scores.shape[-1] // spread
    return scores[:, : spread * columns].unflatten(1, (spread, columns)).amax(1)


def _chunk_sums(weights: torch.Tensor) -> torch.Tensor:
    """The sums of the first 1, 2, ... chunks of each row, float64 [n, chunks].

    Each chunk is summed by one thread, whatever the number of rows: a lone row's sum must not be rounded differently.
    """
    whole = weights.shape[-1] // _CHUNK
    sums = weights[:, : whole * _CHUNK].unflatten(1, (whole, _CHUNK)).sum(-1)
    if weights.shape[-1] % _CHUNK:
        sums = torch.cat((sums, weights[:, whole * _CHUNK :].sum(-1, keepdim=True)), dim=-1)
    return sums.double().cumsum_(-1)


def _most_likely(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest scores and their ids, descending, ties by id; which of the last ties are in is not specified."""
    values, ids = _largest(scores, count)
    ids, order = torch.sort(ids, dim=-1)
    values, order = torch.sort(values.gather(1, order), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _largest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As topk(), sorted or not: it looks only at the columns with the largest maxima, which hold all of the largest."""
    vocab = scores.shape[-1]
    spread = math.isqrt(vocab // count)
    if spread < _LEAST_SPREAD:
        values, ids = torch.topk(scores, count, dim=-1)
        return values, ids
    columns = vocab // spread
    chosen = torch.topk(_column_maxima(scores, spread), count, dim=-1, sorted=False).indices
    steps = columns * torch.arange(spread, device=scores.device)
    rest = torch.arange(spread * columns, vocab, device=scores.device).expand(len(scores), -1)
    ids = torch.cat(((chosen[:, None] + steps[:, None]).flatten(1), rest), dim=1)
    values, places = torch.topk(scores.gather(1, ids), count, dim=-1, sorted=False)
    return values, ids.gather(1, places)


def _sorted(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All scores of each row and their ids, descending, ties by id."""
    if scores.device.type != "cpu" or scores.dtype != torch.float32:
        values, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
        return values, ids
    # NumPy sorts numbers several times as fast as torch does pairs: the score as one that falls, then the id.
    bits = (scores + 0.0).numpy().view(np.uint32)  # without negative zeros
    falling = np.where(bits >> 31, bits, ~bits & np.uint32(0x7FFFFFFF)).astype(np.uint64)
    keys = falling << np.uint64(32) | np.arange(scores.shape[1], dtype=np.uint64)
    keys.sort(axis=-1)
    ids = torch.from_numpy((keys & np.uint64(0xFFFFFFFF)).astype(np.int64))
    return scores.gather(1, ids), ids


def _choose_sorted(
    weights: torch.Tensor,
    ids: torch.Tensor,
    total: torch.Tensor | None,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> Choice:
    """Apply top-p and min-p to descending weights float64 [n, c], the first of each row 1, and choose.

    Args:
        total: sum of weights that top-p refers to, float64 [n]; None for the sum of those given.
    """
    cumulative = weights.cumsum(-1)
    before = F.pad(cumulative[:, :-1], (1, 0))
    limit = top_p * (cumulative[:, -1] if total is None else total)
    keep = (before < limit[:, None]) & (weights >= min_p[:, None])
    kept = keep.sum(-1).clamp_(min=1)
    kept_sum = cumulative.gather(1, kept[:, None] - 1).squeeze(1)
    column = _first_reaching(cumulative, uniform * kept_sum)[:, None]
    return Choice(ids.gather(1, column).squeeze(1), kept_sum.log(), kept)


def _first_reaching(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """First column whose cumulative value is at least the target, int64 [n]; a token without weight is never first."""
    found = torch.searchsorted(cumulative, target[:, None]).squeeze(1)
    return found.clamp_(max=cumulative.shape[-1] - 1)  # only rows that are not finite go beyond
