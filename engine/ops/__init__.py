"""The operations that differ by device; `make_ops` chooses."""

from __future__ import annotations

from engine.execution.kv_tensors import KVTensors
from engine.ops.interface import Ops
from engine.ops.torch_ops import TorchOps


def make_ops(kv: KVTensors) -> Ops:
    """The ops for the device on which the cache lies."""
    return TorchOps(kv)
