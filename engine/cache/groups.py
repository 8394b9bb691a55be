"""Which layers share one block table.

A pure function of the layers' attention windows, called when the engine is sized. Knows no model and no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
    """One group of all layers.

    Args:
        windows: of each layer, as in `LayerGroup`.

    Raises:
        NotImplementedError: a layer has a window.
        ValueError: there are no layers.
    """
    if not windows:
        raise ValueError("the model has no layers")
    if any(window is not None for window in windows):
        raise NotImplementedError("layers with a sliding window are not supported yet")
    return (LayerGroup(tuple(range(len(windows)))),)
