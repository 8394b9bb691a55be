"""The KV cache as the scheduler sees it: block tables of running requests and prefix hits for waiting ones.

The only way to blocks. The scheduler calls it; the runner reads the block tables through the `ScheduledBatch`.
Knows requests and token ids, but no tensors, budgets or order of requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.cache.block_pool import NULL_BLOCK, BlockPool
from engine.cache.host_tier import BlockCopies
from engine.cache.prefix import block_hash, root_hash
from engine.request import Request


@dataclass(slots=True)
class _Entry:
    """What the cache remembers of one live request.

    Attributes:
        table: its blocks; None while it holds none. A list given out is never cleared, only replaced.
        hashes: of its leading full blocks, as many as were asked for so far.
        hits: blocks found at the latest admission.
        own_start, own_end: blocks [own_start, own_end) were written by the request itself, now or before it was
            preempted.
        refused: (blocks ever freed, reserve, hits) when it last did not fit.
    """

    root: bytes
    table: list[int] | None = None
    hashes: list[bytes] = field(default_factory=list)
    own_start: int | None = None
    own_end: int = 0
    hashed_end: int = 0
    refused: tuple[int, int, int] | None = None


class KVCache:
    """Blocks of `page_size` tokens for requests, with sharing of equal prefixes unless `sharing` is False.

    A block is hashed when the step that fills it is scheduled: rows of the same step may share it, since all K/V of a
    step is written before any row attends. A step that fails must `unhash` what it was to fill.
    """

    def __init__(self, num_blocks: int, page_size: int, sharing: bool = True) -> None:
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}, at least 1 is needed")
        self.page_size = page_size
        self.sharing = sharing
        self._pool = BlockPool(num_blocks)
        self._entries: dict[str, _Entry] = {}

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks of no running request; those that only keep a prefix for later count as free."""
        return self._pool.num_free

    @property
    def num_used_blocks(self) -> int:
        return self._pool.num_blocks - self._pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that a later request may hit, used or free."""
        return self._pool.num_cached

    @property
    def max_tokens(self) -> int:
        """The longest request that fits when it has the cache to itself, in tokens."""
        return self._pool.num_blocks * self.page_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def holds(self, request: Request) -> bool:
        """Whether the request has been admitted and not released since."""
        entry = self._entries.get(request.request_id)
        return entry is not None and entry.table is not None

    def table(self, request: Request) -> list[int]:
        """The live block table of a running request: it only grows until the request is released.

        Raises:
            KeyError: the request holds no blocks.
        """
        entry = self._entries.get(request.request_id)
        if entry is None or entry.table is None:
            raise KeyError(f"request {request.request_id!r} holds no blocks")
        return entry.table

    def tables(self, request: Request) -> list[list[int]]:
        """The live block tables of a running request, one a layer group. Raises as `table`."""
        return [self.table(request)]

    def match(self, request: Request) -> int:
        """Length of the longest cached prefix in blocks; at least one known token is left over.

        Takes no block. Hashes are computed once and remembered until `free`.
        """
        return len(self._find_hits(request, self._entry(request)))

    def admit(self, request: Request, reserve: int = 0) -> bool:
        """Takes the hit blocks and new ones for all other known tokens, and sets `computed` to the tokens hit.

        Args:
            reserve: blocks that must stay free afterwards.

        Returns:
            False when it does not fit; then nothing is taken. Asking again costs O(1) until room was made or the
            prefix got longer.
        """
        entry = self._entry(request)
        if entry.table is not None:
            raise RuntimeError(f"request {request.request_id!r} already holds blocks")
        if self._is_still_refused(request, entry, reserve):
            return False
        hits = self._find_hits(request, entry)
        total = self.blocks_for(request.num_tokens)
        free_hits = sum(self._pool.references(block) == 0 for block in hits)
        if total - len(hits) + free_hits + reserve > self._pool.num_free:
            entry.refused = (self._pool.num_freed, reserve, len(hits))
            return False
        for block in hits:
            self._pool.acquire(block)
        entry.table = hits + self._pool.allocate(total - len(hits))
        entry.own_start = len(hits) if entry.own_start is None else min(entry.own_start, len(hits))
        request.computed = len(hits) * self.page_size
        entry.hashed_end = len(hits)
        if request.cached_tokens is None:
            request.cached_tokens = min(request.computed, request.num_prompt_tokens)
        return True

    def grow(self, request: Request) -> bool:
        """Blocks for all known tokens of a running request; False, and nothing taken, when too few are free."""
        table = self.table(request)
        missing = self.blocks_for(request.num_tokens) - len(table)
        if missing > self._pool.num_free:
            return False
        if missing > 0:
            table += self._pool.allocate(missing)
        return True

    def mark_scheduled(self, request: Request, start: int, end: int) -> list[int]:
        """Hashes the blocks that tokens [start, end) of a running request complete."""
        end = min(end, len(request.token_ids))
        entry = self._entry(request)
        first, last = entry.hashed_end, end // self.page_size
        if first >= last or not self.sharing:
            return []
        entry.hashed_end = last
        entry, table = self._entry(request), self.table(request)
        for index in range(first, last):
            self._pool.set_hash(table[index], self._hash(request, entry, index))
        entry.own_end = max(entry.own_end, last)
        return table[first:last]

    def unhash(self, blocks: Iterable[int]) -> None:
        """Undoes `mark_scheduled`, which returned `blocks`, for a step that failed, whoever holds them now."""
        for block in blocks:
            self._pool.drop_hash(block)

    def take_copies(self) -> BlockCopies | None:
        return None

    def copies_failed(self, copies: BlockCopies) -> None:
        raise NotImplementedError

    def unhash_own(self, request: Request) -> None:
        """Makes unfindable what the request has ever written itself; prefixes that others had written stay."""
        entry = self._entries.get(request.request_id)
        if entry is None or entry.own_start is None:
            return
        for own_hash in entry.hashes[entry.own_start : entry.own_end]:
            block = self._pool.lookup(own_hash)
            if block is not None:
                self._pool.drop_hash(block)

    def release(self, request: Request) -> None:
        """Gives the blocks of a preempted request back; they stay findable until reused, the longest prefix first."""
        entry = self._entries.get(request.request_id)
        if entry is not None and entry.table is not None:
            self._pool.release(reversed(entry.table))
            entry.table = None

    def free(self, request: Request) -> None:
        """Gives back what the request holds, if anything, and forgets it."""
        self.release(request)
        self._entries.pop(request.request_id, None)

    def reset(self) -> None:
        """Forgets every prefix. Running requests keep their blocks, and those that they fill later can be hit."""
        self._pool.drop_all_hashes()

    def check_integrity(self, live: Iterable[Request]) -> None:
        """Raises RuntimeError naming what is broken. O(blocks); for tests and idle moments.

        Args:
            live: every request that may be known to the cache.
        """
        self._pool.check_integrity()
        requests = {request.request_id: request for request in live}
        unknown = self._entries.keys() - requests.keys()
        if unknown:
            raise RuntimeError(f"requests that ended are still known: {sorted(unknown)}")
        counts: Counter[int] = Counter()
        seen: dict[int, tuple[int, list[int]]] = {}
        for request_id, entry in self._entries.items():
            if entry.table is None:
                continue
            request, table = requests[request_id], entry.table
            if len(set(table)) != len(table) or NULL_BLOCK in table:
                raise RuntimeError(f"the block table of {request_id!r} repeats a block or holds the null block")
            if len(table) < self.blocks_for(request.computed):
                raise RuntimeError(f"{request_id!r} has {request.computed} tokens in {len(table)} blocks")
            counts.update(table)
            for index, block in enumerate(table):
                prefix = request.token_ids[: (index + 1) * self.page_size]
                shared = seen.setdefault(block, (index, prefix))
                if shared[0] != index or shared[1][: len(prefix)] != prefix[: len(shared[1])]:
                    raise RuntimeError(f"block {block} is shared by requests of different prefixes, one {request_id!r}")
        for block in range(1, self.num_blocks + 1):
            if counts[block] != self._pool.references(block):
                raise RuntimeError(
                    f"block {block} is in {counts[block]} tables, its count is {self._pool.references(block)}"
                )

    def _entry(self, request: Request) -> _Entry:
        entry = self._entries.get(request.request_id)
        if entry is None:
            entry = self._entries[request.request_id] = _Entry(root_hash(request.salt))
        return entry

    def _find_hits(self, request: Request, entry: _Entry) -> list[int]:
        hits: list[int] = []
        if self.sharing:
            for index in range(self._max_hits(request)):
                block = self._pool.lookup(self._hash(request, entry, index))
                if block is None:
                    break
                hits.append(block)
        return hits

    def _max_hits(self, request: Request) -> int:
        """One known token must be left to compute, so that there is something to sample from."""
        return (request.num_tokens - 1) // self.page_size

    def _is_still_refused(self, request: Request, entry: _Entry, reserve: int) -> bool:
        """Whether nothing has happened since the last refusal that could have made the request fit.

        Others taking or evicting blocks never helps; only a block that became free, or one more hit, can.
        """
        if entry.refused is None or entry.refused[:2] != (self._pool.num_freed, reserve):
            return False
        hits = entry.refused[2]
        return (
            not self.sharing
            or hits >= self._max_hits(request)
            or self._pool.lookup(self._hash(request, entry, hits)) is None
        )

    def _hash(self, request: Request, entry: _Entry, index: int) -> bytes:
        hashes, size = entry.hashes, self.page_size
        while len(hashes) <= index:
            begin = len(hashes) * size
            parent = hashes[-1] if hashes else entry.root
            hashes.append(block_hash(parent, request.token_ids[begin : begin + size]))
        return hashes[index]
