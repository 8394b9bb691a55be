"""Clears blocks of the cache in all layers of a group at once.

Called where attention is not the engine's own and multiplies what a query does not see by 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from engine.ops.triton.tile import UNALIGNED

_BLOCK = 2048  # words of 4 bytes
_PROGRAMS = 64  # a tensor


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _clear_kernel(addresses, begun, WORDS: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    words = tl.multiple_of(tl.load(addresses + tl.program_id(1)).to(tl.pointer_type(tl.int32)), 16)
    count = tl.load(begun)
    for item in range(tl.program_id(0), count * PIECES, tl.num_programs(0)):
        block = tl.load(begun + 1 + item // PIECES).to(tl.int64)
        at = item % PIECES * BLOCK + tl.arange(0, BLOCK)
        tl.store(words + block * WORDS + at, tl.zeros([BLOCK], tl.int32), mask=at < WORDS)


class BlockClearer:
    """
    Args:
        tensors: K and V of layers, all [blocks, kv_heads, page, dim] of one dtype, contiguous, a block of a multiple of
            16 bytes. They must outlive this.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._words = tensors[0][0].nbytes // 4
        addresses = [tensor.data_ptr() for tensor in tensors]
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=tensors[0].device)

    def __call__(self, begun: torch.Tensor) -> None:
        """`begun`: int32 [1 + room], how many blocks are meant, then these."""
        room = len(begun) - 1
        pieces = triton.cdiv(self._words, _BLOCK)
        if room:
            _clear_kernel[(min(room * pieces, _PROGRAMS), len(self._addresses))](
                self._addresses, begun, WORDS=self._words, PIECES=pieces, BLOCK=_BLOCK, num_warps=4
            )
