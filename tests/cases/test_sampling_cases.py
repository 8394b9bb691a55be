"""Cases O07 and O11-O16 in the engine: endings, temperatures, leaks between rows, seeds, penalties, bias, logprobs."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from engine.request import Request
from engine.sampling.params import sibling_params
from tests.harness import NO_EOS, Stepper, collect, running, tokens
from tests.models import CJK, COUNT, COUNT_IDS, build_chain, ref, reference

SAMPLED = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1)


@pytest.fixture(scope="module")
def chain() -> PreTrainedModel:
    return build_chain([504, 253, 2, 28, 0, 216])


class TestO07:
    def run(self, chain: PreTrainedModel, config: GenerationConfig, **arguments: Any) -> tuple[list[int], str]:
        stepper = Stepper(chain, config, num_blocks=16)
        request = stepper.add([504], arguments.pop("max_new_tokens", 5), **arguments)
        stepper.drain()
        (output,) = stepper.results().values()
        return request.output_ids, str(output.finish_reason)

    @pytest.mark.parametrize("where", ["config", "request"])
    def test_O07_ending_tokens(self, chain: PreTrainedModel, where: str) -> None:
        def run(eos: Any) -> tuple[list[int], str]:
            if where == "config":
                return self.run(chain, GenerationConfig(eos_token_id=eos))
            return self.run(chain, GenerationConfig(eos_token_id=253), eos_token_id=eos)

        assert run([0, 2]) == ([253, 2], "stop")
        assert run(0) == run([0]) == ([253, 2, 28, 0], "stop")
        assert run(-1) == run([-1]) == ([253, 2, 28, 0, 216], "length")

    def test_O07_ignore_eos(self, chain: PreTrainedModel) -> None:
        both = GenerationConfig(eos_token_id=[0, 2])
        assert self.run(chain, both, ignore_eos=True) == ([253, 2, 28, 0, 216], "length")
        assert self.run(chain, both, ignore_eos=True, stop_token_ids=[28]) == ([253, 2, 28], "stop")


def test_O11_temperature_zero_and_nearly_zero(smol: PreTrainedModel, smol_tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = smol_tokenizer.encode(COUNT)
    mixes: list[dict[str, Any]] = [{"temperature": t} for t in (1e-6, 1e-10, 1e-45)]
    for size in range(4):
        for extra in itertools.combinations([("top_p", 0.1), ("top_k", 3), ("seed", 5)], size):
            mixes.append({"temperature": 0.0} | dict(extra))
    config = GenerationConfig(do_sample=True, temperature=0.7, eos_token_id=-1)
    stepper = Stepper(smol, config, per_request_processors=True)
    requests = [stepper.add(prompt, 16, logprobs=True, **mix) for mix in mixes]
    stepper.drain()
    for request in requests:
        output = stepper.results()[request.request_id]
        assert output.error is None
        assert output.generated_tokens == COUNT_IDS
        assert all(math.isfinite(value) for value in output.logprobs)


PROMPTS = [tokens(12, 12), *(tokens(12 + i, 9 + 3 * i) for i in range(1, 5)), tokens(12, 12)]
MIXES: list[dict[str, Any]] = [
    {},
    {"temperature": 5.0, "top_k": 0},
    {"temperature": 1.0, "top_k": 1},
    {"repetition_penalty": 2.0},
    {"logit_bias": {7: 100.0, 8: -100.0}},
    {},
]


class TestO12:
    N = 12

    def run(self, tiny: PreTrainedModel, order: list[int], apart: int) -> dict[int, list[int]]:
        stepper = Stepper(tiny, NO_EOS, per_request_processors=True, max_batch_tokens=48)
        requests: dict[int, Request] = {}
        for kind in order:
            requests[kind] = stepper.add(PROMPTS[kind], self.N, seed=3, **MIXES[kind])
            for _ in range(apart):
                stepper.step()
        stepper.drain()
        return {kind: request.output_ids for kind, request in requests.items()}

    def test_O12_settings_do_not_leak(self, tiny: PreTrainedModel) -> None:
        alone = {kind: self.run(tiny, [kind], 0)[kind] for kind in range(6)}
        for kind in (0, 2, 5):
            assert alone[kind] == ref(tiny, PROMPTS[kind], self.N)
        assert alone[4] == [7] * self.N
        assert alone[3] != ref(tiny, PROMPTS[3], self.N) != alone[1]
        rng = random.Random(12)
        orders = [list(range(i, 6)) + list(range(i)) for i in range(6)]
        orders += [rng.sample(range(6), 6) for _ in range(6)]
        for order, apart in itertools.product(orders, (0, 2)):
            assert self.run(tiny, order, apart) == alone


class TestO13:
    def choices(self, tiny: PreTrainedModel, n: int, companions: int) -> list[list[int]]:
        stepper = Stepper(tiny, SAMPLED, per_request_processors=True)
        others = [stepper.add(tokens(i, 5 + i), 20, temperature=2.0, top_k=i) for i in range(companions)]
        requests = []
        for index in range(n):
            request = stepper.add(tokens(13, 12), 32, seed=7)
            request.params = sibling_params(request.params, index)
            requests.append(request)
        stepper.drain()
        assert all(len(other.output_ids) == 20 for other in others)
        return [request.output_ids for request in requests]

    def test_O13_choices_differ_and_repeat(self, tiny: PreTrainedModel) -> None:
        (alone,) = self.choices(tiny, 1, 0)
        first, second = self.choices(tiny, 2, 0)
        assert first == alone != second
        assert self.choices(tiny, 2, 7) == [first, second]
        four = self.choices(tiny, 4, 3)
        assert four[:2] == [first, second] and len({tuple(each) for each in four}) == 4


class TestO14:
    PROMPT = tokens(14, 20)
    N = 24

    def run(self, tiny: PreTrainedModel, prompt: list[int], n: int, **penalties: float) -> list[int]:
        """Beside two plain requests, which must not notice."""
        stepper = Stepper(tiny, NO_EOS, per_request_processors=True)
        before = stepper.add(self.PROMPT, n)
        request = stepper.add(prompt, n, **penalties)
        after = stepper.add(tokens(15, 9), n)
        stepper.drain()
        assert before.output_ids == ref(tiny, self.PROMPT, n)
        assert after.output_ids == ref(tiny, tokens(15, 9), n)
        return request.output_ids

    def test_O14_output_penalties_do_not_count_the_prompt(self, tiny: PreTrainedModel) -> None:
        for seed in range(1000):  # until a prompt holds ten times what follows it
            prompt = tokens(seed, 20) * 10
            random.Random(seed).shuffle(prompt)
            found = reference(tiny, prompt, 1)
            if found.token_ids[0] in prompt:
                break
        assert prompt.count(found.token_ids[0]) >= 10
        assert found.gaps[0] < 20  # counting them would tell
        assert self.run(tiny, prompt, 1, frequency_penalty=2.0, presence_penalty=2.0) == found.token_ids
        assert self.run(tiny, prompt, 1, repetition_penalty=50.0) != found.token_ids

    def test_O14_repetition_penalty_counts_the_prompt(self, tiny: PreTrainedModel) -> None:
        ids = torch.tensor([self.PROMPT])
        config = GenerationConfig(
            do_sample=False, max_new_tokens=self.N, repetition_penalty=1.3, eos_token_id=512, pad_token_id=0
        )
        with torch.inference_mode():
            wanted = tiny.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, 20:].tolist()
        assert wanted != ref(tiny, self.PROMPT, self.N)
        assert self.run(tiny, self.PROMPT, self.N, repetition_penalty=1.3) == wanted

    @pytest.mark.parametrize(("frequency", "presence"), [(1.0, 0.0), (0.0, 2.0), (1.5, -0.5), (-1.0, 0.0)])
    def test_O14_output_penalties_like_a_hand_loop(
        self, tiny: PreTrainedModel, frequency: float, presence: float
    ) -> None:
        known = list(self.PROMPT)
        for _ in range(self.N):
            with torch.inference_mode():
                logits = tiny(torch.tensor([known])).logits[0, -1].tolist()
            for token in set(known[20:]):
                logits[token] -= frequency * known[20:].count(token) + presence
            known.append(logits.index(max(logits)))
        found = self.run(tiny, self.PROMPT, self.N, frequency_penalty=frequency, presence_penalty=presence)
        assert found == known[20:]


def test_O15_logit_bias(smol: PreTrainedModel, smol_tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = smol_tokenizer.encode(COUNT)
    with running(smol, NO_EOS, per_request_processors=True) as manager:

        def run(bias: dict[Any, Any] | None, n: int) -> list[int]:
            (output,) = collect(manager, [str(manager.add_request(prompt, max_new_tokens=n, logit_bias=bias))])
            return output.generated_tokens

        plain = [str(manager.add_request(prompt, max_new_tokens=16)) for _ in range(2)]
        assert run({216: -100}, 2)[0] != 216
        assert run({28: 100}, 5) == [28] * 5
        for bad in ({49152: 5}, {-1: 5}, {"abc": 1}, {28: 1e9}):
            with pytest.raises(ValueError, match="^logit_bias "):
                run(bad, 5)
        assert [output.generated_tokens for output in collect(manager, plain)] == [COUNT_IDS] * 2


def test_O16_logprobs(smol: PreTrainedModel, smol_tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = smol_tokenizer.encode(CJK)
    stepper = Stepper(smol, NO_EOS)
    listed = stepper.add(prompt, 12, top_logprobs=3, streaming=True)
    bare = stepper.add(prompt, 12, logprobs=True, top_logprobs=0)
    stepper.drain()
    with torch.inference_mode():
        own = smol(torch.tensor([listed.token_ids])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    output = stepper.results()[listed.request_id]
    assert len(output.logprobs) == len(output.top_logprobs) == 12
    for row, (token, value, top) in enumerate(
        zip(output.generated_tokens, output.logprobs, output.top_logprobs, strict=True)
    ):
        assert value == pytest.approx(own[row, token].item(), abs=1e-3)
        assert len(top) == 3 and top[0] == (token, value)
        assert top == sorted(top, key=lambda pair: (-pair[1], pair[0]))
        assert all(math.isfinite(each) for _, each in top)
    for one in stepper.outputs:
        if one.request_id == listed.request_id:
            assert one.top_logprobs == output.top_logprobs[: one.num_generated_tokens]
    without = stepper.results()[bare.request_id]
    assert without.top_logprobs == []
    assert without.logprobs == pytest.approx(output.logprobs, abs=1e-5)
