"""Puts an engine together from a model and its settings: shadow, runner, cache, scheduler, core.

Called by the manager: for the settings when it is made, where on a device with memory of its own a step is run, and on
first use, which allocates the KV cache. Starts nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.acceleration import Capabilities
from engine.cache.kv_cache import KVCache
from engine.config import ContinuousBatchingConfig, WorkloadHints
from engine.core import EngineCore
from engine.facts import ModelFacts
from engine.memory import DeviceMemory, device_memory
from engine.out_of_memory import release_after, saying_what_to_lower
from engine.profiling import profile
from engine.scheduling.scheduler import Scheduler
from engine.settings import Settings, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from engine.execution.model_runner import ModelRunner
    from engine.execution.waiting import WaitWatch


def settle(
    model: PreTrainedModel, facts: ModelFacts, config: ContinuousBatchingConfig, hints: WorkloadHints | None
) -> Settings:
    """The settings of an engine for this model; finds the kernels that its attention runs in, if any.

    Raises:
        MemoryError, ValueError: as `resolve`.
    """
    from engine.model.shadow import attention_needs, attention_of
    from engine.ops.flash.choice import FLASH, choose_flash
    from engine.ops.triton import probe_cache

    needs, asked = attention_needs(model, facts, config.page_size), attention_of(model)
    kernel = choose_flash(asked, config.auto_switch_to_flash, needs)
    triton = kernel is None and facts.device_type == "cuda"
    if triton:  # as `make_ops` sees it
        may_switch = config.auto_switch_to_flash or asked in FLASH
        triton = may_switch and probe_cache(needs.device, needs.dtype, needs.head_dim) is None
    return resolve(config, facts, hints, capabilities=Capabilities.of(facts.device_type, kernel, triton=triton))


def fit_to_device(
    model: PreTrainedModel,
    facts: ModelFacts,
    config: ContinuousBatchingConfig,
    settings: Settings,
    memory: DeviceMemory,
) -> Settings:
    """The settings with a cache that fits beside the largest step, which is run to see what it takes.

    Raises:
        NotImplementedError: the engine cannot run this architecture.
        MemoryError: the step does not fit, or the cache beside it; the text has the numbers.
    """
    from engine.execution.waiting import WaitWatch

    watch = WaitWatch()
    return profile(settings, config, facts, memory, lambda small: _make_runner(model, small, watch), watch)


def build_core(model: PreTrainedModel, settings: Settings) -> EngineCore:
    """An idle engine for this model.

    Raises:
        NotImplementedError: the engine cannot run this architecture.
        MemoryError: the cache does not fit; the text says what to lower.
    """
    cache = KVCache(
        settings.num_blocks,
        settings.page_size,
        settings.groups,
        settings.sharing,
        max_step_tokens=settings.max_batch_tokens,
        host_slots=settings.host_slots,
    )
    scheduler = Scheduler(
        cache,
        max_batch_tokens=settings.max_batch_tokens,
        max_requests=settings.max_requests,
        safety_margin=settings.safety_margin,
        policy=settings.scheduler_type,
    )
    with saying_what_to_lower():
        runner = _make_runner(model, settings)
    memory = device_memory(settings.device_type, next(model.parameters()).device.index)
    return EngineCore(
        scheduler, runner, overlap=settings.async_batching, free_memory=lambda error: release_after(error, memory)
    )


def _make_runner(model: PreTrainedModel, settings: Settings, watch: WaitWatch | None = None) -> ModelRunner:
    from engine.distributed.nccl import keep_graphs_apart
    from engine.distributed.sharding import tensor_parallel_mesh
    from engine.execution.model_runner import ModelRunner
    from engine.model.shadow import ParameterSource, make_shadow

    shadow = make_shadow(model)
    source = ParameterSource(model, shadow)
    # Copies depend on the memory of each process, and change rounding.
    pack = tensor_parallel_mesh(model) is None
    if not pack and settings.device_type == "cuda" and any(settings.graphs):
        keep_graphs_apart(shadow)
    runner = ModelRunner(shadow, settings, source=source, pack=pack)
    if watch is not None:  # only now: a model with hooks runs in no kernels
        watch.attach(shadow)
    return runner
