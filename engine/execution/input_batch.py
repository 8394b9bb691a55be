"""Turns a `ScheduledBatch` into the arrays of one forward pass.

Called by the model runner once a step. Reads requests and block tables, changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.ops.interface import PackedRows
from engine.scheduling.batch import ScheduledBatch


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step, packed into a single sequence.

    Attributes:
        input_ids: int64 [1, tokens].
        position_ids: int64 [1, tokens], position of each token in its own request.
        keep: int64 [sampled rows], where the last token of each sampled row is, in the order of `batch.sampled`.
        rows: the same rows for the ops.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    keep: torch.Tensor
    rows: PackedRows


def make_input_batch(batch: ScheduledBatch, device: torch.device, *, cached: bool = True) -> InputBatch:
    """Packs the rows: those of one token first, longest context first, then the others as scheduled.

    `cached` False leaves the cache alone: every row must start at 0.
    """
    counts = np.array(batch.counts, dtype=np.int64)
    starts = np.array(batch.starts, dtype=np.int64)
    single = counts == 1 if cached else np.zeros(len(counts), dtype=bool)
    order = np.lexsort((-starts * single, ~single))
    counts, starts = counts[order], starts[order]
    lasts = np.cumsum(counts)
    offsets = lasts - counts
    token_ids: list[int] = []
    for row, start, count in zip(order.tolist(), starts.tolist(), counts.tolist(), strict=True):
        token_ids += batch.requests[row].token_ids[start : start + count]
    positions = np.arange(len(token_ids)) + np.repeat(starts - offsets, counts)
    last_token = np.empty_like(lasts)
    last_token[order] = lasts - 1
    rows = PackedRows(
        starts=starts,
        counts=counts,
        offsets=offsets,
        block_tables=_by_group(batch.block_tables, order.tolist()) if cached else None,
        num_single=int(single.sum()),
    )
    return InputBatch(
        input_ids=_tensor(np.array(token_ids, dtype=np.int64)[None], device),
        position_ids=_tensor(positions[None], device),
        keep=_tensor(last_token[np.array(batch.sampled, dtype=np.int64)], device),
        rows=rows,
    )


def _by_group(tables: list[list[list[int]]], order: list[int]) -> list[list[list[int]]]:
    """[row][group] in the batch's order -> [group][row] in packed order."""
    return [[tables[row][group] for row in order] for group in range(len(tables[0]))]


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
