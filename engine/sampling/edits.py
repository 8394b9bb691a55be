"""The changes that requests ask for in a step's logits, before a token is chosen.

`EditsBuilder` collects them on the host, row by row, from requests that have any; `LogitEdits.apply` makes them in one
pass on the device. Rows that ask for nothing are not touched. Called by the sampler. Order and meaning follow
transformers' list of processors: biased sequences, repetition penalty, repeated n-grams, bad words, minimum length,
forced tokens, suppressed tokens; then frequency and presence penalty, logit bias, allowed tokens, constraint.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.request import Request
from engine.sampling.constraint import check_mask
from engine.sampling.history import History, Ids, as_ids
from engine.sampling.sending import send

NEVER = float("-inf")
_FINITE = (float(np.finfo(np.float32).smallest_subnormal), float(np.finfo(np.float32).max))  # penalties that are so

Array = npt.NDArray[Any]
Change = Callable[..., None]  # of the logits, with its arrays as tensors


class LogitEdits(NamedTuple):
    """What changes in one step's logits: changes in their order, each with the arrays that it takes.

    They hold until the next step's edits are built.
    """

    changes: list[tuple[Change, tuple[Array, ...]]]

    def arrays(self) -> list[Array]:
        """Of all changes, of one dimension each, to be sent to the device."""
        return [array for _, arrays in self.changes for array in arrays]

    def apply(self, logits: torch.Tensor, tensors: Sequence[torch.Tensor] | None = None) -> None:
        """Make the changes in place.

        Args:
            logits: float32 [rows, vocab_size], contiguous, on any device.
            tensors: `arrays` on that device; None sends them.
        """
        tensors = send(self.arrays(), logits.device) if tensors is None else tensors
        of = iter(tensors)
        for change, arrays in self.changes:
            change(logits, *itertools.islice(of, len(arrays)))


class EditsBuilder:
    """Collects the edits of a step, one `add` a request that may have any.

    Serves one step after the other and keeps nothing between them but memory.

    Attributes:
        errors: rows whose constraint failed, with the reason; their token means nothing.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._biased, self._repeated, self._penalties, self._logit_bias, self._forced, self._banned, self._allowed = (
            self._all
        ) = tuple(_Entries(vocab_size) for _ in range(7))
        self.clear()

    def clear(self) -> None:
        """Begin a step. What was built before is no longer to be used."""
        self.errors: dict[int, str] = {}
        self._forced_rows: list[int] = []
        self._restricted: list[int] = []
        for entries in self._all:
            entries.clear()

    def add(self, row: int, request: Request) -> None:
        """Collect the edits of a request's row; its `token_ids` must all be known."""
        params = request.params
        mask = None
        if params.constraint is not None:
            try:
                mask = params.constraint.allowed(request.output_ids)
                if mask is not None:
                    check_mask(mask)
            except BaseException as error:  # the constraint is the caller's code: only its own request may suffer
                self.errors[row] = f"the constraint failed: {type(error).__name__}: {error}"
                return
        forced = _forced_ids(request)
        if forced:
            self._forced_rows.append(row)
            self._forced.add(row, as_ids(forced))
        else:
            if params.edits_logits:
                self._change(row, request)
            if request.num_output_tokens < params.min_new_tokens and not _allows_only(mask, params.ending_ids):
                self._ban(row, params.ending_ids)
        self._ban(row, params.suppress_tokens)
        if request.num_output_tokens == _begin(request):
            self._ban(row, params.begin_suppress_tokens)
        self._restrict(row, _history(request).allowed if params.allowed_token_ids is not None else None, mask)

    def build(self) -> LogitEdits | None:
        """Everything that was collected; None when that is nothing. In memory that the next step uses again."""
        restricted = np.array(self._restricted, np.int64)
        forced = np.array(self._forced_rows, np.int64)
        changes: list[tuple[Change, tuple[Array, ...]]] = [
            (_add, self._biased.arrays),
            (_penalise, self._repeated.arrays),
            (_add, self._penalties.arrays),
            (_add, self._logit_bias.arrays),
            (_force, (forced, self._forced.where)),
            (_ban, (self._banned.where,)),
            (_allow, (restricted, self._allowed.where)),
        ]
        changes = [(change, arrays) for change, arrays in changes if len(arrays[0])]
        return LogitEdits(changes) if changes else None

    def _change(self, row: int, request: Request) -> None:
        """Edits that look at scores or at the tokens so far."""
        params, token_ids = request.params, request.token_ids
        history = _history(request)
        history.update(token_ids)
        if history.biased is not None:
            self._biased.add(row, *history.biased.completing(token_ids))
        if history.seen is not None:
            self._repeated.add(row, history.seen.ids, np.clip(params.repetition_penalty, *_FINITE))
        if history.ngrams is not None:
            self._banned.add(row, history.ngrams.repeating(token_ids))
        if history.bad_words is not None:
            self._banned.add(row, history.bad_words.completing(token_ids)[0])
        if history.generated is not None:
            penalty = params.frequency_penalty * history.generated.counts + params.presence_penalty
            self._penalties.add(row, history.generated.ids, -penalty)
        if history.logit_bias is not None:
            self._logit_bias.add(row, *history.logit_bias)

    def _ban(self, row: int, ids: tuple[int, ...]) -> None:
        if ids:
            array = as_ids(ids)
            self._banned.add(row, array[array < self._vocab_size])

    def _restrict(self, row: int, ids: Ids | None, mask: npt.NDArray[np.bool_] | None) -> None:
        """To the ids, ascending, that are True in the mask; each of the two only if given."""
        if mask is not None:
            mask = mask[: self._vocab_size]
            if ids is not None:
                ids = ids[: np.searchsorted(ids, len(mask))]
                ids = ids[mask[ids]]
            elif 2 * np.count_nonzero(mask) < self._vocab_size:
                ids = np.flatnonzero(mask)
            else:  # the shorter list
                self._banned.add(row, np.flatnonzero(~mask))
                self._banned.add(row, np.arange(len(mask), self._vocab_size))
        if ids is not None:
            self._restricted.append(row)
            self._allowed.add(row, ids)


