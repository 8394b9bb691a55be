"""Which layers share one block table.

A pure function of the model's layer types, called when the KV cache is sized. Knows no model and no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FULL_ATTENTION = "full_attention"


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one attention type; a block id names one page in each of them."""

    layer_type: str
    layers: tuple[int, ...]


def plan_groups(layer_types: Sequence[str]) -> list[LayerGroup]:
    """One group of all layers.

    Raises:
        NotImplementedError: a layer is not of full attention.
        ValueError: there are no layers.
    """
    if not layer_types:
        raise ValueError("the model has no layers")
    other = sorted(set(layer_types) - {FULL_ATTENTION})
    if other:
        raise NotImplementedError(f"layers of type {', '.join(other)}; only {FULL_ATTENTION} is supported")
    return [LayerGroup(FULL_ATTENTION, tuple(range(len(layer_types))))]
