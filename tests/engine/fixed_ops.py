"""Test doubles for recorded steps: operations whose every plan has fixed shapes, and a strict recorder on CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.execution.kv_tensors import KVTensors
from engine.ops.interface import PackedRows
from engine.ops.torch_ops import TorchOps
from tests.engine.launches import kernels_told


@dataclass
class FixedPlan:
    """writes int64 [tokens] and reads int64 [kv], slots of the cache; seen bool [tokens, kv]."""

    writes: torch.Tensor
    reads: torch.Tensor
    seen: torch.Tensor
    widths: tuple[int, int]


class FixedOps:
    """Full attention in plain torch, and both kinds of plans of fixed shapes."""

    sampling = None
    supports_graphs = (True, True)

    def __init__(self, kv: KVTensors) -> None:
        self._plain = TorchOps(kv)
        self.kv_shape = (kv.num_kv_heads, kv.head_dim)
        self._caches = [(k.transpose(0, 1), v.transpose(0, 1)) for k, v in zip(kv.keys, kv.values, strict=True)]
        self._page = kv.page_size
        self._trash = kv.num_blocks_allocated - 1
        self.decode_sizes: list[int] = []
        self.mixed_shapes: list[tuple[int, int, int]] = []

    def window(self, layer: int) -> None:
        return None

    def plan(self, rows: PackedRows) -> Any:
        return self._plain.plan(rows)

    def plan_decode(self, rows: PackedRows, num_rows: int, max_blocks: int) -> FixedPlan:
        self.decode_sizes.append(num_rows)
        assert rows.block_tables is not None and len(rows.starts) <= num_rows
        plan = self._empty(num_rows, num_rows * max_blocks * self._page, (num_rows, max_blocks))
        for row in range(num_rows):
            real = row < len(rows.starts)
            table = rows.block_tables[0][rows.table_of[row]] if real else [self._trash]
            end = int(rows.starts[row]) + 1 if real else 1
            assert end <= max_blocks * self._page
            first = row * max_blocks * self._page
            self._fill(plan, row, first, table, end - 1, end)
        return plan

    def plan_mixed(self, rows: PackedRows, num_tokens: int, num_kv: int, num_rows: int, most_length: int) -> FixedPlan:
        self.mixed_shapes.append((num_tokens, num_kv, num_rows))
        assert rows.block_tables is not None and len(rows.starts) <= num_rows and rows.counts.sum() == num_tokens
        plan, first = self._empty(num_tokens, num_kv, (num_tokens, num_kv)), 0
        for row, table in enumerate(rows.block_tables[0][rows.table_of]):
            start, end = int(rows.starts[row]), int(rows.starts[row] + rows.counts[row])
            self._fill(plan, int(rows.offsets[row]), first, table, start, end)
            first += end
        assert first <= num_kv
        return plan

    def _empty(self, tokens: int, kv: int, widths: tuple[int, int]) -> FixedPlan:
        integers = torch.zeros(tokens, dtype=torch.int64), torch.zeros(kv, dtype=torch.int64)
        return FixedPlan(*integers, torch.zeros(tokens, kv, dtype=torch.bool), widths)

    def _fill(self, plan: FixedPlan, token: int, first: int, table: Sequence[int], start: int, end: int) -> None:
        positions = np.arange(end)
        slots = torch.from_numpy(np.array(table)[positions // self._page] * self._page + positions % self._page)
        plan.reads[first : first + end] = slots
        plan.writes[token : token + end - start] = slots[start:]
        for i in range(end - start):
            plan.seen[token + i, first : first + start + i + 1] = True

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor, plan: Any) -> None:
        if not isinstance(plan, FixedPlan):
            return self._plain.write_kv(layer, key, value, plan)
        block, place = plan.writes // self._page, plan.writes % self._page
        for cache, new in zip(self._caches[layer], (key, value), strict=True):
            cache[:, block, place] = new

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: Any,
        scaling: float | None,
        *others: Any,
    ) -> torch.Tensor:
        if not isinstance(plan, FixedPlan):
            return self._plain.attend(layer, query, key, value, plan, scaling, *others)
        block, place = plan.reads // self._page, plan.reads % self._page
        keys, values = (cache[:, block, place] for cache in self._caches[layer])
        out = scaled_dot_product_attention(
            query.transpose(0, 1), keys, values, attn_mask=plan.seen, scale=scaling, enable_gqa=True
        )
        return out.transpose(0, 1)


class _Calls(TorchDispatchMode):
    """What a function launches: each operation, its shapes and numbers, and the memory that it did not make itself."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outside = self.note(str(func), (args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        results = [_address(leaf) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self._made.update(ptr for ptr in results if ptr not in outside)
        return out

    def note(self, name: str, arguments: Any) -> list[int]:
        """Keeps a launch; where its tensors lie that were not made inside."""
        leaves = tree_leaves(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        outside = [ptr for ptr in map(_address, tensors) if ptr not in self._made]
        numbers = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        self.calls.append((name, [list(tensor.shape) for tensor in tensors], str(numbers), outside))
        return outside


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class FakeGraph:
    """Runs the function again, which must do exactly what it did when it was recorded, on the same memory."""

    def __init__(self, run: Callable[[], None]) -> None:
        run()  # as a device does, before it records
        self._run = run
        self.replays = 0
        self._calls = self._traced()

    def replay(self) -> None:
        self.replays += 1
        for old, new in zip(self._calls, self._traced(), strict=True):
            if old != new:
                raise RuntimeError(f"a recording cannot do {new}: recorded was {old}")

    def _traced(self) -> list[Any]:
        trace = _Calls()
        with kernels_told(trace.note), trace:
            self._run()
        return trace.calls


class FakeGraphs:
    """A `GraphBackend`."""

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []

    def capture(self, run: Callable[[], None]) -> FakeGraph:
        self.graphs.append(FakeGraph(run))
        return self.graphs[-1]
