"""`Ops` over a flash kernel and the Triton kernels: the first one attends, the others do all else.

Made by `make_ops` when settings have chosen a flash kernel and Triton runs on the device. Known models run fused on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from engine.cache.groups import LayerGroup
from engine.execution.kv_tensors import KVTensors
from engine.ops import plan as plain
from engine.ops.explicit import Scores
from engine.ops.fixed_decode import padded_rows
from engine.ops.flash.kernels import FlashKernel, FlashRows, attend_rows
from engine.ops.flash.plan import HostRows, exact_rows, mixed_rows
from engine.ops.interface import PackedRows
from engine.ops.triton.plan import Planner, StepPlan
from engine.ops.triton.triton_ops import TritonOps

_ALIGNED = 4  # numbers: each array begins at a multiple of 16 bytes


class FlashTritonOps(TritonOps):
    """`Ops` for a cache on the kernel's device, in float16 or bfloat16.

    Steps that leave the cache alone are attended by Triton. What `FlashOps` says of NaN holds here too; a step clears
    the blocks that it begins, in all layers of a group, before the first of them writes.

    Raises:
        NotImplementedError: as `TritonOps`.
    """

    def __init__(self, kernel: FlashKernel, kv: KVTensors, groups: Sequence[LayerGroup] | None = None) -> None:
        super().__init__(kv, groups)
        from engine.ops.triton.clear import BlockClearer

        self._kernel = kernel
        self.supports_graphs = (kernel.mixed_graphs, True)
        self._flash_planner = FlashPlanner(kv, kernel.rows_apart)
        sizes = [len(group.layers) for group in groups or ()] or [len(kv.keys)]
        for tensor in (*kv.keys, *kv.values):
            tensor[self._trash] = 0  # padding reads it, and it is never begun
        self._clear = [BlockClearer([*kv.keys[:size], *kv.values[:size]]) for size in sizes]

    def plan(self, rows: PackedRows) -> StepPlan:
        """See `Ops.plan`."""
        if rows.block_tables is None:
            return super().plan(rows)
        return StepPlan([self._flash_planner.flash_exact(rows, tables) for tables in rows.block_tables])

    def plan_decode(self, rows: PackedRows, num_rows: int, max_blocks: int) -> StepPlan:
        """See `Ops.plan_decode`."""
        planner, sizes = self._flash_planner, (num_rows, max_blocks, self._trash)
        return StepPlan([planner.flash_decode(rows, tables, *sizes) for tables in rows.block_tables or ()])

    def plan_mixed(self, rows: PackedRows, num_tokens: int, num_kv: int, num_rows: int, most_length: int) -> StepPlan:
        """See `FixedMixedOps`."""
        planner, sizes = self._flash_planner, (num_tokens, most_length, num_rows)
        return StepPlan([planner.flash_mixed(rows, tables, *sizes) for tables in rows.block_tables or ()])

    def _before_writing(self, group: int, tensor: int, part: Any) -> None:
        if part.paged and tensor == 0:  # layers run in order
            self._clear[group](part.begun)

    def _attend(
        self,
        group: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        groups: Sequence[Any],
        scores: tuple[float | None, float | None],
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        part = groups[group]
        if not part.paged:
            return super()._attend(group, query, keys, values, groups, scores, sinks)
        pages, rule = (keys.transpose(1, 2), values.transpose(1, 2)), Scores(*scores, sinks)
        out = attend_rows(self._kernel, query.to(keys.dtype), *pages, part.rows, self._windows[group], rule)
        return out.to(query.dtype)


@dataclass(frozen=True, slots=True)
class PartSizes:
    """Of one `FlashRows`: its rows, the blocks of each, and what is no tensor."""

    rows: int
    width: int
    most_tokens: int
    most_length: int
    is_decode: bool


@dataclass
class FlashGroupPlan:
    """One step for the layers of one group; everything but what `numbers` holds follows from the sizes.

    Attributes:
        numbers: int32, made on the host and sent to the device; the properties are its parts.
        tokens: of the step.
        room: for so many blocks that the step begins.
        parts: of the rows; see `attend_rows`.
    """

    numbers: torch.Tensor
    tokens: int
    room: int
    parts: tuple[PartSizes, ...]
    paged: ClassVar[bool] = True

    @cached_property
    def slots(self) -> torch.Tensor:
        """int32 [tokens], block * page + place that each token's K/V goes to."""
        return self._arrays[0]

    @cached_property
    def begun(self) -> torch.Tensor:
        """int32 [1 + room], how many blocks are to be cleared, then these."""
        return self._arrays[1]

    @cached_property
    def rows(self) -> list[FlashRows]:
        """For the kernel."""
        made = []
        for index, part in enumerate(self.parts):
            begins, lengths, sums, tables = self._arrays[2 + 4 * index : 6 + 4 * index]
            tables = tables.view(part.rows, part.width)
            made.append(FlashRows(begins, lengths, sums, tables, part.most_tokens, part.most_length, part.is_decode))
        return made

    @cached_property
    def _arrays(self) -> list[torch.Tensor]:
        sizes = [self.tokens, 1 + self.room]
        for part in self.parts:
            sizes += [part.rows + 1, part.rows, part.rows + 1, part.rows * part.width]
        return [self.numbers[first : first + size] for first, size in _places(sizes)]


