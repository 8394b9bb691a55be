"""Every attention backend against attention in float64: mixed steps, one-token steps, windows, softcaps, graphs.

A stage. Requests grow step by step in one cache whose other memory is NaN, as they do in an engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.cache.groups import LayerGroup
from engine.execution.graphs import CudaGraphs
from engine.execution.kv_tensors import allocate
from engine.execution.staging import Staging, to_device
from engine.gpu_check.backends import Backend, backends
from engine.gpu_check.device import Bench
from engine.gpu_check.stages import Progress, SkipStage
from engine.ops.interface import PackedRows

_LIMITS = {torch.bfloat16: 3e-2, torch.float32: 1e-4}  # of numbers around 1
_BLOCKS_EACH = 24
_SEED = 0
_LONG = 1100  # tokens: what float64 computes is quadratic in them
Step = tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]  # the plan, query, key and value
Run = Callable[[Step], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """One layer, and tokens a page where the backend does not want more."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.bfloat16
    page: int = 16

    @property
    def wants(self) -> set[str]:
        wants = {"window"} if self.window is not None else set()
        wants |= {"softcap"} if self.softcap is not None else set()
        return wants | {str(self.dtype).removeprefix("torch.")}


SHAPES = (
    Shape("32 heads on 8, 128", 32, 8, 128),
    Shape("16 heads on 8, 128", 16, 8, 128),
    Shape("32 heads on 8, 128, pages of 256", 32, 8, 128, page=256),
    Shape("9 heads on 3, 64", 9, 3, 64),
    Shape("window", 8, 2, 64, window=70),
    Shape("softcap", 8, 4, 128, softcap=2.0),
    Shape("float32", 4, 2, 64, dtype=torch.float32),
)
SMALL_SHAPES = (
    Shape("4 heads on 2, 16", 4, 2, 16),
    Shape("window", 4, 2, 16, window=7),
    Shape("softcap", 4, 2, 16, softcap=2.0),
    Shape("float32", 4, 2, 16, dtype=torch.float32),
)


