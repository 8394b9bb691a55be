"""Edits of logits: each setting, and all together, give what transformers' processors give, step by step."""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, PreTrainedModel

from engine.request import Request
from engine.sampling.edits import EditsBuilder
from engine.sampling.history import Ngrams, Sequences, TokenCounts
from engine.sampling.params import SamplingParams
from engine.sampling.resolve import make_params, merge_generation_config
from tests.harness import NO_EOS, Stepper, tokens
from tests.models import build_tiny, ref

VOCAB = 24


@pytest.fixture(scope="module")
def small() -> PreTrainedModel:
    """Any model with a small vocabulary, in which repeats are common."""
    return build_tiny(VOCAB)


def edited(logits: torch.Tensor, *requests: Request) -> torch.Tensor:
    """The logits, row i for requests[i], after the requests' edits."""
    builder = EditsBuilder(logits.shape[1])
    for row, request in enumerate(requests):
        builder.add(row, request)
    assert not builder.errors
    logits = logits.clone()
    if (edits := builder.build()) is not None:
        edits.apply(logits)
    return logits


def theirs(
    model: PreTrainedModel, config: GenerationConfig, prompt: list[int], output: list[int], logits: torch.Tensor
) -> torch.Tensor:
    merged, _ = model._prepare_generation_config(copy.deepcopy(config))
    merged.max_length = len(prompt) + config.max_new_tokens
    if config.min_new_tokens is not None:
        merged.min_length = len(prompt) + config.min_new_tokens  # as generate() does
    model._prepare_special_tokens(merged, device="cpu")
    chain = model._get_logits_processor(
        merged, input_ids_seq_length=len(prompt), encoder_input_ids=torch.tensor([prompt]), device="cpu"
    )
    return chain(torch.tensor([prompt + output]), logits[None].clone())[0]


def make_request(model: PreTrainedModel, config: GenerationConfig, prompt: list[int], **own: Any) -> Request:
    params = make_params(
        merge_generation_config(model, config),
        per_request=own,
        per_request_processors=True,
        num_prompt_tokens=len(prompt),
        context_room=1000,
        vocab_size=model.config.vocab_size,
        default_seed=0,
    )
    return Request("r", list(prompt), len(prompt), params)


def noise(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3


token = st.integers(0, VOCAB - 1)
few = st.lists(token, max_size=4)
sequence = st.lists(st.integers(0, 3), min_size=1, max_size=3)  # of common tokens, so that many are completed
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "sequence_bias": st.lists(
        st.tuples(sequence, st.sampled_from([2.0, -7.5, 0.25, -math.inf])).map(list),
        min_size=1,
        max_size=6,
        unique_by=lambda pair: tuple(pair[0]),
    ),
    "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3, 4.0]),
    "no_repeat_ngram_size": st.integers(0, 4),
    "bad_words_ids": st.lists(sequence, min_size=1, max_size=6),
    "eos_token_id": st.sampled_from([1, [1, 5], [7]]),
    "min_new_tokens": st.integers(0, 6),
    "min_length": st.integers(0, 12),
    "forced_bos_token_id": token,
    "forced_eos_token_id": st.sampled_from([3, [3, 4]]),
    "suppress_tokens": few,
    "begin_suppress_tokens": few,
}
history = st.lists(st.one_of(st.integers(0, 3), token), min_size=1, max_size=12)


