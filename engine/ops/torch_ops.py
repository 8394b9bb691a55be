"""The operations of any torch device, in plain torch: the cache write, and attention by SDPA.

Bound to one cache; made by `make_ops`. Rows of one token are attended in buckets of similar length whose K/V is
gathered into small buffers that stay; a longer row is attended alone. Knows nothing of requests or models.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from engine.cache.groups import LayerGroup
from engine.execution.kv_tensors import KVTensors
from engine.ops.explicit import Scores, explicit_attention
from engine.ops.fixed_decode import FixedPlan, attend_fixed, plan_fixed
from engine.ops.interface import PackedRows
from engine.ops.plan import BUCKET_BYTES, Bucket, Chunk, GroupPlan, Planner
from engine.ops.triton import sampling_kernels

_QUERY_CHUNK = 256  # queries that are attended at once
_MIN_REACH = 1024


class TorchOps:
    """`Ops` for a cache on any device that torch supports.

    Attributes:
        fused: whether SDPA computes what it can; what it cannot is written out.
        sampling: kernels for the sampler, on CUDA devices where Triton runs.
        why_plain: what keeps faster operations from being used, where they were wanted.
    """

    fused = True
    why_plain = "plain operations were asked for"

    def __init__(self, kv: KVTensors, groups: Sequence[LayerGroup] | None = None) -> None:
        groups = groups or [LayerGroup(tuple(range(len(kv.keys))))]
        heads, page, dim = kv.num_kv_heads, kv.page_size, kv.head_dim
        self._heads, self._page, self._dim = heads, page, dim
        self.kv_shape = (heads, dim)
        self._dtype, self._device = kv.dtype, kv.device
        self.sampling = sampling_kernels(kv.device)
        self._windows = [group.window for group in groups]
        self._places = {
            layer: (number, tensor) for number, group in enumerate(groups) for tensor, layer in enumerate(group.layers)
        }
        self.supports_graphs = (False, self._windows == [None])
        self._planner = Planner(kv)
        self._blocks = [(k, v) for k, v in zip(kv.keys, kv.values, strict=True)]
        self._lines = [(k.view(-1, page * dim), v.view(-1, page * dim)) for k, v in self._blocks]
        self._slots = [(k.view(-1, dim), v.view(-1, dim)) for k, v in self._blocks]
        self._buffers = self._make_buffers(BUCKET_BYTES // kv.dtype.itemsize)
        self._bands: dict[int | None, torch.Tensor] = {}

    def window(self, layer: int) -> int | None:
        """See `Ops.window`."""
        return self._windows[self._places[layer][0]]

    # Planning

    def plan(self, rows: PackedRows) -> list[GroupPlan]:
        """One plan a group. Cost: the rows' tokens, and a number a block of context that is read."""
        if rows.block_tables is None:
            return [GroupPlan(self._planner.chunks(rows, None, window)) for window in self._windows]
        pairs = zip(rows.block_tables, self._windows, strict=True)
        return [self._plan_group(rows, tables, window) for tables, window in pairs]

    def _plan_group(self, rows: PackedRows, tables: np.ndarray, window: int | None) -> GroupPlan:
        planner = self._planner
        return GroupPlan(
            chunks=planner.chunks(rows, tables, window),
            slots=planner.slots(rows, tables),
            begun=planner.begun(rows, tables),
            buckets=planner.buckets(rows, tables, window),
        )

    def plan_decode(self, rows: PackedRows, num_rows: int, max_blocks: int) -> FixedPlan:
        """See `Ops.plan_decode`."""
        if not self.supports_graphs[1]:
            raise NotImplementedError("layers with a sliding window have no decode plan of fixed shapes")
        return plan_fixed(self._planner, rows, num_rows, max_blocks, self._blocks[0][0].shape[0] - 1)

    # Each layer

    def write_kv(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, plan: Sequence[GroupPlan] | FixedPlan
    ) -> None:
        """A block that is begun is cleared first: what it held before must not reach even a masked score."""
        group, tensor = self._places[layer]
        part = plan if isinstance(plan, FixedPlan) else plan[group]
        if part.slots is None:
            return
        for blocks, lines, new in zip(self._blocks[tensor], self._slots[tensor], (key, value), strict=True):
            if part.begun is not None:
                blocks.index_fill_(0, part.begun, 0)
            lines.index_copy_(0, part.slots, new.reshape(-1, self._dim).to(self._dtype))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: Sequence[GroupPlan] | FixedPlan,
        scaling: float | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Ops.attend`."""
        group, tensor = self._places[layer]
        rule = Scores(scaling, softcap, sinks)
        if isinstance(plan, FixedPlan):
            return attend_fixed(plan, query, self._lines[tensor], self._attention, rule)
        out = query.new_empty(query.shape)
        for bucket in plan[group].buckets:
            self._attend_bucket(tensor, query, bucket, rule, out)
        for chunk in plan[group].chunks:
            span = slice(chunk.first, chunk.last)
            if chunk.index is not None:
                keys, values = self._gather(tensor, chunk.index, 1)
            else:
                keys, values = key[None, :, span].to(self._dtype), value[None, :, span].to(self._dtype)
            self._attend_chunk(query, keys, values, chunk, self._windows[group], rule, out)
        return out

    def _attend_bucket(self, tensor: int, query: torch.Tensor, bucket: Bucket, rule: Scores, out: torch.Tensor) -> None:
        span, rows = slice(bucket.first, bucket.last), bucket.last - bucket.first
        keys, values = self._gather(tensor, bucket.index, rows)
        if bucket.behind is not None:
            for gathered in (keys, values):
                gathered[:, :, : self._page].masked_fill_(bucket.behind, 0)
        result = self._attention(query[span, :, None].to(self._dtype), keys, values, bucket.bias, rule)
        out[span] = result[:, :, 0]

    def _attend_chunk(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        chunk: Chunk,
        window: int | None,
        rule: Scores,
        out: torch.Tensor,
    ) -> None:
        """Queries in portions, each with the keys that any of them sees. `keys` begin at position `chunk.base`."""
        count = chunk.last - chunk.first
        if chunk.index is None and self._is_plain(rule) and (window is None or count <= window):
            queries = query[None, chunk.first : chunk.last].transpose(1, 2).to(self._dtype)
            gqa = query.shape[1] != self._heads
            result = sdpa(queries, keys, values, is_causal=True, scale=rule.scaling, enable_gqa=gqa)
            out[chunk.first : chunk.last] = result[0].transpose(0, 1)
            return
        for first in range(chunk.first, chunk.last, _QUERY_CHUNK):
            last = min(first + _QUERY_CHUNK, chunk.last)
            start, end = chunk.start + first - chunk.first, chunk.start + last - chunk.first
            seen = 0 if window is None else max(0, start - window + 1)
            part = slice(seen - chunk.base, end - chunk.base)
            queries = query[None, first:last].transpose(1, 2).to(self._dtype)
            bias = self._band(window, start - seen, last - first)
            result = self._attention(queries, keys[:, :, part], values[:, :, part], bias, rule)
            out[first:last] = result[0].transpose(0, 1)

    def _attention(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, rule: Scores
    ) -> torch.Tensor:
        """Arguments and result as of `explicit_attention`."""
        if not self._is_plain(rule):
            return explicit_attention(query, keys, values, bias, rule)
        if query.shape[2] > 1:
            gqa = query.shape[1] != keys.shape[1]
            return sdpa(query, keys, values, attn_mask=bias, scale=rule.scaling, enable_gqa=gqa)
        # The heads of a group are the queries of their KV head: one read of K and V serves them all.
        grouped = query.reshape(keys.shape[0], keys.shape[1], -1, self._dim)
        return sdpa(grouped, keys, values, attn_mask=bias, scale=rule.scaling).view(query.shape)

    def _is_plain(self, rule: Scores) -> bool:
        return self.fused and rule.softcap is None and rule.sinks is None

    def _gather(self, tensor: int, index: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V lines, each as [rows, kv_heads, length, head_dim]; overwritten by the next call."""
        size = len(index) * self._page * self._dim
        if size > self._buffers[0].numel():
            self._buffers = self._make_buffers(1 << (size - 1).bit_length())
        gathered = []
        for lines, buffer in zip(self._lines[tensor], self._buffers, strict=True):
            target = buffer[:size].view(len(index), -1)
            torch.index_select(lines, 0, index, out=target)
            gathered.append(target.view(rows, self._heads, -1, self._dim))
        return gathered[0], gathered[1]

    def _make_buffers(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode(False):
            return tuple(torch.empty(size, dtype=self._dtype, device=self._device) for _ in range(2))  # type: ignore[return-value]

    def _band(self, window: int | None, back: int, count: int) -> torch.Tensor:
        """[count, back + count], -inf where a query does not see a key; the first query sees `back` keys before it.

        On CPU a view of one matrix a window, with its diagonal at column `reach`. It grows to the longest `back` seen.
        """
        band = self._bands.get(window)
        if band is None or band.shape[1] < back + _QUERY_CHUNK:
            reach = max(_MIN_REACH, 1 << (back - 1).bit_length())
            with torch.inference_mode(False):
                hidden = torch.full((_QUERY_CHUNK, reach + _QUERY_CHUNK), float("-inf"), dtype=self._dtype)
                band = hidden.triu(reach + 1)
                if window is not None:
                    band += hidden.tril_(reach - window)
                self._bands[window] = band = band.to(self._device)
        reach = band.shape[1] - _QUERY_CHUNK
        part = band[:count, reach - back : reach + count]
        return part if self._device.type == "cpu" else part.contiguous()  # kernels of GPUs read 16 bytes at once
