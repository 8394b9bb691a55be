"""The further ranks of a tensor parallel engine, as the engine actor sees them: processes that it starts and watches.

They live in the actor's placement group by being its children: what Ray has given the actor is theirs too. One that
ends takes the engine with it, and none outlives the actor, however that ends. Knows nothing of what they compute.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

from ray import cloudpickle

from engine.distributed.joining import listen
from rayapp.child import Child
from rayapp.config import ModelConfig
from rayapp.loading import Place

MODULE = "rayapp.rank"


class Ranks:
    """Starts ranks 1 to `config.tensor_parallel_size` - 1 of an engine, whose rank 0 is this process.

    Attributes:
        place: of rank 0.
    """

    def __init__(self, config: ModelConfig) -> None:
        listener = listen()
        port = listener.getsockname()[1]
        self.place = Place(0, port, listener)
        command = [sys.executable, "-m", MODULE, str(os.getpid())]
        self._children = [
            Child(f"tensor parallel rank {rank}", command, pickle.dumps((config, Place(rank, port))))
            for rank in range(1, config.tensor_parallel_size)
        ]

    @property
    def error(self) -> str | None:
        """Why the first rank that has ended did so; None while all live."""
        return next((child.error for child in self._children if child.error is not None), None)

    @property
    def pids(self) -> list[int]:
        """Of those that have been started."""
        return [child.pid for child in self._children if child.pid is not None]


def portable(sampling: dict[str, Any]) -> dict[str, Any]:
    """The same arguments of a request, of which the engine can send its constraint on to the other ranks."""
    constraint = sampling.get("constraint")
    return sampling if constraint is None else sampling | {"constraint": _Portable(constraint)}


class _Portable:
    """A constraint whose class need not be found by name elsewhere: callers' own came here by value too."""

    def __init__(self, constraint: Any) -> None:
        self._constraint = constraint
        self.allowed = constraint.allowed

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_bytes, (cloudpickle.dumps(self._constraint),)


def _from_bytes(pickled: bytes) -> _Portable:
    return _Portable(pickle.loads(pickled))
