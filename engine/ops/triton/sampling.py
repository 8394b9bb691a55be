"""The sampling kernels of GPUs: this module is their `SamplingKernels`. Handed out by `TritonOps`."""

from __future__ import annotations

from engine.ops.triton.best import find_best
from engine.ops.triton.choose import choose_most_likely
from engine.ops.triton.draw import choose_in_vocabulary_order

__all__ = ["choose_in_vocabulary_order", "choose_most_likely", "find_best"]
