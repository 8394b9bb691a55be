"""Whole engines, without a manager, whose steps are recorded by a test's own recorder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedModel

from engine.cache.groups import LayerGroup, plan_groups
from engine.cache.kv_cache import KVCache
from engine.core import EngineCore
from engine.execution.graphs import GraphBackend
from engine.execution.kv_tensors import KVTensors
from engine.model.shadow import model_facts
from engine.ops.interface import Ops
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from tests.engine.rows import make_runner

_BUDGET, _MAX_REQUESTS, _MAX_STEPS = 32, 4, 500


def generate_recorded(
    model: PreTrainedModel,
    make_ops: Callable[[KVTensors, Sequence[LayerGroup]], Ops],
    backend: GraphBackend,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    page_size: int,
    num_blocks: int,
    max_blocks: int,
) -> list[list[int]]:
    """Greedy tokens by recorded decode-only steps, the groups of layers being those of the model."""
    groups = plan_groups(model_facts(model).windows)
    runner = make_runner(
        model,
        ops=lambda kv: make_ops(kv, groups),
        graph_backend=backend,
        graphs=(False, True),
        groups=groups,
        page_size=page_size,
        num_blocks=num_blocks,
        max_blocks_per_request=max_blocks,
        max_batch_tokens=_BUDGET,
        max_requests=_MAX_REQUESTS,
    )
    cache = KVCache(num_blocks, page_size, groups, max_step_tokens=_BUDGET)
    scheduler = Scheduler(cache, max_batch_tokens=_BUDGET, max_requests=_MAX_REQUESTS, safety_margin=0.0)
    core = EngineCore(scheduler, runner)
    requests = [
        Request(str(i), list(prompt), len(prompt), SamplingParams(max_new_tokens=new_tokens), arrival=i)
        for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        core.add(request)
    for _ in range(_MAX_STEPS):
        if not core.has_work:
            break
        core.step()
        cache.check_integrity(list(scheduler.live()))
    return [request.output_ids for request in requests]
