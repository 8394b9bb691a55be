"""The sampler: transformers' distributions, exact choices, and that a row never depends on its neighbours."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.request import Request
from engine.sampling import processors
from engine.sampling.params import SamplingParams
from engine.sampling.processors import Choice
from engine.sampling.sampler import Sampler, SamplingPlan
from engine.sampling.scores import Scores, Workspace
from engine.sampling.search import best_of, in_falling_order, most_likely


def request(position: int = 0, prompt: int = 3, token_ids: Sequence[int] = (), **params: Any) -> Request:
    """A request with `position` tokens generated; `token_ids` are prompt and output."""
    known = list(token_ids) or [0] * (prompt + position)
    return Request("r", known, len(known) - position, SamplingParams(**({"max_new_tokens": 10**6} | params)))


def sampled(position: int = 0, **params: Any) -> Request:
    return request(position, do_sample=True, **params)


def sample(
    logits: torch.Tensor, requests: Sequence[Request], plan: SamplingPlan | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Tokens, log-probabilities of the chosen ones and bad rows. The logits stay as they are."""
    sampler = Sampler(logits.shape[1])
    sampled = sampler(logits.clone(), sampler.plan(requests) if plan is None else plan)
    return sampled.token_ids, None if sampled.logprobs is None else sampled.logprobs.chosen, sampled.bad.bool()


def run(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    tokens, _, bad = sample(logits, requests)
    assert not bad.any()
    return tokens.tolist()


def draw_at(logits: torch.Tensor, uniforms: Sequence[float], **params: Any) -> tuple[list[int], torch.Tensor]:
    """Tokens and log-probabilities of one row of logits at chosen values of the random number."""
    plan = Sampler(logits.shape[0]).plan([sampled(logprobs=True, **params)] * len(uniforms))
    (kind,) = plan.uniform
    plan.uniform[kind] = np.array(uniforms, np.float64)
    tokens, logprobs, bad = sample(logits.expand(len(uniforms), -1), [], plan)
    assert not bad.any()
    assert logprobs is not None
    return tokens.tolist(), logprobs


def transformers_probs(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    chain = LogitsProcessorList()
    if temperature != 1.0:
        chain.append(TemperatureLogitsWarper(temperature))
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        chain.append(TopPLogitsWarper(top_p))
    if min_p:
        chain.append(MinPLogitsWarper(min_p))
    return chain(torch.zeros(1, 1, dtype=torch.long), logits[None]).softmax(-1)[0]


def normal(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def with_ties(logits: torch.Tensor) -> torch.Tensor:
    return (logits * 2).round() / 2


def as_scores(scores: torch.Tensor, maxima: torch.Tensor | None = None) -> Scores:
    return Scores(scores, Workspace(), maxima=maxima)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"min_p": 0.05},
    {"top_k": 5},
    {"top_k": 40, "temperature": 0.7},
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 2.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.1, "temperature": 1.5},
    {"top_p": 0.95, "min_p": 0.2},
    {"top_k": 1000},
]


