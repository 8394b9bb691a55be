"""What `CudaGraphs` does with streams, told by stand-ins for torch's: the kernels themselves need a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from engine.execution.graphs import CudaGraphs

DEVICE = torch.device("cuda", 0)


@dataclass(eq=False)
class Stream:
    """Knows which others it has waited for."""

    name: str = "own"
    waited_for: list[Stream] = field(default_factory=list)

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


class Cuda:
    """One thread's current stream, and recordings that may break off."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.default = self.current = Stream("default")
        self.breaks_off = False
        self.allocating_in: list[Any] = []
        self.released: list[Any] = []
        self.recorded_on: list[tuple[Stream, Any]] = []
        for name, value in {
            "Stream": lambda device: Stream(),
            "current_stream": lambda: self.current,
            "set_stream": self.set_stream,
            "stream": self.stream,
            "CUDAGraph": object,
            "graph": self.graph,
            "graph_pool_handle": object,
            "current_device": lambda: 0,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda.memory, "_cuda_endAllocateToPool", self.end_allocating)
        monkeypatch.setattr(torch.cuda.memory, "_cuda_releasePool", lambda device, pool: self.released.append(pool))

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: Any, *, pool: Any, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        """As torch's, which leaves its stream current where the recording cannot be ended."""
        assert capture_error_mode == "thread_local"
        assert not self.allocating_in
        self.current = stream
        self.allocating_in.append(pool)
        try:
            yield
        finally:
            if self.breaks_off:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.allocating_in.remove(pool)
            self.current = self.default
        self.recorded_on.append((stream, pool))

    def end_allocating(self, device: int, pool: Any) -> None:
        if pool not in self.allocating_in:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.allocating_in.remove(pool)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def noting(cuda: Cuda) -> tuple[list[Stream], Callable[[], None]]:
    seen: list[Stream] = []
    return seen, lambda: seen.append(cuda.current)


def test_a_step_runs_and_is_recorded_on_one_stream(cuda: Cuda) -> None:
    """Libraries keep a workspace for each stream: the first run takes it, so that no recording does."""
    graphs, (seen, run) = CudaGraphs(DEVICE), noting(cuda)
    for _ in range(2):
        graphs.capture(run)
    own = seen[0]
    assert seen == [own] * 4 and own is not cuda.default
    assert len(cuda.recorded_on) == 2 and len(set(cuda.recorded_on)) == 1
    assert own.waited_for == [cuda.default] * 2 and cuda.default.waited_for == [own] * 2
    assert cuda.current is cuda.default


def test_a_recording_that_breaks_off_leaves_nothing_behind(cuda: Cuda) -> None:
    graphs, (_, run) = CudaGraphs(DEVICE), noting(cuda)
    cuda.breaks_off = True
    with pytest.raises(RuntimeError, match="capture"):
        graphs.capture(run)
    assert cuda.current is cuda.default and len(cuda.released) == 1
    cuda.breaks_off = False
    graphs.capture(run)
    assert cuda.recorded_on and not cuda.allocating_in


def test_a_recording_of_what_raises_is_given_up_by_torch(cuda: Cuda) -> None:
    runs = iter((None, ValueError("later")))

    def run() -> None:
        if (error := next(runs)) is not None:
            raise error

    with pytest.raises(ValueError, match="later"):
        CudaGraphs(DEVICE).capture(run)
    assert cuda.current is cuda.default and not cuda.released and not cuda.allocating_in


def test_what_a_failed_run_left_on_its_stream_is_waited_for(cuda: Cuda) -> None:
    def run() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        CudaGraphs(DEVICE).capture(run)
    assert cuda.current is cuda.default and len(cuda.default.waited_for) == 1 and not cuda.recorded_on
