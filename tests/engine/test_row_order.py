"""The order of one-token rows against its definition: families by their longest row, shared prefixes side by side."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.execution.row_order import neighbours

# A tree of prefixes: each row is a path in it, so that a block is always behind the same ones.
PATHS = st.lists(st.lists(st.integers(0, 2), max_size=17), min_size=1, max_size=12)


def table_of(paths: list[list[int]]) -> np.ndarray:
    """Block tables with one block for each distinct prefix of the paths."""
    ids = itertools.count(1)
    blocks: dict[tuple[int, ...], int] = {}
    table = np.zeros((len(paths), max(len(path) for path in paths)), np.int32)
    for row, path in enumerate(paths):
        for depth in range(len(path)):
            prefix = tuple(path[: depth + 1])
            if prefix not in blocks:
                blocks[prefix] = next(ids)
            table[row, depth] = blocks[prefix]
    return table


def order_of(table: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """With the rows' lines among others, and not in the rows' order."""
    lines = 1 + 2 * np.arange(len(table))[::-1]
    array = np.full((2 * len(table) + 1, table.shape[1]), 7, np.int32)
    array[lines] = table
    return neighbours(array, lines, lengths)


def are_neighbours(places: list[int]) -> bool:
    return max(places) - min(places) == len(places) - 1


@given(PATHS, st.randoms(use_true_random=False))
def test_rows_with_the_same_leading_blocks_are_neighbours(paths: list[list[int]], random) -> None:
    table = table_of(paths)
    lengths = np.array([random.randint(1, 5) for _ in paths])
    order = order_of(table, lengths)
    assert sorted(order.tolist()) == list(range(len(paths)))
    place = {row: at for at, row in enumerate(order.tolist())}
    for depth in (1, 2, 4, 8, 16):
        prefixes = {tuple(path[:depth]) for path in paths if len(path) >= depth}
        for prefix in prefixes:
            assert are_neighbours([place[row] for row, path in enumerate(paths) if tuple(path[:depth]) == prefix])


@given(PATHS, st.randoms(use_true_random=False))
def test_families_come_by_their_longest_row(paths: list[list[int]], random) -> None:
    lengths = np.array([random.randint(1, 9) for _ in paths])
    order = order_of(table_of(paths), lengths).tolist()
    families = [
        [lengths[row] for row in rows]
        for _, rows in itertools.groupby(order, key=lambda row: paths[row][0] if paths[row] else f"alone {row}")
    ]
    longest = [max(family) for family in families]
    assert longest == sorted(longest, reverse=True)


def test_rows_that_share_nothing_come_longest_first_then_as_given() -> None:
    assert order_of(table_of([[0], [1], [2]]), np.array([5, 7, 5])).tolist() == [1, 0, 2]
    assert order_of(np.zeros((3, 0), np.int32), np.array([5, 7, 5])).tolist() == [1, 0, 2]


def test_the_null_block_is_shared_by_nobody() -> None:
    table = np.array([[0, 4], [1, 2], [0, 5], [1, 3]])
    assert order_of(table, np.array([9, 8, 7, 6])).tolist() == [0, 1, 3, 2]