class TestLikeTransformers:
    @pytest.mark.parametrize("params", SETTINGS)
    @pytest.mark.parametrize("seed", range(5))
    def test_distribution(self, params: dict[str, Any], seed: int) -> None:
        logits = normal(64, seed=seed)
        n = 4000
        tokens, logprobs = draw_at(logits, [(i + 1) / n for i in range(n)], **params)
        theirs = transformers_probs(logits, **params)
        counts = torch.bincount(torch.tensor(tokens), minlength=64) / n
        assert (counts - theirs).abs().max() <= 1.01 / n  # a grid misses a share by one point at most
        torch.testing.assert_close(logprobs.exp(), theirs[tokens], atol=1e-6, rtol=0)
        assert set(tokens) >= set((theirs > 1 / n).nonzero().flatten().tolist())

    @pytest.mark.parametrize("params", SETTINGS)
    def test_distribution_with_ties(self, params: dict[str, Any]) -> None:
        logits = with_ties(normal(64, seed=9))
        n = 4000
        tokens, logprobs = draw_at(logits, [(i + 1) / n for i in range(n)], **params)
        theirs = transformers_probs(logits, **params)
        ours = torch.zeros(64)
        ours[tokens] = logprobs.exp()
        # Which of several tied tokens top-p drops is up to the sort; how many and how likely they are is not.
        seen = theirs.sort().values > 1 / n
        torch.testing.assert_close(ours.sort().values[seen], theirs.sort().values[seen], atol=1e-6, rtol=0)

    @pytest.mark.parametrize("top_k", [1000, 1500, 2999])
    @pytest.mark.parametrize("top_p", [1.0, 0.9])
    def test_large_vocabulary(self, top_k: int, top_p: float) -> None:
        logits = normal(3000, seed=3, scale=1.0)
        tokens, logprobs = draw_at(logits, [(i + 0.5) / 500 for i in range(500)], top_k=top_k, top_p=top_p)
        theirs = transformers_probs(logits, top_k=top_k, top_p=top_p)
        torch.testing.assert_close(logprobs.exp(), theirs[tokens], atol=1e-6, rtol=0)
        order = logits.argsort(descending=True)
        expected = theirs[order].double().cumsum(0)
        found = torch.searchsorted(expected, torch.tensor([(i + 0.5) / 500 for i in range(500)]).double())
        assert tokens == order[found].tolist()

    @pytest.mark.parametrize("params", [{"top_p": 0.5}, {"min_p": 1.0}, {"min_p": 1.0, "top_k": 3}])
    def test_exactly_at_the_border(self, params: dict[str, Any]) -> None:
        logits = torch.tensor([-99.0, 1.0, 1.0, -99.0] if "min_p" in params else [1.0, 1.0, 1.0, 1.0])
        tokens, _ = draw_at(logits, [(i + 1) / 100 for i in range(100)], **params)
        assert len(set(tokens)) == 2 == int((transformers_probs(logits, **params) > 0).sum())

    def test_top_k_keeps_ties_with_the_last(self) -> None:
        logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0, 2.0])
        tokens, _ = draw_at(logits, [(i + 1) / 100 for i in range(100)], top_k=2)
        assert set(tokens) == {1, 2, 3, 5} == set(transformers_probs(logits, top_k=2).nonzero().flatten().tolist())

    def test_top_k_when_fewer_tokens_are_possible(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(processors, "choose_from_all_sorted", None)  # nothing to sort: no ties that matter
        logits = torch.full((2000,), -math.inf)
        logits[[1999, 5]] = 0.0
        assert draw_at(logits, [0.5, 1.0], top_k=3)[0] == [5, 1999]

    def test_top_k_when_everything_ties(self) -> None:
        tokens, logprobs = draw_at(torch.zeros(2000), [1 / 2000, 0.5, 1.0], top_k=2)
        assert tokens == [0, 999, 1999]
        torch.testing.assert_close(logprobs, torch.full((3,), -math.log(2000)))


class TestOrder:
    def test_vocabulary_order_without_filters(self) -> None:
        logits = torch.tensor([1.0, 3.0, 2.0, 0.0]).log()
        assert draw_at(logits, [2**-53, 0.16, 0.17, 0.66, 0.67, 1.0])[0] == [0, 0, 1, 1, 2, 2]

    @pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.999999}])
    def test_most_likely_first_under_top_k_and_top_p(self, params: dict[str, Any]) -> None:
        logits = torch.tensor([1.0, 3.0, 2.0, 0.0]).log()
        assert draw_at(logits, [2**-53, 0.49, 0.51, 0.83, 0.84, 1.0], **params)[0] == [1, 1, 2, 2, 0, 0]

    @pytest.mark.parametrize("params", [{"top_k": 4}, {"top_p": 0.9}])
    def test_ties_by_id(self, params: dict[str, Any]) -> None:
        logits = torch.full((3000,), -50.0)
        logits[[2900, 7, 1500, 40]] = 5.0
        assert draw_at(logits, [0.1, 0.3, 0.6, 0.9], **params)[0] == [7, 40, 1500, 2900]

    @pytest.mark.parametrize("params", [{}, {"min_p": 1e-3}, {"top_k": 4}, {"top_p": 0.99}])
    def test_a_token_without_probability_is_never_chosen(self, params: dict[str, Any]) -> None:
        logits = torch.full((50,), -math.inf)
        logits[[20, 30]] = 0.0
        assert draw_at(logits, [2**-53, 0.5, 0.5 + 2**-20, 1.0], **params)[0] == [20, 20, 30, 30]


