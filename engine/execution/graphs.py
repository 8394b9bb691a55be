"""Steps recorded as device graphs and replayed: one launch in the place of hundreds of kernels.

Made by the model runner where settings and ops allow it. A recording fixes shapes and addresses: a step's inputs
and plan are written into the memory of those that were recorded. Knows nothing of requests.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.cuda import memory as torch_memory

from engine.execution.forward import Forward, FusedForward, StepInputs, carried_ids
from engine.execution.input_batch import InputBatch
from engine.execution.staging import Staging

logger = logging.getLogger(__name__)

MAX_RECORDINGS = 128  # of a path; the least recently used one goes
_MOST_TRIES = 3  # to record a shape: room for it may be found later
_FINE_FROM = 32  # rows, from which on the products' time grows with them


class Graph(Protocol):
    """A recording."""

    def replay(self) -> None:
        """Do again what was recorded, on what its buffers hold now."""


class GraphBackend(Protocol):
    """How a device records."""

    def capture(self, run: Callable[[], None]) -> Graph:
        """Record what `run` launches, after calling it at least once without."""
        ...


class CudaGraphs:
    """Recordings of one CUDA device, which share their memory: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # one for all: memory that is cached belongs to a stream

    def capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        try:
            with torch.cuda.stream(self._stream):
                run()  # whatever is set up at first use must not be recorded
        finally:
            before.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # On the stream that it has run on: libraries keep memory for each stream, which is taken by now.
        recording = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        try:
            with recording:
                run()
        except Exception:
            self._give_up_memory()
            raise
        finally:
            torch.cuda.set_stream(before)  # a recording that cannot be ended leaves its own
        return graph

    def _give_up_memory(self) -> None:
        """Where torch could not end a recording, its memory still counts as being recorded in: none would ever begin
        again, nor cached memory be given back."""
        device = torch.cuda.current_device()
        with suppress(RuntimeError):  # it was ended
            torch_memory._cuda_endAllocateToPool(device, self._pool)
            torch_memory._cuda_releasePool(device, self._pool)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a recording is made for.

    Attributes:
        tokens: of the step, padding included.
        kept: rows of logits, padding included.
        kv: cached tokens that it may read; 0 in decode-only steps, whose block tables have one width.
    """

    tokens: int
    kept: int
    kv: int = 0


@dataclass(slots=True)
class _Recording:
    """A graph, what it reads, on the device, and the memory of that."""

    graph: Graph
    step: tuple[StepInputs, Any]
    memory: torch.Tensor


class GraphRunner:
    """Runs steps by recordings, making those that are missing.

    Args:
        forward: what is recorded.
        backend: how.
        staging: sends steps to the device. All is done in the order of one stream, so a step may be sent while the
            one before still runs.
        most_kept: rows of logits that no step exceeds.
    """

    def __init__(
        self, forward: Forward | FusedForward, backend: GraphBackend, staging: Staging, most_kept: int
    ) -> None:
        self._forward = forward
        self._backend = backend
        self._staging = staging
        self._most_kept = most_kept
        self._recordings: OrderedDict[StepShape, _Recording] = OrderedDict()
        self._failures: Counter[StepShape] = Counter()
        self._logits = torch.empty(0)  # where every recording leaves its result

    @property
    def num_recordings(self) -> int:
        return len(self._recordings)

    def run(
        self, shape: StepShape, inputs: InputBatch, plan: Any, previous_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The logits of `inputs.keep`, valid until the next call.

        Args:
            shape: large enough for `inputs`.
            plan: on the host, of fixed shapes, all of which follow from `shape`.
            previous_ids: sampled by the step before, for tokens that are carried.

        Raises:
            RuntimeError: the plan does not have the shapes of the one that was recorded.
        """
        step = StepInputs.of(inputs, shape.tokens, shape.kept), plan
        carried = carried_ids(inputs, previous_ids)
        recording = self._recordings.get(shape)
        if recording is not None:
            self._recordings.move_to_end(shape)
            self._staging.send_again(recording.step, recording.memory, step)
            sent = recording.step
        else:
            sent, memory = self._staging.send(step)
        if carried is not None:
            sent[0].carry(carried)
        if recording is not None:
            recording.graph.replay()
        elif self._failures[shape] >= _MOST_TRIES:
            self._run(sent, shape)
        else:
            self._record_and_run(sent, memory, shape)
        return self._logits[: len(inputs.keep)]

    def _record_and_run(self, sent: tuple[StepInputs, Any], memory: torch.Tensor, shape: StepShape) -> None:
        try:
            graph = self._backend.capture(lambda: self._run(sent, shape))
        except Exception as error:
            self._run(sent, shape)  # what raises here too is the step's own fault
            self._failures[shape] += 1
            left = _MOST_TRIES - self._failures[shape]
            logger.warning("%s ran directly, since recording it failed (%d more tries): %r", shape, left, error)
            return
        self._recordings[shape] = _Recording(graph, sent, memory)
        if len(self._recordings) > MAX_RECORDINGS:
            self._recordings.popitem(last=False)
        graph.replay()

    def _run(self, sent: tuple[StepInputs, Any], shape: StepShape) -> None:
        logits = self._forward(*sent)
        if not len(self._logits):  # at first use, which backends do not record
            self._logits = logits.new_zeros(self._most_kept, logits.shape[1])
        self._logits[: shape.kept].copy_(logits)


def decode_sizes(most: int) -> list[int]:
    """Numbers of rows that recorded decode-only steps are padded to: at most a fifth of a large step is padding."""
    sizes = {most}
    for power in (1 << i for i in range((most - 1).bit_length())):
        step = power if power < _FINE_FROM else power // 4
        sizes.update(size for size in range(power, 2 * power, step) if size < most)
    return sorted(sizes)


def powers_of_two(most: int) -> list[int]:
    """Those below `most`, and `most`."""
    return [1 << i for i in range((most - 1).bit_length())] + [most]


def next_power_of_two(count: int) -> int:
    """The smallest that is at least `count`; 1 for 0."""
    return 1 << max(0, count - 1).bit_length()


def round_up(count: int, interval: int) -> int:
    """The smallest multiple of `interval` that is at least `count`."""
    return -(-count // interval) * interval
