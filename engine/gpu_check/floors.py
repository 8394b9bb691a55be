"""The least time that a step can take, from bytes, operations and the rates that a device was seen to reach.

Arithmetic alone: called by the stages with what they have measured. Loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What the device does at best; None: not measured.

    Attributes:
        bandwidth: bytes a second, read and written, of a copy.
        gemm: floating point operations a second of a large matrix product in bfloat16.
    """

    bandwidth: float | None = None
    gemm: float | None = None


@dataclass(frozen=True)
class ModelCosts:
    """What a model must read and compute.

    Attributes:
        weights: numbers that a step reads: all but an input embedding, of which it reads a few lines.
        head: how many of them make the logits.
        kv_bytes: K and V of one token over all layers.
        query_numbers: query heads * head_dim * layers.
        dtype_bytes: of one weight.
    """

    weights: int
    head: int
    kv_bytes: int
    query_numbers: int
    dtype_bytes: int = 2

    def decode_seconds(self, limits: Limits, rows: int, context: float) -> float | None:
        """Of one step of `rows` requests with `context` tokens each: the weights are read while products run, then
        K and V."""
        if limits.bandwidth is None:
            return None
        reading = self.weights * self.dtype_bytes / limits.bandwidth
        computing = 0.0 if limits.gemm is None else 2 * self.weights * rows / limits.gemm
        return max(reading, computing) + rows * context * self.kv_bytes / limits.bandwidth

    def prefill_seconds(self, limits: Limits, tokens: int) -> float | None:
        """Of one prompt in one step: products of every token but the logits' of all but one, and causal attention."""
        if limits.gemm is None:
            return None
        products = 2 * ((self.weights - self.head) * tokens + self.head)
        attention = 2 * self.query_numbers * tokens * tokens  # q k and p v, half of each
        return (products + attention) / limits.gemm


def share(floor: float | None, seconds: float) -> float | None:
    """Which part of the time taken was needed."""
    return None if floor is None else floor / seconds


def busy(intervals: list[tuple[float, float]], joined: float = 0.0) -> float:
    """The length of what the intervals cover together; gaps of at most `joined` between them count too."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(intervals):
        begin = end if first - end <= joined else first
        total += max(0.0, last - begin)
        end = max(end, last)
    return total
