"""A step's rows in the terms of flash kernels, made on the host for one layer group.

Used by both `Ops` over such a kernel, which make tensors of the arrays. Knows no device and no layers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from engine.ops.interface import PackedRows


@dataclass(frozen=True, slots=True)
class HostRows:
    """As `FlashRows`, with int32 arrays on the host."""

    begins: np.ndarray
    lengths: np.ndarray
    length_sums: np.ndarray
    tables: np.ndarray
    most_tokens: int
    most_length: int
    is_decode: bool = False

    @classmethod
    def of(
        cls, rows: PackedRows, tables: np.ndarray, most_tokens: int, most_length: int, *, is_decode: bool = False
    ) -> HostRows:
        """`tables`: [rows, width], a line a row."""
        lengths = rows.starts + rows.counts
        begins = np.append(rows.offsets, rows.offsets[-1:] + rows.counts[-1:])
        return cls(
            begins.astype(np.int32),
            lengths.astype(np.int32),
            np.append(0, lengths.cumsum()).astype(np.int32),
            np.ascontiguousarray(tables),
            most_tokens,
            most_length,
            is_decode,
        )


def exact_rows(rows: PackedRows, tables: np.ndarray, page: int, apart: bool) -> list[HostRows]:
    """As large as the step.

    Args:
        tables: of the group.
        apart: rows of one token come apart from the others, before them.
    """
    single, count = rows.num_single, len(rows.starts)
    borders = [0, single, count] if apart and 0 < single < count else [0, count]
    return [_part(rows, tables, page, first, last) for first, last in itertools.pairwise(borders)]


def _part(rows: PackedRows, tables: np.ndarray, page: int, first: int, last: int) -> HostRows:
    part, offsets = slice(first, last), rows.offsets[first:last]
    own = PackedRows(rows.starts[part], rows.counts[part], offsets - offsets[0], None, rows.table_of[part], 0)
    most_length = int((own.starts + own.counts).max())
    seen = _seen(own, tables[own.table_of, : -(-most_length // page)], page)
    return HostRows.of(own, seen, int(own.counts.max()), most_length, is_decode=last <= rows.num_single)


def mixed_rows(
    rows: PackedRows, tables: np.ndarray, page: int, num_tokens: int, most_length: int, num_rows: int
) -> HostRows:
    """For `FixedMixedOps.plan_mixed`: rows without tokens behind those of the step."""
    count, width = len(rows.starts), -(-most_length // page)
    missing = np.zeros(num_rows - count, dtype=np.int64)
    padded = PackedRows(
        np.append(rows.starts, missing),
        np.append(rows.counts, missing),
        np.append(rows.offsets, missing + num_tokens),
        None,
        np.arange(num_rows),
        rows.num_single,
    )
    own = _seen(rows, tables[rows.table_of, :width], page)
    blocks = np.zeros((num_rows, width), dtype=np.int32)
    blocks[:count, : own.shape[1]] = own
    return HostRows.of(padded, blocks, num_tokens, most_length)


def _seen(rows: PackedRows, tables: np.ndarray, page: int) -> np.ndarray:
    """`tables`, a line a row, with the null block for those that a row has for later steps: they may hold anything."""
    pages = -(-(rows.starts + rows.counts) // page)
    return np.where(np.arange(tables.shape[1]) < pages[:, None], tables, 0).astype(np.int32)
