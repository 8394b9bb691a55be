"""Rows of a step for kernels that are measured on their own: contexts on blocks that lie apart, in any order."""

from __future__ import annotations

import numpy as np

from engine.ops.interface import PackedRows


def spread_rows(starts: np.ndarray, counts: np.ndarray, page: int) -> tuple[PackedRows, int]:
    """Rows of `counts` tokens after `starts` cached ones, those of one token first; and how many blocks they have."""
    pages = -(-(starts + counts) // page)
    blocks = np.random.default_rng(0).permutation(int(pages.sum())) + 1
    table = np.zeros((len(starts), int(pages.max(initial=0))), np.int32)
    table[np.arange(table.shape[1]) < pages[:, None]] = blocks
    offsets = np.cumsum(counts) - counts
    rows = PackedRows(starts, counts, offsets, [table], np.arange(len(starts)), int((counts == 1).sum()))
    return rows, len(blocks)