class _Entries:
    """Places in the flattened logits and values, collected row by row in memory that grows to the largest step."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._size = 0
        self._where: Ids = np.empty(0, np.int64)
        self._values: npt.NDArray[np.float32] = np.empty(0, np.float32)

    def clear(self) -> None:
        self._size = 0

    def add(self, row: int, ids: Ids, values: npt.NDArray[np.floating] | float = NEVER) -> None:
        begin, end = self._size, self._size + len(ids)
        if end > len(self._where):
            self._where = np.concatenate((self._where[:begin], np.empty(2 * end - begin, np.int64)))
            self._values = np.concatenate((self._values[:begin], np.empty(2 * end - begin, np.float32)))
        np.add(ids, row * self._vocab_size, out=self._where[begin:end])
        self._values[begin:end] = values
        self._size = end

    @property
    def where(self) -> Ids:
        """Views, until the next step."""
        return self._where[: self._size]

    @property
    def arrays(self) -> tuple[Ids, npt.NDArray[np.float32]]:
        """The same, and the values."""
        return self.where, self._values[: self._size]


def _history(request: Request) -> History:
    if request.history is None:
        request.history = History(request.params, request.num_prompt_tokens)
    return request.history


def _forced_ids(request: Request) -> tuple[int, ...]:
    """The only tokens that can come next; empty when that is left to the scores."""
    params = request.params
    if request.num_output_tokens == params.max_new_tokens - 1 and params.forced_eos_token_ids:
        return params.forced_eos_token_ids
    if len(request.token_ids) == 1 and params.forced_bos_token_id is not None:
        return (params.forced_bos_token_id,)
    return ()


def _begin(request: Request) -> int:
    """Where `begin_suppress_tokens` applies: at the first token that is not forced."""
    return int(request.num_prompt_tokens == 1 and request.params.forced_bos_token_id is not None)


def _allows_only(mask: npt.NDArray[np.bool_] | None, ids: tuple[int, ...]) -> bool:
    """Whether the constraint is at its end: nothing but some of these tokens may come."""
    return mask is not None and np.count_nonzero(mask) == sum(bool(mask[i]) for i in set(ids) if i < len(mask))


# Changes of logits [rows, vocab_size]:
# `where` int64 [m] are places in the flattened logits, each once at most, `values` and `penalties` float32 [m] what
# belongs there, `rows` int64 [n].


def _add(logits: torch.Tensor, where: torch.Tensor, values: torch.Tensor) -> None:
    flat = logits.view(-1)
    flat.scatter_(0, where, flat.index_select(0, where) + values)


def _penalise(logits: torch.Tensor, where: torch.Tensor, penalties: torch.Tensor) -> None:
    """Divides what is positive and multiplies the rest."""
    flat = logits.view(-1)
    scores = flat.index_select(0, where)
    negative = scores.clamp(max=0).mul_(penalties)
    flat.scatter_(0, where, scores.clamp_(min=0).div_(penalties).add_(negative))


def _force(logits: torch.Tensor, rows: torch.Tensor, where: torch.Tensor) -> None:
    """All of the rows becomes -inf but the places, which become 0."""
    logits.index_fill_(0, rows, NEVER)
    logits.view(-1).index_fill_(0, where, 0.0)


def _ban(logits: torch.Tensor, where: torch.Tensor) -> None:
    logits.view(-1).index_fill_(0, where, NEVER)


def _allow(logits: torch.Tensor, rows: torch.Tensor, where: torch.Tensor) -> None:
    """All of the rows becomes -inf but the places."""
    flat = logits.view(-1)
    scores = flat.index_select(0, where)
    if len(rows) == len(logits):
        logits.fill_(NEVER)
    else:
        logits.index_fill_(0, rows, NEVER)
    flat.scatter_(0, where, scores)
