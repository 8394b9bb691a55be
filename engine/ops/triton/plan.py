"""Where the kernels find the rows of a step: one vector of numbers, shared by all layers of a group.

Made once a step by `TritonOps`, on the host. Sizes are what the step has, or what a recorded graph allows for. Knows
no layers and needs no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from engine.ops.interface import PackedRows
from engine.ops.plan import first_seen

SPLIT = 256  # tokens of context that one program reads for a row of one token; a multiple of every tile of keys
_ROW_ARRAYS = 6


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much a plan has room for.

    Attributes:
        rows, tokens: of the step.
        blocks: entries of all rows' block tables.
        splits: of the contexts of all rows of one token; 0: there are none.
        chunked: whether there may be rows of several tokens.
    """

    rows: int
    tokens: int
    blocks: int
    splits: int
    chunked: bool


class Slots(Protocol):
    """Of a plan what the kernels that write K and V read; see `GroupPlan`."""

    @property
    def paged(self) -> bool: ...

    @property
    def slots(self) -> torch.Tensor: ...


@dataclass
class GroupPlan:
    """One step for the layers of one group; everything but what `numbers` holds follows from the capacity.

    Attributes:
        numbers: int32, made on the host and sent to the device; the properties are its parts.
        paged: False: the step's own K and V are all that is read, and nothing is written.
    """

    numbers: torch.Tensor
    capacity: Capacity
    paged: bool

    def part(self, index: int, size: int) -> torch.Tensor:
        """The `index`-th array of one number a row, of which `size` are meant."""
        return self.numbers[index * self.capacity.rows : index * self.capacity.rows + size]

    # Each int32 [rows].

    @cached_property
    def starts(self) -> torch.Tensor:
        """Tokens in the cache before the step."""
        return self.part(0, self.capacity.rows)

    @cached_property
    def counts(self) -> torch.Tensor:
        """Tokens of the step, of the rows of several; 0 of others."""
        return self.part(1, self.capacity.rows)

    @cached_property
    def offsets(self) -> torch.Tensor:
        """Where the row's tokens begin in the packed order."""
        return self.part(2, self.capacity.rows)

    @cached_property
    def firsts(self) -> torch.Tensor:
        """Where the row's blocks begin in `tables`."""
        return self.part(3, self.capacity.rows)

    @cached_property
    def first_splits(self) -> torch.Tensor:
        """Where the row's splits begin in `splits`."""
        return self.part(4, self.capacity.rows)

    @cached_property
    def num_splits(self) -> torch.Tensor:
        """How many of them are its own; 0 of rows of several tokens."""
        return self.part(5, self.capacity.rows)

    @cached_property
    def all_splits(self) -> torch.Tensor:
        """int32 [1], the splits of all rows."""
        return self._rest(0, 1)

    @cached_property
    def slots(self) -> torch.Tensor:
        """int32 [tokens], block * page + place that each token's K/V goes to; -1: nowhere."""
        return self._rest(1, self.capacity.tokens)

    @cached_property
    def splits(self) -> torch.Tensor:
        """int32 [splits, 2], the row and which of its splits, counted from the start of its context."""
        return self._rest(1 + self.capacity.tokens, 2 * self.capacity.splits)

    @cached_property
    def tables(self) -> torch.Tensor:
        """int32 [blocks], the rows' blocks one row after another."""
        return self._rest(1 + self.capacity.tokens + 2 * self.capacity.splits, self.capacity.blocks)

    def _rest(self, start: int, size: int) -> torch.Tensor:
        start += _ROW_ARRAYS * self.capacity.rows
        return self.numbers[start : start + size]


@dataclass(slots=True)
class StepPlan:
    """One plan a layer group: `GroupPlan`, or that of other operations that write by the same kernels."""

    groups: list[Any]