class FlashPlanner(Planner):
    """Makes `FlashGroupPlan`s for one cache; `apart` as of `exact_rows`."""

    def __init__(self, kv: KVTensors, apart: bool) -> None:
        super().__init__(kv.page_size)
        self._apart, self._plain = apart, plain.Planner(kv)

    def flash_exact(self, rows: PackedRows, tables: np.ndarray) -> FlashGroupPlan:
        """As large as the step."""
        parts = exact_rows(rows, tables, self._page, self._apart)
        begun = self._plain.begun_blocks(rows, tables)
        return self._plan(self._slots(rows, tables), begun, len(begun), parts)

    def flash_decode(
        self, rows: PackedRows, tables: np.ndarray, num_rows: int, max_blocks: int, trash: int
    ) -> FlashGroupPlan:
        """For `Ops.plan_decode`."""
        padded, blocks, begun = padded_rows(rows, tables, self._page, num_rows, max_blocks, trash)
        parts = [HostRows.of(padded, blocks, 1, max_blocks * self._page, is_decode=True)]
        return self._plan(self._slots(padded, blocks), begun[begun != trash], num_rows, parts)

    def flash_mixed(
        self, rows: PackedRows, tables: np.ndarray, num_tokens: int, most_length: int, num_rows: int
    ) -> FlashGroupPlan:
        """For `FixedMixedOps.plan_mixed`."""
        parts = [mixed_rows(rows, tables, self._page, num_tokens, most_length, num_rows)]
        return self._plan(self._slots(rows, tables), self._plain.begun_blocks(rows, tables), num_rows, parts)

    def _plan(self, slots: np.ndarray, begun: np.ndarray, room: int, parts: list[HostRows]) -> FlashGroupPlan:
        blocks = np.zeros(1 + room, dtype=np.int32)
        blocks[0], blocks[1 : 1 + len(begun)] = len(begun), begun
        arrays = [slots, blocks]
        for part in parts:
            arrays += [part.begins, part.lengths, part.length_sums, part.tables.reshape(-1)]
        places = list(_places([len(array) for array in arrays]))
        numbers = np.zeros(sum(places[-1]), dtype=np.int32)
        for array, (first, size) in zip(arrays, places, strict=True):
            numbers[first : first + size] = array
        sizes = tuple(
            PartSizes(len(part.tables), part.tables.shape[1], part.most_tokens, part.most_length, part.is_decode)
            for part in parts
        )
        return FlashGroupPlan(torch.from_numpy(numbers), len(slots), room, sizes)


def _places(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Where arrays of these sizes begin in a vector, and their sizes."""
    first = 0
    for size in sizes:
        yield first, size
        first += -(-size // _ALIGNED) * _ALIGNED
