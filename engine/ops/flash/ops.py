"""`Ops` over a flash kernel: a step's rows and block tables in its terms, the cache write of plain torch.

Made by `make_ops` when settings have chosen a kernel. K and V are written before the kernel runs, not by it: a row may
read a block that another row of the same step completes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.cache.groups import LayerGroup
from engine.execution.kv_tensors import KVTensors
from engine.ops.explicit import Scores
from engine.ops.fixed_decode import padded_rows
from engine.ops.flash.kernels import FlashKernel, FlashRows, attend_rows
from engine.ops.flash.plan import HostRows, exact_rows, mixed_rows
from engine.ops.interface import PackedRows
from engine.ops.plan import GroupPlan
from engine.ops.torch_ops import TorchOps


@dataclass(slots=True)
class FlashPlan:
    """One step for the layers of one group.

    Attributes:
        slots, begun: as in `GroupPlan`.
        rows: for the kernel; see `attend_rows`.
    """

    slots: torch.Tensor
    begun: torch.Tensor | None
    rows: list[FlashRows]


class FlashOps(TorchOps):
    """`Ops` for a cache on the kernel's device, in float16 or bfloat16.

    Steps that leave the cache alone run in plain torch.

    Kernels multiply what a query does not see by 0 where it lies in a tile with something that it sees, so memory that
    was never written must not be NaN there: a block is cleared when it is begun. NaN in a token that lies behind a
    row's window but in its first block, or in a later token of the same step, does reach the row. Both are tokens of
    the same request, which fails by them anyway.
    """

    def __init__(self, kernel: FlashKernel, kv: KVTensors, groups: Sequence[LayerGroup] | None = None) -> None:
        super().__init__(kv, groups)
        self._kernel = kernel
        self.supports_graphs = (kernel.mixed_graphs, True)
        self._trash = kv.num_blocks_allocated - 1
        self._pages = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in self._blocks]

    def plan(self, rows: PackedRows) -> list[Any]:
        """One plan a group: `FlashPlan`s, or without block tables `GroupPlan`s."""
        if rows.block_tables is None:
            return super().plan(rows)
        return [
            FlashPlan(
                self._planner.slots(rows, tables),
                self._planner.begun(rows, tables),
                self._tensors(exact_rows(rows, tables, self._page, self._kernel.rows_apart)),
            )
            for tables in rows.block_tables
        ]

    def plan_decode(self, rows: PackedRows, num_rows: int, max_blocks: int) -> list[FlashPlan]:  # type: ignore[override]
        """See `Ops.plan_decode`."""
        plans = []
        for tables in rows.block_tables or ():
            padded, blocks, begun = padded_rows(rows, tables, self._page, num_rows, max_blocks, self._trash)
            host = HostRows.of(padded, blocks, 1, max_blocks * self._page, is_decode=True)
            slots = self._planner.slots(padded, blocks)
            plans.append(FlashPlan(slots, self._planner.tensor(begun), self._tensors([host])))
        return plans

    def plan_mixed(
        self, rows: PackedRows, num_tokens: int, num_kv: int, num_rows: int, most_length: int
    ) -> list[FlashPlan]:
        """See `FixedMixedOps.plan_mixed`."""
        plans = []
        for tables in rows.block_tables or ():
            begun = self._planner.begun_blocks(rows, tables)
            begun = np.append(begun, np.full(num_rows - len(begun), self._trash))
            host = mixed_rows(rows, tables, self._page, num_tokens, most_length, num_rows)
            slots = self._planner.slots(rows, tables)
            plans.append(FlashPlan(slots, self._planner.tensor(begun), self._tensors([host])))
        return plans

    def _tensors(self, parts: list[HostRows]) -> list[FlashRows]:
        place = self._planner.tensor
        return [
            FlashRows(
                place(part.begins),
                place(part.lengths),
                place(part.length_sums),
                place(part.tables),
                part.most_tokens,
                part.most_length,
                part.is_decode,
            )
            for part in parts
        ]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: Any,
        scaling: float | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Ops.attend`."""
        group, tensor = self._places[layer]
        part = plan[group]
        if isinstance(part, GroupPlan):
            return super().attend(layer, query, key, value, plan, scaling, softcap, sinks)
        rule = Scores(scaling, softcap, sinks)
        keys, values = self._pages[tensor]
        queries, window = query.to(self._dtype), self._windows[group]
        out = attend_rows(self._kernel, queries, keys, values, part.rows, window, rule)
        return out.to(query.dtype)
