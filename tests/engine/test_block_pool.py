"""The block pool alone: order of reuse, reference counts, hashes; then against a plain list in a state machine."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cache.block_pool import BlockPool


def cached(pool: BlockPool, *hashes: bytes) -> list[int]:
    """Blocks with these hashes, free, the first one the next to be evicted."""
    blocks = pool.allocate(len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.set_hash(block, block_hash)
    pool.release(blocks)
    return blocks


def test_hands_out_every_block_once_and_never_the_null_block() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(5)) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0


def test_allocate_takes_nothing_when_too_few_are_free() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(RuntimeError, match="3 blocks asked for, 2 of 3 are free"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check_integrity()


def test_needs_at_least_one_block() -> None:
    with pytest.raises(ValueError, match="num_blocks is 0"):
        BlockPool(0)


def test_cached_blocks_are_reused_last_and_in_order_of_release() -> None:
    pool = BlockPool(5)
    first, second = cached(pool, b"a", b"b")
    untouched = pool.allocate(3)
    assert not {first, second} & set(untouched)
    pool.release(untouched)
    assert set(pool.allocate(3)) == set(untouched), "blocks without a hash go before cached ones"
    assert pool.allocate(1) == [first]
    assert pool.lookup(b"a") is None
    assert pool.lookup(b"b") == second
    assert pool.allocate(1) == [second]
    assert pool.num_cached == 0


def test_a_free_cached_block_is_revived_from_the_middle_of_the_list() -> None:
    pool = BlockPool(3)
    blocks = cached(pool, b"a", b"b", b"c")
    pool.acquire(blocks[1])
    pool.check_integrity()
    assert pool.num_free == 2
    assert pool.lookup(b"b") == blocks[1]
    assert pool.allocate(2) == [blocks[0], blocks[2]]
    assert pool.lookup(b"b") == blocks[1]


def test_a_shared_block_is_free_after_its_last_release() -> None:
    pool = BlockPool(2)
    (block,) = cached(pool, b"a")
    pool.acquire(block)
    pool.acquire(block)
    pool.release([block])
    assert pool.num_free == 1
    pool.release([block])
    assert pool.num_free == 2
    with pytest.raises(RuntimeError, match="more often"):
        pool.release([block])


def test_the_first_block_of_a_hash_keeps_it() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.set_hash(first, b"a")
    pool.set_hash(second, b"a")
    assert pool.lookup(b"a") == first
    assert pool.hash_of(second) is None
    pool.drop_hash(second)
    assert pool.lookup(b"a") == first


def test_a_free_block_that_loses_its_hash_is_reused_first() -> None:
    pool = BlockPool(3)
    blocks = cached(pool, b"a", b"b", b"c")
    pool.drop_hash(blocks[2])
    assert pool.lookup(b"c") is None
    pool.check_integrity()
    assert pool.allocate(1) == [blocks[2]]


def test_a_free_block_cannot_be_given_a_hash() -> None:
    pool = BlockPool(1)
    with pytest.raises(RuntimeError, match="free"):
        pool.set_hash(1, b"a")


def test_dropping_all_hashes_keeps_references() -> None:
    pool = BlockPool(4)
    cached(pool, b"a", b"b")
    (held,) = pool.allocate(1)
    pool.set_hash(held, b"c")
    pool.drop_all_hashes()
    assert pool.num_cached == 0
    assert pool.references(held) == 1
    pool.check_integrity()


@pytest.mark.parametrize("fault", ["references", "hash", "list", "count"])
def test_check_integrity_sees(fault: str) -> None:
    pool = BlockPool(4)
    cached(pool, b"a", b"b")
    pool.allocate(1)
    pool.check_integrity()
    if fault == "references":
        pool._references[pool.lookup(b"a") or 0] = 1
    elif fault == "hash":
        del pool._by_hash[b"a"]
    elif fault == "list":
        pool._next[pool._previous[0]] = pool._next[0]
    else:
        pool._num_free += 1
    with pytest.raises(RuntimeError):
        pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """The pool against two plain lists: unhashed free blocks, last in first out; cached ones, first in first out."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.evicted: list[tuple[int, bytes]] = []
        self.pool = BlockPool(num_blocks, on_evict=lambda block, block_hash: self.evicted.append((block, block_hash)))
        self.num_revived = 0
        self.blank = list(range(1, num_blocks + 1))
        self.kept: list[int] = []
        self.references = dict.fromkeys(self.blank, 0)
        self.hashes: dict[int, bytes] = {}

    def held(self) -> list[int]:
        return [block for block, count in self.references.items() if count]

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        expected = (self.blank + self.kept)[:count]
        if len(expected) < count:
            with pytest.raises(RuntimeError):
                self.pool.allocate(count)
            return
        lost = [(block, self.hashes[block]) for block in expected if block in self.hashes]
        self.evicted.clear()
        assert self.pool.allocate(count) == expected
        assert self.evicted == lost
        for block in expected:
            self.references[block] = 1
            self.hashes.pop(block, None)
        self.blank = [block for block in self.blank if block not in expected]
        self.kept = [block for block in self.kept if block not in expected]

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.held()), unique=True))
        self.pool.release(blocks)
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0 and block in self.hashes:
                self.kept.append(block)
            elif self.references[block] == 0:
                self.blank.insert(0, block)

    @precondition(lambda self: self.hashes)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.hashes)))
        self.pool.acquire(block)
        self.num_revived += self.references[block] == 0
        self.references[block] += 1
        self.kept = [other for other in self.kept if other != block]

    @precondition(lambda self: self.held())
    @rule(data=st.data(), block_hash=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def set_hash(self, data: st.DataObject, block_hash: bytes) -> None:
        block = data.draw(st.sampled_from(self.held()))
        is_first = block_hash not in self.hashes.values()
        assert self.pool.set_hash(block, block_hash) == is_first
        if is_first:
            self.hashes[block] = block_hash

    @rule(data=st.data())
    def drop_hash(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.references)))
        self.pool.drop_hash(block)
        if self.hashes.pop(block, None) is not None and block in self.kept:
            self.kept.remove(block)
            self.blank.insert(0, block)

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_revived == self.num_revived
        assert self.pool.num_free == len(self.blank) + len(self.kept)
        assert {block: self.pool.references(block) for block in self.references} == self.references
        for block_hash in (b"a", b"b", b"c", b"d"):
            block = self.pool.lookup(block_hash)
            assert (block is None) == (block_hash not in self.hashes.values())
            assert block is None or self.hashes[block] == block_hash


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
