"""What the KV cache remembers of a request, from the first question about it until it is freed.

Made and changed by `KVCache` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.cache.prefix import block_hash
from engine.request import Request


@dataclass(slots=True)
class Entry:
    """One live request.

    Attributes:
        hashes: of its leading full blocks, as many as were asked for so far.
        line: of the block tables; None while it holds no blocks.
        firsts, ends: in each group it holds blocks [first, end) of its line; what is before is the null block.
        enough_tokens, enough_computed: nothing is to be taken while the request has no more tokens than the one, and
            nothing to be given back while it has computed less than the other.
        hashed_end: blocks before this one were hit, or hashed since the request was admitted.
        own_start, own_end: blocks [own_start, own_end) were written by the request itself, now or before it was
            preempted.
    """

    root: bytes
    hashes: list[bytes] = field(default_factory=list)
    line: int | None = None
    firsts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    enough_tokens: int = 0
    enough_computed: int = 0
    hashed_end: int = 0
    own_start: int | None = None
    own_end: int = 0

    def hash(self, token_ids: Sequence[int], index: int, page_size: int) -> bytes:
        """Of block `index` of the request with these tokens, which must be known up to its end; computed once."""
        hashes = self.hashes
        while len(hashes) <= index:
            begin = len(hashes) * page_size
            hashes.append(block_hash(hashes[-1] if hashes else self.root, token_ids[begin : begin + page_size]))
        return hashes[index]

    def note_admitted(self, length: int) -> None:
        """The request was admitted with a hit of `length` blocks."""
        self.hashed_end = length
        self.own_start = length if self.own_start is None else min(self.own_start, length)

    def note_hashed(self, end: int) -> None:
        """Blocks up to `end`, which the request writes, have got their hashes."""
        self.hashed_end = end
        self.own_end = max(self.own_end, end)

    @property
    def own_hashes(self) -> list[bytes]:
        """Of the blocks that the request has ever written."""
        return [] if self.own_start is None else self.hashes[self.own_start : self.own_end]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request did not fit, so that asking again is cheap.

    Attributes:
        num_tokens, reserve: what was asked for.
        missing_until: the pool's `num_free + num_revived` must reach this before the request can fit, unless one of
            `hashes` has been cached since. That others take or evict blocks never helps it.
        hashes: of its blocks, as far as they decide its hit.
    """

    request: Request
    num_tokens: int
    reserve: int
    missing_until: int
    hashes: frozenset[bytes]
