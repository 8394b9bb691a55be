"""One token for each row of logits, greedy and sampled rows together.

`plan` runs on the host before or during the forward pass and reads the requests; calling the sampler touches
tensors only. Called by the model runner. Knows nothing of blocks, steps or devices.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch

from engine.outputs import StepOutput
from engine.request import Request
from engine.sampling import processors
from engine.sampling.edits import EditsBuilder, LogitEdits
from engine.sampling.logprobs import LogprobRows, StepLogprobs
from engine.sampling.params import SamplingParams
from engine.sampling.processors import Choice
from engine.sampling.random import uniform
from engine.sampling.scores import Scores, Workspace
from engine.sampling.search import best_of

_GREEDY_TEMPERATURE = 1e-5  # below it rounding decides between near ties: take the most likely token
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-30, 1e30  # float32 divides by these without 0/0 or inf/inf
_MAX_PARTIAL_TOP_K = 1024  # from here on sorting whole rows costs little more
_BAD_SCORES = "no token can be chosen: the model's scores hold NaN or infinity, or every token is excluded"


class _Kind(Enum):
    """How a row's token is found; the first that fits."""

    ARGMAX = "argmax"
    VOCABULARY = "vocabulary"
    TOP_K = "top_k"
    NUCLEUS = "nucleus"
    SORTED = "sorted"


@dataclass(slots=True)
class RowGroup:
    """Rows of one kind: rows, top_k int64 [n]; temperature, top_p, min_p, uniform float64 [n]. On the CPU.

    `asked` holds those that ask for log-probabilities of the scores they are drawn from, `at` where in the group they
    are. `numbers` are `rows` for the host, `seeds` uint64 [n] those of the rows.
    """

    rows: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor
    asked: LogprobRows = field(default_factory=LogprobRows)
    at: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    seeds: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))


@dataclass(slots=True)
class _SortedRows:
    """What follows from the parameters of a step's requests alone, so that it serves every step of the same ones.

    Attributes:
        params: of the requests, which themselves are not kept.
        editing: rows that may have edits.
        groups: without random numbers.
        raw, greedy, certain: as in `SamplingPlan`.
    """

    params: list[SamplingParams]
    editing: list[int] = field(default_factory=list)
    groups: dict[_Kind, RowGroup] = field(default_factory=dict)
    raw: LogprobRows = field(default_factory=LogprobRows)
    greedy: LogprobRows = field(default_factory=LogprobRows)
    certain: LogprobRows = field(default_factory=LogprobRows)


@dataclass(slots=True)
class SamplingPlan:
    """What the sampler does with each row of one step's logits.

    Attributes:
        num_rows: rows of the logits.
        edits: changes of the logits before anything is chosen; None when there are none.
        groups: rows that draw a random number, by kind.
        raw: rows that ask for log-probabilities of the logits as they come from the model.
        greedy: rows that take the most likely token and ask for log-probabilities of the edited logits.
        certain: rows that ask, where sampling leaves one possible token: its log-probability is 0.
        errors: rows that cannot be sampled, with the reason.
    """

    num_rows: int
    edits: LogitEdits | None = None
    groups: dict[_Kind, RowGroup] = field(default_factory=dict)
    raw: LogprobRows = field(default_factory=LogprobRows)
    greedy: LogprobRows = field(default_factory=LogprobRows)
    certain: LogprobRows = field(default_factory=LogprobRows)
    errors: dict[int, str] = field(default_factory=dict)

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.raw or self.greedy or self.certain or any(group.asked for group in self.groups.values()))


@dataclass(slots=True)
class Sampled:
    """The outcome of one step, on the device of the logits.

    Attributes:
        token_ids: int64 [rows].
        bad: bool [rows], True where the scores hold NaN or +inf or allow no token; the token is then 0.
        logprobs: None when no row asks.
        certain: see `SamplingPlan`.
        errors: rows that failed on the host, with the reason.
    """

    token_ids: torch.Tensor
    bad: torch.Tensor
    logprobs: StepLogprobs | None
    certain: LogprobRows
    errors: dict[int, str]

    def read(self) -> StepOutput:
        """The outcome on the host. Waits for the device."""
        token_ids = self.token_ids.tolist()
        errors, bad = self.errors, self.bad.cpu().numpy()  # numpy is the quicker one with so few numbers
        if bad.any():
            errors = dict.fromkeys(bad.nonzero()[0].tolist(), _BAD_SCORES) | errors
        if self.logprobs is None:
            return StepOutput(token_ids, errors=errors)
        top = self.logprobs.top_lists()
        for row, count in zip(self.certain.rows, self.certain.counts, strict=True):
            top[row] = [(token_ids[row], 0.0)][:count]
        lists = [[] if row in errors else top.get(row, []) for row in range(len(token_ids))]
        return StepOutput(token_ids, self.logprobs.chosen.tolist(), errors, lists if any(lists) else None)


