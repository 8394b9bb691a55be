"""The order of a step's rows of one token: those that share blocks run next to each other, long ones first.

A pure function of block tables, called where a step's rows are packed. Shared blocks are then in the processor's cache
when the next row reads them.
"""

from __future__ import annotations

import numpy as np


def neighbours(tables: np.ndarray, lines: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Rows ordered so that those with the same leading blocks are neighbours.

    Rows that begin with the same block are one family. Families come by their longest row, the longest first, so that
    threads which take row after row end together. Within a family rows part where their blocks do, looked at after
    1, 2, 4, 8, ... blocks: rows with the same first 2^k blocks are neighbours for every k. Otherwise long rows come
    first, then rows as given.

    Args:
        tables: int [lines, width], blocks from a first token on. Blocks are shared as prefixes alone: two rows with
            the same block in a column have the same ones before it. A row that begins with 0 (a window has left its
            first block behind) is a family of its own.
        lines: int64 [rows], each row's line of `tables`.
        lengths: int64 [rows], tokens of each row.

    Returns:
        int64 [rows], the row at each place.
    """
    if tables.shape[1] == 0:
        return np.argsort(-lengths, kind="stable")
    first = tables[lines, 0].astype(np.int64)
    alone = first == 0
    first[alone] = -1 - np.flatnonzero(alone)
    families, family = np.unique(first, return_inverse=True)
    if len(families) == len(first):
        return np.argsort(-lengths, kind="stable")
    longest = np.zeros(len(families), np.int64)
    np.maximum.at(longest, family, lengths)
    columns = [tables[lines, column] for column in _doublings(tables.shape[1])]
    return np.lexsort((-lengths, *reversed(columns), first, -longest[family]))


def _doublings(width: int) -> list[int]:
    """Columns of the 2nd, 4th, 8th, ... block."""
    return [2**k - 1 for k in range(1, width.bit_length()) if 2**k <= width]