def compare(model: PreTrainedModel, given_settings: dict[str, Any], prompt: list[int], output: list[int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers on settings that have no effect together
        config = GenerationConfig(max_new_tokens=len(output) + 1, do_sample=False, **given_settings)
        request = make_request(model, config, prompt)
        for step in range(len(output) + 1):
            logits = noise(step)
            wanted = theirs(model, config, prompt, output[:step], logits)
            torch.testing.assert_close(edited(logits[None], request)[0], wanted, rtol=1e-6, atol=1e-6)
            fresh = Request("r", list(request.token_ids), len(prompt), request.params)
            assert torch.equal(edited(logits[None], fresh)[0], edited(logits[None], request)[0])
            request.token_ids += output[step : step + 1]


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=15)
@given(data=st.data(), prompt=history, output=history)
def test_one_setting_as_in_transformers(
    small: PreTrainedModel, name: str, data: st.DataObject, prompt: list[int], output: list[int]
) -> None:
    given_settings = {name: data.draw(SETTINGS[name])}
    if name.startswith("min_"):
        given_settings["eos_token_id"] = data.draw(SETTINGS["eos_token_id"])
    compare(small, given_settings, prompt, output)


@settings(max_examples=60)
@given(chosen=st.fixed_dictionaries({}, optional=SETTINGS), prompt=history, output=history)
def test_all_settings_together_as_in_transformers(
    small: PreTrainedModel, chosen: dict[str, Any], prompt: list[int], output: list[int]
) -> None:
    forced = [chosen.get(name, []) for name in ("forced_bos_token_id", "forced_eos_token_id")]
    suppressed = set(chosen.get("suppress_tokens", []) + chosen.get("begin_suppress_tokens", []))
    assume(not any(suppressed & {*ids} if isinstance(ids, list) else ids in suppressed for ids in forced))
    compare(small, chosen, prompt, output)


@settings(max_examples=40)
@given(
    prompt=history,
    output=history,
    frequency=st.sampled_from([0.0, 0.7, -1.5]),
    presence=st.sampled_from([0.0, 2.0, -0.3]),
    bias=st.dictionaries(token, st.sampled_from([-100.0, -1.0, 2.5, 100.0])),
    allowed=st.none() | st.lists(token, min_size=1),
)
def test_penalties_bias_and_allowed_tokens(
    small: PreTrainedModel,
    prompt: list[int],
    output: list[int],
    frequency: float,
    presence: float,
    bias: dict[int, float],
    allowed: list[int] | None,
) -> None:
    own = {
        "frequency_penalty": frequency, "presence_penalty": presence, "logit_bias": bias, "allowed_token_ids": allowed,
    }  # fmt: skip
    request = make_request(small, NO_EOS, prompt, **own)
    for step in range(len(output) + 1):
        logits = noise(step)
        counts = Counter(output[:step])
        wanted = [
            -math.inf
            if allowed is not None and i not in allowed
            else x - frequency * counts[i] - presence * (counts[i] > 0) + bias.get(i, 0.0)
            for i, x in enumerate(logits.tolist())
        ]
        torch.testing.assert_close(edited(logits[None], request)[0], torch.tensor(wanted), rtol=1e-5, atol=1e-5)
        request.token_ids += output[step : step + 1]


def test_rows_without_edits_are_not_touched(small: PreTrainedModel) -> None:
    plain = make_request(small, NO_EOS, [1, 2, 3])
    busy = make_request(
        small,
        NO_EOS,
        [1, 2, 3],
        repetition_penalty=2.0, logit_bias={0: 1.0, VOCAB - 1: 1.0}, suppress_tokens=[0, VOCAB - 1],
        no_repeat_ngram_size=1, frequency_penalty=1.0, allowed_token_ids=[4], min_new_tokens=3, eos_token_id=[0, 5],
    )  # fmt: skip
    logits = torch.stack([noise(i) for i in range(5)])
    logits[0, 3] = math.nan
    changed = edited(logits, plain, busy, plain, busy, plain)
    assert changed[::2].numpy().tobytes() == logits[::2].contiguous().numpy().tobytes()
    assert not torch.equal(changed[1::2], logits[1::2])


def test_edits_of_the_longest_logits_change_their_own_row_alone() -> None:
    params = SamplingParams(max_new_tokens=5, logit_bias=((0, 1.0), (99, 2.0)), suppress_tokens=(50,))
    changed = edited(torch.zeros(3, 100), *[Request("r", [7], 1, params)] * 3)
    wanted = torch.zeros(100)
    wanted[[0, 50, 99]] = torch.tensor([1.0, -math.inf, 2.0])
    assert torch.equal(changed, wanted.expand(3, -1))


class TestHistory:
    @given(st.lists(st.integers(0, 200)), st.lists(st.integers(0, 200), max_size=300), st.integers(1, 40))
    def test_counts_grow_with_the_tokens(self, before: list[int], after: list[int], chunk: int) -> None:
        counts, token_ids = TokenCounts(len(before)), list(before)
        for start in range(0, len(after) + 1, chunk):
            counts.update(token_ids)
            counts.update(token_ids)
            wanted = Counter(token_ids[len(before) :])
            assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == wanted
            token_ids += after[start : start + chunk]

    @given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 5))
    def test_ngrams(self, token_ids: list[int], size: int) -> None:
        ngrams = Ngrams(size)
        for length in range(len(token_ids) + 1):
            known = token_ids[:length]
            ngrams.update(known)
            runs = [tuple(known[i : i + size]) for i in range(length - size + 1)]
            last = tuple(known[max(0, length + 1 - size) :])
            assert sorted(ngrams.repeating(known).tolist()) == sorted({run[-1] for run in runs if run[:-1] == last})

    def test_sequences_add_up_where_they_end_in_the_same_token(self) -> None:
        sequences = Sequences([((5,), 1.0), ((1, 5), 2.0), ((1, 1, 5), 4.0), ((2, 6), -math.inf), ((1, 5), 8.0)])

        def completing(*token_ids: int) -> dict[int, float]:
            ids, biases = sequences.completing(list(token_ids))
            return dict(zip(ids.tolist(), biases.tolist(), strict=True))

        assert completing() == completing(3) == {5: 1.0}
        assert completing(1) == {5: 9.0}
        assert completing(1, 1) == {5: 13.0}
        assert completing(1, 2) == {5: 1.0, 6: -math.inf}

    def test_a_step_looks_at_new_tokens_only(self) -> None:
        params = SamplingParams(max_new_tokens=9, repetition_penalty=2.0, frequency_penalty=1.0, no_repeat_ngram_size=2)
        request = Request("r", [3] * 1000, 999, params)
        edited(torch.zeros(1, VOCAB), request)
        assert request.history is not None
        parts = (request.history.seen, request.history.generated, request.history.ngrams)
        looked_at = []
        real = list.__getitem__

        class Watched(list):  # type: ignore[type-arg]
            def __getitem__(self, key: Any) -> Any:
                found = real(self, key)
                looked_at.append(len(found) if isinstance(key, slice) else 1)
                return found

        request.token_ids = Watched(request.token_ids)
        request.token_ids.append(4)
        for part in parts:
            assert part is not None
            part.update(request.token_ids)
        assert 0 < sum(looked_at) < 10


