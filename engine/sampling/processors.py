"""From scores to chosen tokens, for rows of one kind: in vocabulary order, or most likely first.

Called by the sampler. Each function treats its rows independently, so that a row gives the same token alone and in
any batch: nothing may depend on the number of rows or on how much padding other rows need. Semantics follow the
chain of warpers in transformers: temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.sampling.scores import Scores
from engine.sampling.search import SORT_ROWS, TIE_ROOM, in_falling_order, largest

NUCLEUS_CANDIDATES = (128, 1024)  # for top-p alone; more where these do not suffice
_CHUNK = 512  # weights that are summed at once


class Choice(NamedTuple):
    """What was chosen in n rows, and from what; unspecified for rows that are not finite.

    A token's log-probability is its score minus `log_total`, if it is among the kept.

    Attributes:
        tokens: ids int64 [n].
        log_total: log of the summed exp(score) of the tokens that were kept, float64 [n].
        kept: how many of the most likely tokens were kept, int64 [n].
        least: where every token was looked at, the exp(score) from which on they were kept, float32 [n].
    """

    tokens: torch.Tensor
    log_total: torch.Tensor
    kept: torch.Tensor
    least: torch.Tensor | None = None


def choose_in_vocabulary_order(scores: Scores, min_p: torch.Tensor | None, uniform: torch.Tensor) -> Choice:
    """Inverse CDF over all tokens in the order of their ids.

    Args:
        min_p: float64 [n]; None when no row has any.
        uniform: float64 [n] in (0, 1].
    """
    least = None if min_p is None else min_p.float()
    sums = _chunk_sums(scores, least)
    target = uniform * sums[:, -1]
    chunk = _first_reaching(sums, target)[:, None]
    before = F.pad(sums, (1, 0)).gather(1, chunk).squeeze(1)
    ids = chunk * _CHUNK + torch.arange(_CHUNK, device=sums.device)
    weights = scores.at(ids.clamp(max=scores.vocab - 1)).exp_()
    if least is not None:
        drop_below(least, weights, torch.empty_like(weights))
    cumulative = weights.double().masked_fill_(ids >= scores.vocab, 0.0).cumsum_(-1)
    # The chunk's own sum may be rounded: what goes beyond it belongs to its last token with a weight.
    column = _first_reaching(cumulative, torch.minimum(target - before, cumulative[:, -1]))[:, None]
    tokens = ids.gather(1, column).squeeze(1).clamp_(max=scores.vocab - 1)  # only rows not finite go beyond
    everything = torch.full_like(tokens, scores.vocab)
    least = torch.zeros_like(uniform, dtype=torch.float32) if least is None else least
    return Choice(tokens, sums[:, -1].log(), everything, least)


def choose_from_top_k(
    scores: Scores, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, uniform: torch.Tensor
) -> Choice:
    """Inverse CDF over the k most likely tokens, most likely first, ties by id; ties with the k-th are kept.

    As `choose_in_vocabulary_order`, with top_k int64 [n] in [1, vocab] and top_p float64 [n].
    """
    width = min(int(top_k.max()) + TIE_ROOM, scores.vocab)
    values, ids = largest(scores, width)
    kth = values.gather(1, top_k[:, None] - 1)
    weights = values.double().exp_().masked_fill_(values < kth, 0.0)
    choice = _choose_sorted(weights, ids, None, top_p, min_p, uniform)
    if width < scores.vocab:
        spilled = (values[:, -1:] == kth) & (kth > float("-inf"))  # further tokens may tie with the k-th
        _choose_again(choose_from_all_sorted, spilled.squeeze(1), choice, scores, top_k, top_p, min_p, uniform)
    return choice


def choose_from_nucleus(scores: Scores, top_p: torch.Tensor, min_p: torch.Tensor, uniform: torch.Tensor) -> Choice:
    """As `choose_from_top_k` without top-k. Whole vocabularies are sorted only for rows whose nucleus is large."""
    total = _chunk_sums(scores, None)[:, -1]
    return _choose_from_nucleus(NUCLEUS_CANDIDATES, scores, total, top_p, min_p, uniform)


def _choose_from_nucleus(
    candidates: tuple[int, ...],
    scores: Scores,
    total: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> Choice:
    """With the first number of candidates, and with the next for rows whose nucleus may go beyond."""
    width = min(candidates[0], scores.vocab) if candidates else scores.vocab
    values, ids = largest(scores, width) if candidates else in_falling_order(scores.whole())
    choice = _choose_sorted(values.double().exp_(), ids, total, top_p, min_p, uniform)
    if width < scores.vocab:
        spilled = values.gather(1, choice.kept[:, None] - 1).squeeze(1) <= values[:, -1]
        wider = partial(_choose_from_nucleus, candidates[1:])
        _choose_again(wider, spilled, choice, scores, total, top_p, min_p, uniform)
    return choice


def choose_from_all_sorted(
    scores: Scores, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, uniform: torch.Tensor
) -> Choice:
    """As `choose_from_top_k`, sorting whole rows: for a large top_k, and where ties or the nucleus run wide."""
    if len(scores) > SORT_ROWS:
        parts = torch.arange(len(scores), device=top_k.device).split(SORT_ROWS)
        inputs = top_k, top_p, min_p, uniform
        choices = [choose_from_all_sorted(scores.narrowed(part), *(each[part] for each in inputs)) for part in parts]
        return Choice(*(torch.cat(each) for each in zip(*(choice[:3] for choice in choices), strict=True)))
    values, ids = in_falling_order(scores.whole())
    kth = values.gather(1, top_k[:, None] - 1)
    weights = values.double().exp_().masked_fill_(values < kth, 0.0)
    return _choose_sorted(weights, ids, None, top_p, min_p, uniform)


def drop_below(least: torch.Tensor, weights: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """In place: weights float32 [n, m] below least float32 [n] become 0. `scratch` is as large."""
    # A product of numbers: masks of bytes cost several times as much on CPUs.
    return weights.mul_(torch.ge(weights, least[:, None], out=scratch))


def _choose_again(
    choose: Callable[..., Choice], spilled: torch.Tensor, choice: Choice, scores: Scores, *inputs: torch.Tensor
) -> None:
    """Choose in another way for the rows marked in `spilled`; writes into the choice."""
    if not bool(spilled.any()):
        return
    for rows in spilled.nonzero().squeeze(1).split(SORT_ROWS):
        again = choose(scores.narrowed(rows), *(each[rows] for each in inputs))
        for old, new in zip(choice[:3], again[:3], strict=True):
            old[rows] = new


def _chunk_sums(scores: Scores, least: torch.Tensor | None) -> torch.Tensor:
    """The summed exp(score) of the first 1, 2, ... chunks of each row, float64 [n, chunks]; those under `least` are 0.

    Each chunk is summed by one thread, whatever the number of rows: a lone row's sum must not be rounded differently.
    """
    whole = scores.vocab // _CHUNK
    sums = torch.empty(len(scores), -(-scores.vocab // _CHUNK), device=scores.logits.device)
    for part, piece in scores.pieces():
        weights = piece.exp_()
        if least is not None:
            drop_below(least[part], weights, scores.workspace.take("kept", weights.shape, weights.device))
        sums[part, :whole] = weights[:, : whole * _CHUNK].unflatten(1, (whole, _CHUNK)).sum(-1)
        if scores.vocab % _CHUNK:
            sums[part, whole] = weights[:, whole * _CHUNK :].sum(-1)
    return sums.double().cumsum_(-1)


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
