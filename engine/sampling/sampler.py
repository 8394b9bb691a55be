"""One token for each row of logits, greedy and sampled rows together.

`plan` runs on the host before or during the forward pass and reads the requests; calling the sampler touches
tensors only, and waits for the device only where that has no kernels of its own. Called by the model runner. Knows
nothing of blocks, steps or devices.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.outputs import StepOutput
from engine.request import Request
from engine.sampling import processors
from engine.sampling.edits import EditsBuilder, LogitEdits
from engine.sampling.kernels import SamplingKernels
from engine.sampling.logprobs import LogprobRows, StepLogprobs
from engine.sampling.params import SamplingParams
from engine.sampling.processors import Choice
from engine.sampling.row_groups import GroupTensors, Kind, RowGroup, SortedRows
from engine.sampling.scores import Scores, Workspace
from engine.sampling.search import best_of
from engine.sampling.sending import ToDevice, send

_BAD_SCORES = "no token can be chosen: the model's scores hold NaN or infinity, or every token is excluded"


@dataclass(slots=True)
class SamplingPlan:
    """What the sampler does with each row of one step's logits.

    Attributes:
        num_rows: rows of the logits.
        rows: the same, sorted.
        uniform: the random numbers of the rows that draw, float64 [n] in (0, 1], by kind.
        edits: changes of the logits before anything is chosen; None when there are none.
        errors: rows that cannot be sampled, with the reason.
    """

    num_rows: int
    rows: SortedRows
    uniform: dict[Kind, npt.NDArray[np.float64]]
    edits: LogitEdits | None = None
    errors: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class Sampled:
    """The outcome of one step, on the device of the logits or, after `copied`, where the copies are.

    Attributes:
        token_ids: int64 [rows].
        bad: [rows], not 0 where the scores hold NaN or +inf or allow no token; the token is then 0.
        logprobs: None when no row asks.
        certain: see `SortedRows`.
        errors: rows that failed on the host, with the reason.
        outcome: int64 [2, rows], of which `token_ids` and `bad` are views; None where they are not.
    """

    token_ids: torch.Tensor
    bad: torch.Tensor
    logprobs: StepLogprobs | None
    certain: LogprobRows
    errors: dict[int, str]
    outcome: torch.Tensor | None = None

    def copied(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> Sampled:
        """The same of copies, each tensor of which is made once.

        With all copies under way before a later step is launched, reading them need not wait for that one.
        """
        outcome = torch.stack((self.token_ids, self.bad.long())) if self.outcome is None else self.outcome
        outcome = copy(outcome)
        logprobs = None if self.logprobs is None else self.logprobs.copied(copy)
        return replace(self, token_ids=outcome[0], bad=outcome[1], logprobs=logprobs, outcome=outcome)

    def read(self) -> StepOutput:
        """The outcome on the host. Waits for the device if that is where the tensors are."""
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


class Sampler:
    """Chooses one token per row.

    A row's token depends on its logits, its request's parameters and the tokens so far, and on nothing else of the
    batch.

    Args:
        kernels: the device's own ways to choose, with which nothing waits for it; None: plain torch.
        to_device: how the numbers of each step reach the device, in one copy; None: from memory that it pins.
    """

    def __init__(
        self, vocab_size: int, kernels: SamplingKernels | None = None, to_device: ToDevice | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self.workspace = Workspace()
        self._kernels, self._to_device = kernels, to_device
        self._edits = EditsBuilder(vocab_size)
        self._rows = SortedRows([])

    def plan(self, requests: Sequence[Request]) -> SamplingPlan:
        """Plan for logits whose row i belongs to requests[i], all of whose tokens are known.

        The requests' tokens are not read after this call. It may bring their `history` up to date. The plan is to be
        used before the next one is made, which takes its memory.
        """
        params = [request.params for request in requests]
        rows = self._rows
        if len(rows.params) != len(params) or not all(map(operator.is_, rows.params, params)):
            rows = self._rows = SortedRows.of(params, self.vocab_size)
        edits = self._edits
        edits.clear()
        for row in rows.editing:
            request = requests[row]
            if request.params.edits_logits or request.num_output_tokens < request.params.min_new_tokens:
                edits.add(row, request)
        uniform = {kind: group.uniform(requests) for kind, group in rows.groups.items()}
        return SamplingPlan(len(requests), rows, uniform, edits.build(), edits.errors)

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
        rows = plan.rows
        uniform, edits = self._send(plan, logits.device)
        tensors = rows.on(logits.device)
        logits = logits.contiguous()
        if self._kernels is None or plan.edits is not None or rows.wants_logprobs:
            logits = self._float32(logits)
        logprobs = StepLogprobs(torch.zeros(plan.num_rows, device=logits.device)) if rows.wants_logprobs else None
        raw = self._kept(logits, tensors.raw) if rows.raw and plan.edits is not None else None
        if plan.edits is not None:
            plan.edits.apply(logits, edits)
        outcome, best, scores = self._best(logits)
        tokens, bad = outcome
        if rows.greedy and logprobs is not None:
            logprobs.add(rows.greedy, tensors.greedy, *_of(scores, tokens, tensors.greedy))
        for kind, group in rows.groups.items():
            drawn = self._scaled(scores, best, tensors.groups[kind])
            choice = self._choose(kind, group, drawn, tensors.groups[kind], uniform[kind])
            tokens.index_copy_(0, tensors.groups[kind].rows, choice.tokens)
            if group.asked and logprobs is not None:
                logprobs.add_choice(group.asked, tensors.groups[kind].asked, tensors.groups[kind].at, drawn, choice)
        if rows.raw and logprobs is not None:
            own, chosen = _of(scores, tokens, tensors.raw)
            logprobs.add(rows.raw, tensors.raw, own if raw is None else raw, chosen)
            bad |= logprobs.chosen.isnan()  # the edits may have hidden what is wrong
        if rows.groups or rows.raw:
            tokens.mul_(bad == 0)
        return Sampled(tokens, bad, logprobs, rows.certain, plan.errors, outcome)

    def warm_up(self, device: torch.device, dtype: torch.dtype) -> None:
        """Runs rows of every kind, so that later ones do not wait for kernels to be compiled; without them nothing.

        Kernels for a top-k beyond 64 are compiled when they are first asked for.

        Args:
            dtype: of the logits.
        """
        if self._kernels is None:
            return
        fields: list[dict[str, Any]] = [
            {},
            *({"do_sample": True, **kind} for kind in ({}, {"top_k": 9}, {"top_p": 0.5})),
        ]
        requests = [Request("warm-up", [0], 1, SamplingParams(max_new_tokens=1, **each)) for each in fields]
        for each in {dtype, torch.float32}:  # the latter for edits and log-probabilities
            self(torch.zeros(len(requests), self.vocab_size, dtype=each, device=device), self.plan(requests))

    def _send(self, plan: SamplingPlan, device: torch.device) -> tuple[dict[Kind, torch.Tensor], list[torch.Tensor]]:
        """What is new in this step: random numbers and the tensors of the edits."""
        arrays = [*plan.uniform.values(), *(plan.edits.arrays() if plan.edits is not None else ())]
        if not arrays:
            return {}, []
        tensors = send(arrays, device, self._to_device)
        count = len(plan.uniform)
        return dict(zip(plan.uniform, tensors[:count], strict=True)), tensors[count:]

    def _float32(self, logits: torch.Tensor) -> torch.Tensor:
        if logits.dtype == torch.float32:
            return logits
        return self.workspace.take("logits", logits.shape, logits.device).copy_(logits)

    def _kept(self, logits: torch.Tensor, rows: torch.Tensor) -> Scores:
        """Logits of some rows that stay as they are."""
        copy = self.workspace.take("raw logits", (len(rows), self.vocab_size), logits.device)
        return Scores(torch.index_select(logits, 0, rows, out=copy), self.workspace)

    def _best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Scores]:
        """`Sampled.outcome` as of greedy rows, the largest logits float32 [rows], and the logits as scores."""
        if self._kernels is not None:
            outcome, values = self._kernels.find_best(logits)
            return outcome, values, Scores(logits, self.workspace)
        best = best_of(logits)
        bad = ~best.values.isfinite()
        outcome = torch.stack((best.tokens.masked_fill(bad, 0), bad.long()))
        return outcome, best.values, Scores(logits, self.workspace, maxima=best.maxima)

    def _scaled(self, scores: Scores, best: torch.Tensor, group: GroupTensors) -> Scores:
        """What a group draws from."""
        drawn, best = _of(scores, best, group.rows)
        drawn.best, drawn.temperature = best, group.temperature
        if self._kernels is not None:
            drawn.rows = group.rows
        return drawn

    def _choose(
        self, kind: Kind, group: RowGroup, scores: Scores, numbers: GroupTensors, uniform: torch.Tensor
    ) -> Choice:
        top_k, top_p, min_p = numbers.top_k, numbers.top_p, numbers.min_p
        if kind is Kind.VOCABULARY:
            if self._kernels is not None:
                return self._kernels.choose_in_vocabulary_order(scores, min_p, uniform)
            return processors.choose_in_vocabulary_order(scores, min_p if group.has_min_p else None, uniform)
        if self._kernels is not None:
            every = kind is Kind.NUCLEUS
            return self._kernels.choose_most_likely(scores, None if every else top_k, group.most, top_p, min_p, uniform)
        if kind is Kind.NUCLEUS:
            return processors.choose_from_nucleus(scores, top_p, min_p, uniform)
        choose = processors.choose_from_top_k if kind is Kind.TOP_K else processors.choose_from_all_sorted
        return choose(scores, top_k, top_p, min_p, uniform)


def _of(scores: Scores, numbers: torch.Tensor, rows: torch.Tensor) -> tuple[Scores, torch.Tensor]:
    """The scores and the numbers [all rows] of these rows, which ascend."""
    if len(rows) == len(scores):
        return replace(scores), numbers
    return scores.narrowed(rows), numbers.index_select(0, rows)