class TestGreedy:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_most_likely_token_lowest_id_among_ties(self, dtype: torch.dtype) -> None:
        logits = normal(20, 3000).to(dtype)
        expected = [int((row == row.max()).nonzero()[0]) for row in logits]
        assert run(logits, [request()] * 20) == expected
        assert run(logits, [sampled(top_k=1)] * 20) == expected

    @pytest.mark.parametrize("temperature", [1e-6, 1e-10, 1e-45, 5e-324])
    @pytest.mark.parametrize("others", [{}, {"top_k": 3}, {"top_p": 0.1}, {"min_p": 0.5}])
    def test_O11_temperature_nearly_0(self, temperature: float, others: dict[str, Any]) -> None:
        logits = normal(30, 200).bfloat16()
        requests = [sampled(i, seed=i, temperature=temperature, logprobs=True, **others) for i in range(30)]
        tokens, logprobs, bad = sample(logits, requests)
        assert tokens.tolist() == run(logits, [request()] * 30)
        assert logprobs is not None
        assert logprobs.tolist() == [0.0] * 30
        assert not bad.any()

    @pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e30, 1e300])
    @pytest.mark.parametrize("others", [{}, {"top_k": 3}, {"top_p": 0.1}, {"min_p": 0.5}])
    def test_extreme_temperatures_give_valid_choices(self, temperature: float, others: dict[str, Any]) -> None:
        logits = normal(50, seed=4, scale=1000.0)
        logits[::2] = -math.inf
        tokens, logprobs = draw_at(logits, [0.1, 0.5, 1.0], temperature=temperature, **others)
        assert all(token % 2 for token in tokens)
        assert logprobs.isfinite().all()
        if temperature < 1:
            assert tokens == [int(logits.argmax())] * 3

    def test_largest_logits(self) -> None:
        logits = torch.tensor([-3e38, 3e38, 0.0, 2e38])
        assert run(logits.expand(3, 4), [request(), sampled(), sampled(top_p=0.5)]) == [1, 1, 1]


class TestLogprobs:
    def test_greedy(self) -> None:
        logits = normal(8, 100)
        tokens, logprobs, _ = sample(logits, [request(logprobs=i % 2 == 0) for i in range(8)])
        expected = logits.log_softmax(-1).amax(-1)
        assert logprobs is not None
        torch.testing.assert_close(logprobs[::2], expected[::2])
        assert logprobs.dtype == torch.float32
        assert tokens.dtype == torch.int64

    def test_none_when_nobody_asks(self) -> None:
        assert sample(normal(2, 100), [request(), sampled()])[1] is None

    def test_asking_changes_no_token(self) -> None:
        logits = normal(40, 2000)
        without = [sampled(seed=i, **SETTINGS[i % len(SETTINGS)]) for i in range(40)]
        asking = [sampled(seed=i, logprobs=True, **SETTINGS[i % len(SETTINGS)]) for i in range(40)]
        assert run(logits, without) == run(logits, asking)


class TestMinimumLength:
    @pytest.mark.parametrize("params", [{}, {"do_sample": True, "temperature": 0.1}, {"do_sample": True, "top_k": 5}])
    def test_ending_tokens_are_out_until_then(self, params: dict[str, Any]) -> None:
        logits = torch.zeros(50)
        logits[[3, 4, 5]] = torch.tensor([90.0, 80.0, 70.0])
        ending = {"min_new_tokens": 2, "eos_token_ids": (3,), "stop_token_ids": (4, 50, 10**9)}
        requests = [request(position, **ending, **params) for position in (0, 1, 2, 3)]
        assert run(logits.expand(4, -1), requests) == [5, 5, 3, 3]

    def test_logprob_is_of_the_masked_scores(self) -> None:
        asking = request(min_new_tokens=1, eos_token_ids=(0,), logprobs=True)
        tokens, logprobs, _ = sample(torch.tensor([[9.0, 1.0, 1.0]]), [asking])
        assert tokens.tolist() == [1]
        assert logprobs is not None
        torch.testing.assert_close(logprobs, torch.tensor([-math.log(2)]))

    def test_nothing_left(self) -> None:
        requests = [request(min_new_tokens=1, eos_token_ids=(0, 1)), request()]
        tokens, _, bad = sample(torch.tensor([[1.0, 2.0], [1.0, 2.0]]), requests)
        assert (tokens.tolist(), bad.tolist()) == ([0, 1], [True, False])


