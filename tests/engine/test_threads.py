"""How many threads the engine computes with: a property of the engine, whatever other threads have asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine import ContinuousBatchingConfig, ContinuousBatchingManager
from engine.execution.model_runner import ModelRunner

CONFIG = ContinuousBatchingConfig(num_blocks=8, page_size=8)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def in_thread(work: Any) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_engine_computes_with_the_threads_of_its_maker(tiny: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with those that another thread asked for last, which a new thread begins with."""
    launch, seen = ModelRunner.launch, []

    def noting(self: ModelRunner, *args: Any) -> Any:
        seen.append(torch.get_num_threads())
        return launch(self, *args)

    monkeypatch.setattr(ModelRunner, "launch", noting)
    torch.set_num_threads(3)
    manager = ContinuousBatchingManager(tiny, config=CONFIG)
    assert manager.num_threads == 3
    for _ in range(2):  # each session has a thread of its own
        torch.set_num_threads(1)
        manager.start()
        in_thread(lambda: torch.set_num_threads(2))
        manager.add_request([1, 2, 3], max_new_tokens=3, eos_token_id=-1)
        assert manager.get_result() is not None
        assert manager.num_threads == 3
        manager.stop()
    manager.destroy()
    assert set(seen) == {3}
    assert torch.get_num_threads() == 1  # this thread's own


def test_num_threads_is_what_the_engine_thread_says(tiny: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.loop.use_compute_threads", lambda count: None)  # as if it had no effect
    torch.set_num_threads(3)
    manager = ContinuousBatchingManager(tiny, config=CONFIG)
    torch.set_num_threads(2)
    manager.start()
    manager.add_request([1], max_new_tokens=1)
    assert manager.get_result() is not None
    assert manager.num_threads == 2
    manager.destroy()
