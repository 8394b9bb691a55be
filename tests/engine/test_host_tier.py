"""Blocks that leave the device are kept on the host and come back: slots alone, then behind the cache facade, then
under a scheduler that runs out of blocks. `Pages` executes the copies in the order that is promised.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from engine.cache.groups import LayerGroup
from engine.cache.host_tier import BlockCopies, HostTier
from engine.cache.kv_cache import KVCache
from engine.request import Request
from engine.scheduling.batch import ScheduledBatch
from tests.engine.scripted import Engine, Pages, Requests, reference

PAGE = 4
A, B, C, D = ((0, name) for name in (b"a", b"b", b"c", b"d"))


def stored(tier: HostTier, *keys: tuple[int, bytes]) -> HostTier:
    """With these keys in it and no copy pending, the first one the next to go."""
    for block, key in enumerate(keys, 1):
        tier.store(block, key)
    tier.take()
    return tier


# Slots


def test_a_stored_block_is_copied_once() -> None:
    tier = HostTier(2)
    tier.store(7, A)
    assert A in tier
    copies = tier.take()
    assert copies is not None
    assert [block for block, _ in copies.to_host] == [7]
    assert copies.from_host == []
    assert tier.take() is None
    tier.store(8, A)
    assert tier.take() is None, "what is here needs no copy"
    assert tier.num_kept == 1


def test_the_least_recently_used_slot_is_reused() -> None:
    tier = stored(HostTier(3), A, B, C)
    tier.store(9, A)
    tier.store(1, D)
    assert A in tier, "it was evicted from the device again"
    assert B not in tier
    tier.take()
    tier.pin(C)
    tier.fill(5, C)
    tier.take()
    tier.store(1, B)
    assert C in tier, "it was hit"
    assert A not in tier
    tier.check_integrity()


def test_a_slot_with_a_pending_copy_is_not_reused() -> None:
    tier = stored(HostTier(2), A)
    tier.pin(A)
    tier.fill(5, A)
    tier.store(6, B)
    tier.store(7, C)
    assert A in tier
    assert B in tier
    assert C not in tier, "no slot could be had"
    copies = tier.take()
    assert copies is not None
    assert len(copies.to_host) == len(copies.from_host) == 1
    assert copies.to_host[0][1] != copies.from_host[0][0]
    tier.store(7, C)
    assert C in tier


def test_a_slot_whose_key_is_dropped_while_a_copy_is_pending_waits_for_it() -> None:
    tier = HostTier(1)
    tier.store(1, A)
    tier.drop(A)
    assert A not in tier
    tier.store(2, B)
    assert B not in tier, "the copy to its only slot may still run"
    tier.check_integrity()
    tier.take()
    tier.store(2, B)
    assert B in tier
    tier.drop(B)
    tier.drop(B)
    tier.check_integrity()


def test_what_is_not_written_yet_is_not_copied() -> None:
    tier = HostTier(4)
    tier.expect([1])
    tier.store(1, A)
    assert A not in tier
    tier.take()
    tier.store(1, A)
    assert A in tier, "the step that writes it is on its way"


def test_a_copy_to_a_block_that_is_reused_is_void() -> None:
    tier = stored(HostTier(2), A, B)
    for block, key in ((5, A), (6, B)):
        tier.pin(key)
        tier.fill(block, key)
    tier.reused([4, 5])
    copies = tier.take()
    assert copies is not None
    assert [block for _, block in copies.from_host] == [6]
    assert A in tier


def test_without_slots_nothing_is_kept() -> None:
    tier = HostTier(0)
    tier.store(1, A)
    assert A not in tier
    assert tier.take() is None
    with pytest.raises(ValueError, match="host_slots is -1"):
        HostTier(-1)


@pytest.mark.parametrize("fault", ["key", "free twice", "lost slot", "two copies", "not pinned"])
def test_check_integrity_sees(fault: str) -> None:
    tier = stored(HostTier(4), A, B)
    tier.store(3, C)
    tier.check_integrity()
    if fault == "key":
        del tier._slots[A]
    elif fault == "free twice":
        tier._free.append(tier._free[0])
    elif fault == "lost slot":
        tier._free.pop()
    elif fault == "two copies":
        tier._to_host *= 2
    else:
        tier._from_host[9] = tier._slots[A]
    with pytest.raises(RuntimeError):
        tier.check_integrity()


# Behind the facade


class Steps:
    """A cache with pages; one step after the other, as scheduler and runner take them."""

    def __init__(self, num_blocks: int, host_slots: int, windows: Sequence[int | None] = (None,)) -> None:
        groups = [LayerGroup((layer,), window) for layer, window in enumerate(windows)]
        self.cache = KVCache(num_blocks, PAGE, groups, max_step_tokens=64, host_slots=host_slots)
        self.pages = Pages(PAGE, groups)
        self.new = Requests()

    def schedule(self, *requests: Request) -> ScheduledBatch:
        """A batch in which each gets all of its tokens; those that do not run yet are admitted."""
        batch = ScheduledBatch()
        for request in requests:
            assert self.cache.grow(request) if self.cache.holds(request) else self.cache.admit(request)
            batch.requests.append(request)
            batch.starts.append(request.computed)
            batch.counts.append(request.remaining)
            batch.table_of.append(self.cache.line(request))
            request.computed = request.num_tokens
            batch.hashed += self.cache.mark_scheduled(request, request.computed)
        batch.block_tables = [array.copy() for array in self.cache.block_tables]  # it may run later
        batch.copies = self.cache.take_copies()
        return batch

    def run(self, *requests: Request) -> ScheduledBatch:
        batch = self.schedule(*requests)
        self.pages.run(batch)
        return batch

    def fail(self, batch: ScheduledBatch) -> None:
        self.pages.run(batch, garbage=True)
        self.cache.unhash(batch.hashed)
        if batch.copies is not None:
            self.cache.copies_failed(batch.copies)
        for request in batch.requests:
            if self.cache.holds(request):
                self.preempt(request)

    def preempt(self, request: Request) -> None:
        self.cache.release(request)
        request.computed = 0

    def fill(self, prompt: Iterable[int]) -> None:
        """A request with this prompt comes and goes."""
        request = self.new(list(prompt))
        self.run(request)
        self.cache.free(request)

    def found(self, prompt: Iterable[int]) -> int:
        """Blocks that a request with this prompt would hit."""
        probe = self.new(list(prompt))
        length = self.cache.match(probe)
        self.cache.free(probe)
        return length


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6), (None, None)])
def test_an_evicted_prefix_comes_back_from_the_host(windows: tuple[int | None, ...]) -> None:
    steps = Steps(4 * len(windows), 8 * len(windows), windows)
    steps.fill(range(16))
    steps.fill(range(100, 116))
    assert steps.cache.num_host_blocks == 4 * len(windows)
    again = steps.new(range(16))
    assert steps.cache.match(again) == 3
    batch = steps.run(again)
    assert batch.starts == [12]
    assert batch.copies is not None
    filled = [block for _, block in batch.copies.from_host]
    assert set(filled) <= {block for table in steps.cache.tables(again) for block in table}
    assert len(filled) == sum(3 if window is None else 2 for window in windows)
    steps.cache.check_integrity([again])


def test_a_block_of_one_step_goes_to_the_host_and_is_filled_from_it() -> None:
    """The copies to the host run before those from it, so that one block can do both."""
    steps = Steps(2, 8)
    steps.fill(range(8))
    steps.fill(range(100, 108))
    batch = steps.run(steps.new(range(8)))
    assert batch.copies is not None
    assert {block for block, _ in batch.copies.to_host} & {block for _, block in batch.copies.from_host}


def test_hits_on_the_host_need_room_on_the_device() -> None:
    steps = Steps(4, 8)
    steps.fill(range(12))
    steps.fill(range(100, 116))
    running = steps.new(range(200, 208))
    steps.run(running)
    again = steps.new(range(12))
    assert steps.cache.match(again) == 2
    assert not steps.cache.admit(again), "two are free; two hits and one new block are three"
    steps.cache.free(running)
    assert steps.cache.admit(again)


def test_rows_of_one_step_share_what_it_fills() -> None:
    steps = Steps(8, 8)
    steps.fill(range(16))
    steps.fill(range(100, 132))
    first, second = steps.new(range(16)), steps.new(range(14))
    batch = steps.run(first, second)
    assert batch.starts == [12, 12]
    assert batch.copies is not None
    assert len(batch.copies.from_host) == 3
    assert steps.cache.tables(first)[0][:3] == steps.cache.tables(second)[0][:3]


def test_a_hit_keeps_the_host_from_losing_it_to_what_it_evicts() -> None:
    steps = Steps(4, 4)
    steps.fill(range(16))
    steps.fill(range(100, 116))
    assert steps.cache.num_host_blocks == 4
    again = steps.new(range(16))
    batch = steps.run(again)
    assert batch.starts == [12], "its allocation evicts four more blocks, and the host has room for one"
    assert batch.copies is not None
    assert len(batch.copies.to_host) == 1


def test_a_request_leaves_before_the_step_that_was_to_bring_its_blocks() -> None:
    steps = Steps(4, 8)
    steps.fill(range(16))
    steps.fill(range(100, 116))
    gone = steps.new(range(16))
    assert steps.cache.admit(gone)
    steps.cache.free(gone)
    assert steps.found(range(16)) == 3
    batch = steps.run(steps.new(range(16)))
    assert batch.starts == [12]
    assert batch.copies is not None
    assert len(batch.copies.from_host) == 3, "the copies that the first one asked for"


def test_a_block_that_was_to_be_filled_is_evicted_before_it_was() -> None:
    steps = Steps(4, 8)
    steps.fill(range(16))
    steps.fill(range(100, 116))
    gone = steps.new(range(16))
    assert steps.cache.admit(gone)
    steps.cache.free(gone)
    batch = steps.run(steps.new(range(200, 216)))
    assert batch.copies is not None
    assert batch.copies.from_host == []
    assert len(batch.copies.to_host) == 4, "what was in the blocks before"
    steps.cache.check_integrity([*batch.requests])
    steps.cache.free(batch.requests[0])
    assert steps.run(steps.new(range(16))).starts == [12]


def test_a_block_that_no_step_has_written_yet_is_not_kept() -> None:
    steps = Steps(4, 8)
    gone = steps.new(range(16))
    assert steps.cache.admit(gone)
    gone.computed = 16
    steps.cache.mark_scheduled(gone, 16)
    steps.cache.free(gone)
    steps.fill(range(100, 116))
    assert steps.cache.num_host_blocks == 0
    assert steps.found(range(16)) == 0


def test_after_a_failed_step_its_copies_count_for_nothing() -> None:
    steps = Steps(4, 8)
    steps.fill(range(16))
    steps.fill(range(100, 116))
    again = steps.new(range(16))
    batch = steps.schedule(again)
    steps.fail(batch)
    steps.cache.check_integrity([again])
    assert steps.found(range(100, 116)) == 0, "nobody knows whether it has reached the host"
    assert steps.found(range(16)) == 3, "the host still has it"
    assert steps.cache.num_cached_blocks == 0
    assert steps.run(again).starts == [12]


def test_what_a_failed_step_wrote_is_dropped_wherever_it_has_gone() -> None:
    """The step fails after the next one was scheduled, which has moved its blocks to the host and reused them."""
    steps = Steps(4, 8)
    first = steps.new(range(16))
    failing = steps.schedule(first)
    steps.cache.free(first)
    second = steps.new(range(100, 116))
    after = steps.schedule(second)
    assert steps.cache.num_host_blocks == 4
    for batch in (failing, after):
        steps.fail(batch)
    assert steps.cache.num_host_blocks == steps.cache.num_cached_blocks == 0
    steps.cache.check_integrity([second])


def test_what_a_failed_step_wrote_is_dropped_even_if_its_copy_was_not_taken() -> None:
    steps = Steps(4, 8)
    first = steps.new(range(16))
    failing = steps.schedule(first)
    steps.cache.free(first)
    gone = steps.new(range(100, 116))
    assert steps.cache.admit(gone)
    steps.cache.free(gone)
    steps.fail(failing)
    assert steps.found(range(16)) == 0
    assert steps.cache.num_host_blocks == 0


def test_what_a_failed_step_was_to_fill_is_dropped_even_if_it_was_to_be_copied_back() -> None:
    steps = Steps(4, 2)
    steps.fill(range(9))
    other = steps.new(range(100, 116))
    hashed = steps.run(other).hashed
    steps.cache.free(other)
    steps.cache.unhash(hashed[1:])
    first = steps.new(range(9))
    failing = steps.schedule(first)
    assert failing.copies is not None
    assert (len(failing.copies.to_host), len(failing.copies.from_host)) == (0, 2)
    steps.cache.free(first)
    gone = steps.new(range(200, 216))
    assert steps.cache.admit(gone)
    steps.cache.free(gone)
    assert steps.found(range(9)) == 1, "the host has replaced it, and it is on its way there again"
    steps.fail(failing)
    assert steps.found(range(9)) == 0


def test_a_failed_request_leaves_nothing_on_the_host() -> None:
    steps = Steps(4, 8)
    rotten = steps.new(range(16))
    steps.run(rotten)
    steps.preempt(rotten)
    steps.fill(range(100, 116))
    assert steps.found(range(16)) == 3
    steps.cache.unhash_own(rotten)
    steps.cache.free(rotten)
    assert steps.found(range(16)) == 0
    assert steps.cache.num_host_blocks == 0


def test_reset_forgets_what_is_on_the_host() -> None:
    steps = Steps(4, 8)
    steps.fill(range(16))
    steps.fill(range(100, 116))
    steps.cache.reset()
    assert steps.cache.num_host_blocks == steps.cache.num_cached_blocks == 0
    assert steps.found(range(16)) == steps.found(range(100, 116)) == 0
    steps.cache.check_integrity([])


def test_the_host_needs_sharing() -> None:
    with pytest.raises(ValueError, match="host_slots needs sharing"):
        KVCache(4, PAGE, sharing=False, host_slots=1)
    assert KVCache(4, PAGE, sharing=False).take_copies() is None


def test_check_integrity_sees_a_block_that_waits_for_something_else() -> None:
    steps = Steps(4, 8)
    steps.fill(range(16))
    steps.fill(range(100, 116))
    again = steps.new(range(16))
    assert steps.cache.admit(again)
    steps.cache.check_integrity([again])
    host = steps.cache._host
    first, second, *_ = host._from_host
    host._from_host[first], host._from_host[second] = host._from_host[second], host._from_host[first]
    with pytest.raises(RuntimeError, match="filled from host slot"):
        steps.cache.check_integrity([again])


# Under a scheduler


@pytest.mark.parametrize("windows", [(None,), (9,), (None, 9), (None, 5, 12)])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("host_slots", [0, 3, 200])
def test_preempted_requests_do_not_compute_full_blocks_again(
    windows: tuple[int | None, ...], overlap: bool, host_slots: int
) -> None:
    groups = [LayerGroup((layer,), window) for layer, window in enumerate(windows)]
    engine = Engine(12 * len(windows), PAGE, budget=16, groups=groups, overlap=overlap, host_slots=host_slots)
    requests = [engine.add([10 + i] * (5 + i), 30) for i in range(6)]
    computed = 0

    def count(batch: ScheduledBatch) -> None:
        nonlocal computed
        computed += batch.num_tokens

    engine.drain(count)
    for request in requests:
        assert request.output_ids == reference(request.prompt_ids, 30)
    preemptions = engine.scheduler.num_preemptions
    assert preemptions > 0
    again = computed - sum(request.num_tokens - 1 for request in requests)
    if host_slots == 200:
        assert again <= preemptions * (PAGE + overlap * PAGE), "of each only its last, unfinished block"
    elif host_slots == 0:
        assert again > preemptions * 2 * PAGE, "the test would show nothing"


def test_a_step_fails_while_blocks_come_and_go() -> None:
    engine = Engine(12, PAGE, budget=16, host_slots=20)
    requests = [engine.add([10 + i] * (5 + i), 30) for i in range(6)]
    copies: list[BlockCopies] = []
    for step in range(400):
        if not engine.scheduler.has_work:
            break
        batch = engine.schedule()
        if batch.copies is not None:
            copies.append(batch.copies)
        if batch.copies is not None and step % 3 == 0 and not engine.scheduler.has_suspects:
            engine.crash(batch)
        else:
            engine.complete(batch)
    for request in requests:
        assert request.output_ids == reference(request.prompt_ids, 30)
    assert any(taken.from_host for taken in copies)
