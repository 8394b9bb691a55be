"""The ops of the cache and of attention: what attention.cpp and kv_write.cpp are given, and the rows as they see them.

Called by the CPU ops, and by the fused layer for its tape. The layouts of K and V in a block belong to the kernels
alone: whoever copies whole blocks need not know them. Knows no models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine.ops.cpu.library import Address, Float, GroupRows, Int, Op
from engine.ops.interface import PackedRows

_DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


class AttendArguments(ctypes.Structure):
    """`Arguments` of attention.cpp."""

    _fields_ = (
        ("query", Address),
        ("query_stride", Int),
        ("query_head_stride", Int),
        ("out", Address),
        ("out_stride", Int),
        ("keys", Address),
        ("values", Address),
        ("sinks", Address),
        ("layer_group", Int),
        ("kv_heads", Int),
        ("group", Int),
        ("page", Int),
        ("dim", Int),
        ("scaling", Float),
        ("softcap", Float),
        ("query_is_bf16", ctypes.c_int32),
        ("out_is_bf16", ctypes.c_int32),
    )


class WriteArguments(ctypes.Structure):
    """`Arguments` of kv_write.cpp."""

    _fields_ = (
        ("key", Address),
        ("value", Address),
        ("key_stride", Int),
        ("key_head_stride", Int),
        ("value_stride", Int),
        ("value_head_stride", Int),
        ("keys", Address),
        ("values", Address),
        ("layer_group", Int),
        ("kv_heads", Int),
        ("page", Int),
        ("dim", Int),
        ("inputs_are_bf16", ctypes.c_int32),
    )


def check_kernels(page: int, dim: int, dtype: torch.dtype) -> None:
    """
    Raises:
        NotImplementedError: there are no kernels for such a cache.
    """
    if dtype not in _DTYPES:
        raise NotImplementedError(f"there is no attention kernel for {dtype} on CPU")
    if dtype == torch.bfloat16 and (dim % 2 or page % 2):
        raise NotImplementedError(f"the attention kernel for bfloat16 needs even sizes, not pages of {page} x {dim}")


def attend_op(
    keys: torch.Tensor,
    values: torch.Tensor,
    layer_group: int,
    query: torch.Tensor,
    out: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> Op:
    """Causal attention of the step's rows over their own contexts, after `write_op` of the same layer.

    A step whose rows have no blocks writes and reads a cache of its own, which its `GroupRows` name.

    Args:
        keys: the layer's K, [blocks, kv_heads, page, dim], in the kernels' layout; `values` likewise.
        layer_group: whose `GroupRows` of the step the layer follows.
        query: [max_tokens, heads, dim], bf16 or fp32, `dim` contiguous; heads a multiple of kv_heads.
        out: [max_tokens, heads * dim], bf16 or fp32, the last dimension contiguous.
        scaling: factor of the scores.
        softcap: scaled scores become softcap * tanh(score / softcap).
        sinks: fp32 [heads], contiguous: one more score a head, which takes its share and has no value.
    """
    arguments = AttendArguments(layer_group=layer_group, **_cache(keys, values))
    set_attend(arguments, query, out, scaling, softcap, sinks)
    return Op(f"attend_{_DTYPES[keys.dtype]}", arguments, (keys, values, query, out, sinks))


def set_attend(
    arguments: AttendArguments,
    query: torch.Tensor,
    out: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """Gives an op other tensors, which the caller keeps alive; see `attend_op`."""
    arguments.group = query.shape[1] // arguments.kv_heads
    arguments.query, arguments.query_is_bf16 = query.data_ptr(), query.dtype == torch.bfloat16
    arguments.query_stride, arguments.query_head_stride, _ = query.stride()
    arguments.out, arguments.out_is_bf16 = out.data_ptr(), out.dtype == torch.bfloat16
    arguments.out_stride = out.stride(0)
    arguments.scaling, arguments.softcap = scaling, softcap or 0.0
    arguments.sinks = None if sinks is None else sinks.data_ptr()


def write_op(keys: torch.Tensor, values: torch.Tensor, layer_group: int, key: torch.Tensor, value: torch.Tensor) -> Op:
    """Stores the step's K and V in the rows' blocks.

    Args:
        keys, values, layer_group: as of `attend_op`.
        key: [max_tokens, kv_heads, dim], bf16 or fp32, `dim` contiguous; `value` likewise and in the same dtype.
    """
    arguments = WriteArguments(layer_group=layer_group, **_cache(keys, values))
    set_write(arguments, key, value)
    return Op(f"write_{_DTYPES[keys.dtype]}", arguments, (keys, values, key, value))


def set_write(arguments: WriteArguments, key: torch.Tensor, value: torch.Tensor) -> None:
    """Gives an op other tensors, which the caller keeps alive; see `write_op`."""
    arguments.key, arguments.value = key.data_ptr(), value.data_ptr()
    arguments.key_stride, arguments.key_head_stride, _ = key.stride()
    arguments.value_stride, arguments.value_head_stride, _ = value.stride()
    arguments.inputs_are_bf16 = key.dtype == torch.bfloat16


def _cache(keys: torch.Tensor, values: torch.Tensor) -> dict[str, int]:
    _, kv_heads, page, dim = keys.shape
    return {"keys": keys.data_ptr(), "values": values.data_ptr(), "kv_heads": kv_heads, "page": page, "dim": dim}


class Rows:
    """The `GroupRows` of one step for every layer group, with the arrays that they point into.

    Attributes:
        tokens: packed tokens.
        groups: what `Step.groups` takes.
    """

    def __init__(self, rows: PackedRows, windows: Sequence[int | None], page: int) -> None:
        """
        Args:
            rows: with block tables.
            windows: of each group.

        Raises:
            ValueError: a token has no block.
        """
        self.tokens = int(rows.counts.sum())
        count, tables = len(rows.starts), rows.block_tables or []
        # All numbers in one array: to ask for an address takes longer than to copy them.
        numbers = np.empty(4 * count + len(windows) * self.tokens, dtype=np.int64)
        np.concatenate((rows.starts, rows.counts, rows.offsets, rows.table_of), out=numbers[: 4 * count])
        addresses = [numbers.ctypes.data + 8 * count * part for part in range(4)]
        all_slots = numbers[4 * count :].reshape(len(windows), self.tokens)
        slots_address = addresses[0] + 8 * 4 * count
        self._owners: list[Any] = [numbers, *tables]
        self.groups = (GroupRows * len(windows))()
        positions, lines = _positions(rows, self.tokens)
        pages, places = np.divmod(positions, page)
        last_page = int(pages.max()) if self.tokens else -1
        for group, table, window, slots in zip(self.groups, tables, windows, all_slots, strict=True):
            if last_page >= table.shape[1]:
                raise ValueError(_UNCOVERED)
            blocks = table[lines, pages]
            if not blocks.all():
                raise ValueError(_UNCOVERED)
            np.multiply(blocks, page, out=slots, dtype=np.int64)
            slots += places
            group.rows, group.width, group.window = count, table.shape[1], window or 0
            group.starts, group.counts, group.offsets, group.table_of = addresses
            group.tables, group.slots = table.ctypes.data, slots_address
            slots_address += 8 * self.tokens

    def use_cache(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Makes every layer write to and read from these blocks in place of its own."""
        self._owners += [keys, values]
        for group in self.groups:
            group.keys, group.values = keys.data_ptr(), values.data_ptr()


_UNCOVERED = "a block table does not cover the tokens of its row"


def _positions(rows: PackedRows, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Of every packed token its position and the line of its row."""
    if tokens == len(rows.starts) and rows.counts.max(initial=1) == 1:  # one each
        return rows.starts, rows.table_of
    positions = np.arange(tokens) + np.repeat(rows.starts - rows.offsets, rows.counts)
    return positions, np.repeat(rows.table_of, rows.counts)
