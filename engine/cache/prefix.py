"""Hashes that name a block by all the tokens up to its end.

A keyed 128-bit chain: equal hash means equal salt and equal tokens from the first one on. The key is drawn once
per process, so that no caller can construct two prompts, or a salt, that collide. Called by `KVCache` only.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16

BlockKey = tuple[int, bytes]  # (layer group, hash): what a cached block holds

_KEY = os.urandom(32)
_BLOCK = blake2b(digest_size=HASH_BYTES, key=_KEY, person=b"block")


def root_hash(salt: bytes) -> bytes:
    """The parent of every first block under this salt, 16 bytes."""
    return blake2b(salt, digest_size=HASH_BYTES, key=_KEY, person=b"root").digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a full block whose predecessor has the hash `parent`, 16 bytes."""
    state = _BLOCK.copy()  # sooner had than made
    state.update(parent)
    state.update(array("q", token_ids))
    return state.digest()
