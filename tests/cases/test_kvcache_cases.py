"""Cases O18-O22: the paged cache under lengths, hits, sharing, chunking and eviction. Tokens equal plain generate()."""

from __future__ import annotations

import random

import pytest
from transformers import PreTrainedModel

from tests.cases.conftest import Variant
from tests.harness import Stepper, collect, running, tokens
from tests.models import ref

PROMPTS = [1, 15, 16, 17, 31, 32, 33, 47, 48, 49]
NEW = [1, 15, 16, 17]


@pytest.mark.parametrize("page_size", [4, 16, 256])
def test_O18_lengths_around_block_borders_alone(tiny: PreTrainedModel, page_size: int) -> None:
    for length in PROMPTS:
        stepper = Stepper(tiny, page_size=page_size, num_blocks=64)
        cache = stepper.core.scheduler.cache
        prompt = tokens(18, length)
        request = stepper.add(prompt, max(NEW), streaming=True)
        while stepper.core.has_work:
            stepper.step()
            if stepper.core.has_work:
                cached = request.computed
                assert cached == length + request.num_output_tokens - 1
                assert cache.num_used_blocks == -(-cached // page_size)
        assert request.output_ids == ref(tiny, prompt, max(NEW))


@pytest.mark.parametrize("page_size", [4, 16, 256])
def test_O18_lengths_around_block_borders_together(tiny: PreTrainedModel, page_size: int) -> None:
    stepper = Stepper(tiny, page_size=page_size, num_blocks=4096 // page_size)
    asked = {stepper.add(tokens(18, length), n).request_id: (tokens(18, length), n) for length in PROMPTS for n in NEW}
    stepper.drain()
    for request_id, output in stepper.results().items():
        prompt, n = asked[request_id]
        assert output.generated_tokens == ref(tiny, prompt, max(NEW))[:n]
        assert output.finish_reason == "length"


@pytest.mark.parametrize("length", [16, 32, 48, 33])
def test_O19_the_whole_prompt_is_cached(tiny: PreTrainedModel, length: int) -> None:
    prompt = tokens(19, length)
    stepper = Stepper(tiny)
    for round_number, n in enumerate([12, 12, 1]):
        request = stepper.add(prompt, n)
        stepper.drain()
        output = stepper.results()[request.request_id]
        assert output.generated_tokens == ref(tiny, prompt, n)
        if round_number == 0:
            assert output.cached_tokens == 0
        else:
            assert output.cached_tokens == (length - 1) // 16 * 16


@pytest.mark.parametrize("budget", [24, 1024])
def test_O20_the_same_prompt_many_times_in_one_cold_step(tiny: PreTrainedModel, budget: int) -> None:
    prompt = tokens(20, 40)
    prompts = [prompt] * 8 + [[*prompt[:-1], (prompt[-1] + i) % 512] for i in range(1, 9)]
    stepper = Stepper(tiny, max_batch_tokens=budget)
    requests = [stepper.add(p, 16) for p in prompts]
    stepper.step()
    if budget == 1024:  # all 16 fit in the first step; 15 of them find the two full blocks of the first
        assert [request.cached_tokens for request in requests] == [0] + [32] * 15
        assert stepper.core.scheduler.cache.num_used_blocks == 2 + 16
    stepper.drain()
    results = stepper.results()
    for request, p in zip(requests, prompts, strict=True):
        assert results[request.request_id].generated_tokens == ref(tiny, p, 16)


@pytest.mark.parametrize("budget", [7, 16, 512])
def test_O21_chunked_prefill_equals_unchunked(tiny: PreTrainedModel, budget: int) -> None:
    check_chunks(Variant(tiny), budget)


@pytest.mark.parametrize("budget", [17, 64])  # a chunk that ends within blocks, and one as long as four of them
def test_O21_chunked_prefill_in_every_variant(any_variant: Variant, budget: int) -> None:
    check_chunks(any_variant, budget)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [7, 16, 17, 64, 512])
def test_O21_chunked_prefill_in_every_variant_with_every_budget(any_variant: Variant, budget: int) -> None:
    check_chunks(any_variant, budget)


def check_chunks(any_variant: Variant, budget: int) -> None:
    stepper = any_variant.stepper(max_batch_tokens=budget)
    long_running = [(stepper.add(tokens(i, 9), 100, streaming=True), tokens(i, 9), 100) for i in range(4)]
    arriving = []
    for length in [1, 2, 7, 8, 15, 16, 17, 33, 64, 65, 99, 100]:
        prompt = tokens(21, length)
        arriving.append((stepper.add(prompt, 5, streaming=True), prompt, 5))
        for output in stepper.step():
            request = next(r for r, _, _ in long_running + arriving if r.request_id == output.request_id)
            assert request.computed >= request.num_prompt_tokens, "a token came before the prompt's last chunk"
    stepper.drain()
    for request, prompt, n in long_running + arriving:
        streamed = [o.num_generated_tokens for o in stepper.outputs if o.request_id == request.request_id]
        assert streamed == list(range(1, n + 1)), "each token is streamed once, in order"
        assert stepper.results()[request.request_id].generated_tokens == ref(any_variant.model, prompt, n)


def test_O22_eviction_reuse_and_reference_counts(any_variant: Variant) -> None:
    most = 8
    rng = random.Random(22)
    families = [tokens(22 + family, 48) for family in range(6)]
    stepper = any_variant.stepper(num_blocks=12, max_batch_tokens=64, max_requests_per_batch=4)
    asked = {}
    hits = 0
    for number in range(300):
        # Tails from a small set: references are computed once, prefixes still meet in every order.
        tail = rng.randrange(8)
        prompt = rng.choice(families) + tokens(tail, 1 + 2 * tail)
        request = stepper.add(prompt, rng.randrange(1, most + 1))
        asked[request.request_id] = (prompt, request.params.max_new_tokens)
        while stepper.core.scheduler.num_running + stepper.core.scheduler.num_waiting >= 4:
            stepper.step()
        if number % 7 == 0:
            stepper.step()
    stepper.drain()
    results = stepper.results()
    for request_id, (prompt, n) in asked.items():
        assert results[request_id].generated_tokens == ref(any_variant.model, prompt, most)[:n]
        hits += results[request_id].cached_tokens > 0
    assert hits > 30 or not stepper.manager.settings.sharing, "the cache was hardly used, so this shows nothing"


def test_O20_O19_through_the_running_engine(tiny: PreTrainedModel) -> None:
    prompts = [tokens(20, 40)] * 6
    with running(tiny) as manager:
        ids = manager.add_requests(prompts, max_new_tokens=10)
        assert ids is not None
        for output in collect(manager, ids):
            assert output.generated_tokens == ref(tiny, prompts[0], 10)