# Chooses by scores, top_k (None: all), top_p, min_p and uniform, which are on the host, most likely tokens first.
MostLikely = Callable[[Scores, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor], Choice]


class Sampler:
    """Chooses one token per row.

    A row's token depends on its logits, its request's parameters and the tokens so far, and on nothing else of the
    batch.

    Args:
        most_likely: the device's own way to choose under top-k and top-p; None: that of processors.py.
    """

    def __init__(self, vocab_size: int, most_likely: MostLikely | None = None) -> None:
        self.vocab_size = vocab_size
        self._most_likely = most_likely
        self.workspace = Workspace()
        self._edits = EditsBuilder(vocab_size)
        self._rows = _SortedRows([])

    def plan(self, requests: Sequence[Request]) -> SamplingPlan:
        """Plan for logits whose row i belongs to requests[i], all of whose tokens are known.

        The requests' tokens are not read after this call. It may bring their `history` up to date. The plan is to be
        used before the next one is made, which takes its memory.
        """
        params = [request.params for request in requests]
        rows = self._rows
        if len(rows.params) != len(params) or not all(map(operator.is_, rows.params, params)):
            rows = self._rows = self._sort(params)
        edits = self._edits
        edits.clear()
        for row in rows.editing:
            request = requests[row]
            if request.params.edits_logits or request.num_output_tokens < request.params.min_new_tokens:
                edits.add(row, request)
        groups = {kind: self._drawn(group, requests) for kind, group in rows.groups.items()}
        return SamplingPlan(len(requests), edits.build(), groups, rows.raw, rows.greedy, rows.certain, edits.errors)

    def __call__(self, logits: torch.Tensor, plan: SamplingPlan) -> Sampled:
        """Choose.

        Args:
            logits: floating [rows, vocab_size], on any device; may be overwritten.
            plan: of the same rows.

        Raises:
            ValueError: the shape of the logits is not that of the plan.
        """
        if logits.shape != (plan.num_rows, self.vocab_size):
            raise ValueError(
                f"logits have shape {tuple(logits.shape)}; the plan is for {plan.num_rows} rows of {self.vocab_size}"
            )
        logits = self._float32(logits)
        logprobs = StepLogprobs(plan.num_rows, logits.device) if plan.wants_logprobs else None
        raw = self._kept(logits, plan.raw.rows) if plan.raw and plan.edits is not None else None
        if plan.edits is not None:
            plan.edits.apply(logits)
        best = best_of(logits)
        tokens, bad = best.tokens, ~best.values.isfinite()
        scores = Scores(logits, self.workspace, maxima=best.maxima)
        if plan.greedy and logprobs is not None:
            logprobs.add(plan.greedy, self._of(scores, plan.greedy.rows), tokens[plan.greedy.rows])
        for kind, group in plan.groups.items():
            # Without waiting: what the host has copied into the driver's memory it may overwrite.
            device = logits.device
            rows = group.rows.to(device, non_blocking=True)
            drawn = self._of(scores, rows)
            temperature = group.temperature.float().to(device, non_blocking=True)
            drawn.best, drawn.temperature = best.values[rows], temperature
            choice = _choose(kind, group, drawn, self._most_likely)
            tokens[rows] = choice.tokens
            if group.asked and logprobs is not None:
                logprobs.add_choice(group.asked, group.at, drawn, choice)
        if plan.raw and logprobs is not None:
            raw = self._of(scores, plan.raw.rows) if raw is None else raw
            logprobs.add(plan.raw, raw, tokens[plan.raw.rows])
            bad |= logprobs.chosen.isnan()  # the edits may have hidden what is wrong
        tokens.masked_fill_(bad, 0)
        return Sampled(tokens, bad, logprobs, plan.certain, plan.errors)

    def _float32(self, logits: torch.Tensor) -> torch.Tensor:
        if logits.dtype == torch.float32:
            return logits.contiguous()
        return self.workspace.take("logits", logits.shape, logits.device).copy_(logits)

    def _kept(self, logits: torch.Tensor, rows: list[int]) -> Scores:
        """Logits of some rows that stay as they are."""
        copy = self.workspace.take("raw logits", (len(rows), self.vocab_size), logits.device)
        return Scores(torch.index_select(logits, 0, torch.tensor(rows, device=logits.device), out=copy), self.workspace)

    @staticmethod
    def _of(scores: Scores, rows: list[int] | torch.Tensor) -> Scores:
        """Of these rows, in ascending order."""
        return replace(scores) if len(rows) == len(scores) else scores.narrowed(rows)

    def _kind(self, params: SamplingParams) -> _Kind:
        if not params.do_sample or params.top_k == 1 or params.temperature < _GREEDY_TEMPERATURE:
            return _Kind.ARGMAX
        if 0 < params.top_k < self.vocab_size:
            return _Kind.TOP_K if params.top_k <= _MAX_PARTIAL_TOP_K else _Kind.SORTED
        return _Kind.NUCLEUS if params.top_p < 1.0 else _Kind.VOCABULARY

    def _sort(self, all_params: list[SamplingParams]) -> _SortedRows:
        rows = _SortedRows(all_params)
        drawn: dict[_Kind, list[int]] = {}
        for row, params in enumerate(all_params):
            if params.edits_logits or params.min_new_tokens:
                rows.editing.append(row)
            kind = self._kind(params)
            if kind is not _Kind.ARGMAX:
                drawn.setdefault(kind, []).append(row)
            if params.logprobs and params.raw_logprobs:
                rows.raw.add(row, params.top_logprobs)
            elif params.logprobs and kind is _Kind.ARGMAX:
                (rows.certain if params.do_sample else rows.greedy).add(row, params.top_logprobs)
        rows.groups = {
            kind: self._group([all_params[row] for row in numbers], numbers) for kind, numbers in drawn.items()
        }
        return rows

    def _group(self, params: list[SamplingParams], rows: list[int]) -> RowGroup:
        temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64)
        at = [i for i, p in enumerate(params) if p.logprobs and not p.raw_logprobs]
        return RowGroup(
            rows=torch.tensor(rows),
            temperature=temperature.clamp_(_MIN_TEMPERATURE, _MAX_TEMPERATURE),
            top_k=torch.tensor([min(p.top_k, self.vocab_size) for p in params]),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64),
            min_p=torch.tensor([p.min_p for p in params], dtype=torch.float64),
            uniform=torch.empty(0, dtype=torch.float64),
            asked=LogprobRows([rows[i] for i in at], [params[i].top_logprobs for i in at]),
            at=at,
            numbers=rows,
            seeds=np.array([p.seed for p in params], dtype=np.uint64),
        )

    def _drawn(self, group: RowGroup, requests: Sequence[Request]) -> RowGroup:
        """The group with its random numbers of this step."""
        positions = np.array([requests[row].num_output_tokens for row in group.numbers], dtype=np.int64)
        return replace(group, uniform=torch.from_numpy(uniform(group.seeds, positions)))


def _choose(kind: _Kind, group: RowGroup, scores: Scores, most_likely: MostLikely | None) -> Choice:
    if most_likely is not None and kind is not _Kind.VOCABULARY:
        top_k = None if kind is _Kind.NUCLEUS else group.top_k
        return most_likely(scores, top_k, group.top_p, group.min_p, group.uniform)
    numbers = (group.top_p, group.min_p, group.uniform)
    top_p, min_p, draw = (each.to(scores.logits.device, non_blocking=True) for each in numbers)
    if kind is _Kind.VOCABULARY:
        some = min_p if bool((group.min_p > 0).any()) else None
        return processors.choose_in_vocabulary_order(scores, some, draw)
    if kind is _Kind.NUCLEUS:
        return processors.choose_from_nucleus(scores, top_p, min_p, draw)
    choose = processors.choose_from_top_k if kind is _Kind.TOP_K else processors.choose_from_all_sorted
    return choose(scores, group.top_k.to(scores.logits.device), top_p, min_p, draw)
