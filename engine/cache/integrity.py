"""Whether the parts of the KV cache agree with each other: for tests and idle moments, O(blocks).

Called by `KVCache.check_integrity`. Changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from engine.cache.block_pool import NULL_BLOCK, BlockPool
from engine.cache.block_tables import BlockTables
from engine.cache.entry import Entry
from engine.cache.host_tier import HostTier
from engine.cache.layout import Layout
from engine.request import Request

# block -> the group, index and prefix for which a table holds it
Holders = dict[int, tuple[int, int, list[int]]]


def check(
    pool: BlockPool,
    host: HostTier,
    layout: Layout,
    tables: BlockTables,
    entries: Mapping[str, Entry],
    live: Iterable[Request],
) -> None:
    """Raises RuntimeError naming what is broken.

    Args:
        entries: of the requests that are known to the cache, by id.
        live: every request that may be known to it.
    """
    pool.check_integrity()
    host.check_integrity()
    requests = {request.request_id: request for request in live}
    unknown = entries.keys() - requests.keys()
    if unknown:
        raise RuntimeError(f"requests that ended are still known: {sorted(unknown)}")
    counts: Counter[int] = Counter()
    holders: Holders = {}
    lines = {entry.line: entry.ends for entry in entries.values() if entry.line is not None}
    tables.check_integrity(list(lines), list(lines.values()))
    for request_id, entry in entries.items():
        for group, end in enumerate(entry.ends if entry.line is not None else ()):
            table = tables.read(group, entry.line, 0, end)  # type: ignore[arg-type]
            _check_table(pool, layout, requests[request_id], entry, group, table, holders)
            counts.update(table[entry.firsts[group] :])
    for block in range(1, pool.num_blocks + 1):
        if counts[block] != pool.references(block):
            raise RuntimeError(f"block {block} is in {counts[block]} tables, its count is {pool.references(block)}")
    for slot, block in host.pending_fills():
        if pool.hash_of(block) not in (None, host.key_in(slot)):
            raise RuntimeError(f"block {block} is to be filled from host slot {slot}, which holds something else")


def _check_table(
    pool: BlockPool, layout: Layout, request: Request, entry: Entry, group: int, table: list[int], holders: Holders
) -> None:
    """Of one running request in one group."""
    first, size = entry.firsts[group], layout.page_size
    name, held = f"group {group} of {request.request_id!r}", table[first:]
    if len(set(held)) != len(held) or NULL_BLOCK in held or any(table[:first]):
        raise RuntimeError(f"the block table of {name} repeats a block, or the null block is in the wrong place")
    if len(table) < layout.blocks_for(request.computed) or first > layout.first(group, request.computed):
        raise RuntimeError(f"{name} has {request.computed} tokens and only blocks {first} to {len(table)}")
    for index, block in enumerate(held, first):
        prefix = request.token_ids[: (index + 1) * size]
        other_group, other_index, other = holders.setdefault(block, (group, index, prefix))
        if (other_group, other_index) != (group, index) or other[: len(prefix)] != prefix[: len(other)]:
            raise RuntimeError(f"block {block} is shared by requests of different prefixes or groups, one {name}")
        key = pool.hash_of(block)
        if key is not None and key != (group, entry.hash(request.token_ids, index, size)):
            raise RuntimeError(f"block {block}, number {index} of {name}, has the hash of something else")
