"""K and V of whole blocks between the plain layout, [blocks, kv_heads, page, dim], and that of the compiled kernels."""

from __future__ import annotations

import torch


def pack_keys(plain: torch.Tensor) -> torch.Tensor:
    """[page, dim] of each block and head as [dim / step][page][step]."""
    return plain.unflatten(-1, (-1, _step(plain))).transpose(-3, -2).reshape(plain.shape)


def pack_values(plain: torch.Tensor) -> torch.Tensor:
    """[page, dim] of each block and head as [page / step][dim][step]."""
    return plain.unflatten(-2, (-1, _step(plain))).transpose(-2, -1).reshape(plain.shape)


def unpack_keys(packed: torch.Tensor) -> torch.Tensor:
    *_, page, dim = packed.shape
    step = _step(packed)
    return packed.reshape(*packed.shape[:-2], dim // step, page, step).transpose(-3, -2).reshape(packed.shape)


def unpack_values(packed: torch.Tensor) -> torch.Tensor:
    *_, page, dim = packed.shape
    step = _step(packed)
    return packed.reshape(*packed.shape[:-2], page // step, dim, step).transpose(-2, -1).reshape(packed.shape)


def spoil(keys: torch.Tensor, values: torch.Tensor, block: int, tokens: slice, *, packed: bool) -> None:
    """Makes some tokens of a block NaN."""
    both = ((keys, pack_keys, unpack_keys), (values, pack_values, unpack_values))
    for tensor, pack, unpack in both:
        plain = unpack(tensor[block]) if packed else tensor[block].clone()
        plain[:, tokens] = float("nan")
        tensor[block] = pack(plain) if packed else plain


def _step(tensor: torch.Tensor) -> int:
    return 2 if tensor.dtype == torch.bfloat16 else 1
