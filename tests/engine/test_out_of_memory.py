"""Steps that run out of memory: their requests run alone, and only what does not fit alone is failed.

The errors are those of torch, raised by the model's forward or while a step is recorded, on CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.core import EngineUnhealthy
from engine.execution.model_runner import ModelRunner
from engine.request import RequestStatus
from tests.engine.fixed_ops import FakeGraphs, FixedOps
from tests.engine.recorded import generate_recorded
from tests.harness import Stepper, before_forward, running, tokens
from tests.models import build_tiny, ref

TEXT = "CUDA out of memory. Tried to allocate 20.00 MiB"
NEW = 4


class Device:
    """Memory of a device, which has to be given back before what is too large for it fits."""

    def __init__(self) -> None:
        self.releases = 0
        self.held: list[weakref.ref[torch.Tensor]] = []
        self.alive_at_release: list[int] = []

    def release(self) -> None:
        self.releases += 1
        self.alive_at_release.append(sum(tensor() is not None for tensor in self.held))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr("engine.build.device_memory", lambda *_: made)
    return made


def stepper(model: PreTrainedModel, hook: Callable[[torch.Tensor], None], overlap: bool = False) -> Stepper:
    made = Stepper(model, overlap=overlap)
    before_forward(made.manager, hook)
    return made


def check_results(
    made: Stepper, model: PreTrainedModel, prompts: list[list[int]], failed: tuple[int, ...] = ()
) -> None:
    requests = [made.add(prompt, NEW) for prompt in prompts]
    made.drain()
    results = made.results()
    for i, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
        output = results[request.request_id]
        if i in failed:
            assert output.status == RequestStatus.FAILED and output.error is not None
            assert output.error.startswith(f"OutOfMemoryError: {TEXT} (to leave steps more memory, lower num_blocks")
            assert "lower max_batch_tokens or max_requests_per_batch" in output.error
        else:
            assert output.status == RequestStatus.FINISHED
            assert list(output.generated_tokens) == ref(model, prompt, NEW)


PROMPTS = [tokens(seed, length) for seed, length in enumerate([5, 17, 30])]


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_of_a_step_that_does_not_fit_run_alone(tiny: PreTrainedModel, overlap: bool, device: Device) -> None:
    """What was large in the failed step is given back before they do."""

    def hook(ids: torch.Tensor) -> None:
        large = torch.zeros(100)
        device.held.append(weakref.ref(large))
        if len(ids) > 40:
            raise torch.OutOfMemoryError(TEXT)

    check_results(stepper(tiny, hook, overlap), tiny, PROMPTS)
    assert device.releases == 1
    assert device.alive_at_release == [0]


def test_nothing_can_be_given_back(tiny: PreTrainedModel, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def hook(ids: torch.Tensor) -> None:
        if len(ids) > 40:
            raise torch.OutOfMemoryError(TEXT)

    monkeypatch.setattr(device, "release", refuse)
    check_results(stepper(tiny, hook), tiny, PROMPTS)


@pytest.mark.parametrize("overlap", [False, True])
def test_it_happens_once_whatever_is_in_the_step(tiny: PreTrainedModel, overlap: bool, device: Device) -> None:
    calls = [0]

    def hook(ids: torch.Tensor) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise torch.OutOfMemoryError(TEXT)

    check_results(stepper(tiny, hook, overlap), tiny, PROMPTS)
    assert device.releases == 1


def test_what_does_not_fit_alone_fails_alone_with_what_to_lower(tiny: PreTrainedModel, device: Device) -> None:
    def hook(ids: torch.Tensor) -> None:
        if len(ids) >= 30:
            raise torch.OutOfMemoryError(TEXT)

    made = stepper(tiny, hook)
    check_results(made, tiny, PROMPTS, failed=(2,))
    assert device.releases == 2
    made.outputs.clear()
    check_results(made, tiny, PROMPTS[:2])


def test_steps_that_can_be_smaller_get_smaller_first(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    """So that a prompt whose chunk does not fit alone is done in smaller ones."""
    model, seen = build_tiny(max_position_embeddings=2048), []

    def hook(ids: torch.Tensor) -> None:
        seen.append(len(ids))
        if len(ids) > 400:
            raise torch.OutOfMemoryError(TEXT)

    made = Stepper(model, max_batch_tokens=1024, max_requests_per_batch=8)
    before_forward(made.manager, hook)
    check_results(made, model, [tokens(1, 1000), tokens(2, 30)])
    assert [count for count in seen if count > 400] == [1024, 512]
    assert made.core.scheduler.max_batch_tokens == 256 and max(seen[seen.index(512) + 1 :]) == 256
    assert "steps have at most 256 tokens from now on (to leave steps more memory" in caplog.text
    assert device.releases == 2


def test_an_engine_that_has_no_memory_for_a_single_token_is_unhealthy(tiny: PreTrainedModel, device: Device) -> None:
    def hook(ids: torch.Tensor) -> None:
        raise torch.OutOfMemoryError(TEXT)

    made = stepper(tiny, hook)
    made.add(PROMPTS[0], NEW)
    with pytest.raises(EngineUnhealthy, match=TEXT):
        made.drain()


def test_other_errors_give_nothing_back(tiny: PreTrainedModel, device: Device) -> None:
    def hook(ids: torch.Tensor) -> None:
        if len(ids) > 40:
            raise RuntimeError("out of order")

    check_results(stepper(tiny, hook), tiny, PROMPTS)
    assert not device.releases


def test_sampling_that_does_not_fit(tiny: PreTrainedModel, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Stepper(tiny)
    runner, sample = made.core.runner, ModelRunner.sample

    def sample_few(self: ModelRunner, pending: Any) -> None:
        if len(pending.requests) > 1:
            raise torch.OutOfMemoryError(TEXT)
        sample(self, pending)

    assert isinstance(runner, ModelRunner)
    monkeypatch.setattr(ModelRunner, "sample", sample_few)
    check_results(made, tiny, PROMPTS)
    assert device.releases > 1


class ScarceGraphs(FakeGraphs):
    """The first recordings find no memory, and breaking off has an error of its own."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    def capture(self, run: Callable[[], None]) -> Any:
        if self.failures:
            self.failures -= 1
            try:
                raise torch.OutOfMemoryError(TEXT)
            finally:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        return super().capture(run)


