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
        self.recorded_on: list[tuple[Stream, Any]] = []
        for name, value in {
            "Stream": lambda device: Stream(),
            "current_stream": lambda: self.current,
            "set_stream": self.set_stream,
            "stream": self.stream,
            "CUDAGraph": object,
            "graph": self.graph,
            "graph_pool_handle": object,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

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
        self.current = stream
        yield
        self.recorded_on.append((stream, pool))
        if self.breaks_off:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.current = self.default


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


def test_what_follows_a_broken_recording_runs_where_steps_run(cuda: Cuda) -> None:
    graphs, (_, run) = CudaGraphs(DEVICE), noting(cuda)
    cuda.breaks_off = True
    with pytest.raises(RuntimeError, match="capture"):
        graphs.capture(run)
    assert cuda.current is cuda.default


def test_what_a_failed_run_left_on_its_stream_is_waited_for(cuda: Cuda) -> None:
    def run() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        CudaGraphs(DEVICE).capture(run)
    assert cuda.current is cuda.default and len(cuda.default.waited_for) == 1 and not cuda.recorded_on
