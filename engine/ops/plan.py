"""How `TorchOps` does a step: which lines of the cache are written and read, in what portions, under which masks.

Made once a step, for each layer group, from the rows and their block tables. In a group with a window only blocks
that a row still sees are read. Computes on the host; knows no layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from engine.execution.kv_tensors import KVTensors
from engine.ops.interface import PackedRows

BUCKET_BYTES = 1 << 20  # of K, and of V: a bucket that stays in a core's cache is read twice at little cost
_PADDING_SHARE = 4  # a bucket's padding may be 1/4 of what it reads,
_PADDING_BYTES = 1 << 17  # or this much, below which one more bucket costs more than the padding


@dataclass(slots=True)
class Bucket:
    """Rows of one token, tokens [first, last) of the packed order, padded to `length` context tokens.

    Attributes:
        index: int64 [rows * kv_heads * pages], (block, head) lines of the cache in the order of the gathered buffer.
        bias: [rows, 1, 1, length], 0 or -inf, in the cache's dtype; None when no row is padded.
        behind: bool [rows, 1, page, 1], tokens of a row's first page that lie behind its window; None when none do.
    """

    first: int
    last: int
    length: int
    index: torch.Tensor
    bias: torch.Tensor | None
    behind: torch.Tensor | None


@dataclass(slots=True)
class Chunk:
    """A row of several tokens, [first, last) of the packed order, after `start` cached ones.

    Attributes:
        index: as in `Bucket`, for what the row sees of its context; None when nothing is cached before it.
        base: position of the first token that `index` covers.
    """

    first: int
    last: int
    start: int
    index: torch.Tensor | None = None
    base: int = 0


@dataclass(slots=True)
class GroupPlan:
    """One step for the layers of one group.

    Attributes:
        slots: int64 [kv_heads * tokens], the (block, head, offset) line that each token's K/V goes to; None: nowhere.
        begun: int64, blocks that this step begins and does not fill.
    """

    chunks: list[Chunk]
    slots: torch.Tensor | None = None
    begun: torch.Tensor | None = None
    buckets: list[Bucket] = field(default_factory=list)


class Planner:
    """Makes the parts of a `GroupPlan` for one cache. `tables` is the group's array in `PackedRows.block_tables`."""

    def __init__(self, kv: KVTensors) -> None:
        self.heads, self.page = kv.num_kv_heads, kv.page_size
        self.dtype = kv.dtype
        self._page_bytes = kv.page_size * kv.num_kv_heads * kv.head_dim * kv.dtype.itemsize

    def slots(self, rows: PackedRows, tables: np.ndarray) -> torch.Tensor:
        """Where the step's tokens are written.

        Raises:
            ValueError: a token has no block.
        """
        positions, table_of = rows.starts, rows.table_of
        if rows.num_single < len(positions):
            positions = np.arange(rows.counts.sum()) + np.repeat(rows.starts - rows.offsets, rows.counts)
            table_of = np.repeat(table_of, rows.counts)
        pages, places = np.divmod(positions, self.page)
        if len(pages) and pages.max() >= tables.shape[1]:
            raise ValueError("a block table does not cover the tokens of its row")
        blocks = tables[table_of, pages]
        if not blocks.all():
            raise ValueError("a block table does not cover the tokens of its row")
        lines = blocks * self.heads + np.arange(self.heads)[:, None]
        return self.tensor((lines * self.page + places).reshape(-1))

    def begun(self, rows: PackedRows, tables: np.ndarray) -> torch.Tensor | None:
        """Blocks whose rest must be cleared, because it will be read before it is written."""
        begun = self.begun_blocks(rows, tables)
        return self.tensor(begun) if len(begun) else None

    def begun_blocks(self, rows: PackedRows, tables: np.ndarray) -> np.ndarray:
        """As `begun`, int64 on the host."""
        ends = rows.starts + rows.counts
        last_pages = (ends - 1) // self.page
        begun = (last_pages * self.page >= rows.starts) & (ends % self.page != 0)
        return tables[rows.table_of[begun], last_pages[begun]].astype(np.int64)

    def chunks(self, rows: PackedRows, tables: np.ndarray | None, window: int | None) -> list[Chunk]:
        """The rows of several tokens; without tables all rows, which then start at 0."""
        chunks = []
        for row in range(0 if tables is None else rows.num_single, len(rows.starts)):
            first, start, count = int(rows.offsets[row]), int(rows.starts[row]), int(rows.counts[row])
            chunk = Chunk(first, first + count, start)
            if start and tables is not None:
                head = (0 if window is None else max(0, start - window + 1)) // self.page
                seen = tables[rows.table_of[row], head : -(-(start + count) // self.page)]
                chunk.index, chunk.base = self.lines(seen[None]), head * self.page
            chunks.append(chunk)
        return chunks

    def buckets(self, rows: PackedRows, tables: np.ndarray, window: int | None) -> list[Bucket]:
        """The rows of one token; greedy in their order, so that neighbours have contexts of similar length."""
        starts = rows.starts[: rows.num_single]
        heads = first_seen(starts, window) // self.page
        pages = starts // self.page + 1 - heads
        sizes = pages.tolist()
        buckets, first = [], 0
        while first < len(sizes):
            height = read = sizes[first]
            last = first + 1
            while last < len(sizes):
                taller, more = max(height, sizes[last]), read + sizes[last]
                total = (last + 1 - first) * taller
                allowed = max(more // _PADDING_SHARE, _PADDING_BYTES // self._page_bytes)
                if total * self._page_bytes > BUCKET_BYTES or total - more > allowed:
                    break
                height, read, last = taller, more, last + 1
            span = slice(first, last)
            buckets.append(self._bucket(rows, span, heads[span], height, tables, window))
            first = last
        return buckets

    def _bucket(
        self, rows: PackedRows, span: slice, heads: np.ndarray, height: int, tables: np.ndarray, window: int | None
    ) -> Bucket:
        starts = rows.starts[span]
        pages = heads[:, None] + np.arange(height)
        blocks = tables[rows.table_of[span, None], np.minimum(pages, tables.shape[1] - 1)]
        blocks = np.where(pages <= (starts // self.page)[:, None], blocks, 0)  # padded with the null block
        first = heads * self.page
        hidden = np.arange(height * self.page) > (starts - first)[:, None]
        behind = None
        if window is not None:
            behind = np.arange(self.page) < (first_seen(starts, window) - first)[:, None]
            hidden[:, : self.page] |= behind
        bias = None
        if hidden.any():
            bias = torch.zeros((len(starts), 1, 1, height * self.page), dtype=self.dtype)
            bias.masked_fill_(self.tensor(hidden[:, None, None]), float("-inf"))
        return Bucket(
            span.start,
            span.stop,
            height * self.page,
            self.lines(blocks),
            bias,
            self.tensor(behind[:, None, :, None]) if behind is not None and behind.any() else None,
        )

    def lines(self, blocks: np.ndarray) -> torch.Tensor:
        """[rows, pages] blocks -> their (block, head) lines, ordered row, head, page."""
        return self.tensor((blocks[:, None, :] * self.heads + np.arange(self.heads)[:, None]).reshape(-1))

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        """On the host: the step is sent to the device as a whole."""
        return torch.from_numpy(array)


def first_seen(positions: np.ndarray, window: int | None) -> np.ndarray:
    """The first position that a query at each of `positions` sees."""
    return np.zeros_like(positions) if window is None else np.maximum(positions - window + 1, 0)
