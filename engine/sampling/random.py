"""Counter-based random numbers: Philox4x32-10, a pure function of (seed, position).

Called by the sampler's plan, once a step for all sampled rows, and wherever a seed is derived. Keeps no
state, so a preempted, resumed or migrated request draws the same numbers. Loads no torch.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10


def philox4x32(counter: npt.NDArray[np.uint32], key: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Ten rounds of Philox for each column: counter uint32 [4, R], key uint32 [2, R] -> uint32 [4, R]."""
    c0, c1, c2, c3 = counter.astype(np.uint64)
    k0, k1 = key.astype(np.uint64)
    for _ in range(_ROUNDS):
        left = _MULTIPLIERS[0] * c0
        right = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (right >> _HALF) ^ c1 ^ k0, right & _LOW, (left >> _HALF) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack((c0, c1, c2, c3)).astype(np.uint32)


def uniform(seed: npt.NDArray[np.uint64], position: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in (0, 1] with 53 random bits per pair: seed uint64 [R], position int64 [R] >= 0 -> float64 [R]."""
    where = position.astype(np.uint64)
    zero = np.zeros_like(where)
    counter = np.stack((where & _LOW, where >> _HALF, zero, zero)).astype(np.uint32)
    key = np.stack((seed & _LOW, seed >> _HALF)).astype(np.uint32)
    words = philox4x32(counter, key).astype(np.uint64)
    bits = ((words[0] << _HALF) | words[1]) >> np.uint64(11)
    return (bits.astype(np.float64) + 1.0) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """64-bit seed of the index-th stream under a seed: unseeded requests of an engine, choices of one request."""
    data = (seed % 2**64).to_bytes(8, "little") + (index % 2**64).to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
