"""The operations of any torch device, in plain torch: the cache write, and attention by SDPA.

Bound to one cache; made by `make_ops`. Rows of one token are attended in buckets of similar length whose K/V is
gathered into small buffers that stay; a longer row is attended alone. Knows nothing of requests or models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from engine.execution.kv_tensors import KVTensors
from engine.ops.interface import PackedRows

_BUCKET_BYTES = 1 << 20  # of K, and of V: a bucket that stays in a core's cache is read twice at little cost
_PADDING_SHARE = 4  # a bucket's padding may be 1/4 of what it reads,
_PADDING_BYTES = 1 << 17  # or this much, below which one more bucket costs more than the padding
_QUERY_CHUNK = 256  # queries that attend to a cached context at once


@dataclass(slots=True)
class Bucket:
    """Rows of one token, tokens [first, last) of the packed order, padded to `length` context tokens.

    Attributes:
        index: int64 [rows * kv_heads * pages], (block, head) lines of the cache in the order of the gathered buffer.
        bias: [rows, 1, 1, length], 0 or -inf, in the cache's dtype; None when no row is padded.
    """

    first: int
    last: int
    length: int
    index: torch.Tensor
    bias: torch.Tensor | None


@dataclass(slots=True)
class Chunk:
    """A row of several tokens, [first, last) of the packed order, after `start` cached ones.

    Attributes:
        index: as in `Bucket`, for the row's whole context; None when nothing is cached before it.
    """

    first: int
    last: int
    start: int
    index: torch.Tensor | None


@dataclass(slots=True)
class Plan:
    """One step for `TorchOps`.

    Attributes:
        slots: int64 [kv_heads * tokens], the (block, head, offset) line that each token's K/V goes to; None: nowhere.
        begun: int64, blocks that this step begins and does not fill.
    """

    slots: torch.Tensor | None
    begun: torch.Tensor | None
    buckets: list[Bucket]
    chunks: list[Chunk]


class TorchOps:
    """`Ops` for a cache on any device that torch supports."""

    def __init__(self, kv: KVTensors) -> None:
        heads, page, dim = kv.num_kv_heads, kv.page_size, kv.head_dim
        self._heads, self._page, self._dim = heads, page, dim
        self.kv_shape = (heads, dim)
        self._dtype, self._device = kv.dtype, kv.device
        self._blocks = [(k, v) for k, v in zip(kv.keys, kv.values, strict=True)]
        self._lines = [(k.view(-1, page * dim), v.view(-1, page * dim)) for k, v in self._blocks]
        self._slots = [(k.view(-1, dim), v.view(-1, dim)) for k, v in self._blocks]
        self._token_bytes = heads * dim * kv.dtype.itemsize
        self._buffers = self._make_buffers(_BUCKET_BYTES // kv.dtype.itemsize)
        self._causal = torch.empty(0, 0)

    # Planning

    def plan(self, rows: PackedRows) -> Plan:
        """Cost: the rows' tokens, and a number a block of context."""
        single = rows.num_single
        spans = [(int(o), int(o + c), int(s)) for o, c, s in zip(rows.offsets, rows.counts, rows.starts, strict=True)]
        if rows.block_tables is None:
            return Plan(None, None, [], [Chunk(*span, index=None) for span in spans])
        (tables,) = rows.block_tables
        ends = rows.starts + rows.counts
        chunks = []
        for (first, last, start), table in zip(spans[single:], tables[single:], strict=True):
            blocks = np.array([table[: -(-(start + last - first) // self._page)]]) if start else None
            chunks.append(Chunk(first, last, start, None if blocks is None else self._lines_of(blocks)))
        return Plan(
            slots=self._plan_slots(rows, tables),
            begun=self._plan_begun(rows.starts, ends, tables),
            buckets=self._plan_buckets(ends[:single], tables),
            chunks=chunks,
        )

    def _plan_slots(self, rows: PackedRows, tables: list[list[int]]) -> torch.Tensor:
        page = self._page
        heads, tails = rows.starts // page, (rows.starts + rows.counts - 1) // page
        touched = np.array(
            [block for table, head, tail in zip(tables, heads, tails, strict=True) for block in table[head : tail + 1]]
        )
        before = np.cumsum(tails - heads + 1) - (tails - heads + 1)
        positions = np.arange(rows.counts.sum()) + np.repeat(rows.starts - rows.offsets, rows.counts)
        blocks = touched[np.repeat(before - heads, rows.counts) + positions // page]
        lines = blocks * self._heads + np.arange(self._heads)[:, None]
        return self._tensor((lines * page + positions % page).reshape(-1))

    def _plan_begun(self, starts: np.ndarray, ends: np.ndarray, tables: list[list[int]]) -> torch.Tensor | None:
        last_pages = (ends - 1) // self._page
        begun = np.flatnonzero((last_pages * self._page >= starts) & (ends % self._page != 0))
        if not len(begun):
            return None
        return self._tensor(np.array([tables[i][last_pages[i]] for i in begun]))

    def _plan_buckets(self, ends: np.ndarray, tables: list[list[int]]) -> list[Bucket]:
        """Greedy from the longest row down, so that a bucket is as long as its first row."""
        pages = -(-ends // self._page)
        page_bytes = self._page * self._token_bytes
        buckets, first = [], 0
        while first < len(ends):
            height, last, padding = int(pages[first]), first + 1, 0
            while last < len(ends):
                padding += height - int(pages[last])
                total = (last + 1 - first) * height
                allowed = max((total - padding) // _PADDING_SHARE, _PADDING_BYTES // page_bytes)
                if total * page_bytes > _BUCKET_BYTES or padding > allowed:
                    break
                last += 1
            buckets.append(self._bucket(first, last, height, ends, tables))
            first = last
        return buckets

    def _bucket(self, first: int, last: int, height: int, ends: np.ndarray, tables: list[list[int]]) -> Bucket:
        length = height * self._page
        blocks = np.zeros((last - first, height), dtype=np.int64)  # padded with the null block
        for line, end, table in zip(blocks, ends[first:last].tolist(), tables[first:last], strict=True):
            used = -(-end // self._page)
            line[:used] = table[:used]
        bias = None
        if (ends[first:last] != length).any():
            hidden = np.arange(length) >= ends[first:last, None, None, None]
            bias = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
            bias.masked_fill_(self._tensor(hidden), float("-inf"))
        return Bucket(first, last, length, self._lines_of(blocks), bias)

    def _lines_of(self, blocks: np.ndarray) -> torch.Tensor:
        """[rows, pages] blocks -> their (block, head) lines, ordered row, head, page."""
        return self._tensor((blocks[:, None, :] * self._heads + np.arange(self._heads)[:, None]).reshape(-1))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    # Each layer

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor, plan: Plan) -> None:
        """A block that is begun is cleared first: what it held before must not reach even a masked score."""
        if plan.slots is None:
            return
        for block, slot, new in zip(self._blocks[layer], self._slots[layer], (key, value), strict=True):
            if plan.begun is not None:
                block.index_fill_(0, plan.begun, 0)
            slot.index_copy_(0, plan.slots, new.reshape(-1, self._dim).to(self._dtype))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: Plan,
        scaling: float | None,
    ) -> torch.Tensor:
        """See `Ops.attend`."""
        out = query.new_empty(query.shape)
        for bucket in plan.buckets:
            self._attend_bucket(layer, query, bucket, scaling, out)
        for chunk in plan.chunks:
            if chunk.index is None:
                self._attend_fresh(query, key, value, chunk, scaling, out)
            else:
                self._attend_chunk(layer, query, chunk, chunk.index, scaling, out)
        return out

    def _attend_bucket(
        self, layer: int, query: torch.Tensor, bucket: Bucket, scaling: float | None, out: torch.Tensor
    ) -> None:
        # The heads of a group are the queries of their KV head: one read of K and V serves them all.
        keys, values = self._gather(layer, bucket.index, bucket.last - bucket.first)
        shape = (bucket.last - bucket.first, self._heads, -1, self._dim)
        grouped = query[bucket.first : bucket.last].to(self._dtype).reshape(shape)
        result = sdpa(grouped, keys, values, attn_mask=bucket.bias, scale=scaling)
        out[bucket.first : bucket.last].view(shape).copy_(result)

    def _attend_fresh(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        chunk: Chunk,
        scaling: float | None,
        out: torch.Tensor,
    ) -> None:
        span = slice(chunk.first, chunk.last)
        result = sdpa(
            query[None, span].transpose(1, 2),
            key[None, :, span],
            value[None, :, span],
            is_causal=True,
            scale=scaling,
            enable_gqa=query.shape[1] != self._heads,
        )
        out[span] = result[0].transpose(0, 1)

    def _attend_chunk(
        self,
        layer: int,
        query: torch.Tensor,
        chunk: Chunk,
        index: torch.Tensor,
        scaling: float | None,
        out: torch.Tensor,
    ) -> None:
        keys, values = self._gather(layer, index, 1)
        for first in range(chunk.first, chunk.last, _QUERY_CHUNK):
            span = slice(first, min(first + _QUERY_CHUNK, chunk.last))
            start = chunk.start + first - chunk.first
            end = chunk.start + span.stop - chunk.first
            result = sdpa(
                query[None, span].transpose(1, 2).to(self._dtype),
                keys[:, :, :end],
                values[:, :, :end],
                attn_mask=self._causal_bias(start, end),
                scale=scaling,
                enable_gqa=query.shape[1] != self._heads,
            )
            out[span] = result[0].transpose(0, 1)

    def _gather(self, layer: int, index: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V lines, each as [rows, kv_heads, length, head_dim]; overwritten by the next call."""
        size = len(index) * self._page * self._dim
        if size > self._buffers[0].numel():
            self._buffers = self._make_buffers(1 << (size - 1).bit_length())
        gathered = []
        for lines, buffer in zip(self._lines[layer], self._buffers, strict=True):
            target = buffer[:size].view(len(index), -1)
            torch.index_select(lines, 0, index, out=target)
            gathered.append(target.view(rows, self._heads, -1, self._dim))
        return gathered[0], gathered[1]

    def _make_buffers(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode(False):
            return tuple(torch.empty(size, dtype=self._dtype, device=self._device) for _ in range(2))  # type: ignore[return-value]

    def _causal_bias(self, start: int, end: int) -> torch.Tensor:
        """[end - start, end], -inf where key > query, for the queries at positions [start, end).

        A window on one matrix whose diagonal lies at column `reach`; it grows to the longest start seen.
        """
        reach = self._causal.shape[1] - _QUERY_CHUNK
        if start > reach:
            reach = 1 << max(start - 1, 1023).bit_length()
            with torch.inference_mode(False):
                hidden = torch.full((_QUERY_CHUNK, reach + _QUERY_CHUNK), float("-inf"), dtype=self._dtype)
                self._causal = hidden.triu_(reach + 1).to(self._device)
        return self._causal[: end - start, reach - start : reach + end - start]
