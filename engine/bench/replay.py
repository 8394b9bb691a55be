"""`python -m engine.bench replay`: what the host does in a decode step that a GPU would replay, in microseconds.

Called by the benchmark's command line. The engine is the real one with two steps in flight, on CPU; where a GPU would
replay a recorded step nothing happens. What its driver takes for the launches of a step (a copy each way, a graph, two
kernels of sampling, an event) comes on top.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.cache.groups import LayerGroup
from engine.cache.kv_cache import KVCache
from engine.core import EngineCore
from engine.execution.kv_tensors import allocate
from engine.execution.model_runner import ModelRunner
from engine.gpu_check.models import build
from engine.model.shadow import make_shadow, model_facts
from engine.ops.triton.plan import StepPlan
from engine.ops.triton.step_plans import StepPlans
from engine.request import Request
from engine.sampling.kernels import SamplingKernels
from engine.sampling.params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.settings import Settings

_PAGE, _BLOCKS_EACH, _ROOM = 256, 32, 4096
_WARM = 20


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench replay", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256], help="requests that decode")
    parser.add_argument("--steps", type=int, default=500, help="of which the median counts")
    options = parser.parse_args(argv)
    if min(*options.rows, options.steps) < 1:
        parser.error("--rows and --steps must be positive")
    torch.set_num_threads(1)
    for rows in options.rows:
        print(f"{rows:5} rows: {1e6 * measure(rows, options.steps):5.0f}", flush=True)


def measure(rows: int, steps: int) -> float:
    """Seconds of the thread's processor time in a step of greedy requests: the median."""
    core = _engine(rows)
    for number in range(rows):
        core.add(Request(str(number), [1] * 16, 16, SamplingParams(max_new_tokens=_ROOM), number, streaming=True))
    for _ in range(_WARM):
        core.step()
    times = []
    for _ in range(min(steps, _ROOM - _WARM)):
        before = time.thread_time()
        core.step()
        times.append(time.thread_time() - before)
    return statistics.median(times)


def _engine(rows: int) -> EngineCore:
    model = build("llama-8b", "cpu", small=True)
    facts = model_facts(model)
    num_blocks, layers = rows * (_ROOM // _PAGE + 1), tuple(range(facts.num_layers))
    settings = Settings(
        page_size=_PAGE,
        num_blocks=num_blocks,
        max_batch_tokens=8192,
        max_requests=rows,
        safety_margin=0.0,
        sharing=True,
        return_logprobs=False,
        per_request_processors=True,
        seed=0,
        scheduler_type="fifo",
        context_length=_PAGE * _BLOCKS_EACH,
        vocab_size=facts.vocab_size,
        kv_bytes_per_block=facts.kv_bytes_per_token * _PAGE,
        device_type="cpu",
        groups=(LayerGroup(layers),),
        graphs=(False, True),
        async_batching=True,
        max_blocks_per_request=_BLOCKS_EACH,
    )
    sizes = facts.num_layers, num_blocks, facts.num_kv_heads, _PAGE, facts.head_dim, model.dtype
    kv = allocate(*sizes, trash=True)
    runner = ModelRunner(make_shadow(model), settings, ops=_PlansAlone(kv), kv=kv, graph_backend=_NoGraphs())
    scheduler = Scheduler(KVCache(num_blocks, _PAGE), max_batch_tokens=8192, max_requests=rows, safety_margin=0.0)
    return EngineCore(scheduler, runner, overlap=True)


class _PlansAlone(StepPlans):
    """`Ops` that plan steps as the Triton kernels want them, and compute nothing."""

    sampling: SamplingKernels | None = None
    supports_graphs = (False, True)

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor, plan: StepPlan) -> None:
        """See `Ops.write_kv`."""

    def attend(self, layer: int, query: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        """See `Ops.attend`."""
        return torch.zeros_like(query)


class _NoGraphs:
    """Records nothing."""

    def capture(self, run: Callable[[], None]) -> _NoGraphs:
        run()
        return self

    def replay(self) -> None:
        """Nothing."""