# End to end: the same tokens as generate() with the same generation config.

N = 24


def settings_for(model: PreTrainedModel) -> dict[str, dict[str, Any]]:
    """Settings that change what the model says after these prompts."""
    first, second = ref(model, tokens(0, 30), N), ref(model, tokens(1, 30), N)
    return {
        "repetition_penalty": {"repetition_penalty": 1.3},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
        "min_new_tokens": {"min_new_tokens": 10, "eos_token_id": [first[4], second[2]]},
        "min_length": {"min_length": 42, "eos_token_id": first[4]},
        "bad_words_ids": {"bad_words_ids": [[first[0]], first[3:5], second[2:5]]},
        "sequence_bias": {"sequence_bias": [[[first[2]], -5.0], [first[5:7], -math.inf], [second[3:5], -9.0]]},
        "suppress_tokens": {"suppress_tokens": [first[0], first[7], second[4]]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [first[0], second[0]]},
        "forced_eos_token_id": {"forced_eos_token_id": 11},
        "several": {
            "repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "suppress_tokens": [first[0]],
            "bad_words_ids": [second[:2]], "min_new_tokens": 5, "eos_token_id": first[2],
        },
    }  # fmt: skip


def generate(model: PreTrainedModel, prompt: list[int], given_settings: dict[str, Any]) -> list[int]:
    fields = {"eos_token_id": model.config.vocab_size} | given_settings
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = GenerationConfig(do_sample=False, max_new_tokens=N, pad_token_id=0, **fields)
        ids = torch.tensor([prompt])
        return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[
            0, len(prompt) :
        ].tolist()


NAMES = [
    "repetition_penalty", "no_repeat_ngram_size", "min_new_tokens", "min_length", "bad_words_ids", "sequence_bias",
    "suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id", "several",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_greedy_like_generate_also_under_preemption(tiny: PreTrainedModel, name: str) -> None:
    chosen = settings_for(tiny)[name]
    prompts = [tokens(i, 30) for i in range(4)]
    wanted = [generate(tiny, prompt, chosen) for prompt in prompts]
    assert wanted != [ref(tiny, prompt, N) for prompt in prompts]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = GenerationConfig(do_sample=False, **({"eos_token_id": -1} | chosen))
    for num_blocks in (64, 8):
        stepper = Stepper(tiny, config, num_blocks=num_blocks, max_batch_tokens=40, safety_margin=0.0)
        requests = [stepper.add(prompt, N) for prompt in prompts]
        stepper.drain()
        assert [request.output_ids for request in requests] == wanted
        if num_blocks == 8:
            assert stepper.core.scheduler.num_preemptions > 0
    stepper = Stepper(tiny, NO_EOS, per_request_processors=True)
    requests = [stepper.add(prompt, N, **chosen) for prompt in prompts]
    plain = stepper.add(tokens(9, 20), N)
    stepper.drain()
    assert [request.output_ids for request in requests] == wanted
    assert plain.output_ids == ref(tiny, tokens(9, 20), N)


def test_a_request_goes_on_with_the_whole_history(tiny: PreTrainedModel) -> None:
    chosen = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "frequency_penalty": 0.5}
    stepper = Stepper(tiny, per_request_processors=True)
    whole = stepper.add(tokens(3, 12), N, **chosen)
    stepper.drain()
    request = stepper.manager._intake.request(
        "resumed", tokens(3, 12), {"max_new_tokens": N, **chosen}, output_ids=whole.output_ids[:10]
    )
    stepper.core.add(request)
    stepper.drain()
    assert request.output_ids == whole.output_ids
