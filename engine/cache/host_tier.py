"""Blocks of the KV cache that were evicted from the device and are kept on the host under the same hash.

Called by `KVCache` only. Knows slots and hashes, no tensors: the runner copies what `BlockCopies` says.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockCopies:
    """What must be copied before the next step runs: first all of `to_host`, then all of `from_host`.

    Attributes:
        to_host: (block, slot).
        from_host: (slot, block).
    """

    to_host: list[tuple[int, int]] = field(default_factory=list)
    from_host: list[tuple[int, int]] = field(default_factory=list)
