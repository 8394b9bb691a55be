"""Which layers share one block table.

A pure function of the layers' attention windows, called when the engine is sized. Knows no model and no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# What one more group costs, in unused layer slots of a block: every group has a block table of its own, which the
# scheduler fills and each step hands to the device. So 22 + 4 layers become 7 groups of 4 (2 slots of 28 unused), not
# 13 of 2 or 26 of 1 (none unused).
_GROUP_COST = 0.5


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one attention type; a block id names one page in each of them.

    Attributes:
        layers: the model's layers, in the order of the cache's tensors: layers[i] uses keys[i] and values[i].
        window: tokens that a query sees, itself included; None sees all.
    """

    layers: tuple[int, ...]
    window: int | None = None


def plan_groups(windows: Sequence[int | None]) -> tuple[LayerGroup, ...]:
    """Splits the layers of each attention type into groups of the one size that wastes least.

    All groups draw on one pool, so a block has as many layer slots as the largest group has layers; what a smaller
    group leaves unused is wasted. A model whose layers are all of one type is one group.

    Args:
        windows: of each layer, as in `LayerGroup`. Layers of the same window are of one type.

    Returns:
        The groups in the order of their first layer. Every layer is in exactly one.

    Raises:
        ValueError: there are no layers, or a window is less than 1.
    """
    if not windows:
        raise ValueError("the model has no layers")
    types: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        if window is not None and window < 1:
            raise ValueError(f"layer {layer} has a window of {window} tokens, at least 1 is needed")
        types.setdefault(window, []).append(layer)
    counts = [len(layers) for layers in types.values()]
    size = min(range(1, max(counts) + 1), key=lambda size: (_cost(counts, size), -size))
    groups = [
        LayerGroup(tuple(layers[start : start + size]), window)
        for window, layers in types.items()
        for start in range(0, len(layers), size)
    ]
    return tuple(sorted(groups, key=lambda group: group.layers[0]))


def _cost(counts: Sequence[int], size: int) -> float:
    """Of groups of `size` layers, in layer slots."""
    num_groups = sum(-(-count // size) for count in counts)
    return num_groups * size - sum(counts) + _GROUP_COST * num_groups
