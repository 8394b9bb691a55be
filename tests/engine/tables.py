"""Block tables as lists, in the arrays in which steps carry them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.ops.interface import PackedRows
from engine.scheduling.batch import ScheduledBatch


def table_array(tables: Sequence[Sequence[int]]) -> np.ndarray:
    """int32 [lines, width], padded with the null block."""
    array = np.zeros((len(tables), max(map(len, tables), default=0)), dtype=np.int32)
    for line, table in zip(array, tables, strict=True):
        line[: len(table)] = table
    return array


def packed_rows(
    starts: np.ndarray,
    counts: np.ndarray,
    offsets: np.ndarray,
    block_tables: Sequence[Sequence[Sequence[int]]] | None,
    num_single: int,
) -> PackedRows:
    """With block_tables[group][row]. In the arrays the rows' lines are among others, and not in the rows' order."""
    lines = 1 + 2 * np.arange(len(starts))[::-1]
    arrays = None
    if block_tables is not None:
        arrays = [
            np.full((2 * len(starts) + 1, table_array(tables).shape[1]), 9999, np.int32) for tables in block_tables
        ]
        for array, tables in zip(arrays, block_tables, strict=True):
            array[lines] = table_array(tables)
    return PackedRows(starts, counts, offsets, arrays, lines, num_single)


def set_tables(batch: ScheduledBatch, tables: Sequence[Sequence[Sequence[int]]]) -> None:
    """Gives the batch tables[row][group]."""
    batch.table_of = list(range(len(tables)))
    batch.block_tables = [table_array(group) for group in zip(*tables, strict=True)]


def tables_of(batch: ScheduledBatch, row: int) -> list[list[int]]:
    """The lines of a row, one a group."""
    return [array[batch.table_of[row]].tolist() for array in batch.block_tables]
