"""Steps recorded as device graphs and replayed: one launch in the place of hundreds of kernels.

Made by the model runner where settings and ops allow it. A recording fixes shapes and addresses: inputs are written
into buffers that stay, a step's plan into the tensors of the plan that was recorded. Knows nothing of requests.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from engine.execution.forward import DeviceInputs, Forward, FusedForward, as_vector
from engine.execution.input_batch import InputBatch

MAX_RECORDINGS = 128  # a set of inputs; the least recently used one goes


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

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # whatever is set up at first use must not be recorded
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph


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
    graph: Graph
    plan: Any


class GraphRunner:
    """Runs steps by recordings, making those that are missing.

    Args:
        forward: what is recorded.
        backend: how.
        largest: shape that no step exceeds in tokens and kept rows.
        num_sets: sets of inputs. With 2 the inputs of a step are written while the step before still reads its own;
            each set has recordings of its own.
    """

    def __init__(
        self, forward: Forward | FusedForward, backend: GraphBackend, largest: StepShape, num_sets: int
    ) -> None:
        self._forward = forward
        self._backend = backend
        self._most_kept = largest.kept
        size = 2 * largest.tokens + largest.kept
        self._inputs = [torch.zeros(size, dtype=torch.int64, device=forward.device) for _ in range(num_sets)]
        self._recordings: list[OrderedDict[StepShape, _Recording]] = [OrderedDict() for _ in range(num_sets)]
        self._turn = 0
        self._logits = torch.empty(0)  # where every recording leaves its result

    @property
    def num_sets(self) -> int:
        return len(self._inputs)

    @property
    def num_recordings(self) -> int:
        return sum(map(len, self._recordings))

    def run(
        self, shape: StepShape, inputs: InputBatch, plan: Any, previous_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The logits of `inputs.keep`; they are the caller's.

        Args:
            shape: large enough for `inputs`.
            plan: of fixed shapes, all of which follow from `shape`.
            previous_ids: sampled by the step before, for tokens that are carried.

        Raises:
            RuntimeError: the plan does not have the shapes of the one that was recorded.
        """
        vector, recordings = self._inputs[self._turn], self._recordings[self._turn]
        self._turn = (self._turn + 1) % self.num_sets
        arrays = as_vector(inputs, shape.tokens, shape.kept)
        vector[: len(arrays)].copy_(arrays, non_blocking=True)
        views = DeviceInputs.of(vector, shape.tokens, shape.kept)
        views.carry(inputs, previous_ids)
        recording = recordings.get(shape)
        if recording is None:
            recording = recordings[shape] = self._record(views, shape, plan)
            if len(recordings) > MAX_RECORDINGS:
                recordings.popitem(last=False)
        else:
            recordings.move_to_end(shape)
            copy_into(recording.plan, plan)
        recording.graph.replay()
        return self._logits[: len(inputs.keep)].clone()

    def _record(self, inputs: DeviceInputs, shape: StepShape, plan: Any) -> _Recording:
        def run() -> None:
            logits = self._forward(inputs, plan)
            if not len(self._logits):  # at first use, which backends do not record
                self._logits = logits.new_zeros(self._most_kept, logits.shape[1])
            self._logits[: shape.kept].copy_(logits)

        return _Recording(self._backend.capture(run), plan)


def decode_sizes(most: int) -> list[int]:
    """Numbers of rows that decode-only steps are padded to: the powers of two below `most`, and `most`."""
    return [1 << i for i in range((most - 1).bit_length())] + [most]


def round_up(count: int, interval: int) -> int:
    """The smallest multiple of `interval` that is at least `count`."""
    return -(-count // interval) * interval


def copy_into(target: Any, source: Any, name: str = "the plan") -> None:
    """Writes every tensor in `source`, at any depth, into the one at the same place in `target`.

    Raises:
        RuntimeError: the two differ in anything but what their tensors hold.
    """
    if isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor):
        if target.shape != source.shape or target.dtype != source.dtype:
            raise RuntimeError(
                f"{name} is {source.dtype} {list(source.shape)}, recorded was {target.dtype} {list(target.shape)}"
            )
        if target is not source:
            target.copy_(source, non_blocking=True)
    elif type(target) is not type(source):
        raise RuntimeError(f"{name} is a {type(source).__name__}, recorded was a {type(target).__name__}")
    elif dataclasses.is_dataclass(target):
        for field in dataclasses.fields(target):
            copy_into(getattr(target, field.name), getattr(source, field.name), f"{name}.{field.name}")
    elif isinstance(target, list | tuple):
        if len(target) != len(source):
            raise RuntimeError(f"{name} has {len(source)} entries, recorded were {len(target)}")
        for i, (old, new) in enumerate(zip(target, source, strict=True)):
            copy_into(old, new, f"{name}[{i}]")
    elif not np.array_equal(target, source):
        raise RuntimeError(f"{name} is {source!r}, recorded was {target!r}")