class Planner:
    """Makes `GroupPlan`s for one cache."""

    def __init__(self, page: int) -> None:
        self._page = page

    def without_cache(self, rows: PackedRows) -> GroupPlan:
        """All rows as rows of several tokens, which see the step's own K and V."""
        count = len(rows.starts)
        tokens = int(rows.counts.sum())
        capacity = Capacity(count, tokens, 0, 0, True)
        numbers = np.zeros(_ROW_ARRAYS * count + 1 + tokens, dtype=np.int32)
        lines = numbers[: _ROW_ARRAYS * count].reshape(_ROW_ARRAYS, count)
        lines[1], lines[2] = rows.counts, rows.offsets
        return GroupPlan(torch.from_numpy(numbers), capacity, False)

    def exact(self, rows: PackedRows, tables: np.ndarray, window: int | None) -> GroupPlan:
        """With the capacity that the step needs."""
        lengths = self._lengths(rows)
        _, counts = _splits(rows, window)
        tokens = int(rows.counts.sum())
        chunked = rows.num_single < len(rows.starts)
        capacity = Capacity(len(rows.starts), tokens, int(lengths.sum()), int(counts.sum()), chunked)
        return self.fixed(rows, tables, window, capacity)

    def fixed(
        self, rows: PackedRows, tables: np.ndarray, window: int | None, capacity: Capacity, trash: int | None = None
    ) -> GroupPlan:
        """With a given capacity; tokens beyond the step's are rows of one token in the block `trash`.

        Raises:
            ValueError: the rows do not fit, or a token has no block.
        """
        layout = _Layout(capacity)
        self._check(rows, tables, capacity)
        count, tokens = len(rows.starts), int(rows.counts.sum())
        lengths = self._lengths(rows)
        firsts = np.cumsum(lengths) - lengths
        used = int(lengths.sum())
        row_of = np.repeat(np.arange(count), lengths)
        layout.tables[:used] = tables[rows.table_of[row_of], np.arange(used) - firsts[row_of]]
        heads, splits = _splits(rows, window)
        first_splits = np.cumsum(splits) - splits
        layout.rows[:, :count] = (
            rows.starts,
            np.where(np.arange(count) < rows.num_single, 0, rows.counts),
            rows.offsets,
            firsts,
            first_splits,
            splits,
        )
        total = int(splits.sum())
        split_row = np.repeat(np.arange(count), splits)
        layout.splits[:total, 0] = split_row
        layout.splits[:total, 1] = np.arange(total) + (heads - first_splits)[split_row]
        layout.rows[2, count:] = tokens
        layout.slots[:tokens] = self._slots(rows, tables)
        if trash is not None:
            total = layout.pad_rows(count, used, total, trash, self._page)
        layout.total[0] = total
        return GroupPlan(torch.from_numpy(layout.numbers), capacity, True)

    def _lengths(self, rows: PackedRows) -> np.ndarray:
        """Blocks of each row's context after the step."""
        return -(-(rows.starts + rows.counts) // self._page)

    def _check(self, rows: PackedRows, tables: np.ndarray, capacity: Capacity) -> None:
        lengths = self._lengths(rows)
        if len(lengths) > capacity.rows or rows.counts.sum() > capacity.tokens or lengths.sum() > capacity.blocks:
            raise ValueError(
                f"{len(lengths)} rows of {rows.counts.sum()} tokens and {lengths.sum()} blocks do not fit a plan for "
                f"{capacity.rows} rows, {capacity.tokens} tokens and {capacity.blocks} blocks"
            )
        if len(lengths) and lengths.max() > tables.shape[1]:
            raise ValueError("a block table does not cover the tokens of its row")

    def _slots(self, rows: PackedRows, tables: np.ndarray) -> np.ndarray:
        positions, table_of = rows.starts, rows.table_of
        if rows.num_single < len(positions):
            positions = np.arange(rows.counts.sum()) + np.repeat(rows.starts - rows.offsets, rows.counts)
            table_of = np.repeat(table_of, rows.counts)
        blocks = tables[table_of, positions // self._page]
        if not blocks.all():
            raise ValueError("a block table does not cover the tokens of its row")
        return blocks * self._page + positions % self._page


class _Layout:
    """The parts of a plan's vector while it is filled, all 0 at first; tokens of no row are written nowhere."""

    def __init__(self, capacity: Capacity) -> None:
        sizes = (_ROW_ARRAYS * capacity.rows, 1, capacity.tokens, 2 * capacity.splits, capacity.blocks)
        self.numbers = np.zeros(sum(sizes), dtype=np.int32)
        ends = np.cumsum(sizes)
        rows, self.total, self.slots, splits, self.tables = np.split(self.numbers, ends[:-1])
        self.rows = rows.reshape(_ROW_ARRAYS, capacity.rows)
        self.splits = splits.reshape(-1, 2)
        self.slots[:] = -1

    def pad_rows(self, count: int, used: int, total: int, trash: int, page: int) -> int:
        """Makes the rows from `count` on rows of one token, alone in the trash block; all splits then."""
        missing = self.rows.shape[1] - count
        each = np.arange(missing)
        self.tables[used : used + missing] = trash
        self.rows[2, count:] = count + each
        self.rows[3, count:] = used + each
        self.rows[4, count:] = total + each
        self.rows[5, count:] = 1
        self.splits[total : total + missing, 0] = count + each
        self.slots[count:] = trash * page
        return total + missing


def _splits(rows: PackedRows, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """The first split that each row reads, and how many; none of rows of several tokens."""
    heads = first_seen(rows.starts, window) // SPLIT
    counts = rows.starts // SPLIT + 1 - heads
    counts[rows.num_single :] = 0
    return heads, counts


def most_splits(tokens: int) -> int:
    """Of a context of so many tokens."""
    return -(-tokens // SPLIT)
