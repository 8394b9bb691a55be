"""Ops of `layers.cpp`: norms with the residual stream, norms and rotary positions of queries and keys, gathered rows.

Used by the fused decoder. Rows are the step's tokens, in packed order, at most as many as the tensors have. Knows
shapes; nothing of models or weights' names.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from engine.ops.cpu.library import Address, Float, Int, Op

_SUFFIXES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class _NormArguments(ctypes.Structure):
    _fields_ = (
        ("x", Address),
        ("added", Address),
        ("added_weight", Address),
        ("weight", Address),
        ("out", Address),
        ("width", Int),
        ("epsilon", Float),
        ("kept", ctypes.c_int32),
    )


class _RotateArguments(ctypes.Structure):
    _fields_ = (
        ("qkv", Address),
        ("table", Address),
        ("q_weight", Address),
        ("k_weight", Address),
        ("stride", Int),
        ("heads", Int),
        ("kv_heads", Int),
        ("dim", Int),
        ("rotary", Int),
        ("epsilon", Float),
        ("whole", ctypes.c_int32),
    )


class _GatherArguments(ctypes.Structure):
    _fields_ = (("source", Address), ("target", Address), ("bytes", Int))


class HeadNorms(NamedTuple):
    """RMS norms of queries and keys.

    Attributes:
        query, key: float32 weights, [head_dim] for norms of each head, [heads * head_dim] for one over all heads.
        epsilon: added to the mean of squares.
    """

    query: torch.Tensor
    key: torch.Tensor
    epsilon: float


def norm_op(
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    weight: torch.Tensor | None,
    epsilon: float,
    added: torch.Tensor | None = None,
    added_weight: torch.Tensor | None = None,
    kept: bool = False,
) -> Op:
    """out = norm(x) * weight, where x += norm(added) * added_weight before if that is given.

    Args:
        x: float32 [rows, width], contiguous, as all others.
        out: [rows, width], float32 or bfloat16.
        weight: float32 [width]; None: `out` is x as it is.
        epsilon: added to the mean of squares, in both norms.
        added: float32 [rows, width].
        added_weight: float32 [width].
        kept: the tensors' rows are the step's kept ones.

    Raises:
        ValueError: shapes or dtypes are not as said.
    """
    width = x.shape[1]
    floats = [tensor for tensor in (x, weight, added, added_weight) if tensor is not None]
    shapes = [tensor.shape[-1] for tensor in (*floats, out)]
    if (
        set(shapes) != {width}
        or any(tensor.dtype != torch.float32 for tensor in floats)
        or (added is None) != (added_weight is None)
    ):
        raise ValueError(f"norms take float32 tensors of one width, not {[(t.dtype, list(t.shape)) for t in floats]}")
    tensors = (x, added, added_weight, weight, out)
    arguments = _NormArguments(*map(_address, tensors), width, epsilon, kept)
    return Op(f"norm_{_suffix(out)}", arguments, tensors)


def rotate_op(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    table: torch.Tensor | None = None,
    norms: HeadNorms | None = None,
) -> Op:
    """Norms queries and keys, then turns them by their tokens' positions, in place.

    Args:
        qkv: [rows, columns], float32 or bfloat16, contiguous: `heads` query heads, then `kv_heads` of keys, then
            what is left alone.
        table: float32 [positions, 2, pairs], cosines and sines; dimension i of a head turns with i + pairs, those
            from 2 * pairs on stay. None: no positions.
        norms: None: no norms.

    Raises:
        ValueError: shapes or dtypes are not as said.
    """
    pairs = 0 if table is None else table.shape[2]
    fits = qkv.shape[1] >= (heads + kv_heads) * head_dim and 2 * pairs <= head_dim
    whole = norms is not None and (norms.query.numel(), norms.key.numel()) != (head_dim, head_dim)
    if norms is not None:
        sizes = (heads * head_dim, kv_heads * head_dim) if whole else (head_dim, head_dim)
        fits &= (norms.query.numel(), norms.key.numel()) == sizes
    if not fits:
        raise ValueError(f"{heads} + {kv_heads} heads of {head_dim} do not fit {list(qkv.shape)}, pairs or norms")
    query, key, epsilon = norms or (None, None, 0.0)
    tensors = (qkv, table, query, key)
    sizes_ = (qkv.shape[1], heads, kv_heads, head_dim, 2 * pairs)
    arguments = _RotateArguments(*map(_address, tensors), *sizes_, epsilon, whole)
    return Op(f"rotate_{_suffix(qkv)}", arguments, tensors)


def gather_op(source: torch.Tensor, target: torch.Tensor) -> Op:
    """Copies the step's kept rows of `source` to the first rows of `target`; both contiguous and of one dtype."""
    if source.dtype != target.dtype or source.shape[1] != target.shape[1]:
        raise ValueError(f"rows of {list(source.shape)} do not fit {list(target.shape)}")
    arguments = _GatherArguments(_address(source), _address(target), source.shape[1] * source.itemsize)
    return Op("gather_rows", arguments, (source, target))


def _suffix(tensor: torch.Tensor) -> str:
    if tensor.dtype not in _SUFFIXES:
        raise ValueError(f"activations are float32 or bfloat16, not {tensor.dtype}")
    return _SUFFIXES[tensor.dtype]


def _address(tensor: torch.Tensor | None) -> int | None:
    if tensor is None:
        return None
    if not tensor.is_contiguous():
        raise ValueError("a contiguous tensor is needed")
    return tensor.data_ptr()
