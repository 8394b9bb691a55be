"""The block tables of everything that runs, as arrays that stay: what a step reads of them is not copied.

Owned by `KVCache`, which alone changes it; steps read the arrays. Knows nothing of requests or of which block is free.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.cache.block_pool import NULL_BLOCK

_LINES, _WIDTH = 8, 16  # to begin with; both double when they do not suffice

Blocks = npt.NDArray[np.int32]


class BlockTables:
    """One line a running request in each group; whatever holds no block is the null block.

    Attributes:
        arrays: int32 [lines, width], C-contiguous, one a layer group, all of one shape. Replaced when they grow.
    """

    def __init__(self, num_groups: int) -> None:
        self.arrays: list[Blocks] = [np.zeros((_LINES, _WIDTH), np.int32) for _ in range(num_groups)]
        self._free = list(reversed(range(_LINES)))

    def take(self) -> int:
        """A line of null blocks, the same in every group, for one request."""
        if not self._free:
            lines, width = self.arrays[0].shape
            self._resize(2 * lines, width)
            self._free = list(reversed(range(lines, 2 * lines)))
        return self._free.pop()

    def give_back(self, line: int, ends: Sequence[int]) -> None:
        """The line is free again; in each group nothing was written to it from `ends` on."""
        for array, end in zip(self.arrays, ends, strict=True):
            array[line, :end] = NULL_BLOCK
        self._free.append(line)

    def write(self, group: int, line: int, start: int, blocks: Sequence[int]) -> None:
        """Puts `blocks` at [start, start + len(blocks)) of a line."""
        lines, width = self.arrays[group].shape
        end = start + len(blocks)
        if end > width:
            self._resize(lines, max(2 * width, end))
        if len(blocks) == 1:
            self.arrays[group][line, start] = blocks[0]  # several times as fast
        else:
            self.arrays[group][line, start:end] = blocks

    def read(self, group: int, line: int, start: int, end: int) -> list[int]:
        """Blocks [start, end) of a line."""
        blocks: list[int] = self.arrays[group][line, start:end].tolist()
        return blocks

    def check_integrity(self, taken: Sequence[int], ends: Sequence[Sequence[int]]) -> None:
        """Raises RuntimeError unless these lines are in use, up to these ends, and everything else is null."""
        if sorted([*taken, *self._free]) != list(range(len(self.arrays[0]))):
            raise RuntimeError(f"lines {sorted(taken)} of the block tables are taken, and {sorted(self._free)} free")
        for group, array in enumerate(self.arrays):
            rest = array.copy()
            for line, line_ends in zip(taken, ends, strict=True):
                rest[line, : line_ends[group]] = NULL_BLOCK
            if rest.any():
                raise RuntimeError(f"the block tables of group {group} hold blocks where nothing was written")

    def _resize(self, lines: int, width: int) -> None:
        """To at least the present shape."""
        grown = []
        for array in self.arrays:
            new = np.zeros((lines, width), np.int32)
            new[: array.shape[0], : array.shape[1]] = array
            grown.append(new)
        self.arrays = grown
