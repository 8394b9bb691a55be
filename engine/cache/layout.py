"""Which blocks of a request each layer group holds: pure arithmetic on positions.

Called by `KVCache`, and by whoever sizes an engine. Knows no request, no block id and no tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from engine.cache.groups import LayerGroup

UNBOUNDED = sys.maxsize  # tokens: a request of any length fits


class Layout:
    """Pages of `page_size` tokens in groups of layers, some of which see only a window.

    A request that has computed `computed` of its `num_tokens` tokens holds, in each group, the blocks
    [first, end): in a group without a window those of all tokens, in one with a window those that the query at
    position `computed` or a later one sees, up to the last token that the next step can compute.

    Args:
        groups: of the model's layers.
        max_step_tokens: tokens that one step computes of one request at most.

    Raises:
        ValueError: a number is less than 1, or there are no groups.
    """

    def __init__(self, page_size: int, groups: Sequence[LayerGroup], max_step_tokens: int) -> None:
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}, at least 1 is needed")
        if max_step_tokens < 1:
            raise ValueError(f"max_step_tokens is {max_step_tokens}, at least 1 is needed")
        if not groups:
            raise ValueError("there are no layer groups")
        self.page_size = page_size
        self.max_step_tokens = max_step_tokens
        self.windows = [group.window for group in groups]
        self.full_groups = [group for group, window in enumerate(self.windows) if window is None]
        self.windowed_groups = [group for group, window in enumerate(self.windows) if window is not None]

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.page_size)

    def first(self, group: int, computed: int) -> int:
        """Index of the first block that the query at position `computed` sees."""
        window = self.windows[group]
        return 0 if window is None else max(0, computed - window + 1) // self.page_size

    def end(self, group: int, computed: int, num_tokens: int) -> int:
        """Index after the last block that the next step can write."""
        if self.windows[group] is not None:
            num_tokens = min(num_tokens, computed + self.max_step_tokens)
        return self.blocks_for(num_tokens)

    def behind_at(self, group: int, index: int) -> int:
        """How many tokens must be computed for block `index` to lie wholly behind the window."""
        window = self.windows[group]
        return UNBOUNDED if window is None else (index + 1) * self.page_size + window - 1

    def windowed_peak(self, computed: int, num_tokens: int) -> int:
        """The most blocks that the groups with windows hold together, from `computed` on until all is computed.

        Since the first and the last held block move on at the same pace, that is when the first token of the
        request's last block comes within reach of a step, or now if it already is.
        """
        last_block_start = (num_tokens - 1) // self.page_size * self.page_size
        at = max(computed, last_block_start + 1 - self.max_step_tokens)
        return sum(self.end(group, at, num_tokens) - self.first(group, at) for group in self.windowed_groups)

    def need(self, computed: int, num_tokens: int) -> int:
        """The most blocks that a request holds at once, from `computed` on until all is computed."""
        return len(self.full_groups) * self.blocks_for(num_tokens) + self.windowed_peak(computed, num_tokens)

    def longest_request(self, num_blocks: int) -> int:
        """Tokens of the longest request that always fits when it has `num_blocks` to itself, however it is chunked.

        0 when not even one token fits, `UNBOUNDED` when any length does.
        """
        widest = max((self.windows[group] or 0 for group in self.windowed_groups), default=0)
        if self.full_groups:
            most = num_blocks // len(self.full_groups) * self.page_size
        else:
            most = widest + self.max_step_tokens + 2 * self.page_size  # from here on more tokens need no more blocks
            if self.need(0, most) <= num_blocks:
                return UNBOUNDED
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.need(0, middle) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def longest_hit(self, most: int, has: Callable[[int, int], bool]) -> int:
        """The largest number n <= most of blocks that need not be computed, given what is cached.

        The query at position n * page_size must find all it sees: blocks [0, n) of each group without a window,
        and of one with a window those from `first` on. Asks for each block at most once, in groups without a window
        not beyond the first that is missing.

        Args:
            has: (group, index) -> whether this block of the request is cached.
        """
        length = most
        for group in self.full_groups:
            length = next((index for index in range(length) if not has(group, index)), length)
        if not self.windowed_groups:
            return length
        firsts = {group: self.first(group, length * self.page_size) for group in self.windowed_groups}
        index = length - 1
        while index >= min(firsts.values()):
            if any(index >= first and not has(group, index) for group, first in firsts.items()):
                length = index  # and nothing in between, since that would need this block as well
                firsts = {group: self.first(group, length * self.page_size) for group in self.windowed_groups}
            index -= 1
        return length
