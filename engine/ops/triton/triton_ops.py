"""The operations on a GPU in Triton: `Ops` that the models of transformers call layer by layer.

Made by `make_ops` where `probe` allows it. Every step has a plan whose shapes can be fixed, so that graphs can record
it. Knows nothing of requests or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.cache.groups import LayerGroup
from engine.execution.kv_tensors import KVTensors
from engine.ops.interface import PackedRows
from engine.ops.triton import probe
from engine.ops.triton.plan import Capacity, GroupPlan, Planner, StepPlan, most_splits
from engine.sampling.kernels import SamplingKernels

if TYPE_CHECKING:
    import numpy as np

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_DIM = 256


class TritonOps:
    """`Ops` for a cache on a CUDA device, or on CPU in Triton's interpreter.

    Attributes:
        kv_shape: (kv_heads, head_dim) of the cache.
        supports_graphs: all of them.
        sampling: kernels for the sampler.

    Raises:
        NotImplementedError: the kernels do not run here, or not on such a cache; the text says why.
    """

    supports_graphs = (True, True)

    def __init__(self, kv: KVTensors, groups: Sequence[LayerGroup] | None = None) -> None:
        if (why := probe(kv.device)) is not None:
            raise NotImplementedError(why)
        if kv.dtype not in _DTYPES:
            raise NotImplementedError(f"there is no Triton kernel for {kv.dtype}")
        if kv.head_dim > _MOST_DIM:
            raise NotImplementedError(f"the Triton kernels are for heads of up to {_MOST_DIM}, not {kv.head_dim}")
        from engine.ops.triton import decode, prefill, rotary, sampling, tile, write

        self.sampling: SamplingKernels | None = sampling
        self._decode, self._prefill, self._rule = decode.decode, prefill.prefill, tile.ScoreRule.of
        self._write, self._rotate_and_write = write.write, rotary.rotate_and_write
        groups = groups or [LayerGroup(tuple(range(len(kv.keys))))]
        self.kv_shape = (kv.num_kv_heads, kv.head_dim)
        self._kv, self._trash, self._page = kv, kv.num_blocks_allocated - 1, kv.page_size
        self._windows = [group.window for group in groups]
        self._places = {
            layer: (number, tensor) for number, group in enumerate(groups) for tensor, layer in enumerate(group.layers)
        }
        self._planner = Planner(kv.page_size, kv.device)

    def window(self, layer: int) -> int | None:
        """See `Ops.window`."""
        return self._windows[self._places[layer][0]]

    # Planning

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

    def plan_mixed(self, rows: PackedRows, num_tokens: int, num_kv: int, num_rows: int) -> StepPlan:
        """See `FixedMixedOps`."""
        blocks = num_kv // self._page + num_rows
        splits = most_splits(num_kv) + num_rows
        return self._fixed(rows, Capacity(num_rows, num_tokens, blocks, splits, chunked=True), None)

    def _fixed(self, rows: PackedRows, capacity: Capacity, trash: int | None) -> StepPlan:
        pairs = self._groups(rows)
        return StepPlan([self._planner.fixed(rows, tables, window, capacity, trash) for tables, window in pairs])

    def _groups(self, rows: PackedRows) -> list[tuple[np.ndarray, int | None]]:
        return list(zip(rows.block_tables or [], self._windows, strict=True))

    # Each layer

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor, plan: StepPlan) -> None:
        """See `Ops.write_kv`."""
        group, tensor = self._places[layer]
        part = plan.groups[group]
        if part.paged:
            self._write(_inner(key), _inner(value), self._kv.keys[tensor], self._kv.values[tensor], part)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: StepPlan,
        scaling: float | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Ops.attend`."""
        group, tensor = self._places[layer]
        keys, values = self._kv.keys[tensor], self._kv.values[tensor]
        if not plan.groups[group].paged:
            keys, values = key.to(keys.dtype).contiguous(), value.to(keys.dtype).contiguous()
        return self._attend(group, _inner(query), keys, values, plan.groups, (scaling, softcap), sinks)

    def rotate_and_attend(
        self,
        layer: int,
        projected: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        table: torch.Tensor,
        groups: Sequence[GroupPlan],
        *,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        epsilon: float,
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Norms, rotates, writes K and V and attends, for models that run fused.

        Args:
            projected: query [tokens, heads * dim], key and value [tokens, kv_heads * dim], the last dimension
                contiguous.
            positions, table, norms, epsilon: as of `rotate_and_write`.
            groups: of the step's plan.
            scaling, softcap: as of `Ops.attend`, whose result this has.
        """
        group, tensor = self._places[layer]
        cache = self._kv.keys[tensor], self._kv.values[tensor]
        rotated = self._rotate_and_write(*projected, positions, table, cache, groups[group], norms, epsilon)
        return self._attend(group, *rotated, groups, (scaling, softcap), None)

    def _attend(
        self,
        group: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        groups: Sequence[GroupPlan],
        scores: tuple[float | None, float | None],
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        part, window = groups[group], self._windows[group]
        out = query.new_empty(query.shape)
        rule = self._rule(query.shape[2], *scores)
        sinks = None if sinks is None else sinks.contiguous()
        if part.capacity.splits:
            self._decode(query, keys, values, part, out, window=window, rule=rule, sinks=sinks)
        if part.capacity.chunked:
            self._prefill(query, keys, values, part, out, window=window, rule=rule, sinks=sinks)
        return out


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    """With a contiguous last dimension."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
