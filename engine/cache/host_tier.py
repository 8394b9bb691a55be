"""Blocks of the KV cache that were evicted from the device and are kept on the host under the same key.

Called by `KVCache` only. Knows slots and keys, no tensors and no requests: the runner copies what `BlockCopies` says.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from engine.cache.prefix import BlockKey


@dataclass(slots=True)
class BlockCopies:
    """What must be copied before the next step runs: first all of `to_host`, then all of `from_host`.

    Attributes:
        to_host: (block, slot).
        from_host: (slot, block).
    """

    to_host: list[tuple[int, int]] = field(default_factory=list)
    from_host: list[tuple[int, int]] = field(default_factory=list)


class HostTier:
    """Host slots 0..num_slots-1, each with the key of the block that it keeps, the least recently used reused first.

    A copy is pending from the call that asks for it until `take`. A slot with one is pinned: it is given to no other
    key meanwhile, so that all copies of a step can run in the order of `BlockCopies` and each finds what it expects.
    What is evicted while every slot is pinned is lost.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 0:
            raise ValueError(f"host_slots is {num_slots}, it cannot be negative")
        self.num_slots = num_slots
        self._keys: list[BlockKey | None] = [None] * num_slots
        self._slots: dict[BlockKey, int] = {}
        self._free = list(range(num_slots))
        self._unpinned: OrderedDict[int, None] = OrderedDict()  # slots with a key, the next to be reused first
        self._pinned: dict[int, None] = {}
        self._to_host: list[tuple[int, int]] = []
        self._from_host: dict[int, int] = {}  # block -> slot
        self._unwritten: set[int] = set()

    @property
    def num_kept(self) -> int:
        """Slots that hold a block which can be found."""
        return len(self._slots)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._slots

    def key_in(self, slot: int) -> BlockKey | None:
        return self._keys[slot]

    def expect(self, blocks: Iterable[int]) -> None:
        """The step to come writes these blocks: until it is launched there is nothing in them to keep."""
        if self.num_slots:
            self._unwritten.update(blocks)

    def store(self, block: int, key: BlockKey) -> None:
        """Keeps what an evicted block holds, if a slot can be had.

        A key that is here already needs no copy. So a block that a pending copy is to fill is never copied from: its
        key is pinned.
        """
        slot = self._slots.get(key)
        if slot is not None:
            if slot in self._unpinned:
                self._unpinned.move_to_end(slot)
            return
        if block in self._unwritten:
            return
        if self._free:
            slot = self._free.pop()
        elif self._unpinned:
            slot, _ = self._unpinned.popitem(last=False)
            self._forget(slot)
        else:
            return
        self._keys[slot] = key
        self._slots[key] = slot
        self._pinned[slot] = None
        self._to_host.append((block, slot))

    def pin(self, key: BlockKey) -> None:
        """Makes sure that a key which is here stays until `fill`, whatever is stored in between."""
        slot = self._slots[key]
        self._unpinned.pop(slot, None)
        self._pinned[slot] = None

    def fill(self, block: int, key: BlockKey) -> None:
        """Asks for a pinned key's copy to a device block. It stays here, too."""
        self._from_host[block] = self._slots[key]

    def reused(self, blocks: Iterable[int]) -> None:
        """These blocks have got a new owner: a copy that is pending to one of them is void."""
        if self._from_host:
            for block in blocks:
                self._from_host.pop(block, None)

    def drop(self, key: BlockKey) -> None:
        """Forgets a key; nothing happens if it is not here. A copy to its slot may still run and hurts nobody."""
        slot = self._slots.get(key)
        if slot is None:
            return
        self._forget(slot)
        if slot not in self._pinned:
            del self._unpinned[slot]
            self._free.append(slot)

    def drop_all(self) -> None:
        for key in list(self._slots):
            self.drop(key)

    def take(self) -> BlockCopies | None:
        """The pending copies, None when there are none. Whatever is asked for later runs after them."""
        self._unwritten.clear()
        for slot in self._pinned:
            if self._keys[slot] is None:
                self._free.append(slot)
            else:
                self._unpinned[slot] = None
        self._pinned.clear()
        if not self._to_host and not self._from_host:
            return None
        copies = BlockCopies(self._to_host, self.pending_fills())
        self._to_host, self._from_host = [], {}
        return copies

    def pending_keys(self, blocks: Container[int]) -> list[BlockKey]:
        """What copies that wait to be taken are to bring here from these blocks."""
        keys = [self._keys[slot] for block, slot in self._to_host if block in blocks]
        return [key for key in keys if key is not None]

    def pending_fills(self) -> list[tuple[int, int]]:
        """(slot, block) of the copies from the host that wait to be taken."""
        return [(slot, block) for block, slot in self._from_host.items()]

    def check_integrity(self) -> None:
        """Raises RuntimeError naming what is broken. O(num_slots); for tests and idle moments."""
        if {key: slot for slot, key in enumerate(self._keys) if key is not None} != self._slots:
            raise RuntimeError("the host slots and their table of keys differ")
        groups = [set(self._free), set(self._unpinned), set(self._pinned)]
        if sorted(slot for group in groups for slot in group) != list(range(self.num_slots)):
            raise RuntimeError("a host slot is not in exactly one of free, unpinned and pinned")
        if len(self._free) != len(groups[0]) or any(self._keys[slot] is not None for slot in self._free):
            raise RuntimeError("a free host slot is listed twice or has a key")
        if any(self._keys[slot] is None for slot in self._unpinned):
            raise RuntimeError("a host slot without a key is not free")
        written = [slot for _, slot in self._to_host]
        if len(set(written)) != len(written):
            raise RuntimeError("two copies to one host slot are pending")
        if not {*written, *self._from_host.values()} <= groups[2]:
            raise RuntimeError("a host slot with a pending copy is not pinned")

    def _forget(self, slot: int) -> None:
        key = self._keys[slot]
        if key is not None:
            del self._slots[key]
            self._keys[slot] = None