class Requests:
    """Requests in one layer's cache, with what attention must give for them."""

    def __init__(self, backend: Backend, shape: Shape, page: int, count: int, device: torch.device) -> None:
        self.shape, self.page, self.device = shape, page, device
        self.kv = allocate(1, count * _BLOCKS_EACH, shape.kv_heads, page, shape.dim, shape.dtype, device, trash=True)
        for tensor in (*self.kv.keys, *self.kv.values):
            tensor[1:] = float("nan")
        self.ops = backend.make(self.kv, [LayerGroup((0,), shape.window)])
        self._random = torch.Generator().manual_seed(_SEED)
        order = 1 + torch.randperm(count * _BLOCKS_EACH, generator=self._random).view(count, -1)
        self._tables = order.numpy().astype(np.int32)
        self._keys = [torch.empty(0, shape.kv_heads, shape.dim, dtype=torch.float64) for _ in range(count)]
        self._values = list(self._keys)

    def plain_run(self, step: Step) -> torch.Tensor:
        """Of a step on the host."""
        return self.attend(to_device(step, self.device))

    def attend(self, step: Step) -> torch.Tensor:
        """Of a step on the device."""
        plan, query, key, value = step
        key, value = key.transpose(0, 1), value.transpose(0, 1)
        self.ops.write_kv(0, key, value, plan)
        return self.ops.attend(0, query, key, value, plan, None, self.shape.softcap)

    def step(self, counts: dict[int, int], run: Run, *, fixed: int = 0) -> float:
        """Appends tokens to requests in one step; the largest error. `fixed`: a plan for so many one-token rows."""
        order = sorted(counts, key=lambda which: (counts[which] != 1, -len(self._keys[which])))
        starts, sizes = (np.array(part) for part in zip(*((len(self._keys[i]), counts[i]) for i in order), strict=True))
        rows = PackedRows(
            starts,
            sizes,
            np.cumsum(sizes) - sizes,
            [self._visible(order, starts)],
            np.array(order),
            int((sizes == 1).sum()),
        )
        tokens = max(int(sizes.sum()), fixed)
        query, key, value = (
            torch.randn(tokens, heads, self.shape.dim, generator=self._random).to(self.shape.dtype)
            for heads in (self.shape.heads, self.shape.kv_heads, self.shape.kv_heads)
        )
        plan = self.ops.plan_decode(rows, fixed, _BLOCKS_EACH) if fixed else self.ops.plan(rows)
        out = run((plan, query, key, value)).double().cpu()
        worst = 0.0
        for which, first, size in zip(order, rows.offsets.tolist(), sizes.tolist(), strict=True):
            span = slice(first, first + size)
            self._keys[which] = torch.cat((self._keys[which], key[span].double()))
            self._values[which] = torch.cat((self._values[which], value[span].double()))
            error = (out[span] - self._expected(which, query[span].double())).abs().nan_to_num(math.inf)
            worst = max(worst, error.max().item())
        return worst

    def _visible(self, order: list[int], starts: np.ndarray) -> np.ndarray:
        """Block tables by request; blocks that lie wholly behind a window are 0."""
        tables = self._tables.copy()
        if self.shape.window is not None:
            for which, start in zip(order, starts.tolist(), strict=True):
                tables[which, : max(0, start - self.shape.window + 1) // self.page] = 0
        return tables

    def _expected(self, which: int, query: torch.Tensor) -> torch.Tensor:
        shape, key, value = self.shape, self._keys[which], self._values[which]
        key, value = (part.repeat_interleave(shape.heads // shape.kv_heads, dim=1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(shape.dim)
        if shape.softcap is not None:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        distance = torch.arange(len(key) - len(query), len(key))[:, None] - torch.arange(len(key))
        hidden = (distance < 0) | (distance >= (shape.window or len(key)))
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value)


class Recorded:
    """A step recorded once, with short contexts, and replayed with what later steps put into its tensors."""

    def __init__(self, requests: Requests) -> None:
        self._attend, self._device = requests.attend, requests.device
        self._staging = Staging(requests.device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, step: Step) -> torch.Tensor:
        if self._graph is None:
            sent, self._memory = self._staging.send(step)
            self._sent = sent

            def run() -> None:
                self._out = self._attend(sent)

            self._graph = CudaGraphs(self._device).capture(run)
        self._staging.send_again(self._sent, self._memory, step)
        self._graph.replay()
        return self._out.clone()


@torch.inference_mode()
def parity(bench: Bench, progress: Progress) -> None:
    """One row for each backend and shape: the largest errors of each kind of step."""
    found, missing = backends(bench.device)
    for name, why in missing.items():
        progress.add(name, skipped=why)
    for shape in SMALL_SHAPES if bench.small else SHAPES:
        for backend in found:
            case = f"{backend.name}, {shape.name}"
            if not progress.has_time(case):
                return
            with progress.case(case):
                _compare(bench, progress, case, backend, shape)


def _compare(bench: Bench, progress: Progress, case: str, backend: Backend, shape: Shape) -> None:
    if lacks := sorted(backend.lacks & shape.wants):
        raise SkipStage(f"{backend.name} does not compute {' and '.join(lacks)}")
    page = max(backend.page_multiple, 4 if bench.small else shape.page)
    requests = Requests(backend, shape, page, 5, bench.device)
    run = requests.plain_run
    errors: dict[str, Any] = {
        "mixed": max(requests.step(counts, run) for counts in _mixed_steps(page)),
        "decode": max(requests.step(dict.fromkeys(range(5), 1), run) for _ in range(2)),
    }
    if requests.ops.supports_graphs[1]:
        errors["fixed"] = max(requests.step(dict.fromkeys(range(4), 1), run, fixed=8) for _ in range(2))
        if bench.is_cuda:
            errors["graph"] = _replayed(Requests(backend, shape, page, 4, bench.device), page)
    limit = _LIMITS[shape.dtype]
    graph = {} if "graph" in errors else {"graph_skipped": _why_no_graph(bench)}
    progress.add(case, page=page, **errors, **graph, limit=limit, right=all(error < limit for error in errors.values()))
    if (worst := max(errors.values())) >= limit:
        raise ArithmeticError(f"off by {worst:.3g} from float64, {limit:g} is the limit")


def _mixed_steps(page: int) -> list[dict[int, int]]:
    """Prompts in chunks beside single tokens, over the ends of pages."""
    return [{0: page, 1: 2 * page - 1, 2: 1, 3: 7}, {0: 1, 1: 1, 2: page + 3, 4: 3 * page}, {2: 1, 3: page - 1, 4: 1}]


def _why_no_graph(bench: Bench) -> str:
    if not bench.is_cuda:
        return f"CUDA graphs need a CUDA device, and this is {bench.device.type}"
    return "it has no plan of fixed shapes"


def _replayed(requests: Requests, page: int) -> float:
    """Recorded with contexts of a few tokens, replayed with some of many pages."""
    recorded, rows = Recorded(requests), dict.fromkeys(range(3), 1)
    worst = [requests.step({0: 2, 1: 3, 2: 2}, requests.plain_run), requests.step(rows, recorded, fixed=4)]
    worst.append(requests.step({0: min(20 * page, _LONG), 1: 5, 2: 3 * page}, requests.plain_run))
    return max(*worst, *(requests.step(each, recorded, fixed=4) for each in (rows, {0: 1, 2: 1}, rows)))
