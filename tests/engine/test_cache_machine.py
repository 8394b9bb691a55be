"""The KV cache under random requests, without a scheduler, against what a memory of pages really holds.

Every hit is compared with a search through all hashed blocks, every admission with a plain count of blocks, and every
scheduled row checks that its context holds its own tokens.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cache.kv_cache import KVCache
from engine.request import Request
from tests.engine.scripted import Pages, Requests

FAMILIES = [[0] * 30, [0, 1] * 15, [1, 2, 0, 0, 1] * 6]


PROMPTS = st.builds(
    lambda family, length, tail: [*family[:length], *tail],
    st.sampled_from(FAMILIES),
    st.integers(1, 16),
    st.lists(st.integers(0, 2), max_size=3),
)
ARRIVALS = st.lists(st.tuples(PROMPTS, st.sampled_from([b"", b"", b"", b"salt"])), min_size=2, max_size=5)


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(6, 20), page_size=st.sampled_from([1, 2, 2, 4]), sharing=st.integers(0, 9),
        arrivals=ARRIVALS,
    )  # fmt: skip
    def start(self, num_blocks: int, page_size: int, sharing: int, arrivals: list[tuple[list[int], bytes]]) -> None:
        self.cache = KVCache(num_blocks, page_size, sharing=sharing > 0)
        self.pages = Pages(page_size)
        self.new = Requests()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.last_row: tuple[Request, list[int], int, int] | None = None
        self.arrive(arrivals)

    @rule(arrivals=ARRIVALS)
    def arrive(self, arrivals: list[tuple[list[int], bytes]]) -> None:
        self.waiting += [self.new(prompt, salt=salt) for prompt, salt in arrivals]

    @rule(
        most=st.sampled_from([3, 2, 1, 0]),
        reserve=st.sampled_from([0, 0, 0, 1, 3]),
        counts=st.lists(st.sampled_from([30, 30, 30, 5, 1]), min_size=2, max_size=4),
        tokens=st.lists(st.integers(0, 1), max_size=5),
    )
    def work(self, most: int, reserve: int, counts: list[int], tokens: list[int]) -> None:
        self.admit(most, reserve)
        self.compute(counts)
        self.decode(tokens)

    def admit(self, most: int, reserve: int) -> None:
        """Tries everyone who waits, so that many are refused again and again while the cache changes."""
        for request in list(self.waiting):
            if most == 0:
                return
            hits = self.expected_hits(request)
            total = -(-request.num_tokens // self.cache.page_size)
            in_use = {block for other in self.running for block in self.cache.table(other)}
            fits = len(in_use | set(hits)) + total - len(hits) + reserve <= self.cache.num_blocks
            assert self.cache.admit(request, reserve) == fits
            if fits:
                assert self.cache.table(request)[: len(hits)] == hits
                assert not in_use & set(self.cache.table(request)[len(hits) :])
                assert request.computed == len(hits) * self.cache.page_size < request.num_tokens
                self.waiting.remove(request)
                self.running.append(request)
                most -= 1

    def compute(self, counts: list[int]) -> None:
        """One row for each of the first running requests."""
        for request, count in zip(self.running, counts, strict=False):
            start = request.computed
            end = min(start + count, request.num_tokens)
            request.computed = end
            table = self.cache.table(request)
            self.cache.mark_scheduled(request, start, end)
            self.pages.write(request, table, start, end)
            self.pages.attend(request, table, end)
            self.last_row = (request, table, start, end)

    def decode(self, tokens: list[int]) -> None:
        for request in list(self.running):
            for token in tokens:
                request.token_ids.append(token)
                missing = self.cache.blocks_for(request.num_tokens) - len(self.cache.table(request))
                fits = missing <= self.cache.num_free_blocks
                assert self.cache.grow(request) == fits
                if not fits:
                    self.preempt(request)
                    break

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 9), how=st.sampled_from(["preempt", "end", "end", "fail"]))
    def leave(self, index: int, how: str) -> None:
        request = self.running[index % len(self.running)]
        if how == "preempt":
            self.preempt(request)
            return
        self.running.remove(request)
        if how == "fail":
            self.cache.unhash_own(request)
            self.pages.spoil(request, {block for other in self.running for block in self.cache.table(other)})
        self.cache.free(request)

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.waiting.append(request)
        self.cache.release(request)
        request.computed = 0

    @precondition(lambda self: self.last_row is not None)
    @rule()
    def fail_last_row(self) -> None:
        """The latest row turns out to have failed, perhaps after its request has left."""
        assert self.last_row is not None
        request, table, start, end = self.last_row
        self.last_row = None
        size = self.cache.page_size
        if any(self.pages.slots[table[i // size], i % size][1] is not request for i in range(start, end)):
            return  # reused since
        self.cache.unhash(table, start, end)
        self.pages.write(request, table, start, end, garbage=True)
        written = set(table[start // size : -(-end // size)])
        for other in [other for other in self.running if written & set(self.cache.table(other))]:
            self.preempt(other)  # the request itself, and those of the same step that share with it

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 9))
    def cancel_waiting(self, index: int) -> None:
        self.cache.free(self.waiting.pop(index % len(self.waiting)))

    @rule(chance=st.integers(0, 9))
    def reset(self, chance: int) -> None:
        if chance == 0:
            self.cache.reset()
            assert self.cache.num_cached_blocks == 0

    @invariant()
    def whole(self) -> None:
        self.cache.check_integrity(self.running + self.waiting)
        for request in self.waiting:
            assert self.cache.match(request) == len(self.expected_hits(request))

    def expected_hits(self, request: Request) -> list[int]:
        """By content: the blocks whose last slot holds the request's prefix and which are hashed."""
        size = self.cache.page_size
        holders = {
            self.pages.slots[block, size - 1][0]: block
            for block in range(1, self.cache.num_blocks + 1)
            if self.cache._pool.hash_of(block) is not None
        }
        hits: list[int] = []
        path = self.pages.path(request)
        for end in range(size, request.num_tokens, size):
            if path[end - 1] not in holders:
                break
            hits.append(holders[path[end - 1]])
        return hits

    def teardown(self) -> None:
        for request in self.running + self.waiting:
            self.cache.free(request)
        self.cache.check_integrity([])
        assert self.cache.num_free_blocks == self.cache.num_blocks


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_the_pages_notice_a_foreign_block() -> None:
    """The check that the machines rely on can fail."""
    pages, new = Pages(2), Requests()
    first, second = new([1, 2, 3]), new([1, 5, 3])
    pages.write(first, [1, 2], 0, 3)
    pages.attend(first, [1, 2], 3)
    with pytest.raises(AssertionError, match="instead of"):
        pages.attend(second, [1, 2], 3)
    with pytest.raises(AssertionError):
        pages.attend(first, [1, 3], 3)
