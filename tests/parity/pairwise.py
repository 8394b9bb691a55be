"""Few combinations that still hold every pair of values of any two factors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Pair = tuple[tuple[str, int], tuple[str, int]]


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Combinations, one value a factor, in which every two values of different factors meet. Always the same ones.

    Greedy: of many random combinations that hold a pair not met yet the one that holds most such pairs is taken.
    """
    rng = random.Random(0)
    names = list(factors)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    chosen = []
    while missing:
        start = min(missing)
        candidates = [{name: rng.randrange(len(factors[name])) for name in names} | dict(start) for _ in range(50)]
        best = max(candidates, key=lambda candidate: len(missing & _pairs(names, candidate)))
        missing -= _pairs(names, best)
        chosen.append({name: factors[name][index] for name, index in best.items()})
    return chosen


def _pairs(names: Sequence[str], candidate: Mapping[str, int]) -> set[Pair]:
    return {((a, candidate[a]), (b, candidate[b])) for a, b in itertools.combinations(names, 2)}
