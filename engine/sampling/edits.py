"""The changes that requests ask for in a step's logits, before a token is chosen.

`EditsBuilder` collects them on the host, row by row, from requests that have any; `LogitEdits.apply` makes them in one
pass on the device. Rows that ask for nothing are not touched. Called by the sampler. Order and meaning follow
transformers' list of processors: biased sequences, repetition penalty, repeated n-grams, bad words, minimum length,
forced tokens, suppressed tokens; then frequency and presence penalty, logit bias, allowed tokens, constraint.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from engine.request import Request
from engine.sampling.constraint import check_mask
from engine.sampling.history import History, Ids, as_ids

NEVER = float("-inf")


@dataclass(slots=True)
class Sparse:
    """Some entries of the logits: where int64 [m] in the flattened logits, each at most once; values float32 [m]."""

    where: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True)
class LogitEdits:
    """What changes in one step's logits; tensors on the CPU.

    Attributes:
        biased: added first.
        repeated: penalties that multiply or divide.
        added: added one after the other.
        forced: (row, token ids int64 [n]) whose logits become 0, all others of the row -inf.
        banned: int64 [m] in the flattened logits, that become -inf.
        excluded: (rows int64 [n] in ascending order, bool [n, vocab_size]); True becomes -inf.
    """

    biased: Sparse | None = None
    repeated: Sparse | None = None
    added: list[Sparse] = field(default_factory=list)
    forced: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    banned: torch.Tensor | None = None
    excluded: tuple[torch.Tensor, torch.Tensor] | None = None

    def apply(self, logits: torch.Tensor) -> None:
        """Make the changes in place: float32 [rows, vocab_size], contiguous, on any device."""
        device = logits.device
        flat = logits.view(-1)
        if self.biased is not None:
            _add(flat, self.biased)
        if self.repeated is not None:
            where, penalty = _to(self.repeated.where, device), _to(self.repeated.values, device)
            scores = flat.index_select(0, where)
            flat.scatter_(0, where, torch.where(scores < 0, scores * penalty, scores / penalty))
        for sparse in self.added:
            _add(flat, sparse)
        for row, ids in self.forced:
            logits[row] = NEVER
            logits[row, _to(ids, device)] = 0.0
        if self.banned is not None:
            flat.index_fill_(0, _to(self.banned, device), NEVER)
        if self.excluded is not None:
            rows, excluded = _to(self.excluded[0], device), _to(self.excluded[1], device)
            if len(rows) == len(logits):
                logits.masked_fill_(excluded, NEVER)
            else:
                logits[rows] = logits[rows].masked_fill_(excluded, NEVER)


class EditsBuilder:
    """Collects the edits of a step, one `add` a request that may have any.

    Attributes:
        errors: rows whose constraint failed, with the reason; their token means nothing.
    """

    def __init__(self, vocab_size: int) -> None:
        self.errors: dict[int, str] = {}
        self._vocab_size = vocab_size
        self._biased = _SparseBuilder(vocab_size)
        self._repeated = _SparseBuilder(vocab_size)
        self._penalties = _SparseBuilder(vocab_size)
        self._logit_bias = _SparseBuilder(vocab_size)
        self._banned = _SparseBuilder(vocab_size)
        self._forced: list[tuple[int, torch.Tensor]] = []
        self._excluded: dict[int, npt.NDArray[np.bool_]] = {}

    def add(self, row: int, request: Request) -> None:
        """Collect the edits of a request's row; its `token_ids` must all be known."""
        params = request.params
        forced = _forced_ids(request)
        if forced:
            self._forced.append((row, torch.tensor(forced)))
        else:
            self._change(row, request)
            if request.num_output_tokens < params.min_new_tokens:
                self._ban(row, params.ending_ids)
        self._ban(row, params.suppress_tokens)
        if request.num_output_tokens == _begin(request):
            self._ban(row, params.begin_suppress_tokens)
        if params.allowed_token_ids is not None:
            self._excluded[row] = np.ones(self._vocab_size, np.bool_)
            self._excluded[row][list(params.allowed_token_ids)] = False
        if params.constraint is not None:
            try:
                self._constrain(row, params.constraint.allowed(request.output_ids))
            except BaseException as error:  # the constraint is the caller's code: only its own request may suffer
                self.errors[row] = f"the constraint failed: {type(error).__name__}: {error}"

    def build(self) -> LogitEdits | None:
        """Everything that was collected; None when that is nothing."""
        builders = (self._biased, self._repeated, self._penalties, self._logit_bias, self._banned)
        biased, repeated, penalties, logit_bias, banned = (each.build() for each in builders)
        edits = LogitEdits(
            biased=biased,
            repeated=repeated,
            added=[each for each in (penalties, logit_bias) if each is not None],
            forced=self._forced,
            banned=None if banned is None else banned.where,
        )
        if self._excluded:
            masks = np.stack(list(self._excluded.values()))
            edits.excluded = torch.tensor(list(self._excluded)), torch.from_numpy(masks)
        return edits if any(builders) or self._forced or self._excluded else None

    def _change(self, row: int, request: Request) -> None:
        """Edits that look at scores or at the tokens so far."""
        params, token_ids = request.params, request.token_ids
        if not params.edits_logits:
            return
        if (history := request.history) is None:
            history = request.history = History(params, request.num_prompt_tokens)
        history.update(token_ids)
        if history.biased is not None:
            self._biased.add(row, *history.biased.completing(token_ids))
        if history.seen is not None:
            self._repeated.add(row, history.seen.ids, params.repetition_penalty)
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

    def _constrain(self, row: int, answer: npt.NDArray[np.bool_] | None) -> None:
        if answer is None:
            return
        check_mask(answer)
        excluded = np.ones(self._vocab_size, np.bool_)
        excluded[: len(answer)] = ~answer[: self._vocab_size]
        self._excluded[row] = excluded | self._excluded[row] if row in self._excluded else excluded


class _SparseBuilder:
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._where: list[Ids] = []
        self._values: list[npt.NDArray[np.floating]] = []

    def add(self, row: int, ids: Ids, values: npt.NDArray[np.floating] | float = NEVER) -> None:
        if len(ids):
            self._where.append(ids + row * self._vocab_size)
            self._values.append(np.broadcast_to(np.asarray(values, np.float32), ids.shape))

    def __bool__(self) -> bool:
        return bool(self._where)

    def build(self) -> Sparse | None:
        if not self:
            return None
        return Sparse(torch.from_numpy(np.concatenate(self._where)), torch.from_numpy(np.concatenate(self._values)))


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


def _add(flat: torch.Tensor, sparse: Sparse) -> None:
    where = _to(sparse.where, flat.device)
    flat.scatter_(0, where, flat.index_select(0, where) + _to(sparse.values, flat.device))


def _to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device, without waiting for it."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
