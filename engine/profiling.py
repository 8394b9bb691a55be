"""What a step really takes of a device's memory: the largest ones are run, and the cache gets what they leave.

Called when a manager is made on a device that has memory of its own. The model runs with a cache of one block; where
nothing is free for a step, the error says what makes it smaller. Knows no device but through `DeviceMemory`.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.acceleration import asked_graphs
from engine.config import ContinuousBatchingConfig
from engine.core import Runner
from engine.facts import ModelFacts
from engine.memory import DeviceMemory
from engine.out_of_memory import forget_frames, is_out_of_memory
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.scheduling.batch import ScheduledBatch
from engine.settings import Settings, fit_measured
from engine.sizing import GIB, RESERVED_BLOCKS, StepSize

logger = logging.getLogger(__name__)

_ONE_BLOCK = 1
# A recorded graph keeps its launches on the device, beside the memory that all of them share. Not measured: a graph has
# some hundred to two thousand launches.
_RECORDING = 8 << 20
_MIXED_RECORDINGS = 32


class Watch(Protocol):
    """Looks on while the model runs.

    Attributes:
        waits: whether its last pass had the host wait for the device.
    """

    waits: bool


@dataclass(frozen=True)
class StepCost:
    """Bytes beyond the model's weights and the cache.

    Attributes:
        mixed: of a step of as many tokens and rows as there may be, all of which are sampled.
        decode: of one with a single token in each row.
        replayed: what stays on the device where steps are recorded.
    """

    mixed: int
    decode: int
    replayed: int = 0

    @property
    def total(self) -> int:
        return max(self.mixed, self.decode) + self.replayed


def profile(
    settings: Settings,
    config: ContinuousBatchingConfig,
    facts: ModelFacts,
    memory: DeviceMemory,
    make_runner: Callable[[Settings], Runner],
    watch: Watch,
) -> Settings:
    """The settings with as many blocks as fit beside what a step was seen to take; the log has the numbers.

    Nor are steps recorded, unless that was asked for, where the model's forward was seen to wait for the device.

    Args:
        settings: planned by formulas.
        make_runner: makes one that is not used any more afterwards, and whose model is watched.

    Raises:
        MemoryError: a step does not fit, or not `config.num_blocks` beside it.
    """
    mixed, decode = measure(settings, memory, make_runner)
    settings = _without_waiting(settings, config, watch)
    cost = StepCost(mixed, decode, _replayed(settings, facts, mixed, decode))
    available = memory.available()
    found = fit_measured(settings, config, facts, cost.total, available)
    logger.info(
        "memory: a step takes up to %.2f GiB (mixed %.2f, decode-only %.2f, kept for recorded graphs %.2f); the cache "
        "gets %.2f of %.2f that are free",
        *(size / GIB for size in (cost.total, cost.mixed, cost.decode, cost.replayed)),
        found.num_blocks * found.kv_bytes_per_block / GIB,
        available / GIB,
    )
    return found


def measure(settings: Settings, memory: DeviceMemory, make_runner: Callable[[Settings], Runner]) -> tuple[int, int]:
    """Bytes that the largest mixed and the largest decode-only step take, neither compiled nor recorded.

    Contexts are short: kernels need no memory for them beyond the cache. No prompt is scored.

    Raises:
        MemoryError: there is not enough memory to run them.
    """
    # Weights must outlive the runner, and the next one compiles and records.
    small = dataclasses.replace(
        settings,
        num_blocks=_ONE_BLOCK,
        host_slots=0,
        graphs=(False, False),
        async_batching=False,
        mixed_compile=None,
        decode_compile=None,
        release_weights=False,
    )
    memory.release()
    memory.start()
    before = memory.available()
    try:
        return _peaks(small, memory, make_runner)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        forget_frames(error)
        raise MemoryError(
            f"a step of {settings.max_batch_tokens:,} tokens and {settings.max_requests:,} requests does not fit into "
            f"the {before / GIB:.2f} GiB that are free beside the model: lower max_batch_tokens or "
            f"max_requests_per_batch ({str(error).partition(chr(10))[0]})"
        ) from None
    finally:
        gc.collect()  # modules refer to themselves
        memory.release()


def largest_step(settings: Settings) -> ScheduledBatch:
    """As many rows and tokens as a step may have, all in the trash block, every row sampled."""
    counts = [1] * settings.max_requests
    left = settings.max_batch_tokens - len(counts)
    for row in range(len(counts)):
        more = min(left, settings.context_length - 1)
        counts[row] += more
        left -= more
    return _batch(settings, counts)


def _peaks(settings: Settings, memory: DeviceMemory, make_runner: Callable[[Settings], Runner]) -> tuple[int, int]:
    """What is taken at most in each of the two steps, with what the runner keeps."""
    runner, peaks = make_runner(settings), []
    for batch in (largest_step(settings), _batch(settings, [1] * settings.max_requests)):
        pending = runner.launch(batch)
        runner.sample(pending)
        pending.result()
        del pending
        peaks.append(memory.peak())
    return peaks[0], peaks[1]


def _without_waiting(settings: Settings, config: ContinuousBatchingConfig, watch: Watch) -> Settings:
    if not (watch.waits and any(settings.graphs)):
        return settings
    is_asked = asked_graphs(config) is not None
    logger.warning(
        "the model's forward waits for the device, which cannot be recorded: %s",
        "the CUDA graphs that were asked for may fail" if is_asked else "decode-only steps are not",
    )
    return settings if is_asked else dataclasses.replace(settings, graphs=(False, False), async_batching=False)


def _batch(settings: Settings, counts: Sequence[int]) -> ScheduledBatch:
    params = SamplingParams(max_new_tokens=1, do_sample=True, top_p=0.9, logprobs=settings.return_logprobs)
    requests = [Request(f"profile-{row}", [0] * count, count, params) for row, count in enumerate(counts)]
    trash = settings.num_blocks + RESERVED_BLOCKS - 1
    table = np.full((len(counts), -(-max(counts) // settings.page_size)), trash, dtype=np.int32)
    rows = list(range(len(counts)))
    return ScheduledBatch(requests, [0] * len(counts), list(counts), rows, [table] * len(settings.groups), rows)


def _replayed(settings: Settings, facts: ModelFacts, mixed: int, decode: int) -> int:
    """Recorded steps keep the memory that they were recorded in, all steps of one kind the same."""
    is_mixed, is_decode = settings.graphs
    if not any(settings.graphs):
        return 0
    from engine.execution.graphs import decode_sizes

    size = StepSize(settings.max_batch_tokens, settings.max_requests, settings.max_blocks_per_request, replayed=True)
    recordings = is_mixed * _MIXED_RECORDINGS + is_decode * len(decode_sizes(settings.max_requests))
    share = min(1.0, (settings.recorded_tokens or settings.max_batch_tokens) / settings.max_batch_tokens)
    return is_mixed * int(share * mixed) + is_decode * decode + recordings * _RECORDING + size.buffer_bytes(facts)
