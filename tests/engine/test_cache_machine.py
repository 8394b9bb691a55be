"""The KV cache under random requests, without a scheduler, against what a memory of pages really holds.

Layer groups, a host tier, steps in flight and failing steps included. Every hit is compared with a search through all
keys on device and host, every admission with a plain count of blocks, every findable block with what its key stands
for, and every scheduled row checks that what it sees are its own tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cache.groups import LayerGroup
from engine.cache.host_tier import BlockCopies
from engine.cache.kv_cache import KVCache
from engine.cache.prefix import BlockKey, block_hash, root_hash
from engine.request import Request
from engine.scheduling.batch import ScheduledBatch
from tests.engine.scripted import Pages, Requests, next_token

FAMILIES = [[0] * 30, [0, 1] * 15, [1, 2, 0, 0, 1] * 6]
LAYOUTS: list[list[int | None]] = [
    [None], [None], [None], [None, None], [1], [3], [5, 5], [8], [None, 3], [None, 6], [4, None, 9], [9, 4], [None, 1],
]  # fmt: skip

PROMPTS = st.builds(
    lambda family, length, tail: [*family[:length], *tail],
    st.sampled_from(FAMILIES),
    st.integers(1, 16),
    st.lists(st.integers(0, 2), max_size=3),
)
ARRIVALS = st.lists(
    st.tuples(PROMPTS, st.integers(1, 8), st.sampled_from([b"", b"", b"", b"", b"", b"salt"])), min_size=2, max_size=5
)


class Flight(NamedTuple):
    batch: ScheduledBatch
    broken: bool


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 16), page_size=st.sampled_from([1, 2, 2, 4]), windows=st.sampled_from(LAYOUTS),
        sharing=st.integers(0, 9), max_step_tokens=st.sampled_from([100, 8, 3, 1]),
        host_slots=st.sampled_from([0, 2, 6, 12, 30]), overlap=st.booleans(), arrivals=ARRIVALS,
    )  # fmt: skip
    def start(
        self, num_blocks: int, page_size: int, windows: list[int | None], sharing: int, max_step_tokens: int,
        host_slots: int, overlap: bool, arrivals: list[tuple[list[int], int, bytes]],
    ) -> None:  # fmt: skip
        groups = [LayerGroup((layer,), window) for layer, window in enumerate(windows)]
        num_blocks *= len(groups)
        self.windows = windows
        self.max_step_tokens = max_step_tokens
        self.cache = KVCache(
            num_blocks, page_size, groups, sharing > 0, max_step_tokens=max_step_tokens,
            host_slots=host_slots if sharing else 0,
        )  # fmt: skip
        self.pages = Pages(page_size, groups)
        self.new = Requests()
        self.overlap = overlap
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.flights: list[Flight] = []
        self.chains: dict[Request, list[bytes]] = {}
        self.contents: dict[BlockKey, list[tuple[int, int]]] = {}
        self.arrive(arrivals)

    @rule(arrivals=ARRIVALS)
    def arrive(self, arrivals: list[tuple[list[int], int, bytes]]) -> None:
        for prompt, max_new_tokens, salt in arrivals[: max(0, 6 - len(self.waiting))]:
            self.waiting.append(self.new(prompt[: self.cache.max_tokens], max_new_tokens, salt=salt))

    # A step

    @rule(
        most=st.sampled_from([3, 2, 1, 0]),
        reserve=st.sampled_from([0, 0, 0, 1, 3]),
        counts=st.lists(st.sampled_from([30, 30, 30, 5, 1]), min_size=2, max_size=4),
        steps=st.integers(1, 6),
        in_order=st.booleans(),
        together=st.booleans(),
    )
    def work(
        self, most: int, reserve: int, counts: list[int], steps: int, in_order: bool, together: bool
    ) -> None:  # fmt: skip
        for _ in range(steps):
            self.launch(self.schedule(most, reserve, counts, in_order, together), broken=False)

    @rule(
        most=st.sampled_from([2, 1, 0]),
        counts=st.lists(st.sampled_from([30, 30, 5, 1]), min_size=2, max_size=4),
        leaves=st.sampled_from([0, 0, 1, 2]),
    )
    def crash(self, most: int, counts: list[int], leaves: int) -> None:
        """The step fails, and with it the one launched after it. Requests may leave before that is known."""
        self.launch(self.schedule(most, 0, counts), broken=True)
        for index in range(leaves):
            if self.running:
                self.leave(index, ["end", "preempt"][index])

    @rule(most=st.integers(1, 3), how=st.sampled_from(["end", "preempt"]))
    def admit_and_leave(self, most: int, how: str) -> None:
        """Requests leave before the step that they were admitted for, and their copies with another one."""
        for request in list(self.admit(most, 0)):
            self.leave(self.running.index(request), how)

    def schedule(
        self, most: int, reserve: int, counts: list[int], in_order: bool = False, together: bool = False
    ) -> ScheduledBatch:  # fmt: skip
        """As the scheduler does it: rows of running requests, then each that is admitted gets one at once."""
        batch = ScheduledBatch()
        running = list(self.running)
        all_fit = self.cache.grow_all(running) if together else None
        for request in running:
            if request in self.running:
                self.grow(request)
        assert all_fit in (None, self.running == running)
        self.running[:2] = self.running[:2][::-1]  # so that not always the same ones get rows
        for request, count in zip(self.running, counts, strict=False):
            self.add_row(batch, request, count)
        for request in self.admit(most, reserve, in_order):
            self.add_row(batch, request, counts[-1])
        if batch:
            batch.block_tables = self.cache.block_tables
            batch.copies = self.cache.take_copies()
        return batch

    def grow(self, request: Request) -> None:
        cache, c = self.cache, request.computed
        if request.num_tokens > cache.max_tokens:
            self.running.remove(request)
            cache.free(request)
            return
        line, before = cache.line(request), cache.tables(request)
        mine = set().union(*before) - {0}
        seen = [self.held(window, c, request.num_tokens) for window in self.windows]
        keep = {table[i] for table, held in zip(before, seen, strict=True) for i in held if i < len(table)}
        lost = [block for block in mine - keep if not any(block in self.blocks(o) for o in self.others(request))]
        missing = sum(i >= len(table) for table, held in zip(before, seen, strict=True) for i in held)
        fits = missing <= cache.num_free_blocks + len(lost)
        assert cache.grow(request) == fits
        assert cache.line(request) == line
        for table, old, held in zip(cache.tables(request), before, seen, strict=True):
            assert [i for i, block in enumerate(table) if block] == [i for i in held if fits or i < len(old)]
            assert all(table[i] == old[i] for i in held if i < len(old))
        if not fits:
            self.preempt(request)

    def admit(self, most: int, reserve: int, in_order: bool = False) -> Iterator[Request]:
        """Tries everyone who waits, or all up to the first who is refused, again and again while the cache changes."""
        cache, size = self.cache, self.cache.page_size
        for request in list(self.waiting):
            if most == 0:
                return
            length, device = self.expected_hits(request)
            in_use = {block for other in self.running for block in self.blocks(other)}
            later = [
                [
                    (group, i)
                    for group, window in enumerate(self.windows)
                    for i in self.held(window, c, request.num_tokens)
                ]
                for c in range(length * size, request.num_tokens)
            ]
            lasting = [key for key in later[0] if self.windows[key[0]] is None or set(later[0]) >= set().union(*later)]
            shared = sum(key[1] < length and device.get(key) in in_use for key in lasting)
            fits = max(map(len, later)) - shared + reserve <= cache.num_free_blocks
            assert cache.admit(request, reserve) == fits
            if not fits and in_order:
                return
            if not fits:
                continue
            assert request.computed == length * size < request.num_tokens
            for group, table in enumerate(cache.tables(request)):
                held = self.held(self.windows[group], request.computed, request.num_tokens)
                assert [i for i, block in enumerate(table) if block] == list(held)
                for i in held:
                    if i < length and (group, i) in device:
                        assert table[i] == device[group, i]
                    else:
                        assert table[i] not in in_use
            self.waiting.remove(request)
            self.running.append(request)
            most -= 1
            yield request

    def add_row(self, batch: ScheduledBatch, request: Request, count: int) -> None:
        start = request.computed
        end = min(start + min(count, self.max_step_tokens), request.num_tokens)
        if end == start or request.unknown > 1:
            return
        request.computed = end
        if end == request.num_tokens:
            batch.sampled.append(len(batch.requests))
            request.unknown += 1
        batch.requests.append(request)
        batch.starts.append(start)
        batch.counts.append(end - start)
        batch.table_of.append(self.cache.line(request))
        tables, size, chain = self.cache.tables(request), self.cache.page_size, self.chain(request)
        batch.hashed += self.cache.mark_scheduled(request, end)
        for index in range(start // size, min(end // size, len(chain)) if self.cache.sharing else 0):
            for group, table in enumerate(tables):
                assert table[index] == 0 or self.cache._pool.lookup((group, chain[index])) is not None

    def launch(self, batch: ScheduledBatch, broken: bool) -> None:
        if batch:
            broken = broken or any(flight.broken for flight in self.flights)
            self.pages.run(batch, garbage=broken)
            for row in batch.sampled:
                request = batch.requests[row]
                self.pages.sampled.setdefault(request, []).append(next_token(self.pages.token_ids(request)))
            self.flights.append(Flight(batch, broken))
        while len(self.flights) > (self.overlap and bool(batch)):
            self.land()

    def land(self) -> None:
        batch, broken = self.flights[0]
        if not broken:
            del self.flights[0]
            for row in batch.sampled:
                request = batch.requests[row]
                token = self.pages.sampled[request].pop(0)
                if request in self.running or request in self.waiting:
                    request.token_ids.append(token)
                    request.unknown -= 1
                if request in self.running and request.num_output_tokens >= request.params.max_new_tokens:
                    self.running.remove(request)
                    self.cache.free(request)
            return
        for failed, _ in self.flights:
            self.cache.unhash(failed.hashed)
            if failed.copies is not None:
                self.cache.copies_failed(failed.copies)
            for request in failed.requests:
                request.unknown = 0
                if request in self.running:
                    self.preempt(request)
        self.flights.clear()
        self.pages.sampled.clear()

    # What else happens

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 9), how=st.sampled_from(["preempt", "preempt", "end", "end", "rot"]))
    def leave(self, index: int, how: str) -> None:
        request = self.running[index % len(self.running)]
        if how == "preempt":
            self.preempt(request)
            return
        self.running.remove(request)
        if how == "rot":
            self.cache.unhash_own(request)
            self.pages.spoil(request, {block for other in self.running for block in self.blocks(other)})
        self.cache.free(request)

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.waiting.append(request)
        self.cache.release(request)
        request.computed = 0

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 9))
    def cancel_waiting(self, index: int) -> None:
        self.cache.free(self.waiting.pop(index % len(self.waiting)))

    @rule(chance=st.integers(0, 9))
    def reset(self, chance: int) -> None:
        if chance == 0:
            self.cache.reset()
            assert self.cache.num_cached_blocks == self.cache.num_host_blocks == 0

    # What must hold

    @invariant()
    def whole(self) -> None:
        self.cache.check_integrity(self.running + self.waiting)
        for request in self.waiting:
            assert self.cache.match(request) == self.expected_hits(request)[0]

    @invariant()
    def what_can_be_found_is_what_its_key_says(self) -> None:
        if any(flight.broken for flight in self.flights):
            return
        pages = copy.copy(self.pages)
        pages.device, pages.host = dict(pages.device), dict(pages.host)
        host = self.cache._host
        pages.copy(BlockCopies(list(host._to_host), host.pending_fills()))
        found = [(key, pages.device.get(block, {})) for key, block in self.cache._pool._by_hash.items()]
        found += [(key, pages.host.get(slot, {})) for key, slot in host._slots.items()]
        for key, page in found:
            assert [page[slot][0] for slot in range(self.cache.page_size)] == self.contents[key]
        assert self.cache.sharing or not found

    def others(self, request: Request) -> list[Request]:
        return [other for other in self.running if other is not request]

    def blocks(self, request: Request) -> set[int]:
        return set().union(*self.cache.tables(request)) - {0}

    def held(self, window: int | None, computed: int, num_tokens: int) -> list[int]:
        """Indices of the blocks that a group must hold, position by position."""
        size = self.cache.page_size
        if window is None:
            positions = range(num_tokens)
        else:
            positions = range(max(0, computed - window + 1), min(num_tokens, computed + self.max_step_tokens))
        return sorted({position // size for position in positions})

    def expected_hits(self, request: Request) -> tuple[int, dict[tuple[int, int], int]]:
        """The longest hit by trying every length, and (group, index) -> block of all that the device has."""
        size, device, cached = self.cache.page_size, {}, set()
        for index, own_hash in enumerate(self.chain(request)):
            for group in range(len(self.windows)):
                block = self.cache._pool.lookup((group, own_hash))
                if block is not None:
                    device[group, index] = block
                if block is not None or (group, own_hash) in self.cache._host:
                    cached.add((group, index))

        def works(length: int) -> bool:
            """The query at the first position that is not hit finds every key that it sees."""
            return all(
                (group, position // size) in cached
                for group, window in enumerate(self.windows)
                for position in range(0 if window is None else max(0, length * size - window + 1), length * size)
            )

        most = (request.num_tokens - 1) // size if self.cache.sharing else 0
        return max(n for n in range(most + 1) if works(n)), device

    def chain(self, request: Request) -> list[bytes]:
        """The hashes of the request's blocks; notes what a block of each holds."""
        size, path, chain = self.cache.page_size, self.pages.path(request), self.chains.setdefault(request, [])
        for start in range(len(chain) * size, len(request.token_ids) - size + 1, size):
            parent = chain[-1] if chain else root_hash(request.salt)
            chain.append(block_hash(parent, request.token_ids[start : start + size]))
            for group in range(len(self.windows)):
                self.contents[group, chain[-1]] = [(group, prefix) for prefix in path[start : start + size]]
        return chain

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for request in self.running + self.waiting:
            self.cache.free(request)
        self.cache.take_copies()
        self.cache.check_integrity([])
        assert self.cache.num_free_blocks == self.cache.num_blocks


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_the_pages_notice_a_foreign_block() -> None:
    """The check that the machines rely on can fail."""
    pages, new = Pages(2), Requests()
    first, second = new([1, 2, 3]), new([1, 5, 3])
    pages.write(first, [[1, 2]], 0, 3)
    pages.attend(first, [[1, 2]], 2, 3)
    with pytest.raises(AssertionError, match="instead of"):
        pages.attend(second, [[1, 2]], 2, 3)
    with pytest.raises(AssertionError):
        pages.attend(first, [[1, 3]], 2, 3)
    pages.copy(BlockCopies(to_host=[(1, 0)], from_host=[(0, 5)]))
    pages.attend(first, [[5, 2]], 2, 3)
    pages.copy(BlockCopies(to_host=[(2, 0)], from_host=[(0, 5)]))
    with pytest.raises(AssertionError, match="instead of"):
        pages.attend(first, [[5, 2]], 2, 3)


def test_the_pages_notice_what_a_window_sees_and_whose_group_it_is() -> None:
    pages, new = Pages(2, [LayerGroup((0,)), LayerGroup((1,), 2)]), Requests()
    request = new([1, 2, 3])
    pages.write(request, [[1, 2], [3, 4]], 0, 3)
    pages.attend(request, [[1, 2], [3, 4]], 2, 3)
    with pytest.raises(AssertionError, match="group 1 reads"):
        pages.attend(request, [[1, 2], [0, 4]], 2, 3)
    with pytest.raises(AssertionError, match="group 0 reads"):
        pages.attend(request, [[3, 2], [3, 4]], 2, 3)
    with pytest.raises(AssertionError, match="null block"):
        pages.write(request, [[1, 2], [0, 4]], 1, 3)
    pages.attend(request, [[1, 2], [0, 4]], 3, 3)
