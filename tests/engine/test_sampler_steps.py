"""One sampler over many steps: each row gets what a plain computation gives its request alone, and no new memory.

Requests come and go, change their places, are preempted and begin again from their tokens elsewhere; what the sampler
and the requests keep between steps must never show.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from engine.bench.sampling import KINDS
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.sampling.random import uniform
from engine.sampling.sampler import Sampler

VOCABULARIES = (40, 700, 2100)
CHUNK = 512


class EveryThird:
    """A constraint that leaves out every third token, of a vocabulary that is a little smaller."""

    def allowed(self, output_ids: Sequence[int]) -> npt.NDArray[np.bool_]:
        return np.arange(36) % 3 != len(output_ids) % 3


class Plain:
    """What a row must give: from the definition, over the whole vocabulary, of one request alone."""

    def __init__(self, logits: torch.Tensor, request: Request) -> None:
        self.params = request.params
        raw = logits.float()
        scores = self.edited(raw.clone(), request)
        best, token = scores.max(-1)
        self.bad = not math.isfinite(best)
        self.token, of = int(token), scores
        if self.samples(len(scores)):
            scaled = (scores - best) / torch.tensor(self.params.temperature)
            draw = uniform(np.array([self.params.seed], np.uint64), np.array([request.num_output_tokens]))[0]
            self.token, kept = self.drawn(scaled, float(draw))
            of = scaled.double().masked_fill(~kept, -math.inf)
        elif self.params.do_sample:
            of = torch.full_like(scores, -math.inf)
            of[self.token] = 0.0
        self.logprobs = (raw if self.params.raw_logprobs else of).log_softmax(-1)

    def samples(self, vocab: int) -> bool:
        return self.params.do_sample and self.params.top_k != 1

    def edited(self, scores: torch.Tensor, request: Request) -> torch.Tensor:
        params = self.params
        for token in set(request.token_ids):
            penalty = params.repetition_penalty
            scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
        for token, count in Counter(request.output_ids).items():
            scores[token] -= params.frequency_penalty * count + params.presence_penalty
        for token, bias in params.logit_bias:
            scores[token] += bias
        scores[list(params.suppress_tokens)] = -math.inf
        allowed = torch.ones(len(scores), dtype=torch.bool)
        if params.allowed_token_ids is not None:
            allowed[:] = False
            allowed[list(params.allowed_token_ids)] = True
        if params.constraint is not None:
            mask = params.constraint.allowed(request.output_ids)
            assert mask is not None
            allowed[: len(mask)] &= torch.from_numpy(mask)
            allowed[len(mask) :] = False
        return scores.masked_fill(~allowed, -math.inf)

    def drawn(self, scores: torch.Tensor, draw: float) -> tuple[int, torch.Tensor]:
        """The token, and which ones it was drawn from."""
        params, vocab = self.params, len(scores)
        chunks = [chunk.sum().double() for chunk in scores.exp().split(CHUNK)]
        if not 0 < params.top_k < vocab and params.top_p == 1.0:
            weights = scores.exp()
            kept = weights >= params.min_p
            weights[~kept] = 0.0
            before = 0.0
            target = draw * float(sum(chunk.sum().double() for chunk in weights.split(CHUNK)))
            for start, chunk in zip(itertools.count(0, CHUNK), weights.split(CHUNK), strict=False):
                total = float(chunk.sum())
                if before + total >= target and total:
                    cumulative = chunk.double().cumsum(-1)
                    reached = cumulative >= min(target - before, float(cumulative[-1]))
                    return start + int(reached.int().argmax()), kept & (weights > 0)
                before += total
        values, ids = scores.sort(descending=True, stable=True)
        weights = values.double().exp()
        total = float(sum(chunks))
        if 0 < params.top_k < vocab:
            weights[values < values[params.top_k - 1]] = 0.0
            total = float(weights.cumsum(-1)[-1])
        cumulative = weights.cumsum(-1)
        first = (cumulative - weights < params.top_p * total) & (weights >= params.min_p)
        count = max(1, int(first.sum()))
        column = int((cumulative >= draw * cumulative[count - 1]).int().argmax())
        kept = torch.zeros(vocab, dtype=torch.bool)
        kept[ids[:count]] = True
        return int(ids[column]), kept & (scores.double().exp() > 0)

    def top(self) -> list[float]:
        values = self.logprobs.sort(descending=True).values[: self.params.top_logprobs]
        return values[values > -math.inf].tolist()


PARAMETERS = st.fixed_dictionaries(
    {
        "do_sample": st.sampled_from([True, True, False]),
        "temperature": st.sampled_from([0.5, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 0, 1, 9, 1500]),
        "top_p": st.sampled_from([1.0, 0.9]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "seed": st.integers(0, 2**64 - 1),
        "logprobs": st.booleans(),
        "raw_logprobs": st.booleans(),
        "top_logprobs": st.integers(0, 3),
    },
    optional={
        "repetition_penalty": st.sampled_from([0.7, 2.0]),
        "frequency_penalty": st.sampled_from([-1.0, 2.0]),
        "presence_penalty": st.sampled_from([-1.0, 2.0]),
        "logit_bias": st.sampled_from([((0, -3.0), (9, 1.0)), ((3, 2.0),)]),
        "suppress_tokens": st.sampled_from([(0,), (1, 7)]),
        "allowed_token_ids": st.sampled_from([(5, 1, 9), tuple(range(2, 40)), (0, 13)]),
        "constraint": st.just(EveryThird()),
    },
)
PROMPT = st.lists(st.integers(0, 39), min_size=1, max_size=30)
REQUEST = st.tuples(PARAMETERS, PROMPT)


def logits_of(request: Request, vocab: int, scale: float, ties: bool) -> torch.Tensor:
    """A row that depends on the request and its position alone."""
    seed = request.arrival * 1000 + request.num_output_tokens
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale
    return (row * 2).round() / 2 if ties else row


def begun_again(request: Request) -> Request:
    """The same request as another engine, or this one after a failure, gets it."""
    return Request(
        request.request_id, list(request.token_ids), request.num_prompt_tokens, request.params, request.arrival
    )


@settings(max_examples=60)
@given(
    data=st.data(),
    vocab=st.sampled_from(VOCABULARIES),
    scale=st.sampled_from([0.1, 1.0, 4.0]),
    ties=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_each_row_as_its_request_alone_whatever_came_before(
    data: st.DataObject, vocab: int, scale: float, ties: bool, dtype: torch.dtype
) -> None:
    sampler = Sampler(vocab)
    numbers = itertools.count()
    live: list[Request] = []
    for _ in range(data.draw(st.integers(2, 6), "steps")):
        for params, prompt in data.draw(st.lists(REQUEST, max_size=4), "arrivals"):
            number = next(numbers)
            live.append(Request(str(number), prompt, len(prompt), SamplingParams(max_new_tokens=99, **params), number))
        live = data.draw(st.permutations(live), "order")
        live = live[: data.draw(st.integers(0, len(live)), "stay") + 3]
        live = [begun_again(request) if data.draw(st.booleans(), "again") else request for request in live]
        running = live[: data.draw(st.integers(0, len(live)), "running")]
        check_step(sampler, running, [logits_of(each, vocab, scale, ties).to(dtype) for each in running])


def check_step(sampler: Sampler, requests: list[Request], logits: list[torch.Tensor]) -> None:
    if not requests:
        return
    wanted = [Plain(row, request) for row, request in zip(logits, requests, strict=True)]
    output = sampler(torch.stack(logits), sampler.plan(requests)).read()
    assert set(output.errors) == {row for row, plain in enumerate(wanted) if plain.bad}
    for row, (request, plain) in enumerate(zip(requests, wanted, strict=True)):
        if plain.bad:
            request.token_ids.append(0)
            continue
        token = output.token_ids[row]
        assert token == plain.token
        if request.params.logprobs:
            assert output.logprobs is not None
            assert output.logprobs[row] == pytest.approx(plain.logprobs[token].item(), abs=1e-4)
            top = [] if output.top_logprobs is None else output.top_logprobs[row]
            assert [value for _, value in top] == pytest.approx(plain.top(), abs=1e-4)
        request.token_ids.append(token)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_of_the_size_of_the_logits_is_allocated_once_there_was_a_step(kind: str, dtype: torch.dtype) -> None:
    if kind in ("top-p, flat", "large top-k"):
        pytest.skip("sorts whole rows")
    vocab, rows, fields = 20_000, 8, KINDS[kind]
    sampler = Sampler(vocab)
    # Few rows differ from the others: a part of the batch must not be copied to somewhere new either.
    others: list[dict[str, Any]] = [fields, fields, {}, {"do_sample": True}]
    requests = [
        Request(str(i), list(range(100)), 50, SamplingParams(max_new_tokens=99, seed=i, **others[i % 4]))
        for i in range(rows)
    ]
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 4
    with torch.inference_mode():
        sampler(logits.to(dtype), sampler.plan(requests))
        kept, again = sampler.workspace.nbytes, logits.to(dtype)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            sampler(again, sampler.plan(requests)).read()
    # Half of the rows are of one kind: even their part would be seen.
    assert {event.name for event in profiled.events() if event.cpu_memory_usage >= 2 * rows * vocab} == set()
    assert sampler.workspace.nbytes == kept
