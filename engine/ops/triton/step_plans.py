"""Plans of whole steps for one cache, one a layer group; with shapes that are fixed, where graphs are to record them.

The part of `TritonOps` that works on the host, and needs no Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.cache.groups import LayerGroup
from engine.execution.kv_tensors import KVTensors
from engine.ops.interface import PackedRows
from engine.ops.triton.plan import Capacity, Planner, StepPlan, most_splits


class StepPlans:
    """The plans of `Ops`, and where the layers' K and V are.

    Attributes:
        kv_shape: (kv_heads, head_dim) of the cache.
    """

    def __init__(self, kv: KVTensors, groups: Sequence[LayerGroup] | None = None) -> None:
        groups = groups or [LayerGroup(tuple(range(len(kv.keys))))]
        self.kv_shape = (kv.num_kv_heads, kv.head_dim)
        self._kv, self._trash, self._page = kv, kv.num_blocks_allocated - 1, kv.page_size
        self._windows = [group.window for group in groups]
        self._places = {
            layer: (number, tensor) for number, group in enumerate(groups) for tensor, layer in enumerate(group.layers)
        }
        self._planner = Planner(kv.page_size)

    def window(self, layer: int) -> int | None:
        """See `Ops.window`."""
        return self._windows[self._places[layer][0]]

    def plan(self, rows: PackedRows) -> StepPlan:
        """As large as the step."""
        if rows.block_tables is None:
            return StepPlan([self._planner.without_cache(rows)] * len(self._windows))
        return StepPlan([self._planner.exact(rows, tables, window) for tables, window in self._groups(rows)])

    def plan_decode(self, rows: PackedRows, num_rows: int, max_blocks: int) -> StepPlan:
        """See `Ops.plan_decode`."""
        count = len(rows.starts)
        if count > num_rows or rows.num_single != count:
            raise ValueError(
                f"{num_rows} rows of one token fit this plan, not {count} of which {rows.num_single} have one"
            )
        sizes = rows.starts // self._page + 1
        if count and sizes.max() > max_blocks:
            raise ValueError(f"a row of {sizes.max()} blocks does not fit a plan of {max_blocks} blocks a row")
        splits = num_rows * most_splits(max_blocks * self._page)
        capacity = Capacity(num_rows, num_rows, num_rows * max_blocks, splits, chunked=False)
        return self._fixed(rows, capacity, self._trash)

    def plan_mixed(self, rows: PackedRows, num_tokens: int, num_kv: int, num_rows: int, most_length: int) -> StepPlan:
        """See `FixedMixedOps`."""
        blocks = num_kv // self._page + num_rows
        splits = most_splits(num_kv) + num_rows
        return self._fixed(rows, Capacity(num_rows, num_tokens, blocks, splits, chunked=True), None)

    def _fixed(self, rows: PackedRows, capacity: Capacity, trash: int | None) -> StepPlan:
        pairs = self._groups(rows)
        return StepPlan([self._planner.fixed(rows, tables, window, capacity, trash) for tables, window in pairs])

    def _groups(self, rows: PackedRows) -> list[tuple[np.ndarray, int | None]]:
        return list(zip(rows.block_tables or [], self._windows, strict=True))
