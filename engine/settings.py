"""Frozen settings of one engine: the user's config resolved against a model, hints and memory.

Called once by the manager when it is made; every other part reads `Settings` only. Pure but for
`available_memory`; allocates nothing and knows nothing of requests.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from engine.cache.groups import LayerGroup, plan_groups
from engine.config import ContinuousBatchingConfig, WorkloadHints

T = TypeVar("T")

_GIB = 1 << 30
_MIN_BATCH_TOKENS = 256
_DEFAULT_REQUESTS = 1024
_DEFAULT_MARGIN = {"fifo": 0.15, "prefill_first": 0.0}
_MAX_HOST_BLOCKS = 65536  # each costs host memory for its bookkeeping from the start


@dataclass(frozen=True)
class _DeviceDefaults:
    page_size: int
    max_batch_tokens: int
    memory_percent: float


_CUDA = _DeviceDefaults(page_size=256, max_batch_tokens=8192, memory_percent=0.9)
_HOST = _DeviceDefaults(page_size=32, max_batch_tokens=512, memory_percent=0.6)  # short steps: 2048 tokens take 0.7 s


@dataclass(frozen=True)
class ModelFacts:
    """What sizing needs to know of a model.

    Attributes:
        num_layers: layers with a KV cache.
        num_kv_heads: of one attention layer in this process.
        num_heads, head_dim: of one attention layer of the whole model.
        dtype_bytes: bytes of one K or V number.
        context_length: positions the model knows; None when its config does not say.
        vocab_size: rows of the embedding, which is also the width of the logits.
        device_type: "cpu", "cuda", ...
        windows: of each layer: tokens that a query sees, itself included; None sees all.
        device_index: which device of that type; None for the current one.
    """

    num_layers: int
    num_kv_heads: int
    num_heads: int
    head_dim: int
    dtype_bytes: int
    context_length: int | None
    vocab_size: int
    device_type: str
    windows: tuple[int | None, ...]
    device_index: int | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token over all layers, bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes


@dataclass(frozen=True)
class Settings:
    """Every number an engine runs with.

    Attributes:
        page_size: tokens per block.
        num_blocks: usable blocks; the null block comes on top.
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

    @property
    def cache_tokens(self) -> int:
        """Tokens that the whole KV cache holds."""
        return self.num_blocks * self.page_size


def resolve(
    config: ContinuousBatchingConfig,
    facts: ModelFacts,
    hints: WorkloadHints | None = None,
    *,
    memory: int | None = None,
) -> Settings:
    """Settle every setting.

    Args:
        config: what the user asked for.
        facts: of the model.
        hints: what is known of the requests to come.
        memory: free bytes to plan with; None reads them from the system.

    Raises:
        MemoryError: the KV cache or the step buffers do not fit in the memory budget; the text has the numbers.
        ValueError: the system does not tell its free memory and num_blocks is not set.
    """
    hints = hints or WorkloadHints()
    device = _CUDA if facts.device_type == "cuda" else _HOST
    if memory is None:
        memory = available_memory(facts.device_type, facts.device_index)
    budget = None if memory is None else int(memory * _given(config.max_memory_percent, device.memory_percent))
    page_size = _given(config.page_size, device.page_size)
    max_batch_tokens = config.max_batch_tokens or _default_batch_tokens(device, facts, budget)
    max_requests = config.max_requests_per_batch or _default_requests(hints, facts, budget)
    max_requests = min(max_requests, max_batch_tokens)
    block_bytes = facts.kv_bytes_per_token * page_size
    step_bytes = max_batch_tokens * _token_bytes(facts) + max_requests * _row_bytes(facts)
    num_blocks = _num_blocks(config, facts, page_size, block_bytes, step_bytes, budget)
    return Settings(
        page_size=page_size,
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
        max_requests=min(max_requests, num_blocks),
        safety_margin=_given(config.safety_margin, _DEFAULT_MARGIN[config.scheduler_type]),
        sharing=config.allow_block_sharing,
        return_logprobs=config.return_logprobs,
        per_request_processors=config.per_request_processors,
        seed=secrets.randbits(64) if config.seed is None else config.seed % 2**64,
        scheduler_type=config.scheduler_type,
        context_length=facts.context_length or num_blocks * page_size,
        vocab_size=facts.vocab_size,
        kv_bytes_per_block=block_bytes,
        device_type=facts.device_type,
        groups=plan_groups(facts.windows),
    )


def describe(settings: Settings) -> list[str]:
    """Lines for the start-up log: what the engine runs with and what fits."""
    size = settings.num_blocks * settings.kv_bytes_per_block / _GIB
    concurrency = settings.cache_tokens / settings.context_length
    return [
        f"KV cache: {settings.cache_tokens:,} tokens, {settings.num_blocks:,} blocks of {settings.page_size}, "
        f"{size:.2f} GiB",
        f"maximum concurrency: {concurrency:.2f} requests of {settings.context_length:,} tokens",
        f"step: at most {settings.max_batch_tokens:,} tokens and {settings.max_requests:,} requests, "
        f"{settings.scheduler_type}, safety margin {settings.safety_margin:g}",
        f"prefix caching: {'on' if settings.sharing else 'off'}; seed {settings.seed}",
    ]


