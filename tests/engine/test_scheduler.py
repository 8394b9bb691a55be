"""The scheduler with scripted pages in place of a model: budgets, admission, hits, preemption, cancel, failed steps."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.cache.kv_cache import KVCache
from engine.request import FinishReason, Request, RequestStatus
from engine.scheduling.batch import ScheduledBatch
from engine.scheduling.policies import fifo
from engine.scheduling.scheduler import Scheduler
from tests.engine.scripted import Engine, Requests, next_token, reference


def rows(batch: ScheduledBatch) -> dict[str, tuple[int, int]]:
    """Request id -> (start, count)."""
    return {r.request_id: (s, c) for r, s, c in zip(batch.requests, batch.starts, batch.counts, strict=True)}


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{seed}").choices(range(100), k=length)


def assert_undisturbed(*requests: Request) -> None:
    for request in requests:
        assert request.output_ids == reference(request.prompt_ids, request.params.max_new_tokens), request.request_id


def test_tokens_left_are_what_steps_compute() -> None:
    """Of requests that run and wait: the prompt not yet computed, and what may be generated up to a cap."""
    engine = Engine(100, 4, budget=10)
    engine.add(prompt(15, 1), 4)
    engine.add(prompt(30, 2), 50)
    scheduler = engine.scheduler
    assert scheduler.load(1024).tokens_left == 15 + 4 + 30 + 50
    assert scheduler.load(20).tokens_left == 15 + 4 + 30 + 20
    left = scheduler.load(20).tokens_left
    batch = engine.step()
    assert scheduler.load(20).tokens_left == left - batch.num_tokens
    engine.drain()
    assert scheduler.load(20).tokens_left == 0


# Budgets and order


def test_decodes_come_first_then_prefills_share_the_rest() -> None:
    engine = Engine(100, 4, budget=10)
    first = engine.add(prompt(5, 1))
    engine.step()
    second, third = engine.add(prompt(20, 2)), engine.add(prompt(20, 3))
    batch = engine.step()
    assert rows(batch) == {first.request_id: (5, 1), second.request_id: (0, 9)}
    assert batch.sampled == [0]
    assert third.status is RequestStatus.PENDING, "no budget was left to admit it"
    assert second.status is RequestStatus.PREFILLING
    engine.step()
    batch = engine.step()
    assert rows(batch) == {first.request_id: (7, 1), second.request_id: (18, 2), third.request_id: (0, 7)}
    assert batch.sampled == [0, 1]
    assert second.status is RequestStatus.DECODING, "its prompt is fully scheduled"
    engine.drain()
    assert_undisturbed(first, second, third)


@pytest.mark.parametrize("budget", [7, 16, 17, 64, 512])
def test_O21_chunks_keep_the_budget_and_sample_only_after_the_last(budget: int) -> None:
    engine = Engine(400, 16, budget=budget, max_requests=7)
    requests = [engine.add(prompt(3, seed), 30) for seed in range(4)]
    for length in (1, 16, 17, 50, 100):
        engine.step()
        requests.append(engine.add(prompt(length, length), 3))

    def check(batch: ScheduledBatch) -> None:
        assert 0 < batch.num_tokens <= budget
        assert len(set(batch.requests)) == len(batch.requests)
        for row, (request, start, count) in enumerate(zip(batch.requests, batch.starts, batch.counts, strict=True)):
            sampled = request.num_tokens - 1 if row in batch.sampled else request.num_tokens
            assert (start + count == sampled) == (row in batch.sampled)

    engine.drain(check)
    assert_undisturbed(*requests)


@pytest.mark.parametrize("page_size", [4, 16])
def test_a_token_that_is_being_sampled_can_be_scheduled_but_not_beyond_the_last(page_size: int) -> None:
    engine = Engine(10, page_size, overlap=True)
    request = engine.add(prompt(5), 3)
    assert rows(engine.step()) == {request.request_id: (0, 5)}
    assert rows(engine.step()) == {request.request_id: (5, 1)}
    assert request.num_output_tokens == 1
    assert request.unknown == 1
    assert rows(engine.step()) == {request.request_id: (6, 1)}
    assert not engine.step(), "the third token is being sampled, and it is the last"
    assert not engine.scheduler.has_work
    assert_undisturbed(request)


def test_prefill_first_serves_prefilling_ones_first_but_no_stream_stands_still() -> None:
    engine = Engine(100, 4, budget=10, policy="prefill_first")
    stream = engine.add(prompt(5, 1), 30)
    engine.step()
    long = engine.add(prompt(90, 2))
    served = []
    for _ in range(9):
        batch = rows(engine.step())
        served.append(stream.request_id in batch)
        assert batch[long.request_id][1] == 10 - served[-1]
    assert served == [True, False, False, False, True, False, False, False, True]
    engine.drain()
    assert_undisturbed(stream, long)


def test_fifo_serves_decoding_ones_first_and_leaves_out_those_without_a_known_token() -> None:
    new = Requests()
    requests = [new(prompt(8)) for _ in range(5)]
    for request, computed in zip(requests, (3, 7, 8, 0, 7), strict=True):
        request.computed = computed
    decoding, prefilling = [requests[1], requests[4]], [requests[0], requests[3]]
    assert fifo(decoding, prefilling) == [decoding, prefilling]


def test_priority_goes_before_arrival() -> None:
    engine = Engine(100, 4, max_requests=2)
    low, first, second = (engine.add(prompt(4, i), priority=p) for i, p in enumerate((1, 0, 0)))
    assert list(rows(engine.step())) == [first.request_id, second.request_id]
    assert low.status is RequestStatus.PENDING
    engine.drain()
    assert_undisturbed(low, first, second)


@pytest.mark.parametrize(
    ("step", "max_requests", "left"),
    [(2048, 8, 1024), (600, 8, 300), (300, 8, 256), (256, 8, None), (2048, 1500, 1500), (1500, 1500, None)],
)
def test_steps_that_were_too_large_shrink(step: int, max_requests: int, left: int | None) -> None:
    scheduler = Scheduler(KVCache(8, 4), max_batch_tokens=2048, max_requests=max_requests, safety_margin=0.0)
    assert scheduler.shrink_steps(step) == (left is not None)
    assert scheduler.max_batch_tokens == (left or 2048)


def test_the_request_cap_holds() -> None:
    engine = Engine(100, 4, max_requests=3)
    requests = [engine.add(prompt(4, i)) for i in range(7)]
    most = 0

    def check(batch: ScheduledBatch) -> None:
        nonlocal most
        most = max(most, len(batch.requests))

    engine.drain(check)
    assert most == 3
    assert_undisturbed(*requests)


def test_the_margin_holds_back_waiting_requests_only() -> None:
    engine = Engine(10, 4, margin=0.2)
    first = engine.add(prompt(36), 5)
    engine.step()
    assert engine.cache.num_free_blocks == 1, "alone it is admitted into the margin"
    second = engine.add(prompt(4, 1))
    for _ in range(4):
        assert list(rows(engine.step())) == [first.request_id], "and grows into it, while the second one waits"
    engine.drain()
    assert_undisturbed(first, second)
    assert engine.scheduler.num_preemptions == 0


def test_the_first_waiting_request_is_not_overtaken() -> None:
    engine = Engine(10, 4)
    engine.add(prompt(20), 8)
    engine.step()
    large, small = engine.add(prompt(24, 1)), engine.add(prompt(4, 2))
    assert len(engine.step().requests) == 1
    assert engine.scheduler.num_waiting == 2
    engine.drain()
    assert_undisturbed(large, small)


# Block borders and prefix hits


@pytest.mark.parametrize("page_size", [1, 4, 16, 256])
@pytest.mark.parametrize("together", [True, False])
def test_O18_block_borders(page_size: int, together: bool) -> None:
    lengths, new_tokens = (1, 15, 16, 17, 31, 32, 33, 47, 48, 49), (1, 15, 16, 17)
    engine = Engine(2700 if page_size == 1 else 700, page_size, budget=512, max_requests=40)

    def check(batch: ScheduledBatch) -> None:
        for row in batch.sampled:
            request = batch.requests[row]
            cached_tokens = batch.starts[row] + batch.counts[row]
            assert cached_tokens == request.num_tokens - 1
            assert np.count_nonzero(batch.block_tables[0][batch.table_of[row]]) == -(-cached_tokens // page_size)

    requests = []
    for length in lengths:
        for count in new_tokens:
            requests.append(engine.add(prompt(length, length * 100 + count), count))
            if not together:
                engine.drain(check)
    engine.drain(check)
    assert_undisturbed(*requests)


def test_O19_whole_prompt_cached() -> None:
    for length in (16, 32, 48, 33):
        engine = Engine(20, 16)
        for turn, count in enumerate((5, 5, 1)):
            request = engine.add(prompt(length), count)
            engine.drain()
            assert request.cached_tokens == ((length - 1) // 16 * 16 if turn else 0)
            assert_undisturbed(request)


@pytest.mark.parametrize("budget", [24, 1024])
def test_O20_many_equal_prompts_in_one_cold_step(budget: int) -> None:
    engine = Engine(100, 16, budget=budget, max_requests=16)
    requests = [engine.add(prompt(40), 6) for _ in range(8)]
    requests += [engine.add([*prompt(39), 100 + last], 6) for last in range(8)]
    first = engine.step()
    if budget == 1024:
        assert first.counts == [40] + [8] * 15, "all but the first share two blocks, scheduled in this very step"
        assert engine.cache.num_used_blocks == 2 + 16
    else:
        assert first.counts == [24]
        assert engine.step().counts == [16, 8], "the second block is a hit once its last token is scheduled"
    engine.drain()
    assert_undisturbed(*requests)
    assert [request.cached_tokens for request in requests] == [0] + [32] * 15


def test_no_sharing_means_no_hits() -> None:
    engine = Engine(100, 16, sharing=False)
    requests = [engine.add(prompt(40)) for _ in range(3)]
    assert engine.step().counts == [40, 40, 40]
    engine.drain()
    assert_undisturbed(*requests)


def test_O22_eviction_and_reuse_of_prefix_families() -> None:
    generator = random.Random(7)
    engine = Engine(12, 16, max_requests=4)
    requests: list[Request] = []
    while len(requests) < 300 or engine.scheduler.has_work:
        while len(requests) < 300 and len(list(engine.scheduler.live())) < 4:
            tail = generator.choices(range(100), k=generator.randint(1, 20))
            requests.append(engine.add([*prompt(48, generator.randrange(6)), *tail], generator.randint(1, 12)))
        assert engine.step()
    hits = sum(bool(request.cached_tokens) for request in requests)
    assert 60 < hits < 300
    engine.drain()
    assert_undisturbed(*requests)


# Preemption and outgrowing


@pytest.mark.parametrize("num_blocks", [10, 8])
@pytest.mark.parametrize("sharing", [True, False])
def test_O23_preemption_changes_nothing(num_blocks: int, sharing: bool) -> None:
    engine = Engine(num_blocks, 16, margin=0.15, sharing=sharing)
    requests = [engine.add(prompt(40, seed), 60) for seed in range(6)]
    engine.drain()
    assert engine.scheduler.num_preemptions > 0
    assert_undisturbed(*requests)
    assert all(request.num_prompt_tokens == 40 for request in requests)


def test_preemption_takes_the_lowest_priority_then_the_newest() -> None:
    engine = Engine(9, 4)
    low = engine.add(prompt(12, 0), 20, priority=1)
    old, new = engine.add(prompt(12, 1), 20), engine.add(prompt(12, 2), 20)
    engine.step()
    assert engine.scheduler.num_running == 3
    batch = engine.step()
    assert set(batch.requests) == {old, new}
    assert (low.computed, low.status) == (0, RequestStatus.PENDING)
    assert engine.scheduler.num_preemptions == 1
    for _ in range(3):
        engine.step()
    assert engine.scheduler.num_preemptions == 1, "the blocks of the first one last a while"
    assert set(engine.step().requests) == {old}
    engine.drain()
    assert_undisturbed(low, old, new)


def test_a_preempted_request_resumes_from_its_own_blocks() -> None:
    engine = Engine(8, 4)
    old, new = engine.add(prompt(8, 1), 16), engine.add(prompt(12, 2), 8)
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    assert new.computed == 0
    while not engine.cache.holds(new):
        batch = engine.step()
    assert batch.starts[batch.requests.index(new)] > 0
    engine.drain()
    assert_undisturbed(old, new)


def test_O24_a_request_too_long_is_refused_with_the_numbers() -> None:
    engine = Engine(4, 16)
    with pytest.raises(ValueError, match=r"150 tokens.*holds 64.*86 too few; raise num_blocks"):
        engine.add(prompt(150))
    small = engine.add(prompt(5))
    engine.drain()
    assert_undisturbed(small)


def test_O24_a_request_that_outgrows_the_cache_leaves_with_what_it_has() -> None:
    engine = Engine(4, 16)
    large = engine.add(prompt(20), 100)
    small = engine.add(prompt(5, 1), 60)
    engine.drain()
    assert large.finish_reason is FinishReason.LENGTH
    assert large.num_tokens == 65, "the last token is sampled from a full cache"
    assert large.output_ids == reference(large.prompt_ids, 45)
    assert_undisturbed(small)


def test_a_prompt_as_large_as_the_cache_gets_one_token() -> None:
    engine = Engine(4, 16)
    request = engine.add(prompt(64), 10)
    engine.drain()
    assert request.output_ids == reference(request.prompt_ids, 1)


def test_a_request_that_outgrows_the_cache_while_it_is_a_suspect_leaves_with_what_it_has() -> None:
    engine = Engine(5, 2, budget=16)
    request = engine.add(prompt(7), 5)
    for _ in range(4):
        engine.step()
    assert request.num_tokens == 11 > engine.cache.max_tokens
    assert engine.rot(request) == [request] and engine.scheduler.is_suspect(request)
    small = engine.add(prompt(3, 1), 2)
    batch = engine.step()
    assert batch.outgrown == [request] and not batch.requests
    assert not engine.scheduler.has_suspects
    while engine.scheduler.has_work:
        engine.step()
    assert_undisturbed(small)


def test_a_request_that_outgrows_the_cache_while_preempted_does_not_wait_for_ever() -> None:
    """It shared all blocks of an older one, so that together they used the whole cache."""
    engine = Engine(5, 4)
    old = engine.add(prompt(8), 6)
    new = engine.add([*old.token_ids, *prompt(12, 3)], 5)
    engine.step()
    assert engine.cache.num_free_blocks == 0
    batch = engine.step()
    assert batch.requests == [old]
    assert new.num_tokens == engine.cache.max_tokens + 1
    assert engine.scheduler.num_waiting == 1
    assert engine.step().outgrown == [new]
    engine.drain()
    assert_undisturbed(old)


# Cancel


@pytest.mark.parametrize("state", ["waiting", "mid-prefill", "decoding", "preempted", "suspect", "running suspect"])
def test_O25_cancel(state: str) -> None:
    engine = Engine(30 if state != "preempted" else 9, 4, budget=8, max_requests=8)
    others = [engine.add(prompt(9, 1), 14), engine.add(prompt(7, 2), 14)]
    for _ in range(4):
        engine.step()
    request = engine.add(prompt(20 if state != "preempted" else 3, 3), 14)
    if state == "mid-prefill":
        engine.step()
        assert 0 < request.computed < 20
    elif state == "decoding":
        while request.num_output_tokens < 3:
            engine.step()
    elif state == "preempted":
        while engine.scheduler.num_preemptions == 0:
            engine.step()
        assert request.computed == 0
        assert request.num_output_tokens > 0
    elif state == "suspect":
        engine.step()
        engine.crash(engine.schedule())
        assert engine.scheduler.is_suspect(request)
    elif state == "running suspect":
        engine.step()
        engine.crash(engine.schedule())
        while not engine.cache.holds(request):
            engine.step()
        assert engine.scheduler.is_suspect(request)
    assert engine.scheduler.cancel(request.request_id) is request
    assert engine.scheduler.cancel(request.request_id) is None
    assert engine.scheduler.cancel("unknown") is None
    produced = request.num_output_tokens
    engine.drain()
    assert request.num_output_tokens == produced
    assert_undisturbed(*others)
    assert engine.scheduler.cancel(others[0].request_id) is None


def test_an_id_can_be_used_again_after_its_request_has_left() -> None:
    engine = Engine(20, 4, max_requests=1)
    running = engine.add(prompt(4))
    engine.step()
    first = engine.add(prompt(5, 1), request_id="same")
    with pytest.raises(ValueError, match="'same' is live"):
        engine.add(prompt(6, 2), request_id="same")
    engine.scheduler.cancel("same")
    second = engine.add(prompt(6, 2), request_id="same")
    engine.scheduler.finish(first)
    engine.scheduler.fail(first)
    engine.drain()
    assert first.output_ids == []
    assert_undisturbed(running, second)


def test_cancelled_waiting_requests_leave_nothing_behind() -> None:
    engine = Engine(4, 4)
    running = engine.add(prompt(16), 1)
    for seed in range(2000):
        engine.scheduler.cancel(engine.add(prompt(4, seed)).request_id)
    assert engine.scheduler.num_waiting == 1
    assert len(engine.scheduler._queue) < 100
    engine.drain()
    assert_undisturbed(running)


# Starvation


def test_O26_a_long_prompt_is_not_starved_by_short_ones() -> None:
    engine = Engine(64, 16, budget=32, max_requests=8, margin=0.15)
    seeds = iter(range(10**6))

    def refill() -> None:
        while sum(request.num_prompt_tokens == 8 for request in engine.scheduler.live()) < 4:
            engine.add(prompt(8, next(seeds)), 8)

    refill()
    engine.step()
    long = engine.add(prompt(200, -1))
    after: set[Request] = set()
    while long.num_output_tokens == 0:
        refill()
        after |= {request for request in engine.scheduler.live() if request.arrival > long.arrival}
        engine.step()
    assert sum(request.finish_reason is not None for request in after) < 30


def test_O26_a_decoding_stream_is_not_starved_by_long_prompts() -> None:
    engine = Engine(64, 16, budget=32, max_requests=8, margin=0.15)
    stream = engine.add(prompt(8), 100)
    for step in range(100):
        engine.add(prompt(200, step), 2)
        engine.step()
        assert stream.num_output_tokens == step + 1
    engine.drain()
    assert_undisturbed(stream)


def test_scheduling_does_not_look_at_those_who_wait() -> None:
    """Thousands of waiting requests are neither matched nor visited while the first of them does not fit."""
    engine = Engine(8, 4)
    engine.add(prompt(24), 8)
    engine.step()
    waiting = [engine.add(prompt(16, 1 + seed)) for seed in range(3000)]
    for _ in range(5):
        engine.step()
    assert len(engine.cache._entries) == 2, "the running one and the first waiting one"
    assert all(request.computed == 0 for request in waiting)


# Failed steps


def test_a_failed_step_reruns_each_request_alone() -> None:
    engine = Engine(40, 4, budget=16)
    running = [engine.add(prompt(6, seed), 5) for seed in range(3)]
    engine.step()
    engine.step()
    waiting = engine.add(prompt(30, 9), 5)
    failed = engine.schedule()
    assert waiting in failed.requests
    assert engine.crash(failed) == []
    late = engine.add(prompt(3, 10), 5)
    assert engine.scheduler.num_running == 0
    alone: list[Request] = []
    while any(engine.scheduler.is_suspect(request) for request in (*running, waiting)):
        batch = engine.step()
        assert len(batch.requests) == 1
        alone += batch.requests
    assert alone == [*running, waiting, waiting], "in order, and the long one in two chunks"
    assert late.output_ids == []
    engine.drain()
    assert_undisturbed(*running, waiting, late)


def test_suspects_run_in_order_of_priority() -> None:
    engine = Engine(40, 4)
    first = engine.add(prompt(6, 1), 6)
    engine.step()
    urgent = engine.add(prompt(6, 2), 6, priority=-1)
    batch = engine.schedule()
    assert batch.requests == [first, urgent]
    engine.crash(batch)
    assert engine.step().requests == [urgent]
    assert engine.step().requests == [first]
    engine.drain()
    assert_undisturbed(first, urgent)


def test_what_fails_alone_fails_and_the_others_go_on() -> None:
    engine = Engine(40, 4)
    requests = [engine.add(prompt(10, seed), 5) for seed in range(3)]
    engine.step()
    engine.crash(engine.schedule())
    engine.step()
    assert engine.crash(engine.schedule()) == [requests[1]]
    engine.drain()
    assert_undisturbed(requests[0], requests[2])
    again = engine.add(requests[1].prompt_ids, 5)
    engine.drain()
    assert again.cached_tokens == 0
    assert_undisturbed(again)


def test_blocks_of_a_failed_step_are_never_hit() -> None:
    engine = Engine(40, 4)
    first, second = engine.add(prompt(17), 5), engine.add(prompt(17), 5)
    batch = engine.schedule()
    assert batch.starts == [0, 16], "the second shares what the first is about to write"
    engine.crash(batch)
    assert engine.cache.num_cached_blocks == 0
    engine.drain()
    assert_undisturbed(first, second)


def test_a_step_that_fails_after_a_cancel_unhashes_the_cancelled_ones_blocks() -> None:
    engine = Engine(40, 4)
    first, second = engine.add(prompt(17), 5), engine.add(prompt(17, 1), 5)
    batch = engine.schedule()
    engine.scheduler.cancel(first.request_id)
    engine.crash(batch)
    assert engine.cache.num_cached_blocks == 0
    again = engine.add(prompt(17), 5)
    engine.drain()
    assert_undisturbed(second, again)


def test_running_requests_that_were_not_in_the_failed_step_keep_their_blocks() -> None:
    engine = Engine(40, 4, budget=4, max_requests=4, policy="prefill_first")
    first = engine.add(prompt(4, 1), 6)
    engine.step()
    second = engine.add(prompt(12, 2), 6)
    engine.step()
    failing = engine.schedule()
    assert failing.requests == [second]
    engine.crash(failing)
    assert engine.cache.holds(first)
    assert not engine.cache.holds(second)
    assert engine.step().requests == [second]
    engine.drain()
    assert engine.scheduler.num_preemptions == 0
    assert_undisturbed(first, second)


def test_a_suspect_takes_blocks_from_running_requests_when_it_must() -> None:
    """It shared blocks that are no hits any more when its turn comes."""
    engine = Engine(5, 4, budget=2, max_requests=2, policy="prefill_first")
    old = engine.add(prompt(9), 6)
    while not old.num_output_tokens:
        engine.step()
    new = engine.add([*prompt(8), 7, 7, 7, 7], 6)
    assert engine.step().starts == [9, 8]
    failing = engine.schedule()
    assert (failing.requests, failing.starts) == ([new], [9])
    engine.crash(failing)
    engine.cache.reset()
    assert engine.step().requests == [new]
    assert not engine.cache.holds(old)
    assert engine.scheduler.num_preemptions == 1
    engine.drain()
    assert_undisturbed(old, new)


@pytest.mark.parametrize("failing", [0, 1, 2, 3, 4])
def test_a_failure_with_two_steps_in_flight_fails_both(failing: int) -> None:
    engine = Engine(40, 4, overlap=True)
    requests = [engine.add(prompt(6, seed), 6) for seed in range(2)]
    for _ in range(failing):
        engine.step()
    engine.crash(engine.schedule())
    assert all(engine.scheduler.is_suspect(request) for request in requests)
    assert not any(request.unknown for request in requests)
    engine.drain()
    assert_undisturbed(*requests)


def test_fail_drops_the_blocks_of_one_rotten_row() -> None:
    engine = Engine(40, 4)
    rotten, other = engine.add(prompt(17, 1), 9), engine.add(prompt(17, 2), 9)
    engine.step()
    engine.step()
    engine.fail(rotten)
    again = engine.add(rotten.prompt_ids, 9)
    engine.drain()
    assert again.cached_tokens == 0
    assert_undisturbed(other, again)


# Construction


def test_settings_that_cannot_work_are_refused() -> None:
    cache = KVCache(4, 4)

    def make(max_batch_tokens: int = 8, max_requests: int = 4, margin: float = 0.1, policy: str = "fifo") -> None:
        Scheduler(
            cache,
            max_batch_tokens=max_batch_tokens,
            max_requests=max_requests,
            safety_margin=margin,
            policy=policy,
        )

    make()
    with pytest.raises(ValueError, match=r"max_requests is 9.*max_batch_tokens, 8"):
        make(max_requests=9)
    with pytest.raises(ValueError, match="max_requests is 0"):
        make(max_requests=0)
    with pytest.raises(ValueError, match=r"safety_margin is 1\.5"):
        make(margin=1.5)
    with pytest.raises(ValueError, match="unknown scheduling policy 'lifo'; known: fifo"):
        make(policy="lifo")
    with pytest.raises(ValueError, match="no tokens"):
        Engine(4, 4).add([])


def test_a_resumed_request_goes_on_where_it_was() -> None:
    engine = Engine(20, 4)
    begin = prompt(6)
    output = reference(begin, 5)
    resumed = engine.add(begin, 9, output=output)
    engine.drain()
    assert_undisturbed(resumed)
    assert next_token(begin) == resumed.output_ids[0]
