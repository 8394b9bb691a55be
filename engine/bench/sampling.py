"""What choosing a step's tokens costs, by kind of request: the plan, the tensor work and reading the outcome.

Called by the step benchmark. Needs no model: the logits are random, which fall with the rank as those of real text do.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampler

_DRAW: dict[str, Any] = {"do_sample": True}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": _DRAW | {"temperature": 0.8},
    "min-p": _DRAW | {"min_p": 0.05},
    "top-k": _DRAW | {"top_k": 50},
    "top-k, top-p": _DRAW | {"top_k": 50, "top_p": 0.9},
    "top-p": _DRAW | {"top_p": 0.9},
    "top-p, flat": _DRAW | {"top_p": 0.98, "temperature": 8.0},
    "large top-k": _DRAW | {"top_k": 5000},
    "greedy, log-probabilities": {"logprobs": True},
    "greedy, top 5": {"logprobs": True, "top_logprobs": 5},
    "greedy, raw top 5": {"logprobs": True, "top_logprobs": 5, "raw_logprobs": True},
    "temperature, top 5": _DRAW | {"logprobs": True, "top_logprobs": 5},
    "top-k, top 5": _DRAW | {"top_k": 50, "logprobs": True, "top_logprobs": 5},
    "repetition penalty": {"repetition_penalty": 1.1},
    "frequency penalty": {"frequency_penalty": 0.5},
    "allowed tokens": {"allowed_token_ids": tuple(range(0, 3000, 30))},
}


def measure(rows: int, vocab: int, history: int, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Seconds of processor time for one step of `rows` requests with `history` tokens each, the best of `rounds`."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.rand(rows, vocab, generator=generator).argsort(-1).argsort(-1)
    logits = 15 - 1.5 * torch.log1p(ranks)
    logits = logits.to(dtype)
    tokens = torch.randint(vocab, (rows, 2 * history), generator=generator).tolist()
    return {kind: _measure_kind(logits, tokens, history, fields, rounds) for kind, fields in KINDS.items()}


@torch.inference_mode()
def _measure_kind(
    logits: torch.Tensor, tokens: list[list[int]], history: int, fields: dict[str, Any], rounds: int
) -> float:
    sampler = Sampler(logits.shape[1])
    requests = [
        Request(str(row), ids[:history], 1, SamplingParams(max_new_tokens=2 * history, seed=row, **fields))
        for row, ids in enumerate(tokens)
    ]
    spent = []
    for step in range(rounds + 1):
        scores = logits.clone()
        begun = time.thread_time()
        sampler(scores, sampler.plan(requests)).read()
        spent.append(time.thread_time() - begun)
        for request, ids in zip(requests, tokens, strict=True):
            request.token_ids.append(ids[history + step])
    return min(spent[1:])  # the first one reads the whole history
