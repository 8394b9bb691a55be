"""Rows of a step sorted by how their token is found, with the numbers that this takes.

All of it follows from the parameters of the step's requests, so that it serves, on the host and on the device, for as
long as the same requests go on. Made and used by the sampler.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch

from engine.request import Request
from engine.sampling.logprobs import LogprobRows
from engine.sampling.params import SamplingParams
from engine.sampling.random import uniform
from engine.sampling.sending import send

_GREEDY_TEMPERATURE = 1e-5  # below it rounding decides between near ties: take the most likely token
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-30, 1e30  # float32 divides by these without 0/0 or inf/inf
_MAX_PARTIAL_TOP_K = 1024  # from here on sorting whole rows costs little more


class Kind(Enum):
    """How a row's token is found; the first that fits."""

    ARGMAX = "argmax"
    VOCABULARY = "vocabulary"
    TOP_K = "top_k"
    NUCLEUS = "nucleus"
    SORTED = "sorted"


def kind_of(params: SamplingParams, vocab_size: int) -> Kind:
    """Of a request's rows."""
    if not params.do_sample or params.top_k == 1 or params.temperature < _GREEDY_TEMPERATURE:
        return Kind.ARGMAX
    if 0 < params.top_k < vocab_size:
        return Kind.TOP_K if params.top_k <= _MAX_PARTIAL_TOP_K else Kind.SORTED
    return Kind.NUCLEUS if params.top_p < 1.0 else Kind.VOCABULARY


@dataclass(slots=True)
class GroupTensors:
    """The numbers of a `RowGroup` on the device, by the names they have there; `asked` of the rows that ask."""

    rows: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    asked: torch.Tensor
    at: torch.Tensor


class RowGroup:
    """Rows of one kind that draw a random number.

    Attributes:
        rows: int64 [n] of the step, ascending; temperature float32 [n], top_k int64 [n], top_p and min_p float64 [n].
        most: the largest top_k.
        has_min_p: whether any row has one.
        asked: those that ask for log-probabilities of the scores they are drawn from; `at` int64, where in the group.
    """

    def __init__(self, rows: list[int], all_params: Sequence[SamplingParams], vocab_size: int) -> None:
        params = [all_params[row] for row in rows]
        temperature = np.array([p.temperature for p in params])
        self.rows = np.array(rows, np.int64)
        self.temperature = temperature.clip(_MIN_TEMPERATURE, _MAX_TEMPERATURE).astype(np.float32)
        self.top_k = np.array([min(p.top_k, vocab_size) for p in params], np.int64)
        self.top_p = np.array([p.top_p for p in params])
        self.min_p = np.array([p.min_p for p in params])
        self.most = int(self.top_k.max())
        self.has_min_p = bool((self.min_p > 0).any())
        self.at = np.array([i for i, p in enumerate(params) if p.logprobs and not p.raw_logprobs], np.int64)
        self.asked = LogprobRows([rows[i] for i in self.at], [params[i].top_logprobs for i in self.at])
        self._rows = rows
        self._seeds = np.array([p.seed for p in params], np.uint64)

    def uniform(self, requests: Sequence[Request]) -> npt.NDArray[np.float64]:
        """The rows' random numbers of this step, float64 [n] in (0, 1]."""
        positions = np.array([requests[row].num_output_tokens for row in self._rows], np.int64)
        return uniform(self._seeds, positions)

    def arrays(self) -> list[npt.NDArray[np.generic]]:
        """Of `GroupTensors`."""
        asked = self.asked.array()
        return [self.rows, self.temperature, self.top_k, self.top_p, self.min_p, asked, self.at]


@dataclass(slots=True)
class RowTensors:
    """The numbers of `SortedRows` on the device: int64 [n] of the rows that ask, and those of the groups."""

    raw: torch.Tensor
    greedy: torch.Tensor
    groups: dict[Kind, GroupTensors]


@dataclass(slots=True)
class SortedRows:
    """A step's rows by what is done with them.

    Attributes:
        params: of the requests, which themselves are not kept.
        editing: rows that may have edits.
        groups: rows that draw a random number, by kind.
        raw: rows that ask for log-probabilities of the logits as they come from the model.
        greedy: rows that take the most likely token and ask for log-probabilities of the edited logits.
        certain: rows that ask, where sampling leaves one possible token: its log-probability is 0.
    """

    params: list[SamplingParams]
    editing: list[int] = field(default_factory=list)
    groups: dict[Kind, RowGroup] = field(default_factory=dict)
    raw: LogprobRows = field(default_factory=LogprobRows)
    greedy: LogprobRows = field(default_factory=LogprobRows)
    certain: LogprobRows = field(default_factory=LogprobRows)
    _sent: dict[torch.device, RowTensors] = field(default_factory=dict)

    @classmethod
    def of(cls, all_params: list[SamplingParams], vocab_size: int) -> SortedRows:
        rows = cls(all_params)
        drawn: dict[Kind, list[int]] = {}
        for row, params in enumerate(all_params):
            if params.edits_logits or params.min_new_tokens:
                rows.editing.append(row)
            kind = kind_of(params, vocab_size)
            if kind is not Kind.ARGMAX:
                drawn.setdefault(kind, []).append(row)
            if params.logprobs and params.raw_logprobs:
                rows.raw.add(row, params.top_logprobs)
            elif params.logprobs and kind is Kind.ARGMAX:
                (rows.certain if params.do_sample else rows.greedy).add(row, params.top_logprobs)
        rows.groups = {kind: RowGroup(numbers, all_params, vocab_size) for kind, numbers in drawn.items()}
        return rows

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.raw or self.greedy or self.certain or any(group.asked for group in self.groups.values()))

    def on(self, device: torch.device) -> RowTensors:
        """The numbers on the device: sent once, without waiting for it."""
        if device not in self._sent:
            grouped = itertools.chain.from_iterable(group.arrays() for group in self.groups.values())
            raw, greedy, *rest = send([self.raw.array(), self.greedy.array(), *grouped], device)
            of = iter(rest)
            count = len(GroupTensors.__dataclass_fields__)
            groups = {kind: GroupTensors(*itertools.islice(of, count)) for kind in self.groups}
            self._sent[device] = RowTensors(raw, greedy, groups)
        return self._sent[device]
