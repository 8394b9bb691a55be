"""The matrix products of a decode step alone, as a share of their floor: where time goes that attention does not take.

A stage. Products are replayed from a graph, as in a step, over weights that no cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F
from transformers import PreTrainedConfig

from engine.execution.graphs import CudaGraphs
from engine.gpu_check.device import Bench
from engine.gpu_check.floors import Limits, share
from engine.gpu_check.models import NAMES, config_of
from engine.gpu_check.stages import Progress

_BATCHES = (1, 32, 256)
_WEIGHTS_BYTES = {True: 1 << 20, False: 1 << 29}  # of one case, small or not: several times any cache
_MOST_COPIES = 64


@torch.inference_mode()
def products(bench: Bench, progress: Progress) -> None:
    """One row for each model, product and batch."""
    for name in NAMES:
        for product, (outputs, inputs) in shapes(config_of(name, bench.small)):
            for batch in _BATCHES:
                case = f"{name} {product}, batch {batch}"
                if not progress.has_time(case):
                    return
                with progress.case(case):
                    seconds = _seconds(bench, batch, outputs, inputs)
                    floor = floor_seconds(bench.limits, batch, outputs, inputs)
                    progress.add(case, batch=batch, us=1e6 * seconds, share=share(floor, seconds))
        bench.free()


def shapes(config: PreTrainedConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    """(rows, columns) of the weights of a layer whose projections of one input are joined, and of the logits."""
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    hidden, between = config.hidden_size, config.intermediate_size
    yield "qkv", ((heads + 2 * kv_heads) * dim, hidden)
    yield "output", (hidden, heads * dim)
    yield "gate and up", (2 * between, hidden)
    yield "down", (hidden, between)
    yield "logits", (config.vocab_size, hidden)


def floor_seconds(limits: Limits, batch: int, outputs: int, inputs: int) -> float | None:
    """Of one product in bfloat16: what it reads and writes, or what it computes."""
    if limits.bandwidth is None:
        return None
    numbers = outputs * inputs + batch * (outputs + inputs)
    computing = 0.0 if limits.gemm is None else 2 * batch * outputs * inputs / limits.gemm
    return max(2 * numbers / limits.bandwidth, computing)


def _seconds(bench: Bench, batch: int, outputs: int, inputs: int) -> float:
    copies = min(_MOST_COPIES, -(-_WEIGHTS_BYTES[bench.small] // (2 * outputs * inputs)))
    weights = torch.randn(copies, outputs, inputs, device=bench.device, dtype=torch.bfloat16)
    x = torch.randn(batch, inputs, device=bench.device, dtype=torch.bfloat16)

    def run() -> None:
        for weight in weights:
            F.linear(x, weight)

    call: Callable[[], None] = run
    if bench.is_cuda:
        call = CudaGraphs(bench.device).capture(run).replay
    return bench.best_seconds(call, calls=3) / copies
