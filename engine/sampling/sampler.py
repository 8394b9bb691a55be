"""One token for each row of logits, greedy and sampled rows together.

`plan` runs on the host before or during the forward pass and reads the requests; calling the sampler touches
tensors only. Called by the model runner. Knows nothing of blocks, steps or devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import torch

from engine.request import Request
from engine.sampling import processors
from engine.sampling.params import SamplingParams
from engine.sampling.random import uniform

_GREEDY_TEMPERATURE = 1e-5  # below it rounding decides between near ties: take the most likely token
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-30, 1e30  # float32 divides by these without 0/0 or inf/inf
_MAX_PARTIAL_TOP_K = 1024  # from here on sorting whole rows costs little more


class _Kind(Enum):
    """How a row's token is found; the first that fits."""

    ARGMAX = "argmax"
    VOCABULARY = "vocabulary"
    TOP_K = "top_k"
    NUCLEUS = "nucleus"
    SORTED = "sorted"


@dataclass(slots=True)
class RowGroup:
    """Rows of one kind: rows, top_k int64 [n]; temperature, top_p, min_p, uniform float64 [n]. On the CPU."""

    rows: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor


@dataclass(slots=True)
class SamplingPlan:
    """What the sampler does with each row of one step's logits.

    Attributes:
        num_rows: rows of the logits.
        groups: rows that draw a random number, by kind.
        scored: greedy rows whose log-probability is asked for, int64 [n]; None when there are none.
        banned: (rows int64 [m], token ids int64 [m]) that cannot be chosen; None when there are none.
        wants_logprobs: some row asks for log-probabilities.
    """

    num_rows: int
    groups: dict[_Kind, RowGroup] = field(default_factory=dict)
    scored: torch.Tensor | None = None
    banned: tuple[torch.Tensor, torch.Tensor] | None = None
    wants_logprobs: bool = False


class Sampler:
    """Chooses one token per row.

    A row's token depends on its logits, its request's parameters and the number of tokens generated so far, and on
    nothing else of the batch.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def plan(self, requests: Sequence[Request]) -> SamplingPlan:
        """Plan for logits whose row i belongs to requests[i]; read again by no one after this call."""
        plan = SamplingPlan(len(requests))
        drawn: dict[_Kind, list[int]] = {}
        scored: list[int] = []
        banned: list[tuple[int, int]] = []
        for row, request in enumerate(requests):
            params = request.params
            plan.wants_logprobs |= params.logprobs
            if request.num_output_tokens < params.min_new_tokens:
                banned.extend((row, token) for token in params.ending_ids if token < self.vocab_size)
            kind = self._kind(params)
            if kind is not _Kind.ARGMAX:
                drawn.setdefault(kind, []).append(row)
            elif params.logprobs and not params.do_sample:
                scored.append(row)
        plan.groups = {kind: self._group(requests, rows) for kind, rows in drawn.items()}
        if scored:
            plan.scored = torch.tensor(scored)
        if banned:
            plan.banned = torch.tensor([r for r, _ in banned]), torch.tensor([token for _, token in banned])
        return plan

    def __call__(
        self, logits: torch.Tensor, plan: SamplingPlan
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Choose.

        Args:
            logits: floating [rows, vocab_size], on any device; may be overwritten.
            plan: of the same rows.

        Returns:
            token ids int64 [rows]; log-probabilities under the processed scores float32 [rows], valid where the
            request asks for them, or None when none does; bool [rows], True where the scores hold NaN or +inf or
            allow no token (the row's token is then 0).

        Raises:
            ValueError: the shape of the logits is not that of the plan.
        """
        if logits.shape != (plan.num_rows, self.vocab_size):
            raise ValueError(
                f"logits have shape {tuple(logits.shape)}; the plan is for {plan.num_rows} rows of {self.vocab_size}"
            )
        logits = logits.float()
        device = logits.device
        if plan.banned is not None:
            rows, banned = plan.banned
            logits[rows.to(device), banned.to(device)] = float("-inf")
        best, tokens = logits.max(dim=-1)
        bad = ~best.isfinite()
        logprobs = torch.zeros(plan.num_rows, device=device) if plan.wants_logprobs else None
        if plan.scored is not None and logprobs is not None:
            rows = plan.scored.to(device)
            scores = logits if len(rows) == plan.num_rows else logits[rows]
            logprobs[rows] = scores.log_softmax(-1).gather(1, tokens[rows, None]).squeeze(1)
        for kind, group in plan.groups.items():
            rows = group.rows.to(device)
            scores = logits if len(rows) == plan.num_rows else logits[rows]
            scores = _scale(scores, best[rows], group.temperature.to(device))
            tokens[rows], chosen_logprobs = _choose(kind, group, scores)
            if logprobs is not None:
                logprobs[rows] = chosen_logprobs
        return tokens.masked_fill_(bad, 0), logprobs, bad

    def _kind(self, params: SamplingParams) -> _Kind:
        if not params.do_sample or params.top_k == 1 or params.temperature < _GREEDY_TEMPERATURE:
            return _Kind.ARGMAX
        if 0 < params.top_k < self.vocab_size:
            return _Kind.TOP_K if params.top_k <= _MAX_PARTIAL_TOP_K else _Kind.SORTED
        return _Kind.NUCLEUS if params.top_p < 1.0 else _Kind.VOCABULARY

    def _group(self, requests: Sequence[Request], rows: list[int]) -> RowGroup:
        chosen = [requests[row] for row in rows]
        params = [request.params for request in chosen]
        temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64)
        seeds = np.array([p.seed for p in params], dtype=np.uint64)
        positions = np.array([request.num_output_tokens for request in chosen], dtype=np.int64)
        return RowGroup(
            rows=torch.tensor(rows),
            temperature=temperature.clamp_(_MIN_TEMPERATURE, _MAX_TEMPERATURE),
            top_k=torch.tensor([min(p.top_k, self.vocab_size) for p in params]),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64),
            min_p=torch.tensor([p.min_p for p in params], dtype=torch.float64),
            uniform=torch.from_numpy(uniform(seeds, positions)),
        )


def _scale(logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """In place: (logits - best) / temperature, float32 [n, vocab]."""
    return logits.sub_(best[:, None]).div_(temperature.to(logits.dtype)[:, None])


def _choose(kind: _Kind, group: RowGroup, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    device = scores.device
    top_p, min_p, draw = group.top_p.to(device), group.min_p.to(device), group.uniform.to(device)
    if kind is _Kind.VOCABULARY:
        return processors.choose_in_vocabulary_order(scores, min_p, draw)
    if kind is _Kind.NUCLEUS:
        return processors.choose_from_nucleus(scores, top_p, min_p, draw)
    choose = processors.choose_from_top_k if kind is _Kind.TOP_K else processors.choose_from_all_sorted
    return choose(scores, group.top_k.to(device), top_p, min_p, draw)
