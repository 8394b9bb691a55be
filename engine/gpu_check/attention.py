"""Decode attention alone, as a share of the device's copy bandwidth. A stage; K and V are far larger than any cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.bench.rows import spread_rows
from engine.cache.groups import LayerGroup
from engine.execution.graphs import CudaGraphs
from engine.execution.kv_tensors import allocate
from engine.execution.staging import to_device
from engine.gpu_check.backends import Backend, backends
from engine.gpu_check.device import Bench
from engine.gpu_check.floors import share
from engine.gpu_check.stages import Progress

_PAGE = 256
_RECORDED = 5  # calls in one graph


@dataclass(frozen=True)
class Case:
    """`rows` requests with `context` tokens each, in one layer."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    rows: int
    context: int

    @property
    def tokens(self) -> int:
        return self.rows * self.context

    def read_bytes(self, dtype: torch.dtype) -> int:
        """K and V of every token, read once."""
        return 2 * self.tokens * self.kv_heads * self.dim * dtype.itemsize


CASES = (
    Case("llama-8b heads, 256 x 1024", 32, 8, 128, 256, 1024),
    Case("qwen3-0.6b heads, 256 x 1024", 16, 8, 128, 256, 1024),
    Case("llama-8b heads, 32 x 8192", 32, 8, 128, 32, 8192),
    Case("llama-8b heads, 8 x 32768", 32, 8, 128, 8, 32768),
    Case("llama-8b heads, 32 x 1024", 32, 8, 128, 32, 1024),
    Case("llama-8b heads, 1 x 8192", 32, 8, 128, 1, 8192),
)
SMALL_CASES = (Case("4 heads on 2, 4 x 100", 4, 2, 16, 4, 100), Case("4 heads on 2, 1 x 500", 4, 2, 16, 1, 500))


@torch.inference_mode()
def attention(bench: Bench, progress: Progress) -> None:
    """One row for each case and backend, those first that are to be fast."""
    found, missing = backends(bench.device)
    for name, why in missing.items():
        progress.add(name, skipped=why)
    cases = SMALL_CASES if bench.small else CASES
    for is_fast in (True, False):
        for case in cases if is_fast else cases[:1]:
            for backend in found:
                if backend.fast != is_fast:
                    continue
                name = f"{backend.name}, {case.name}"
                if not progress.has_time(name):
                    return
                with progress.case(name):
                    _measure(bench, progress, name, backend, case)


def _measure(bench: Bench, progress: Progress, name: str, backend: Backend, case: Case) -> None:
    dtype = torch.bfloat16
    page = _PAGE if not bench.small else max(32, backend.page_multiple)
    rows, blocks = spread_rows(np.full(case.rows, case.context - 1), np.ones(case.rows, np.int64), page)
    kv = allocate(1, blocks, case.kv_heads, page, case.dim, dtype, bench.device, trash=True)
    for tensor in (*kv.keys, *kv.values):
        tensor.normal_()
    ops = backend.make(kv, [LayerGroup((0,))])
    width = -(-case.context // page)
    plan: Any = ops.plan_decode(rows, case.rows, width) if ops.supports_graphs[1] else ops.plan(rows)
    plan = to_device(plan, bench.device)
    query = torch.randn(case.rows, case.heads, case.dim, device=bench.device, dtype=dtype)
    key = torch.randn(case.kv_heads, case.rows, case.dim, device=bench.device, dtype=dtype)
    ops.write_kv(0, key, key, plan)
    is_fixed = bench.is_cuda and backend.fast and ops.supports_graphs[1]
    seconds, launched = call_seconds(bench, lambda: ops.attend(0, query, key, key, plan, None), is_fixed)
    rate, limit = case.read_bytes(dtype) / seconds, bench.limits.bandwidth
    floor = None if limit is None else case.read_bytes(dtype) / limit
    progress.add(
        name,
        tokens=case.tokens,
        ms=1e3 * seconds,
        bytes_per_s=rate,
        share=share(floor, seconds),
        fast=backend.fast,
        launched=launched,
    )


def call_seconds(bench: Bench, call: Callable[[], object], is_fixed: bool) -> tuple[float, str]:
    """Of one call, and how it was launched.

    Args:
        is_fixed: it can be recorded, as steps are: what the host takes to launch it is then no part of it.
    """
    if not is_fixed:
        return bench.best_seconds(call), "directly"

    def several() -> None:
        for _ in range(_RECORDED):
            call()

    try:
        graph = CudaGraphs(bench.device).capture(several)
    except RuntimeError as error:
        return bench.best_seconds(call), f"directly, since recording failed: {error}"
    return bench.best_seconds(graph.replay) / _RECORDED, "recorded"
