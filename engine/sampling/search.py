"""The largest scores of each row: the first, the first few, or all in order.

Used by the sampler, its processors and the log-probabilities. Whole vocabularies are sorted only for rows whose ties
run wide. Each row is searched independently of the others.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from engine.sampling.scores import Scores

TIE_ROOM = 64  # candidates beyond those that are wanted, for ties with the last one
SPREAD = 16  # scores that are compared at once in the search of the largest
SORT_ROWS = 32  # rows of one full sort, which takes some 40 bytes of memory per score
_LEAST_SPREAD = 2  # below it whole rows are searched
_ROOM = 8  # columns for each candidate, from which on those of `Best` serve to find them


class Best(NamedTuple):
    """The largest score of each row, floating [n], and its id int64 [n], of equal ones the lowest.

    Unspecified ids for rows that hold NaN. `maxima` [n, columns] are of the scores c, columns + c, 2 * columns + c, ...
    of each row, SPREAD of them; None where the search did without.
    """

    values: torch.Tensor
    tokens: torch.Tensor
    maxima: torch.Tensor | None


def best_of(scores: torch.Tensor) -> Best:
    """Of scores floating [n, vocab]. Faster than max(), which looks for the id while it reads."""
    if scores.device.type != "cpu" or scores.dtype != torch.float32 or not len(scores):
        return Best(*scores.max(dim=-1), maxima=None)
    spread = min(SPREAD, scores.shape[-1])
    columns = scores.shape[-1] // spread
    maxima = _column_maxima(scores, spread)
    best = maxima.amax(-1)
    column = torch.from_numpy(maxima.numpy().argmax(-1))
    ids = column[:, None] + columns * torch.arange(spread)
    first = (scores.gather(1, ids) == best[:, None]).to(torch.int8).argmax(-1, keepdim=True)
    tokens = ids.gather(1, first).squeeze(1)
    doubtful = torch.from_numpy(np.count_nonzero(maxima.numpy() == best.numpy()[:, None], axis=-1) > 1)
    rest = scores[:, spread * columns :]
    if rest.shape[1]:
        doubtful |= rest.amax(-1) > best
    if bool(doubtful.any()):
        best[doubtful], tokens[doubtful] = scores[doubtful].max(dim=-1)
    return Best(best, tokens, maxima if spread == SPREAD else None)


def most_likely(scores: Scores, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest scores of each row, descending, ties by id: values [n, count] and ids int64 [n, count]."""
    count = min(count, scores.vocab)
    if scores.logits.device.type != "cpu":
        return _largest_keys(scores, count)
    width = min(count + TIE_ROOM, scores.vocab)
    values, ids = largest(scores, width)
    if width < scores.vocab:
        spilled = (values[:, -1] == values[:, count - 1]) & (values[:, -1] > float("-inf"))
        if bool(spilled.any()):
            for rows in spilled.nonzero().squeeze(1).split(SORT_ROWS):
                in_order, order = in_falling_order(scores.narrowed(rows).whole())
                values[rows], ids[rows] = in_order[:, :width], order[:, :width]
    return values[:, :count], ids[:, :count]


def _largest_keys(scores: Scores, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `most_likely`, without a word to the host: ids make all scores different, so that none can tie."""
    if not len(scores):
        return scores.logits.new_empty(0, count), torch.empty(0, count, dtype=torch.int64, device=scores.logits.device)
    found = []
    behind = torch.arange(scores.vocab, device=scores.logits.device).neg_().add_(scores.vocab - 1)
    for at in torch.arange(len(scores), device=scores.logits.device).split(SORT_ROWS):
        bits = (scores.narrowed(at).whole() + 0.0).view(torch.int32)  # without negative zeros
        ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        keys = (ascending.long() << 32) | behind
        best = keys.topk(count, dim=-1).values
        found.append(scores.vocab - 1 - (best & 0xFFFFFFFF))
    ids = torch.cat(found)
    return scores.at(ids), ids


def largest(scores: Scores, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `most_likely`, but which of the last ties are in is not specified."""
    # Of the logits, whose order is that of the scores: only what is found has to be scaled.
    ids, _ = torch.sort(_candidates(scores, count), dim=-1)
    values, order = torch.sort(scores.at(ids), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def in_falling_order(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All scores [n, vocab] of each row and their ids, descending, ties by id."""
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


def _candidates(scores: Scores, count: int) -> torch.Tensor:
    """Ids int64 [n, count] of the largest, in any order: they are in the columns with the largest maxima."""
    vocab = scores.vocab
    spread, maxima = SPREAD, scores.maxima
    if maxima is None or maxima.shape[1] < _ROOM * count:
        spread = math.isqrt(vocab // count)
        if spread < _LEAST_SPREAD:
            return torch.cat([_places(piece, count) for _, piece in scores.logit_pieces()])
        maxima = torch.cat([_column_maxima(piece, spread) for _, piece in scores.logit_pieces()])
    columns = vocab // spread
    device = maxima.device
    steps = columns * torch.arange(spread, device=device)
    rest = torch.arange(spread * columns, vocab, device=device).expand(len(maxima), -1)
    ids = torch.cat(((_places(maxima, count)[:, None] + steps[:, None]).flatten(1), rest), dim=1)
    return ids.gather(1, _places(scores.logits_at(ids), count))


def _places(values: torch.Tensor, count: int) -> torch.Tensor:
    """Where the largest of each row are, int64 [n, count], in any order."""
    if values.device.type != "cpu" or count == values.shape[1]:
        return torch.topk(values, count, dim=-1, sorted=False).indices
    # Several times as fast as topk().
    return torch.from_numpy(np.argpartition(values.numpy(), values.shape[1] - count, axis=-1)[:, -count:])


def _column_maxima(scores: torch.Tensor, spread: int) -> torch.Tensor:
    columns = scores.shape[-1] // spread
    return scores[:, : spread * columns].unflatten(1, (spread, columns)).amax(1)
