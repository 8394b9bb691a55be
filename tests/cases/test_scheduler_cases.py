"""Cases O23-O26: preemption, requests too large, cancelling in every state, starvation."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from engine import RequestStatus
from tests.cases.conftest import Variant
from tests.harness import Stepper, collect, running, tokens
from tests.models import ref


@pytest.mark.parametrize("num_blocks", [10, 8])
def test_O23_preemption_neither_changes_nor_doubles_tokens(variant: Variant, num_blocks: int) -> None:
    stepper = variant.stepper(num_blocks=num_blocks, safety_margin=0.0)
    requests = [stepper.add(tokens(23 + i, 40), 60, streaming=True) for i in range(6)]
    preemptions, was_running = 0, set()
    while stepper.core.has_work:
        stepper.step()
        pending = {r.request_id for r in requests if r.status == RequestStatus.PENDING}
        preemptions += len(was_running & pending)
        was_running = {r.request_id for r in requests if r.status in (RequestStatus.PREFILLING, RequestStatus.DECODING)}
    assert preemptions > 0, "nothing was preempted, so this shows nothing"
    for i, request in enumerate(requests):
        output = stepper.results()[request.request_id]
        assert output.generated_tokens == ref(variant.model, tokens(23 + i, 40), 60)
        assert output.finish_reason == "length"
        assert output.num_prompt_tokens == 40
        streamed = [o.num_generated_tokens for o in stepper.outputs if o.request_id == request.request_id]
        assert streamed == list(range(1, 61))
    stepper.drain()


def test_O24_a_request_that_can_never_fit_is_refused_alone(tiny: PreTrainedModel) -> None:
    with running(tiny, num_blocks=4) as manager:
        with pytest.raises(ValueError, match=r"150 tokens.*64.*num_blocks"):
            manager.add_request(tokens(24, 150))
        (output,) = collect(manager, [manager.add_request(tokens(24, 5), max_new_tokens=6)])
        assert output.generated_tokens == ref(tiny, tokens(24, 5), 6)


def test_O24_a_request_that_outgrows_the_cache_ends_with_length(tiny: PreTrainedModel) -> None:
    with running(tiny, num_blocks=4) as manager:
        (output,) = collect(manager, [manager.add_request(tokens(24, 20), max_new_tokens=100)])
        assert (output.status, output.finish_reason) == (RequestStatus.FINISHED, "length")
        # 64 tokens are cached; the 65th known token, the 45th generated, needs no block of its own.
        assert output.generated_tokens == ref(tiny, tokens(24, 20), 45)
        (small,) = collect(manager, [manager.add_request(tokens(24, 5), max_new_tokens=6)])
        assert small.generated_tokens == ref(tiny, tokens(24, 5), 6)


def test_O24_two_that_outgrow_the_cache_together_both_end(variant: Variant) -> None:
    stepper = variant.stepper(num_blocks=4)
    requests = [stepper.add(tokens(24 + i, 20), 100) for i in range(2)]
    stepper.drain()
    for i, request in enumerate(requests):
        assert stepper.results()[request.request_id].generated_tokens == ref(variant.model, tokens(24 + i, 20), 45)


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "preempted"])
def test_O25_cancel_in_every_state(variant: Variant, state: str) -> None:
    stepper = variant.stepper(num_blocks=16, max_batch_tokens=8, safety_margin=0.0)
    others = [stepper.add(tokens(i, 6), 90, f"other{i}") for i in range(2)]
    victim = stepper.add(tokens(25, 100), 140, "victim", streaming=True)
    if state != "waiting":
        wanted = {
            "prefilling": lambda: victim.status == RequestStatus.PREFILLING and victim.computed > 0,
            "decoding": lambda: victim.num_output_tokens > 2,
            "preempted": lambda: victim.status == RequestStatus.PENDING and victim.num_output_tokens > 0,
        }[state]
        for _ in range(400):
            stepper.step()
            if wanted():
                break
        assert wanted(), f"the request never was {state}"
    before = victim.num_output_tokens
    stepper.cancel("victim")
    stepper.cancel("victim")
    stepper.cancel("never seen")
    stepper.drain()
    results = stepper.results()
    assert results["victim"].status == RequestStatus.CANCELLED
    assert results["victim"].finish_reason == "cancelled"
    assert victim.num_output_tokens == before, "tokens came after the cancellation"
    for i, request in enumerate(others):
        assert results[request.request_id].generated_tokens == ref(variant.model, tokens(i, 6), 90)
    stepper.cancel("other0")
    assert not stepper.core.has_work


def test_O25_cancel_through_the_manager(tiny: PreTrainedModel) -> None:
    with running(tiny, max_batch_tokens=8) as manager:
        others = [manager.add_request(tokens(i, 6), max_new_tokens=60) for i in range(2)]
        victims = [manager.add_request(tokens(25, 100), max_new_tokens=100, streaming=True) for _ in range(2)]
        assert next(manager.request_id_iter(victims[0])).num_generated_tokens == 1
        for victim in victims:
            manager.cancel_request(victim)
            manager.cancel_request(victim)
        manager.cancel_request("unknown")
        for output in collect(manager, victims):
            assert output.status == RequestStatus.CANCELLED
        for i, output in enumerate(collect(manager, others)):
            assert output.generated_tokens == ref(tiny, tokens(i, 6), 60)
        manager.cancel_request(others[0])


def test_O26_a_long_prompt_is_not_starved_by_short_ones(any_variant: Variant) -> None:
    stepper = any_variant.stepper(max_batch_tokens=32, max_requests_per_batch=8)
    short = [stepper.add(tokens(i, 8), 8) for i in range(4)]
    stepper.step()
    long = stepper.add(tokens(26, 200), 4)
    later_finished = 0
    later: list[str] = []
    while long.num_output_tokens == 0:
        for output in stepper.step():
            if output.is_finished():
                later_finished += output.request_id in later
                later.append(stepper.add(tokens(len(later), 8), 8).request_id)
        assert later_finished < 30, "the long prompt starves"
    stepper.drain()
    assert stepper.results()[long.request_id].generated_tokens == ref(any_variant.model, tokens(26, 200), 4)
    assert all(stepper.results()[r.request_id].finish_reason == "length" for r in short)


def test_O26_a_stream_is_not_starved_by_long_prompts(any_variant: Variant) -> None:
    stepper = any_variant.stepper(max_batch_tokens=32)
    stream = stepper.add(tokens(0, 8), 60, streaming=True)
    stepper.step()
    waited = longest = 0
    while not stream.status.is_terminal:
        stepper.add(tokens(stepper.steps, 200), 2)
        before = stream.num_output_tokens
        stepper.step()
        waited = 0 if stream.num_output_tokens > before else waited + 1
        longest = max(longest, waited)
    assert longest <= 4
    assert stepper.results()[stream.request_id].generated_tokens == ref(any_variant.model, tokens(0, 8), 60)
    for request in list(stepper.core.scheduler.live()):
        stepper.cancel(request.request_id)
    stepper.drain()


@pytest.mark.parametrize("prompt_length", [14, 15, 16, 30])
def test_O25_cancel_while_a_step_that_completes_a_block_is_in_flight(tiny: PreTrainedModel, prompt_length: int) -> None:
    for steps in range(1, 6):
        stepper = Stepper(tiny, overlap=True)
        other = stepper.add(tokens(0, 20), 12)
        victim = stepper.add(tokens(25, prompt_length), 40)
        for _ in range(steps):
            stepper.step()
        stepper.cancel(victim.request_id)
        again = stepper.add(tokens(25, prompt_length), 8)
        stepper.drain()
        assert stepper.results()[victim.request_id].status == RequestStatus.CANCELLED
        for request in (other, again):
            wanted = ref(tiny, request.prompt_ids, request.params.max_new_tokens)
            assert stepper.results()[request.request_id].generated_tokens == wanted
