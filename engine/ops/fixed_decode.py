"""One-token rows under a plan of fixed shapes, so that a recorded graph serves every step of the same size.

Used by `TorchOps.plan_decode`. Every row reads `max_blocks` blocks, whatever its context: what it does not see is
cleared after it was gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.ops.explicit import Scores
from engine.ops.interface import PackedRows
from engine.ops.plan import Planner

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, Scores], torch.Tensor]


@dataclass(slots=True)
class FixedPlan:
    """One step of one-token rows, padded. For a replay each tensor is copied into the one that was recorded.

    Attributes:
        slots: int64 [kv_heads * num_rows], the (block, head, offset) line that each row's K/V goes to.
        begun: int64 [num_rows], blocks that are cleared first: those that the step begins, else the trash block.
        index: int64 [num_rows * kv_heads * max_blocks], the (block, head) lines that are read.
        hidden: bool [num_rows, 1, max_blocks * page, 1], tokens that the row does not see.
        bias: [num_rows, 1, 1, max_blocks * page], -inf where `hidden`, else 0.
    """

    slots: torch.Tensor
    begun: torch.Tensor
    index: torch.Tensor
    hidden: torch.Tensor
    bias: torch.Tensor


def plan_fixed(planner: Planner, rows: PackedRows, num_rows: int, max_blocks: int, trash: int) -> FixedPlan:
    """Rows that pad the step have no context but themselves and write to the block `trash`; see `Ops.plan_decode`."""
    (tables,) = rows.block_tables or (None,)
    padded, blocks, begun = padded_rows(rows, tables, planner.page, num_rows, max_blocks, trash)
    hidden = np.arange(max_blocks * planner.page) > padded.starts[:, None]
    bias = np.where(hidden, -np.inf, 0.0)[:, None, None]
    return FixedPlan(
        slots=planner.slots(padded, blocks),
        begun=planner.tensor(begun),
        index=planner.lines(blocks),
        hidden=planner.tensor(hidden[:, None, :, None]),
        bias=planner.tensor(bias).to(planner.dtype),
    )


def padded_rows(
    rows: PackedRows, tables: np.ndarray | None, page: int, num_rows: int, max_blocks: int, trash: int
) -> tuple[PackedRows, np.ndarray, np.ndarray]:
    """One-token rows, and behind them so many without a context, in the block `trash`, that there are `num_rows`.

    Args:
        tables: of one group.

    Returns:
        The rows without their tables; int32 [num_rows, max_blocks], the blocks that each of them sees; int64
        [num_rows], the block that it begins, else `trash`.

    Raises:
        ValueError: the rows do not fit.
    """
    count = len(rows.starts)
    if count > num_rows or rows.num_single != count or tables is None:
        raise ValueError(f"{num_rows} rows of one token fit this plan, not {count} of which {rows.num_single} have one")
    starts = np.zeros(num_rows, dtype=np.int64)  # of padding too: it sees itself alone
    starts[:count] = rows.starts
    sizes = starts // page + 1
    if sizes.max() > max_blocks:
        raise ValueError(f"a row of {sizes.max()} blocks does not fit a plan of {max_blocks} blocks a row")
    blocks = np.zeros((num_rows, max_blocks), dtype=np.int32)
    width = min(max_blocks, tables.shape[1])
    blocks[:count, :width] = tables[rows.table_of, :width]
    blocks[np.arange(max_blocks) >= sizes[:, None]] = 0
    blocks[count:, 0] = trash
    each = np.arange(num_rows)
    begun = np.where(starts % page == 0, blocks[each, sizes - 1], trash).astype(np.int64)
    return PackedRows(starts, np.ones_like(starts), each, None, each, num_rows), blocks, begun


def attend_fixed(
    plan: FixedPlan,
    query: torch.Tensor,
    lines: tuple[torch.Tensor, torch.Tensor],
    attention: Attention,
    rule: Scores,
) -> torch.Tensor:
    """Attention of the rows [num_rows, heads, head_dim] over their lines of K and V."""
    rows, _, dim = query.shape
    length = plan.bias.shape[-1]
    # New memory each time: a graph keeps what it was recorded with, and buffers that grow would leave it.
    keys, values = (
        part.index_select(0, plan.index).view(rows, -1, length, dim).masked_fill_(plan.hidden, 0) for part in lines
    )
    return attention(query[:, :, None].to(keys.dtype), keys, values, plan.bias, rule)[:, :, 0].to(query.dtype)
