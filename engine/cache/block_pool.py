"""The blocks of the KV cache as numbers: which are free, who counts on which, which hold a known prefix.

Owned by `KVCache`, which alone calls it. Knows nothing of requests, tokens or tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.cache.prefix import BlockKey

NULL_BLOCK = 0


class BlockPool:
    """Reference-counted blocks 1..num_blocks with one free list; block 0 is the null block, never handed out.

    The free list is doubly linked through two arrays, with the null block as its two ends, so that a block leaves
    from the middle in O(1). A cached block (one with a hash) that nobody references waits at the list's tail and
    keeps its hash until `allocate` takes it from the head; a block without a hash is worth nothing to a later
    request and is put at the head. A hash here is any key that names the content, the layer group included.

    Args:
        on_evict: called with each cached block that `allocate` takes, and the hash it has just lost.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int, BlockKey], None] | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, at least 1 is needed")
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._next = [*range(1, num_blocks + 1), NULL_BLOCK]
        self._previous = [num_blocks, *range(num_blocks)]
        self._references = [0] * (num_blocks + 1)
        self._hashes: list[BlockKey | None] = [None] * (num_blocks + 1)
        self._by_hash: dict[BlockKey, int] = {}
        self._num_free = num_blocks
        self._num_revived = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody references, cached ones included."""
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Blocks with a hash, referenced or not."""
        return len(self._by_hash)

    @property
    def num_revived(self) -> int:
        """How often `acquire` has taken a free block since the start."""
        return self._num_revived

    def references(self, block: int) -> int:
        return self._references[block]

    def hash_of(self, block: int) -> BlockKey | None:
        return self._hashes[block]

    def lookup(self, block_hash: BlockKey) -> int | None:
        """The block that holds the prefix of this hash, referenced or free."""
        return self._by_hash.get(block_hash)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks from the head of the free list; cached ones among them lose their hash.

        Raises:
            RuntimeError: fewer than `count` are free. Nothing is taken then.
        """
        if count > self._num_free:
            raise RuntimeError(f"{count} blocks asked for, {self._num_free} of {self.num_blocks} are free")
        after = self._next[NULL_BLOCK]
        blocks = []
        for _ in range(count):
            blocks.append(after)
            self._references[after] = 1
            after = self._next[after]
        self._next[NULL_BLOCK], self._previous[after] = after, NULL_BLOCK
        self._num_free -= count
        for block in blocks:
            block_hash = self._hashes[block]
            if block_hash is not None:
                self._forget_hash(block)
                if self._on_evict is not None:
                    self._on_evict(block, block_hash)
        return blocks

    def acquire(self, block: int) -> None:
        """One more reference to a cached block; a free one is taken off the free list with its hash."""
        if self._references[block] == 0:
            self._unlink(block)
            self._num_revived += 1
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each; of those that become free the first given is the first evicted.

        Raises:
            RuntimeError: a block that nobody references.
        """
        for block in blocks:
            if self._references[block] <= 0:
                raise RuntimeError(f"block {block} is released more often than it was taken")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._link(block)

    def set_hash(self, block: int, block_hash: BlockKey) -> bool:
        """Makes a referenced block findable; False if another is: the first block of a hash keeps it."""
        if self._references[block] <= 0:
            raise RuntimeError(f"block {block} is free and cannot be given a hash")
        if block_hash in self._by_hash:
            return False
        if self._hashes[block] is not None:
            self._forget_hash(block)
        self._hashes[block] = block_hash
        self._by_hash[block_hash] = block
        return True

    def drop_hash(self, block: int) -> None:
        """Makes a block unfindable, whoever references it; nothing happens to one without a hash."""
        if self._hashes[block] is None:
            return
        self._forget_hash(block)
        if self._references[block] == 0:
            self._unlink(block)
            self._link(block)

    def drop_all_hashes(self) -> None:
        for block in list(self._by_hash.values()):
            self.drop_hash(block)

    def check_integrity(self) -> None:
        """Walks everything, O(num_blocks). Raises RuntimeError naming what is broken; for tests and idle moments."""
        free: list[int] = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK and len(free) <= self.num_blocks:
            if self._previous[self._next[block]] != block:
                raise RuntimeError(f"free list: block {self._next[block]} does not point back to {block}")
            free.append(block)
            block = self._next[block]
        if len(free) != self._num_free or len(set(free)) != len(free):
            raise RuntimeError(f"free list holds {len(free)} blocks, {self._num_free} were counted")
        unreferenced = {b for b in range(1, self.num_blocks + 1) if self._references[b] == 0}
        if set(free) != unreferenced:
            raise RuntimeError(f"blocks both free and referenced, or neither: {sorted(set(free) ^ unreferenced)}")
        if min(self._references) < 0 or self._references[NULL_BLOCK] != 0:
            raise RuntimeError("a reference count is negative, or the null block is referenced")
        hashed = {h: b for b, h in enumerate(self._hashes) if h is not None}
        if hashed != self._by_hash or self._hashes[NULL_BLOCK] is not None:
            raise RuntimeError("the hash table and the blocks' hashes differ")

    def _link(self, block: int) -> None:
        """To the tail with a hash, to the head without one."""
        after = NULL_BLOCK if self._hashes[block] is None else self._previous[NULL_BLOCK]
        before = self._next[after]
        self._previous[block], self._next[block] = after, before
        self._next[after] = self._previous[before] = block
        self._num_free += 1

    def _unlink(self, block: int) -> None:
        after, before = self._previous[block], self._next[block]
        self._next[after], self._previous[before] = before, after
        self._num_free -= 1

    def _forget_hash(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hashes[block] = None