@pytest.mark.parametrize("failures", [1, 2])
def test_a_recording_that_does_not_fit(tiny: PreTrainedModel, failures: int) -> None:
    """The next try finds room: all have what they ask for."""
    backend = ScarceGraphs(failures)
    sizes = {"page_size": 16, "num_blocks": 40, "max_blocks": 4}
    own = generate_recorded(tiny, lambda kv, groups: FixedOps(kv), backend, PROMPTS, NEW, **sizes)
    assert own == [ref(tiny, prompt, NEW) for prompt in PROMPTS]
    assert not backend.failures and any(graph.replays for graph in backend.graphs)


def test_warming_up_says_what_to_lower(tiny: PreTrainedModel) -> None:
    def hook(ids: torch.Tensor) -> None:
        raise torch.OutOfMemoryError(TEXT)

    made = Stepper(tiny)
    before_forward(made.manager, hook)
    with pytest.raises(MemoryError, match=f"{TEXT} .to leave steps more memory, lower num_blocks"):
        made.manager.warmup()


def test_the_engine_thread_goes_on(tiny: PreTrainedModel) -> None:
    def hook(ids: torch.Tensor) -> None:
        if len(ids) > 20:
            raise torch.OutOfMemoryError(TEXT)

    with running(tiny) as manager:
        before_forward(manager, hook)
        long, short = (
            manager.add_request(PROMPTS[2], max_new_tokens=NEW),
            manager.add_request(PROMPTS[0], max_new_tokens=NEW),
        )
        failed, finished = manager.get_result(long, timeout=20), manager.get_result(short, timeout=20)
        assert failed is not None and finished is not None
        assert failed.error is not None and "lower max_batch_tokens" in failed.error
        assert list(finished.generated_tokens) == ref(tiny, PROMPTS[0], NEW)
        assert manager.fatal_error is None
