"""Matrix products of one input with several projections: one product, where their weights lie one below another.

Made by the fused decoder of GPUs. Where the engine owns the model, weights are moved so that they do. They stay the
model's own parameters, as views of one matrix: there is no copy that could be out of date.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from engine.model.families import Rows


@dataclass(frozen=True, slots=True)
class _Move:
    """A parameter that is to lie in `place`, and what it holds."""

    parameter: torch.Tensor
    place: torch.Tensor
    source: torch.Tensor


class Product:
    """x W^T + b for the projections of `parts`, which have the same input.

    Args:
        parts: all of them are asked for their weights when this is made and at each `refresh_products`.
        moved: the ids of parameters that were moved for other products, to which this one's are added. None: none may
            be moved, and only parts that share a linear layer are one product.
    """

    def __init__(self, *parts: Rows, moved: set[int] | None = None) -> None:
        self._parts = parts
        self._sizes = [part.last - part.first for part in parts]
        self._places: list[list[torch.Tensor]] = []
        groups = [group for group in self._parameters() if group]
        ids = {id(parameter) for group in groups for parameter in group}
        is_whole = len(ids) == len(groups) * len(parts)  # as many biases as weights, if any, and none twice
        if moved is not None and len(parts) > 1 and is_whole and ids.isdisjoint(moved):
            moved |= ids
            self._places = [_one_below_another(group) for group in groups]
            _run(self.moves(set()))
        self.read()

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x: [tokens, in_features]; [tokens, rows] of each part, the last dimension contiguous."""
        if self._joined is not None:
            weight, bias = self._joined
            return F.linear(x, weight, bias).split(self._sizes, dim=1)
        return tuple(F.linear(x, weight, bias) for weight, bias in self._each)

    @property
    def storages(self) -> set[int]:
        """Addresses of the memory that parameters were moved to."""
        return {_storage(group[0]) for group in self._places}

    def moves(self, storages: set[int]) -> list[_Move]:
        """What brings back parameters that lie elsewhere now.

        Args:
            storages: of all products. What lies there may be overwritten by other moves, and is copied first.
        """
        moves = []
        for parameters, places in zip(filter(None, self._parameters()), self._places, strict=False):
            for parameter, place in zip(parameters, places, strict=True):
                if parameter.data_ptr() != place.data_ptr():
                    source = parameter.detach()
                    moves.append(_Move(parameter, place, source.clone() if _storage(source) in storages else source))
        return moves

    def read(self) -> None:
        """Takes the parameters as they lie now."""
        self._each = [(part.weight(), part.bias()) for part in self._parts]
        weight = _joined([weight for weight, _ in self._each])
        biases = [bias for _, bias in self._each if bias is not None]
        bias = _joined(biases) if len(biases) == len(self._parts) else None
        one = not biases or bias is not None
        self._joined = (weight, bias) if weight is not None and one else None

    def _parameters(self) -> list[list[torch.Tensor]]:
        """Weights, then biases."""
        linears = [part.linear for part in self._parts]
        return [[each.weight for each in linears], [each.bias for each in linears if each.bias is not None]]


@torch.no_grad()
def refresh_products(products: Sequence[Product]) -> None:
    """Makes parameters that were replaced by others count, also in what was recorded where they had been moved."""
    storages = {address for product in products for address in product.storages}
    _run([move for product in products for move in product.moves(storages)])
    for product in products:
        product.read()


@torch.no_grad()
def _run(moves: Sequence[_Move]) -> None:
    for move in moves:
        move.place.copy_(move.source)
        move.parameter.data = move.place


def _one_below_another(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Memory for tensors [rows, ...], of the same dtype and width, as parts of one; their own, if they lie so."""
    if _joined(parameters) is not None:
        return [parameter.detach() for parameter in parameters]
    first, rows = parameters[0], [len(parameter) for parameter in parameters]
    with torch.inference_mode(False):
        whole = torch.empty(sum(rows), *first.shape[1:], dtype=first.dtype, device=first.device)
        return list(whole.split(rows))


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensor whose rows are those of all parts, if they lie so in memory."""
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if _storage(part) != _storage(first) or part.data_ptr() != end or not part.is_contiguous():
            return None
        end += part.nbytes
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
