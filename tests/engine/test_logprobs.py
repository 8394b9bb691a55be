"""Log-probabilities: of chosen tokens, of the most likely ones, of raw scores and of prompts; and their snapshots."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from engine.outputs import GenerationOutput, StepOutput
from engine.request import Request, TokenLogprobs
from engine.sampling import logprobs, search
from engine.sampling.logprobs import prompt_logprobs
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampler
from engine.sampling.search import most_likely
from tests.engine.test_sampling import SETTINGS, as_scores, normal, request, sampled, transformers_probs, with_ties
from tests.harness import Stepper, collect, running, tokens
from tests.models import ref

Top = list[tuple[int, float]]


def run(logits: torch.Tensor, requests: Sequence[Request]) -> StepOutput:
    sampler = Sampler(logits.shape[1])
    return sampler(logits.clone(), sampler.plan(requests)).read()


def expected_top(values: torch.Tensor, k: int) -> Top:
    """The k best of one row that are possible, ties by id."""
    pairs = sorted(enumerate(values.tolist()), key=lambda pair: (-pair[1], pair[0]))
    return [(token, value) for token, value in pairs[:k] if value > -math.inf]


def close(found: Top, wanted: Top, tolerance: float = 1e-5) -> bool:
    same_ids = [token for token, _ in found] == [token for token, _ in wanted]
    return same_ids and [v for _, v in found] == pytest.approx([v for _, v in wanted], abs=tolerance)


class TestMostLikely:
    @pytest.mark.parametrize("shape", [(1, 3), (5, 40), (7, 3000)])
    @pytest.mark.parametrize("ties", [False, True])
    def test_like_a_full_sort(self, shape: tuple[int, int], ties: bool) -> None:
        scores = normal(*shape, seed=5)
        scores = with_ties(scores) if ties else scores
        for count in (1, 2, 20, 200):
            values, ids = most_likely(as_scores(scores), count)
            all_values, all_ids = torch.sort(scores, dim=-1, descending=True, stable=True)
            assert torch.equal(ids, all_ids[:, :count])
            assert torch.equal(values, all_values[:, :count])

    def test_when_everything_ties(self) -> None:
        scores = torch.zeros(3, 5000)
        scores[1, 4000] = 1.0
        assert most_likely(as_scores(scores), 3)[1].tolist() == [[0, 1, 2], [4000, 0, 1], [0, 1, 2]]

    def test_sorts_whole_rows_only_for_ties(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(search, "SORT_ROWS", None)
        most_likely(as_scores(normal(4, 5000)), 5)
        few = torch.full((1, 5000), -math.inf)
        few[0, [7, 9]] = 0.0
        assert most_likely(as_scores(few), 5)[1][0, :2].tolist() == [7, 9]


class TestTop:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_greedy(self, dtype: torch.dtype) -> None:
        logits = normal(6, 300).to(dtype)
        output = run(logits, [request(logprobs=True, top_logprobs=k) for k in (0, 1, 3, 20, 0, 5)])
        assert output.logprobs is not None and output.top_logprobs is not None
        for row, k in enumerate((0, 1, 3, 20, 0, 5)):
            assert close(output.top_logprobs[row], expected_top(logits[row].float().log_softmax(-1), k))
            if k:
                assert output.top_logprobs[row][0] == (output.token_ids[row], output.logprobs[row])

    @pytest.mark.parametrize("params", SETTINGS)
    @pytest.mark.parametrize("vocab", [64, 2500])
    def test_sampled_are_of_what_is_drawn_from(self, params: dict[str, Any], vocab: int) -> None:
        logits = normal(8, vocab, seed=2)
        requests = [sampled(seed=i, logprobs=i != 7, top_logprobs=20 * (i % 2), **params) for i in range(8)]
        output = run(logits, requests)
        assert output.logprobs is not None and output.top_logprobs is not None
        for row in range(8):
            processed = transformers_probs(logits[row], **params).log()
            assert row == 7 or output.logprobs[row] == pytest.approx(processed[output.token_ids[row]].item(), abs=1e-5)
            top = output.top_logprobs[row]
            assert close(top, expected_top(processed, 20) if row % 2 and row != 7 else [])
            listed = dict(top)
            assert output.logprobs[row] == listed.get(output.token_ids[row], output.logprobs[row])

    @pytest.mark.parametrize("params", [{"top_k": 1}, {"temperature": 1e-30}])
    def test_one_possible_token(self, params: dict[str, Any]) -> None:
        output = run(normal(2, 50), [sampled(logprobs=True, top_logprobs=k, **params) for k in (0, 5)])
        assert output.logprobs == [0.0, 0.0]
        assert output.top_logprobs == [[], [(output.token_ids[1], 0.0)]]

    def test_excluded_tokens_are_left_out(self) -> None:
        output = run(normal(1, 50), [request(logprobs=True, top_logprobs=9, allowed_token_ids=(3, 30, 40))])
        assert output.top_logprobs is not None
        assert {token for token, _ in output.top_logprobs[0]} == {3, 30, 40}
        assert sum(math.exp(value) for _, value in output.top_logprobs[0]) == pytest.approx(1)

    def test_rows_that_cannot_be_sampled_have_no_list(self) -> None:
        logits = normal(2, 50)
        logits[0, 3] = math.nan
        for raw in (False, True):
            output = run(logits, [request(logprobs=True, top_logprobs=2, raw_logprobs=raw)] * 2)
            assert output.top_logprobs is not None
            assert [len(top) for top in output.top_logprobs] == [0, 2]

    def test_scores_that_round_to_the_same_logprob(self) -> None:
        logits = torch.full((1, 50_000), -1e-3)
        best = torch.tensor(1e-3)
        logits[0, [7, 3]] = torch.stack([best, torch.nextafter(best, torch.tensor(0.0))])
        assert logits[0, 7] > logits[0, 3] and logits.log_softmax(-1)[0, 7] == logits.log_softmax(-1)[0, 3]
        output = run(logits, [request(logprobs=True, top_logprobs=1)])
        assert output.token_ids == [7] and output.top_logprobs is not None
        assert [token for token, _ in output.top_logprobs[0]] == [7]


EDITED: dict[str, Any] = {
    "repetition_penalty": 2.0, "logit_bias": ((5, 9.0),), "suppress_tokens": (1, 2), "frequency_penalty": 1.0,
    "allowed_token_ids": tuple(range(40)), "bad_words_ids": ((7,),), "min_new_tokens": 9, "eos_token_ids": (8,),
}  # fmt: skip


class TestRaw:
    @pytest.mark.parametrize("params", [{}, *SETTINGS])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_of_the_models_own_scores(self, params: dict[str, Any], dtype: torch.dtype) -> None:
        logits = normal(6, 60, seed=1).to(dtype)
        own = logits.float().log_softmax(-1)
        fields = {"do_sample": bool(params), "token_ids": (1, 2, 1, 5), "position": 1} | EDITED | params
        asking = [
            request(seed=i, logprobs=True, raw_logprobs=True, top_logprobs=i, **fields) if i % 3 else request(0)
            for i in range(6)
        ]
        output = run(logits, asking)
        assert output.logprobs is not None and output.top_logprobs is not None
        for row in (1, 2, 4, 5):
            assert output.logprobs[row] == pytest.approx(own[row, output.token_ids[row]].item(), abs=1e-6)
            assert close(output.top_logprobs[row], expected_top(own[row], row))
        assert (
            output.token_ids
            == run(logits, [request(seed=i, **fields) if i % 3 else request(0) for i in range(6)]).token_ids
        )

    def test_scores_that_are_wrong_where_the_edits_hide_it(self) -> None:
        logits = normal(2, 60)
        logits[0, 3] = math.nan
        fields: dict[str, Any] = {"suppress_tokens": (3,), "logprobs": True, "raw_logprobs": True, "top_logprobs": 2}
        output = run(logits, [request(**fields)] * 2)
        assert list(output.errors) == [0] and output.top_logprobs is not None
        assert [len(top) for top in output.top_logprobs] == [0, 2]

    def test_without_edits_they_are_those_of_the_processed_scores(self) -> None:
        logits = normal(2, 60)
        raw, processed = (request(logprobs=True, top_logprobs=4, raw_logprobs=raw) for raw in (True, False))
        output = run(torch.stack([logits[0], logits[0]]), [raw, processed])
        assert output.logprobs is not None and output.top_logprobs is not None
        assert output.logprobs[0] == output.logprobs[1] and output.top_logprobs[0] == output.top_logprobs[1]


class TestPrompt:
    @pytest.mark.parametrize("k", [0, 1, 5])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_values(self, k: int, dtype: torch.dtype) -> None:
        logits = normal(150, 200, seed=4).to(dtype)
        next_ids = torch.arange(150)
        before = logits.clone()
        found = prompt_logprobs(logits, next_ids, k)
        assert torch.equal(logits, before)
        own = logits.float().log_softmax(-1)
        assert [each.logprob for each in found] == own.gather(1, next_ids[:, None]).squeeze(1).tolist()
        for row, each in enumerate(found):
            assert close(each.top, expected_top(own[row], k))

    def test_more_likely_ones_than_there_are(self) -> None:
        (found,) = prompt_logprobs(normal(1, 5), torch.tensor([2]), 9)
        assert len(found.top) == 5 and dict(found.top)[2] == found.logprob

    def test_in_any_pieces(self) -> None:
        logits, next_ids = normal(100, 700), torch.arange(100)
        whole = prompt_logprobs(logits, next_ids, 3)
        for size in (1, 7, 64, logprobs._PROMPT_ROWS + 1):
            pieces = zip(logits.split(size), next_ids.split(size), strict=True)
            assert [each for piece in pieces for each in prompt_logprobs(*piece, 3)] == whole
        assert prompt_logprobs(logits[:0], next_ids[:0], 3) == []

    @given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 11), st.integers(1, 12)), max_size=12))
    def test_every_position_once_however_often_it_is_computed(self, length: int, chunks: list[tuple[int, int]]) -> None:
        wanted = [TokenLogprobs(-float(i), []) for i in range(1, length)]
        prompt = Request("r", [0] * length, length, SamplingParams(max_new_tokens=1, prompt_logprobs=0))
        plain = Request("r", [0] * length, length, SamplingParams(max_new_tokens=1))
        assert not plain.needs_prompt_logprobs
        computed = 0
        for start, count in [*chunks, (0, length)]:
            # A request starts anew at 0 when it was preempted, else it goes on.
            start = 0 if start % 3 == 0 else computed
            computed = min(start + count, length)
            assert prompt.needs_prompt_logprobs == (len(prompt.prompt_logprobs) < length - 1)
            prompt.add_prompt_logprobs(start + 1, wanted[start : min(computed, length - 1)])
            assert prompt.prompt_logprobs == wanted[: len(prompt.prompt_logprobs)]
        if start == 0:
            assert prompt.prompt_logprobs == wanted
            assert not prompt.needs_prompt_logprobs

    def test_gaps_and_excess_are_errors(self) -> None:
        prompt = Request("r", [0] * 4, 4, SamplingParams(max_new_tokens=1, prompt_logprobs=0))
        value = TokenLogprobs(-1.0, [])
        for start, count in ((0, 1), (2, 1), (1, 4)):
            with pytest.raises(ValueError, match=r"expected them from 1 on and up to 3"):
                prompt.add_prompt_logprobs(start, [value] * count)
        assert prompt.needs_prompt_logprobs and not prompt.prompt_logprobs


class TestSnapshots:
    def test_they_never_change(self) -> None:
        params = SamplingParams(max_new_tokens=9, logprobs=True, top_logprobs=1, prompt_logprobs=0)
        # The last token of the output was generated elsewhere, without log-probabilities.
        growing = Request("r", [1, 2, 3, 9], 3, params, record_timestamps=True)
        taken: list[tuple[GenerationOutput, tuple[Any, ...]]] = []

        def views(output: GenerationOutput) -> tuple[Any, ...]:
            return (
                output.generated_tokens, output.logprobs, output.top_logprobs, output.prompt_logprobs, output.timestamps
            )  # fmt: skip

        def snapshot() -> None:
            output = GenerationOutput(growing)
            taken.append((output, views(output)))

        snapshot()
        for position in (1, 2):
            growing.add_prompt_logprobs(position, [TokenLogprobs(-float(position), [])])
            snapshot()
        for i in range(5):
            growing.token_ids.append(i)
            growing.logprobs.append(-float(i))
            growing.top_logprobs.append([(i, -float(i))])
            growing.timestamps.append(float(i))
            snapshot()
        for output, seen in taken:
            assert views(output) == seen
        assert [len(seen[0]) for _, seen in taken] == [1, 1, 1, 2, 3, 4, 5, 6]
        assert [len(seen[1]) for _, seen in taken] == [0, 0, 0, 1, 2, 3, 4, 5]
        assert [seen[3] for _, seen in taken[:3]] == [
            [None], [None, TokenLogprobs(-1.0, [])], [None, TokenLogprobs(-1.0, []), TokenLogprobs(-2.0, [])]
        ]  # fmt: skip

    def test_they_cost_nothing_until_looked_at(self) -> None:
        long = Request("r", [0] * 10, 10, SamplingParams(max_new_tokens=9, logprobs=True, prompt_logprobs=0))
        output = GenerationOutput(long)
        assert output._request is long

    def test_empty_when_not_asked_for(self) -> None:
        output = GenerationOutput(Request("r", [1, 2], 1, SamplingParams(max_new_tokens=1)))
        assert (output.logprobs, output.top_logprobs, output.prompt_logprobs) == ([], [], [])


@pytest.mark.parametrize("num_blocks", [64, 8])
def test_logprobs_are_the_models_own(tiny: PreTrainedModel, num_blocks: int) -> None:
    stepper = Stepper(tiny, return_logprobs=True, num_blocks=num_blocks, max_batch_tokens=24, safety_margin=0.0)
    requests = [stepper.add(tokens(i, 30), 30, top_logprobs=i) for i in range(4)]
    stepper.drain()
    if num_blocks == 8:
        assert stepper.core.scheduler.num_preemptions > 0
    for k, asking in enumerate(requests):
        output = stepper.results()[asking.request_id]
        with torch.inference_mode():
            logits = tiny(torch.tensor([asking.token_ids])).logits[0].log_softmax(-1)
        wanted = [logits[29 + i, token].item() for i, token in enumerate(output.generated_tokens)]
        assert output.logprobs == pytest.approx(wanted, abs=1e-4)
        assert len(output.top_logprobs) == (30 if k else 0)
        for i, top in enumerate(output.top_logprobs):
            assert close(top, expected_top(logits[29 + i], k), 1e-4)
            assert top[0] == (output.generated_tokens[i], output.logprobs[i])


def test_streamed_lists_are_cumulative(tiny: PreTrainedModel) -> None:
    stepper = Stepper(tiny)
    stepper.add(tokens(0, 8), 6, top_logprobs=2, streaming=True)
    stepper.drain()
    lists = [output.top_logprobs for output in stepper.outputs]
    assert [len(each) for each in lists] == [1, 2, 3, 4, 5, 6]
    assert all(longer[:-1] == shorter for shorter, longer in itertools.pairwise(lists))


def test_logprobs_are_off_unless_asked_for(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:
        plain, asked = collect(
            manager,
            [
                str(manager.add_request(tokens(0, 8), max_new_tokens=5)),
                str(manager.add_request(tokens(0, 8), max_new_tokens=5, logprobs=True)),
            ],
        )
        assert plain.logprobs == [] and len(asked.logprobs) == 5
        assert plain.generated_tokens == asked.generated_tokens == ref(tiny, tokens(0, 8), 5)