def available_memory(
    device_type: str = "cpu",
    device_index: int | None = None,
    *,
    meminfo: str = "/proc/meminfo",
    cgroup_root: str = "/sys/fs/cgroup",
    own_cgroup: str = "/proc/self/cgroup",
) -> int | None:
    """Bytes that this process can still take, or None where the system does not say.

    On CUDA: free device memory, and what torch keeps cached. Elsewhere: the least of the system's available memory
    and what each control group (v1 or v2) above this process leaves.
    """
    if device_type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device_index)
        return free + torch.cuda.memory_reserved(device_index) - torch.cuda.memory_allocated(device_index)
    limits = [_system_available(Path(meminfo)), *_cgroup_rooms(Path(cgroup_root), Path(own_cgroup))]
    known = [limit for limit in limits if limit is not None]
    return max(0, min(known)) if known else None


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _token_bytes(facts: ModelFacts) -> int:
    """Step memory of one token: hidden states, projections and the gated MLP, some 16 vectors of the model's width."""
    return 16 * facts.num_heads * facts.head_dim * facts.dtype_bytes


def _row_bytes(facts: ModelFacts) -> int:
    """Step memory of one row of logits: as the model gives them, as float32, and two float32 copies in sampling."""
    return facts.vocab_size * (facts.dtype_bytes + 12)


def _default_batch_tokens(device: _DeviceDefaults, facts: ModelFacts, budget: int | None) -> int:
    """The device's default, cut so that a step's tokens take an eighth of the budget at most; not below 256."""
    if budget is None:
        return device.max_batch_tokens
    return max(_MIN_BATCH_TOKENS, min(device.max_batch_tokens, budget // 8 // _token_bytes(facts)))


def _default_requests(hints: WorkloadHints, facts: ModelFacts, budget: int | None) -> int:
    """As many as the hints name, at most 1024, cut so that the logits take an eighth of the budget at most."""
    count = min(hints.num_requests or _DEFAULT_REQUESTS, _DEFAULT_REQUESTS)
    return count if budget is None else max(1, min(count, budget // 8 // _row_bytes(facts)))


def _num_blocks(
    config: ContinuousBatchingConfig,
    facts: ModelFacts,
    page_size: int,
    block_bytes: int,
    step_bytes: int,
    budget: int | None,
) -> int:
    if budget is None:
        if config.num_blocks is None:
            raise ValueError("the free memory of this system is not known: set num_blocks")
        return config.num_blocks
    fitting = (budget - step_bytes) // block_bytes - 1  # the null block takes one
    wanted = 1 if config.num_blocks is None else config.num_blocks
    if wanted > fitting:
        needed = step_bytes + (wanted + 1) * block_bytes
        raise MemoryError(
            f"{wanted} blocks of {page_size} tokens and the buffers of a step take {needed / _GIB:.2f} GiB "
            f"({step_bytes / _GIB:.2f} GiB for the buffers), {(needed - budget) / _GIB:.2f} more than the budget of "
            f"{budget / _GIB:.2f} GiB: lower num_blocks, max_batch_tokens or max_requests_per_batch, or raise "
            "max_memory_percent"
        )
    if config.num_blocks is not None:
        return config.num_blocks
    if facts.device_type == "cuda":
        return fitting
    most = _MAX_HOST_BLOCKS
    if facts.context_length is not None:
        most = min(most, _DEFAULT_REQUESTS * -(-facts.context_length // page_size))
    return min(fitting, most)


def _system_available(meminfo: Path) -> int | None:
    """MemAvailable in bytes; physical pages that are free where there is no such file."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _cgroup_rooms(root: Path, own: Path) -> list[int]:
    """Bytes left under the limit of each control group that this process is in."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            base = root
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            base = root / "memory"
        else:
            continue
        group = base / path.strip("/")
        for folder in (group, *group.parents):  # a container may see its own group as the root
            room = _room(folder, *names)
            if room is not None:
                rooms.append(room)
            if folder == base:
                break
    return rooms


def _room(folder: Path, limit_name: str, used_name: str, reclaimable_name: str) -> int | None:
    """Limit minus use of one control group, page cache that can be dropped not counted; None without a limit."""
    try:
        limit = int((folder / limit_name).read_text())  # "max" is no number
        used = int((folder / used_name).read_text())
    except (OSError, ValueError):
        return None
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        used -= int(stat.get(reclaimable_name, 0))
    except (OSError, ValueError):
        pass
    return limit - used
