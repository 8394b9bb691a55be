"""The operations that differ by device; `make_ops` chooses."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from engine.cache.groups import LayerGroup
from engine.execution.kv_tensors import KVTensors
from engine.ops.cpu.build import BuildError
from engine.ops.cpu.cpu_ops import CpuOps
from engine.ops.interface import Ops
from engine.ops.torch_ops import TorchOps

logger = logging.getLogger(__name__)


def make_ops(kv: KVTensors, groups: Sequence[LayerGroup] | None = None) -> Ops:
    """The ops for the device on which the cache lies. `groups` None: all layers in one group without a window."""
    if kv.device.type == "cpu":
        try:
            return CpuOps(kv)
        except (BuildError, NotImplementedError) as error:
            logger.warning("attention runs in plain torch, which makes decoding on CPU much slower: %s", error)
    return TorchOps(kv)
