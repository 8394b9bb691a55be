"""The KV cache as the scheduler sees it: block tables of running requests and prefix hits for waiting ones.

The only way to blocks. The scheduler calls it; the runner reads the block tables and the copies through the
`ScheduledBatch`. Knows requests and token ids, but no tensors, budgets or order of requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.cache import integrity
from engine.cache.block_pool import NULL_BLOCK, BlockPool
from engine.cache.block_tables import Blocks, BlockTables
from engine.cache.entry import Entry, Refusal
from engine.cache.groups import LayerGroup
from engine.cache.host_tier import BlockCopies, HostTier
from engine.cache.layout import UNBOUNDED, Layout
from engine.cache.prefix import BlockKey, root_hash
from engine.request import Request

_ONE_GROUP = (LayerGroup((0,)),)


class KVCache:
    """Blocks of `page_size` tokens for requests: paged, in layer groups, shared by equal prefixes, kept on the host.

    A block holds one page of each layer of one group. In groups with a window a request holds the blocks that it can
    still see and those of its next step; what lies wholly behind the window is given back, and its table says null.

    A full block is hashed when the step that fills it is scheduled: rows of the same step may share it, since all K/V
    of a step is written before any row attends. A block that nobody holds stays findable until its memory is needed;
    with host slots it is then copied there, and comes back with the next hit. The copies that this takes are asked
    for with `take_copies` for each batch that has rows, and run before it.

    A step that fails must `unhash` what it was to fill and report its copies to `copies_failed`, and so must every
    step launched after it.

    Args:
        num_blocks: usable blocks; the null block comes on top.
        page_size: tokens per block.
        groups: of the model's layers; one group without a window when None.
        sharing: prefix caching; without it nothing is ever hashed or looked up.
        max_step_tokens: tokens of one request in one step, at most.
        host_slots: blocks that the host can keep.

    Raises:
        ValueError: a number is too small, or host slots without sharing, which could never be used.
    """

    def __init__(
        self, num_blocks: int, page_size: int, groups: Sequence[LayerGroup] | None = None, sharing: bool = True, *,
        max_step_tokens: int = 2**30, host_slots: int = 0,
    ) -> None:  # fmt: skip
        self._layout = Layout(page_size, _ONE_GROUP if groups is None else groups, max_step_tokens)
        if num_blocks < self._layout.num_groups:
            raise ValueError(
                f"num_blocks is {num_blocks}, but a token takes one in each of {self._layout.num_groups} layer groups"
            )
        if host_slots and not sharing:
            raise ValueError("blocks on the host are found by prefix: host_slots needs sharing, or must be 0")
        self.page_size = page_size
        self.sharing = sharing
        self._max_tokens = self._layout.longest_request(num_blocks)
        self._host = HostTier(host_slots)
        self._pool = BlockPool(num_blocks, on_evict=self._host.store)
        self._tables = BlockTables(self._layout.num_groups)
        self._entries: dict[str, Entry] = {}
        self._refusal: Refusal | None = None

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
        """Blocks on the device that a later request may hit, used or free."""
        return self._pool.num_cached

    @property
    def num_host_blocks(self) -> int:
        """Blocks on the host that a later request may hit."""
        return self._host.num_kept

    @property
    def max_tokens(self) -> int:
        """The longest request that fits when it has the cache to itself, in tokens; `UNBOUNDED` when any does."""
        return self._max_tokens

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of one group that so many tokens fill."""
        return self._layout.blocks_for(num_tokens)

    def holds(self, request: Request) -> bool:
        """Whether the request has been admitted and not released since."""
        entry = self._entries.get(request.request_id)
        return entry is not None and entry.line is not None

    @property
    def block_tables(self) -> list[Blocks]:
        """int32 [lines, width], one a layer group: the tables of all that runs, one line a request, no copies.

        A line holds the request's blocks, in groups with a window from the first that it still sees on, and otherwise
        the null block. To be asked for again whenever blocks were taken.
        """
        return self._tables.arrays

    def line(self, request: Request) -> int:
        """Which line of `block_tables` is that of a running request; the same until it is released.

        Raises:
            KeyError: the request holds no blocks.
        """
        return self._running(request)[1]

    def tables(self, request: Request) -> list[list[int]]:
        """Copies of the block tables of a running request, one a layer group. Raises as `line`."""
        entry, line = self._running(request)
        return [self._tables.read(group, line, 0, end) for group, end in enumerate(entry.ends)]

    # Waiting requests

    def match(self, request: Request) -> int:
        """Length of the longest cached prefix in blocks; at least one known token is left over.

        Takes no block. Hashes are computed once and remembered until `free`.
        """
        return self._hit_length(request, self._entry(request))

    def admit(self, request: Request, reserve: int = 0) -> bool:
        """Takes the hit blocks and those that its next step needs. Sets `computed` to the tokens hit, and `table_line`.

        There must be room for the most that its known tokens will need at any time, less the hits that running
        requests hold anyway: in groups with a window only if its next step reaches the last token, since otherwise
        the window moves on from what it shares.

        Args:
            reserve: blocks that must be left beyond that.

        Returns:
            False when it does not fit; then nothing is taken. Asking again for the request refused last costs O(1)
            until room was made or its prefix got longer.
        """
        entry = self._entry(request)
        if entry.line is not None:
            raise RuntimeError(f"request {request.request_id!r} already holds blocks")
        if self._is_still_refused(request, reserve):
            return False
        length = self._hit_length(request, entry)
        room = self._room_for(request, entry, length) + reserve
        if room > self._pool.num_free:
            hashes = frozenset(entry.hashes[: self._max_hits(request)])
            until = room + self._pool.num_revived
            self._refusal = Refusal(request, request.num_tokens, reserve, until, hashes)
            return False
        request.computed = length * self.page_size
        self._take(request, entry, length)
        entry.note_admitted(length)
        if request.cached_tokens is None:
            request.cached_tokens = min(request.computed, request.num_prompt_tokens)
        return True

    # Running requests

    def grow(self, request: Request) -> bool:
        """Gives back what lies behind a window, and takes what the next step can need.

        Returns:
            False when too few blocks are free; then none is taken.
        """
        return self.grow_all((request,))

    def grow_all(self, requests: Iterable[Request]) -> bool:
        """`grow` for several: False when too few blocks are free for all of them together, or one has more than
        `max_tokens`; then none is taken."""
        layout, total = self._layout, 0
        missing: list[tuple[Entry, int, int, int]] = []
        for request in requests:
            entry, line = self._running(request)
            computed, num_tokens = request.computed, request.num_tokens
            if num_tokens <= entry.enough_tokens and computed < entry.enough_computed:
                continue
            if num_tokens > self._max_tokens:
                return False
            for group in layout.windowed_groups:
                self._drop_behind(entry, line, group, layout.first(group, computed))
            for group, held in enumerate(entry.ends):
                count = layout.end(group, computed, num_tokens) - held
                if count > 0:
                    missing.append((entry, line, group, count))
                    total += count
        if total > self._pool.num_free:
            return False
        blocks = self._allocate(total)
        taken = 0
        for entry, line, group, count in missing:
            self._tables.write(group, line, entry.ends[group], blocks[taken : taken + count])
            entry.ends[group] += count
            self._note_enough(entry)
            taken += count
        return True

    def mark_scheduled(self, request: Request, end: int) -> list[int]:
        """Hashes the full blocks of a running request that its tokens up to `end` complete, as far as they are known.

        A block whose last token was not known when it was scheduled gets its hash the next time.

        Returns:
            The blocks that got a hash; if the step fails they must lose it with `unhash`.
        """
        entry, line = self._running(request)
        first, last = entry.hashed_end, end // self.page_size
        if first < last:
            last = min(last, len(request.token_ids) // self.page_size)
        if first >= last or not self.sharing:
            return []
        hashed = []
        for index in range(first, last):
            own_hash = entry.hash(request.token_ids, index, self.page_size)
            for group, array in enumerate(self._tables.arrays):
                block = array.item(line, index)
                if block != NULL_BLOCK and self._set_hash(block, (group, own_hash)):
                    hashed.append(block)
        entry.note_hashed(last)
        self._host.expect(hashed)
        return hashed

    def calm_until(self, request: Request) -> int:
        """Up to how many tokens, all but the last computed, `grow` and `mark_scheduled` have nothing to do for it."""
        entry = self._entries[request.request_id]
        calm = entry.enough_tokens if entry.enough_tokens < entry.enough_computed else entry.enough_computed
        if not self.sharing:
            return calm
        unhashed = (entry.hashed_end + 1) * self.page_size - 1
        return unhashed if unhashed < calm else calm

    def release(self, request: Request) -> None:
        """Gives the blocks of a preempted request back; they stay findable until reused, the first ones longest."""
        entry = self._entries.get(request.request_id)
        if entry is None or entry.line is None:
            return
        held = [
            (index, block)
            for group, (first, end) in enumerate(zip(entry.firsts, entry.ends, strict=True))
            for index, block in enumerate(self._tables.read(group, entry.line, first, end), first)
        ]
        self._pool.release([block for _, block in sorted(held, reverse=True)])
        self._tables.give_back(entry.line, entry.ends)
        entry.line = None

    def free(self, request: Request) -> None:
        """Gives back what the request holds, if anything, and forgets it."""
        self.release(request)
        self._entries.pop(request.request_id, None)
        if self._refusal is not None and self._refusal.request is request:
            self._refusal = None

    # Steps

    def take_copies(self) -> BlockCopies | None:
        """What must be copied between device and host before the next step; None when nothing. Each is told once."""
        return self._host.take()

    def unhash(self, blocks: Iterable[int]) -> None:
        """Undoes `mark_scheduled`, which returned `blocks`, for a step that failed, whoever holds them now."""
        written = set(blocks)
        for key in [*map(self._pool.hash_of, written), *self._host.pending_keys(written)]:
            self._forget(key)

    def copies_failed(self, copies: BlockCopies) -> None:
        """Forgets what these copies were to bring, for a step that failed: nobody knows whether they ran."""
        filled = {block for _, block in copies.from_host}
        for block in filled:
            self._pool.drop_hash(block)
        for key in [*(self._host.key_in(slot) for _, slot in copies.to_host), *self._host.pending_keys(filled)]:
            self._forget(key)

    def unhash_own(self, request: Request) -> None:
        """Makes unfindable what the request has ever written itself; prefixes that others had written stay."""
        entry = self._entries.get(request.request_id)
        for own_hash in entry.own_hashes if entry is not None else ():
            for group in range(self._layout.num_groups):
                self._forget((group, own_hash))

    def unhash_all(self, request: Request) -> None:
        """Makes unfindable all blocks with the request's tokens, whoever has written them."""
        entry = self._entries.get(request.request_id)
        for block_hash in entry.hashes if entry is not None else ():
            for group in range(self._layout.num_groups):
                self._forget((group, block_hash))

    def reset(self) -> None:
        """Forgets every prefix. Running requests keep their blocks, and those that they fill later can be hit."""
        self._pool.drop_all_hashes()
        self._host.drop_all()

    def check_integrity(self, live: Iterable[Request]) -> None:
        """Raises RuntimeError naming what is broken. O(blocks); for tests and idle moments.

        Args:
            live: every request that may be known to the cache.
        """
        integrity.check(self._pool, self._host, self._layout, self._tables, self._entries, live)

    # Inside

    def _entry(self, request: Request) -> Entry:
        entry = self._entries.get(request.request_id)
        if entry is None:
            entry = self._entries[request.request_id] = Entry(root_hash(request.salt))
        return entry

    def _running(self, request: Request) -> tuple[Entry, int]:
        entry = self._entries.get(request.request_id)
        if entry is None or entry.line is None:
            raise KeyError(f"request {request.request_id!r} holds no blocks")
        return entry, entry.line

    def _max_hits(self, request: Request) -> int:
        """One token must be left to compute, so that there is something to sample from."""
        return (request.num_tokens - 1) // self.page_size

    def _hit_length(self, request: Request, entry: Entry) -> int:
        if not self.sharing or request.needs_prompt_logprobs:
            return 0

        def has(group: int, index: int) -> bool:
            key = group, entry.hash(request.token_ids, index, self.page_size)
            return self._pool.lookup(key) is not None or key in self._host

        return self._layout.longest_hit(self._max_hits(request), has)

    def _room_for(self, request: Request, entry: Entry, length: int) -> int:
        """Blocks that must be free to admit a request with a hit of `length` blocks. A shorter hit never needs less."""
        layout, computed = self._layout, length * self.page_size
        room = layout.need(computed, request.num_tokens)
        moves_on = layout.blocks_for(computed + layout.max_step_tokens) < layout.blocks_for(request.num_tokens)
        for group in layout.full_groups if moves_on else range(layout.num_groups):
            for own_hash in entry.hashes[layout.first(group, computed) : length]:
                block = self._pool.lookup((group, own_hash))
                room -= block is not None and self._pool.references(block) > 0
        return room

    def _is_still_refused(self, request: Request, reserve: int) -> bool:
        refusal = self._refusal
        return (
            refusal is not None
            and refusal.request is request
            and (refusal.num_tokens, refusal.reserve) == (request.num_tokens, reserve)
            and self._pool.num_free + self._pool.num_revived < refusal.missing_until
        )

    def _take(self, request: Request, entry: Entry, length: int) -> None:
        """Fills the tables of a request that was found to fit, with a hit of `length` blocks.

        Hits are secured before anything is allocated, which may evict both from the device and from the host.
        """
        layout, missing = self._layout, []
        tables: list[list[int]] = []
        entry.firsts = [layout.first(group, request.computed) for group in range(layout.num_groups)]
        for group, first in enumerate(entry.firsts):
            table = [NULL_BLOCK] * layout.end(group, request.computed, request.num_tokens)
            for index in range(first, len(table)):
                key = (group, entry.hashes[index]) if index < length else None
                block = None if key is None else self._pool.lookup(key)
                if block is not None:
                    self._pool.acquire(block)
                    table[index] = block
                    continue
                if key is not None:
                    self._host.pin(key)
                missing.append((table, index, key))
            tables.append(table)
        for block, (table, index, key) in zip(self._allocate(len(missing)), missing, strict=True):
            table[index] = block
            if key is not None:
                self._host.fill(block, key)
                self._set_hash(block, key)
        entry.line = request.table_line = self._tables.take()
        entry.ends = list(map(len, tables))
        for group, table in enumerate(tables):
            self._tables.write(group, entry.line, 0, table)
        self._note_enough(entry)

    def _drop_behind(self, entry: Entry, line: int, group: int, first: int) -> None:
        """Gives back the blocks before `first` of a running request in a group with a window."""
        start = entry.firsts[group]
        behind = self._tables.read(group, line, start, first)
        self._tables.write(group, line, start, [NULL_BLOCK] * len(behind))
        entry.firsts[group] = first
        self._pool.release(behind)
        self._note_enough(entry)

    def _note_enough(self, entry: Entry) -> None:
        layout = self._layout
        entry.enough_tokens = min(entry.ends) * self.page_size
        entry.enough_computed = UNBOUNDED
        for group in layout.windowed_groups:
            entry.enough_computed = min(entry.enough_computed, layout.behind_at(group, entry.firsts[group]))

    def _allocate(self, count: int) -> list[int]:
        blocks = self._pool.allocate(count)
        self._host.reused(blocks)
        return blocks

    def _set_hash(self, block: int, key: BlockKey) -> bool:
        """Makes a block findable, which may be what the request refused last is waiting for."""
        if not self._pool.set_hash(block, key):
            return False
        if self._refusal is not None and key[1] in self._refusal.hashes:
            self._refusal = None
        return True

    def _forget(self, key: BlockKey | None) -> None:
        """On the device and on the host: what was copied from one to the other is no better."""
        if key is None:
            return
        block = self._pool.lookup(key)
        if block is not None:
            self._pool.drop_hash(block)
        self._host.drop(key)
