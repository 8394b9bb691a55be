"""`TorchOps` without fused kernels: what a model that asks for "eager" or "paged|eager" runs with.

Made by `make_ops`. The reference that other ops can be compared with.
"""

from __future__ import annotations

from engine.ops.torch_ops import TorchOps


class EagerOps(TorchOps):
    """`Ops` for a cache on any device that torch supports: matrix products, masks, a softmax."""

    fused = False