class TestBadRows:
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    @pytest.mark.parametrize("vocab", [40, 3000])
    def test_reported_and_harmless_to_others(self, value: float, vocab: int) -> None:
        logits = normal(2 * len(SETTINGS) + 2, vocab)
        requests = [sampled(seed=i, logprobs=True, **SETTINGS[i // 2]) for i in range(2 * len(SETTINGS))]
        requests += [request(logprobs=True), request(logprobs=True)]
        clean_tokens, clean_logprobs, _ = sample(logits, requests)
        logits[::2, vocab // 2] = value
        tokens, logprobs, bad = sample(logits, requests)
        assert bad.tolist() == [True, False] * (len(requests) // 2)
        assert tokens[::2].tolist() == [0] * (len(requests) // 2)
        assert torch.equal(tokens[1::2], clean_tokens[1::2])
        assert logprobs is not None
        assert clean_logprobs is not None
        assert torch.equal(logprobs[1::2], clean_logprobs[1::2])

    @pytest.mark.parametrize("params", SETTINGS)
    def test_all_minus_infinity(self, params: dict[str, Any]) -> None:
        tokens, _, bad = sample(torch.full((2, 8), -math.inf), [sampled(**params), request()])
        assert (tokens.tolist(), bad.tolist()) == ([0, 0], [True, True])

    def test_shape(self) -> None:
        sampler = Sampler(8)
        for shape in ((1, 8), (2, 7), (2, 8, 1)):
            with pytest.raises(ValueError, match="plan is for 2 rows of 8"):
                sampler(torch.zeros(shape), sampler.plan([request(), request()]))

    def test_no_rows(self) -> None:
        tokens, logprobs, bad = sample(torch.zeros(0, 8), [])
        assert (tokens.shape, logprobs, bad.shape) == ((0,), None, (0,))


class TestRandomStream:
    @pytest.mark.parametrize("params", SETTINGS)
    def test_frequencies(self, params: dict[str, Any]) -> None:
        logits = normal(16, seed=1, scale=1.0)
        n = 6000
        requests = [sampled(i % 50, seed=i // 50, **params) for i in range(n)]
        counts = np.bincount(run(logits.expand(n, -1), requests), minlength=16)
        probs = transformers_probs(logits, **params).double().numpy()
        kept = probs > 0
        assert counts[~kept].sum() == 0
        chi_square = ((counts - n * probs)[kept] ** 2 / (n * probs[kept])).sum()
        freedom = kept.sum() - 1
        assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 4

    def test_depends_on_seed_and_position_only(self) -> None:
        logits = torch.zeros(1, 1000)
        first = [run(logits, [sampled(position, seed=7)])[0] for position in range(20)]
        assert first == [
            run(logits, [request(position, prompt=50, do_sample=True, seed=7)])[0] for position in range(20)
        ]
        assert len(set(first)) > 15
        assert first != [run(logits, [sampled(position, seed=8)])[0] for position in range(20)]


@st.composite
def rows(draw: st.DrawFn) -> tuple[torch.Tensor, list[Request]]:
    vocab = draw(st.sampled_from([3, 100, 1500]))
    count = draw(st.integers(2, 12))
    seed = draw(st.integers(0, 10**6))
    logits = normal(count, vocab, seed=seed, scale=draw(st.sampled_from([0.01, 1.0, 5.0])))
    if draw(st.booleans()):
        logits = with_ties(logits)
    if draw(st.booleans()):
        logits = logits.bfloat16()
    if draw(st.booleans()):
        logits[0, 1] = math.nan
    parameters = st.fixed_dictionaries(
        {
            "do_sample": st.sampled_from([True, True, True, False]),
            "temperature": st.sampled_from([1e-45, 0.3, 1.0, 5.0]),
            "top_k": st.sampled_from([0, 0, 1, 2, 50, 1100, 5000]),
            "top_p": st.sampled_from([1.0, 1.0, 0.1, 0.9, 0.99]),
            "min_p": st.sampled_from([0.0, 0.0, 0.05, 1.0]),
            "seed": st.integers(0, 2**64 - 1),
            "min_new_tokens": st.sampled_from([0, 5]),
            "eos_token_ids": st.sampled_from([(), (0,), (0, 2)]),
            "logprobs": st.booleans(),
            "raw_logprobs": st.booleans(),
            "top_logprobs": st.integers(0, 4),
        },
        optional={
            "repetition_penalty": st.sampled_from([0.7, 2.0]),
            "frequency_penalty": st.sampled_from([-1.0, 2.0]),
            "presence_penalty": st.sampled_from([-1.0, 2.0]),
            "logit_bias": st.just(((0, -3.0), (2, 1.0))),
            "bad_words_ids": st.just(((1,), (0, 2))),
            "allowed_token_ids": st.just((0, 2)),
            "no_repeat_ngram_size": st.integers(1, 3),
            "sequence_bias": st.just((((1, 2), 4.0), ((0,), -2.0))),
            "suppress_tokens": st.just((0,)),
            "begin_suppress_tokens": st.just((2,)),
            "forced_bos_token_id": st.just(1),
        },
    )
    tokens = st.lists(st.integers(0, 2), min_size=9, max_size=12)
    return logits, [request(draw(st.integers(0, 8)), token_ids=draw(tokens), **draw(parameters)) for _ in range(count)]


@settings(max_examples=60)
@given(rows(), st.randoms(use_true_random=False))
def test_O12_a_row_is_the_same_alone_and_in_any_batch(
    batch: tuple[torch.Tensor, list[Request]], order: random.Random
) -> None:
    logits, requests = batch
    sampler = Sampler(logits.shape[1])

    def outcome(chosen: list[int]) -> list[tuple[int, float, list[tuple[int, float]], bool]]:
        output = sampler(logits[chosen].clone(), sampler.plan([requests[i] for i in chosen])).read()
        found = []
        for row, i in enumerate(chosen):
            asks = requests[i].params.logprobs and row not in output.errors
            score = output.logprobs[row] if asks and output.logprobs is not None else 0.0
            top = output.top_logprobs[row] if output.top_logprobs is not None else []
            found.append((output.token_ids[row], score, top, row in output.errors))
        return found

    everyone = list(range(len(requests)))
    together = outcome(everyone)
    assert [outcome([i])[0] for i in everyone] == together
    shuffled = order.sample(everyone, len(everyone))
    assert outcome(shuffled) == [together[i] for i in shuffled]
    some = everyone[::2]
    assert outcome(some) == [together[i] for i in some]


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 4.0])
@pytest.mark.parametrize("ties", [False, True])
def test_partial_selection_is_as_good_as_sorting_everything(scale: float, ties: bool) -> None:
    logits = normal(200, 4000, seed=2, scale=scale)
    if ties:
        logits = with_ties(logits)
    scores = logits - logits.amax(-1, keepdim=True)
    uniform = torch.rand(200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    top_p = torch.linspace(0.05, 0.999, 200, dtype=torch.float64)
    min_p = torch.zeros(200, dtype=torch.float64)
    top_k = torch.arange(1, 201)
    everything = torch.full((200,), 4000)
    nucleus = processors.choose_from_nucleus(as_scores(scores), top_p, min_p, uniform)
    top = processors.choose_from_top_k(as_scores(scores), top_k, top_p, min_p, uniform)
    for found, limit in ((nucleus, everything), (top, top_k)):
        sorted_choice = processors.choose_from_all_sorted(as_scores(scores), limit, top_p, min_p, uniform)
        assert torch.equal(found.tokens, sorted_choice.tokens)
        assert torch.equal(found.kept, sorted_choice.kept)
        torch.testing.assert_close(logprob(scores, found), logprob(scores, sorted_choice), atol=1e-6, rtol=0)


def logprob(scores: torch.Tensor, choice: Choice) -> torch.Tensor:
    return scores.gather(1, choice.tokens[:, None]).squeeze(1) - choice.log_total


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 200, 4001])
@pytest.mark.parametrize("ties", [False, True])
def test_searches_by_columns_find_what_whole_rows_hold(vocab: int, ties: bool) -> None:
    scores = normal(50, vocab, seed=3, scale=1.0)
    if ties:
        scores = scores.round()
    scores[0] = 0.0
    scores[0, ::2] = -0.0
    best, tokens, maxima = best_of(scores)
    values, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    assert torch.equal(best, values[:, 0])
    assert torch.equal(tokens, ids[:, 0])
    assert torch.equal(in_falling_order(scores)[1], ids)
    for count in {1, min(5, vocab), vocab}:
        for columns in (None, maxima):
            found = most_likely(as_scores(scores, columns), count)
            assert torch.equal(found[0], values[:, :count])
            assert torch.equal(found[1], ids[:, :count])
