"""Frozen settings of one engine: the user's config resolved against a model, hints and memory.

Called once by the manager when it is made; every other part reads `Settings` only. Pure but for
`available_memory`; allocates nothing and knows nothing of requests.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
from dataclasses import dataclass
from typing import TypeVar

from engine import sizing
from engine.acceleration import Capabilities, CompileSettings, resolve_acceleration
from engine.cache.groups import LayerGroup, plan_groups
from engine.cache.layout import Layout
from engine.config import ContinuousBatchingConfig, WorkloadHints
from engine.facts import ModelFacts
from engine.memory import available_memory
from engine.sizing import GIB, StepSize

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DEFAULT_MARGIN = {"fifo": 0.15, "prefill_first": 0.0}
_AS_GIVEN = (
    "return_logprobs",
    "per_request_processors",
    "scheduler_type",
    "auto_switch_to_flash",
    "max_queue_size",
    "weight_quantization",
    "release_weights",
    "drop_unsupported_processors",
    "cpu_group_timeout",
)


@dataclass(frozen=True)
class _DeviceDefaults:
    page_size: int
    max_batch_tokens: int
    memory_percent: float


_CUDA = _DeviceDefaults(page_size=256, max_batch_tokens=8192, memory_percent=0.9)
_HOST = _DeviceDefaults(page_size=32, max_batch_tokens=512, memory_percent=0.6)  # short steps: 2048 tokens take 0.7 s


@dataclass(frozen=True)
class Settings:
    """Every number an engine runs with.

    Attributes:
        page_size: tokens per block.
        num_blocks: usable blocks; the null block and the trash block come on top.
        max_batch_tokens: tokens of one step.
        max_requests: requests that run at the same time.
        safety_margin: share of blocks that waiting requests must leave free.
        sharing: prefix caching.
        return_logprobs: log-probabilities for every request.
        per_request_processors: requests may bring their own sampling parameters.
        seed: 64-bit seed that the streams of unseeded requests derive from.
        scheduler_type: scheduling policy.
        context_length: prompt plus generated tokens of one request, at most; the cache's size when the model sets none.
        vocab_size: width of the logits.
        kv_bytes_per_block: bytes of one block over the layers of a group.
        device_type: where the model runs.
        groups: which layers share one block table.
        max_blocks_per_request: blocks of a request in the decode-only path, which longer ones do not take; 0: no path.
        graphs: whether (mixed, decode-only) steps are recorded and replayed, if the device's operations allow it.
        recorded_tokens: mixed steps of more tokens are not recorded; None: any are.
        q_padding: replayed or statically compiled mixed steps have a multiple of so many tokens.
        kv_padding: replayed mixed steps read a multiple of so many cached tokens.
        async_batching: schedule the next step while this one runs.
        mixed_compile, decode_compile: how the forward of such steps is compiled; None: not.
        auto_switch_to_flash: faster attention may replace the implementation that the model was loaded with.
        flash_package: whose flash kernel attention runs in; None: in none.
        host_slots: blocks that the host keeps of those that left the device.
        max_queue_size: requests that may wait to be taken in; 0: any number.
        weight_quantization: "int8": matrices are kept in 8 bits; None: in the model's dtype.
        release_weights: weights of which there are packed copies are given up.
        drop_unsupported_processors: unsupported settings of a GenerationConfig are dropped, not refused.
        cpu_group_timeout: seconds until a collective operation between processes fails; None: never.
    """

    page_size: int
    num_blocks: int
    max_batch_tokens: int
    max_requests: int
    safety_margin: float
    sharing: bool
    return_logprobs: bool
    per_request_processors: bool
    seed: int
    scheduler_type: str
    context_length: int
    vocab_size: int
    kv_bytes_per_block: int
    device_type: str
    groups: tuple[LayerGroup, ...]
    max_blocks_per_request: int = 0
    graphs: tuple[bool, bool] = (False, False)
    recorded_tokens: int | None = None
    q_padding: int = 64
    kv_padding: int = 16384
    async_batching: bool = False
    mixed_compile: CompileSettings | None = None
    decode_compile: CompileSettings | None = None
    auto_switch_to_flash: bool = True
    flash_package: str | None = None
    host_slots: int = 0
    max_queue_size: int = 0
    weight_quantization: str | None = None
    release_weights: bool = False
    drop_unsupported_processors: bool = False
    cpu_group_timeout: float | None = 300.0

    @property
    def cache_tokens(self) -> int:
        """Tokens of the longest request that fits when it has the cache to itself."""
        return self.layout.longest_request(self.num_blocks)

    @property
    def layout(self) -> Layout:
        """Which blocks a request holds."""
        return Layout(self.page_size, self.groups, self.max_batch_tokens)


def resolve(
    config: ContinuousBatchingConfig,
    facts: ModelFacts,
    hints: WorkloadHints | None = None,
    *,
    memory: int | None = None,
    host_memory: int | None = None,
    capabilities: Capabilities | None = None,
) -> Settings:
    """Settle every setting. What was asked for and cannot be had is said in the log.

    Args:
        config: what the user asked for.
        facts: of the model.
        hints: what is known of the requests to come.
        memory: free bytes to plan with where the model is; None reads them from the system.
        host_memory: likewise of the host, where the model is on another device.
        capabilities: of the device; None tells them by its type.

    Raises:
        MemoryError: the KV cache or the step buffers do not fit in the memory budget; the text has the numbers.
        ValueError: the system does not tell its free memory and num_blocks, or the space for offloading, is not set.
    """
    hints = hints or WorkloadHints()
    defaults = _defaults(facts)
    if memory is None:
        memory = available_memory(facts.device_type, facts.device_index)
    budget = None if memory is None else int(memory * _given(config.max_memory_percent, defaults.memory_percent))
    groups = plan_groups(facts.windows)
    device = capabilities or Capabilities.of(facts.device_type)
    page_size = _given(config.page_size, -(-defaults.page_size // device.page_multiple) * device.page_multiple)
    tokens = config.max_batch_tokens or sizing.default_batch_tokens(defaults.max_batch_tokens, facts, budget)
    requests = config.max_requests_per_batch or sizing.default_requests(hints.num_requests, facts, budget)
    requests = min(requests, tokens)
    most_tokens = sizing.default_decode_tokens(requests, facts, budget) if device.splits else None
    acceleration = resolve_acceleration(config, facts, hints, page_size, device, most_tokens)
    step = StepSize(tokens, requests, acceleration.max_blocks_per_request, replayed=any(acceleration.graphs))
    block_bytes = sizing.block_bytes(facts, groups, page_size)
    num_blocks = _num_blocks(config, facts, groups, page_size, step, budget)
    if facts.device_type == "cpu":
        taken = step.bytes(facts) + (num_blocks + sizing.RESERVED_BLOCKS) * block_bytes
        host_memory = None if memory is None else max(0, memory - taken)
    elif host_memory is None and config.cpu_offload_space != 0:
        host_memory = available_memory("cpu")
    settings = Settings(
        page_size=page_size,
        num_blocks=num_blocks,
        max_batch_tokens=step.tokens,
        max_requests=max(1, min(step.requests, num_blocks // len(groups))),
        safety_margin=_given(config.safety_margin, _DEFAULT_MARGIN[config.scheduler_type]),
        sharing=config.allow_block_sharing,
        seed=secrets.randbits(64) if config.seed is None else config.seed % 2**64,
        context_length=facts.context_length or num_blocks * page_size,
        vocab_size=facts.vocab_size,
        kv_bytes_per_block=block_bytes,
        device_type=facts.device_type,
        groups=groups,
        flash_package=device.flash_package,
        host_slots=_host_slots(config, host_memory, block_bytes),
        **{name: getattr(config, name) for name in _AS_GIVEN},
        **{field.name: getattr(acceleration, field.name) for field in dataclasses.fields(acceleration)},
    )
    if settings.cache_tokens < 1:
        raise ValueError(
            f"a KV cache of {num_blocks} blocks of {page_size} tokens, shared by {len(groups)} groups of layers, holds "
            "not a single token: raise num_blocks"
        )
    _say_what_has_no_effect(config, settings)
    return settings


def fit_measured(
    settings: Settings, config: ContinuousBatchingConfig, facts: ModelFacts, step: int, memory: int
) -> Settings:
    """The settings with as many blocks as fit beside a step whose bytes were measured.

    Args:
        settings: what `resolve` made of the others.
        step: bytes that a step takes.
        memory: free bytes.

    Raises:
        MemoryError: as `resolve`.
    """
    budget = int(memory * _given(config.max_memory_percent, _defaults(facts).memory_percent))
    size = settings.kv_bytes_per_block
    num_blocks = sizing.fit_blocks(
        config.num_blocks, None, settings.page_size, size, step, budget, offloads=settings.host_slots > 0
    )
    return dataclasses.replace(
        settings,
        num_blocks=num_blocks,
        max_requests=max(1, min(settings.max_requests, num_blocks // len(settings.groups))),
        context_length=facts.context_length or num_blocks * settings.page_size,
    )


def describe(settings: Settings) -> list[str]:
    """Lines for the start-up log: what the engine runs with and what fits."""
    size = settings.num_blocks * settings.kv_bytes_per_block / GIB
    tokens = min(settings.cache_tokens, settings.num_blocks * settings.page_size)
    each = settings.layout.need(0, settings.context_length)
    groups = f" for {len(settings.groups)} groups of layers" if len(settings.groups) > 1 else ""
    lines = [
        f"KV cache: {tokens:,} tokens, {settings.num_blocks:,} blocks of {settings.page_size}{groups}, {size:.2f} GiB",
        f"maximum concurrency: {settings.num_blocks / each:.2f} requests of {settings.context_length:,} tokens",
        f"step: at most {settings.max_batch_tokens:,} tokens and {settings.max_requests:,} requests, "
        f"{settings.scheduler_type}, safety margin {settings.safety_margin:g}",
        f"prefix caching: {_on(settings.sharing)}; seed {settings.seed}",
    ]
    if settings.max_blocks_per_request or any(settings.graphs) or settings.async_batching:
        lines.append(
            f"decode fast path: {settings.max_blocks_per_request or 'no'} blocks; CUDA graphs: mixed "
            f"{_on(settings.graphs[0])}, decode {_on(settings.graphs[1])}; async batching: "
            f"{_on(settings.async_batching)}"
        )
    if settings.host_slots:
        size = settings.host_slots * settings.kv_bytes_per_block / GIB
        lines.append(f"offloading: {settings.host_slots:,} blocks on the host, {size:.2f} GiB")
    for name, compiled in (("mixed", settings.mixed_compile), ("decode-only", settings.decode_compile)):
        if compiled is not None:
            lines.append(f"{name} steps are compiled: mode {compiled.mode}, dynamic {compiled.dynamic}")
    return lines


def _defaults(facts: ModelFacts) -> _DeviceDefaults:
    return _CUDA if facts.device_type == "cuda" else _HOST


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _on(value: bool) -> str:
    return "on" if value else "off"


def _num_blocks(
    config: ContinuousBatchingConfig,
    facts: ModelFacts,
    groups: tuple[LayerGroup, ...],
    page_size: int,
    step: StepSize,
    budget: int | None,
) -> int:
    if budget is None:
        if config.num_blocks is None:
            raise ValueError("the free memory of this system is not known: set num_blocks")
        return config.num_blocks
    most = None
    if facts.device_type != "cuda":
        most = sizing.MAX_HOST_BLOCKS
        if facts.context_length is not None:
            each = Layout(page_size, groups, step.tokens).need(0, facts.context_length)
            most = min(most, sizing.DEFAULT_REQUESTS * each)
    size = sizing.block_bytes(facts, groups, page_size)
    offloads = config.cpu_offload_space != 0
    return sizing.fit_blocks(config.num_blocks, most, page_size, size, step.bytes(facts), budget, offloads=offloads)


def _host_slots(config: ContinuousBatchingConfig, memory: int | None, block_bytes: int) -> int:
    """Blocks that offloading may keep in `memory`, the bytes that are free on the host once the engine runs."""
    space, share = config.cpu_offload_space, config.cpu_offload_space_safety_threshold
    if space == 0 or share == 0:
        if space != 0:
            logger.warning("cpu_offload_space=%s has no effect: cpu_offload_space_safety_threshold is 0", space)
        return 0
    if not config.allow_block_sharing:
        logger.warning("cpu_offload_space=%s has no effect: blocks come back as prefixes, which are not shared", space)
        return 0
    if memory is None:
        if space is None:
            raise ValueError("the free memory of this system is not known: set cpu_offload_space")
        logger.warning("cpu_offload_space=%s is not checked: the free memory of this system is not known", space)
        return int(space * GIB) // block_bytes
    limit = int(share * memory)
    if space is None:
        return min(limit // block_bytes, sizing.MAX_HOST_BLOCKS)
    if space * GIB > limit:
        logger.warning(
            "cpu_offload_space is cut from %.2f to %.2f GiB, %g of the %.2f GiB that are free "
            "(cpu_offload_space_safety_threshold)",
            space,
            limit / GIB,
            share,
            memory / GIB,
        )
    slots = min(int(space * GIB), limit) // block_bytes
    if not slots:
        logger.warning(
            "nothing is offloaded: cpu_offload_space leaves %.2f MiB, and a block takes %.2f",
            min(space * GIB, limit) / 2**20,
            block_bytes / 2**20,
        )
    return slots


def _say_what_has_no_effect(config: ContinuousBatchingConfig, settings: Settings) -> None:
    """Log the fields that were set and mean nothing here; those that are only partly followed have said so."""
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    static = settings.mixed_compile is not None and settings.mixed_compile.dynamic is False
    graphs = any(settings.graphs)
    reasons = {
        "q_padding_interval_size": (not graphs and not static, "no steps are replayed"),
        "kv_padding_interval_size": (not graphs, "no steps are replayed"),
        "cpu_offload_space_safety_threshold": (config.cpu_offload_space == 0, "cpu_offload_space is 0"),
        "cpu_group_timeout": (alone, "this process shares its model with no other"),
        "disable_nccl_graph_mixing": (alone, "this process shares its model with no other"),
    }
    for name, value in config.non_default().items():
        without, reason = reasons.get(name, (False, ""))
        if without:
            logger.info("%s=%r has no effect: %s", name, value, reason)
