"""From scores to chosen tokens, for rows of one kind: in vocabulary order, or most likely first.

Called by the sampler. Scores here are (logits - largest logit of the row) / temperature: at most 0, so that no
temperature overflows. Each function treats its rows independently, so that a row gives the same token alone and in
any batch: nothing may depend on the number of rows or on how much padding other rows need. Semantics follow the
chain of warpers in transformers: temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

TIE_ROOM = 64  # candidates beyond top-k, for ties with the k-th one
NUCLEUS_CANDIDATES = 1024  # enough for top-p alone on all but flat distributions
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
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1]  # not sum(), which may split a lone row by threads and round differently
    tokens = _first_reaching(cumulative, (uniform * total).to(cumulative.dtype))
    if keep_scores:
        scores.log_()
    return Choice(tokens, total.double().log(), torch.full_like(tokens, scores.shape[-1]))


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
    vocab = scores.shape[-1]
    values, ids = _most_likely(scores, min(NUCLEUS_CANDIDATES, vocab))
    total = 1.0 / scores.softmax(-1).amax(-1).double()  # the largest weight is 1, so its probability is 1 / total
    choice = _choose_sorted(values.double().exp_(), ids, total, top_p, min_p, uniform)
    if values.shape[-1] < vocab:
        spilled = values.gather(1, choice.kept[:, None] - 1).squeeze(1) <= values[:, -1]
        everything = torch.full_like(choice.tokens, vocab)
        _choose_again(spilled, choice, scores, everything, top_p, min_p, uniform)
    return choice


def choose_from_all_sorted(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, uniform: torch.Tensor
) -> Choice:
    """As `choose_from_top_k`, sorting whole rows: for a large top_k, and where ties or the nucleus run wide."""
    values, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
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
                in_order, order = torch.sort(scores[rows], dim=-1, descending=True, stable=True)
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


def _most_likely(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest scores and their ids, descending, ties by id; which of the last ties are in is not specified."""
    values, ids = torch.topk(scores, count, dim=-1)
    ids, order = torch.sort(ids, dim=-1)
    values, order = torch.sort(values.gather(1, order), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


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
