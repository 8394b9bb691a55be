"""The cache is sized by what a step was seen to take. The device's memory is a fake that reports chosen numbers, the
steps that are measured are real ones on CPU.
"""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from engine import memory as memory_module
from engine.acceleration import Capabilities
from engine.build import fit_to_device
from engine.cache.groups import plan_groups
from engine.config import ContinuousBatchingConfig
from engine.distributed.coordinator import Alone
from engine.execution.model_runner import ModelRunner
from engine.execution.waiting import WaitWatch
from engine.facts import ModelFacts
from engine.manager import ContinuousBatchingManager
from engine.memory import CudaMemory, device_memory
from engine.model.shadow import make_shadow, model_facts
from engine.out_of_memory import forget_frames, is_out_of_memory
from engine.profiling import largest_step, measure, profile
from engine.settings import Settings, resolve
from tests.architectures import build
from tests.engine.rows import make_settings
from tests.harness import Stepper, tokens
from tests.models import build_tiny, ref

GIB = 1 << 30
FACTS = ModelFacts(30, 3, 9, 64, 2, 8192, 49152, "cuda", (None,) * 30)
BLOCK = 256 * 2 * 30 * 3 * 64 * 2


class FakeMemory:
    """Of a device on which the first step takes `peaks[0]`, the next one `peaks[1]`."""

    def __init__(self, free: int, peaks: tuple[int, int] = (0, 0)) -> None:
        self.free, self._peaks = free, iter(peaks)
        self.calls: list[str] = []

    def available(self) -> int:
        self.calls.append("available")
        return self.free

    def start(self) -> None:
        self.calls.append("start")

    def peak(self) -> int:
        self.calls.append("peak")
        return next(self._peaks)

    def release(self) -> None:
        self.calls.append("release")


class Steps:
    """A runner that notes what it is given, and raises `error` in a step of several tokens a row."""

    def __init__(self, settings: Settings, error: Exception | None = None) -> None:
        self.settings, self.error = settings, error
        self.steps: list[tuple[int, int, int]] = []

    def launch(self, batch: Any, previous: Any = None) -> Steps:
        if self.error is not None and batch.num_tokens > len(batch.requests):
            raise self.error
        self.steps.append((batch.num_tokens, len(batch.requests), len(batch.sampled)))
        return self

    def sample(self, pending: Any) -> None:
        assert pending is self

    def result(self) -> None:
        pass


def planned(**config: Any) -> tuple[Settings, ContinuousBatchingConfig]:
    wanted = ContinuousBatchingConfig(**config)
    return resolve(wanted, FACTS, memory=80 * GIB), wanted


def profiled(
    memory: FakeMemory, error: Exception | None = None, waits: bool = False, **config: Any
) -> tuple[Settings, Steps]:
    settings, wanted = planned(**config)
    made: list[Steps] = []

    def make(small: Settings) -> Any:
        made.append(Steps(small, error))
        return made[0]

    return profile(settings, wanted, FACTS, memory, make, SimpleNamespace(waits=waits)), made[0]


def test_the_cache_gets_what_the_step_leaves(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found, _ = profiled(FakeMemory(10 * GIB, (2 * GIB, GIB)))
    assert found.num_blocks == (9 * GIB - 2 * GIB) // BLOCK - 2
    (record,) = caplog.records
    assert "a step takes up to 2.00 GiB (mixed 2.00, decode-only 1.00, kept for recorded graphs 0.00)" in caplog.text
    assert f"the cache gets {found.num_blocks * BLOCK / GIB:.2f} of 10.00 that are free" in record.getMessage()
    half, _ = profiled(FakeMemory(10 * GIB, (GIB, 2 * GIB)), max_memory_percent=0.5)
    assert half.num_blocks == (5 * GIB - 2 * GIB) // BLOCK - 2


def test_recorded_steps_keep_what_they_were_recorded_in() -> None:
    def blocks(graphs: tuple[bool, bool]) -> int:
        return profiled(FakeMemory(20 * GIB, (2 * GIB, GIB)), use_cuda_graph=graphs)[0].num_blocks

    none, decode, mixed, both = (
        blocks(graphs) for graphs in ((False, False), (False, True), (True, False), (True,) * 2)
    )
    assert none - decode > GIB // BLOCK and decode - mixed > GIB // 2 // BLOCK
    assert none - both > 3 * GIB // BLOCK


def test_blocks_that_were_asked_for_must_fit() -> None:
    assert profiled(FakeMemory(10 * GIB, (2 * GIB, GIB)), num_blocks=200)[0].num_blocks == 200
    with pytest.raises(
        MemoryError,
        match=r"2000 blocks of 256 tokens .*\(2\.00 GiB for the buffers\).*the budget of 9\.00 GiB: lower num_",
    ):
        profiled(FakeMemory(10 * GIB, (2 * GIB, GIB)), num_blocks=2000)
    with pytest.raises(MemoryError, match="1 blocks of 256 tokens"):
        profiled(FakeMemory(3 * GIB, (3 * GIB, GIB)))


def test_what_follows_from_the_blocks_follows() -> None:
    found, _ = profiled(FakeMemory(GIB, (0, 0)))
    assert found.max_requests == found.num_blocks < 1024
    facts = dataclasses.replace(FACTS, context_length=None)
    settings = resolve(ContinuousBatchingConfig(), facts, memory=80 * GIB)
    found = profile(
        settings, ContinuousBatchingConfig(), facts, FakeMemory(GIB), lambda small: Steps(small), WaitWatch()
    )  # type: ignore[arg-type, return-value]
    assert found.context_length == found.num_blocks * 256


def test_the_steps_that_are_measured() -> None:
    memory = FakeMemory(10 * GIB)
    _, runner = profiled(memory, use_cuda_graph=True, release_weights=True, max_requests_per_batch=100, num_blocks=200)
    assert runner.steps == [(8192, 100, 100), (100, 100, 100)]
    small = runner.settings
    assert small.num_blocks == 1 and small.graphs == (False, False) and not small.release_weights
    assert memory.calls.index("start") < memory.calls.index("peak")
    assert memory.calls[-2:] == ["release", "available"], "what is kept for later is given back before it is counted"


@pytest.mark.parametrize(
    ("tokens", "rows", "context", "counts"),
    [(64, 4, 128, [61, 1, 1, 1]), (64, 4, 30, [30, 30, 3, 1]), (64, 4, 8, [8] * 4), (4, 4, 8, [1] * 4)],
)
def test_the_largest_step(tiny: PreTrainedModel, tokens: int, rows: int, context: int, counts: list[int]) -> None:
    settings = make_settings(tiny, max_batch_tokens=tokens, max_requests=rows, context_length=context)
    assert largest_step(settings).counts == counts


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore"), MemoryError("no room")]
)
def test_a_step_that_does_not_fit_says_what_to_lower(error: Exception) -> None:
    memory = FakeMemory(2 * GIB)
    with pytest.raises(MemoryError) as raised:
        profiled(memory, error, max_requests_per_batch=64)
    text = str(raised.value)
    assert "a step of 8,192 tokens and 64 requests does not fit into the 2.00 GiB" in text
    assert "lower max_batch_tokens or max_requests_per_batch" in text and "More" not in text
    assert memory.calls[-1] == "release"


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(NotImplementedError, match="cannot run"):
        profiled(FakeMemory(2 * GIB), NotImplementedError("cannot run"))


# With the model


class Waiting(nn.Module):
    """Warns as CUDA does when the host waits, if that is to be noticed."""

    def __init__(self, modes: list[str], waits: bool) -> None:
        super().__init__()
        self.modes, self.waits = modes, waits

    def forward(self, fails: bool = False) -> None:
        if self.waits and self.modes[-1] == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        if fails:
            raise RuntimeError("failed")


def test_a_forward_that_waits_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    watch, waiting, running = WaitWatch(), Waiting(modes, True), Waiting(modes, False)
    for module in (waiting, running):
        watch.attach(module)
    assert not watch.waits
    waiting()
    assert watch.waits and modes[-1] == "default"
    running()
    assert not watch.waits
    with pytest.raises(RuntimeError, match="failed"):
        waiting(fails=True)
    assert watch.waits and modes[-1] == "default"


@pytest.mark.parametrize(
    ("config", "graphs"), [({}, (False, False)), ({"use_cuda_graph": (False, True)}, (False, True))]
)
def test_steps_that_wait_are_not_recorded_unless_asked(
    config: dict[str, Any], graphs: tuple[bool, bool], caplog: pytest.LogCaptureFixture
) -> None:
    wanted = ContinuousBatchingConfig(**config)
    settings = resolve(wanted, FACTS, memory=80 * GIB, capabilities=Capabilities(graphs=True, block_tables=True))
    assert settings.graphs == (False, True) and settings.async_batching
    watch = SimpleNamespace(waits=True)
    found = profile(settings, wanted, FACTS, FakeMemory(10 * GIB), lambda small: Steps(small), watch)  # type: ignore[arg-type, return-value]
    assert found.graphs == graphs and found.async_batching is graphs[1]
    assert "the model's forward waits for the device" in caplog.text
    assert ("may fail" in caplog.text) is graphs[1]


def test_steps_that_do_not_wait_stay_recorded(caplog: pytest.LogCaptureFixture) -> None:
    assert profiled(FakeMemory(10 * GIB), use_cuda_graph=True)[0].graphs == (True, True)
    assert profiled(FakeMemory(10 * GIB), waits=True)[0].graphs == (False, False)
    assert not caplog.text


@pytest.mark.parametrize("windows", [False, True])
def test_a_model_really_runs_its_largest_step(windows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mistral", seed=1, sliding_window=8) if windows else build_tiny()
    groups = plan_groups(model_facts(model).windows)
    settings = make_settings(model, max_batch_tokens=48, max_requests=5, groups=groups)
    seen: list[tuple[int, int]] = []
    launch = ModelRunner.launch

    def noted(self: ModelRunner, *arguments: Any) -> Any:
        pending = launch(self, *arguments)
        seen.append((arguments[0].num_tokens, len(pending.logits)))
        return pending

    monkeypatch.setattr(ModelRunner, "launch", noted)
    shadow = make_shadow(model)
    assert measure(settings, FakeMemory(GIB, (7, 5)), lambda small: ModelRunner(shadow, small)) == (7, 5)
    assert seen == [(48, 5), (5, 5)]


def test_a_manager_is_sized_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was run to measure it leaves no trace in what is generated."""
    model = build_tiny()
    block = 16 * model_facts(model).kv_bytes_per_token
    free = 4 * (100_000 + 50 * block)
    monkeypatch.setattr("engine.manager.device_memory", lambda *_: FakeMemory(free, (100_000, 0)))
    stepper = Stepper(model, page_size=16, max_memory_percent=0.25, num_blocks=None)
    assert stepper.manager.settings.num_blocks == 48 == stepper.core.scheduler.cache.num_blocks
    prompts = [tokens(seed, 20) for seed in range(3)]
    requests = [stepper.add(prompt, 5) for prompt in prompts]
    stepper.drain()
    results = stepper.results()
    for request, prompt in zip(requests, prompts, strict=True):
        assert list(results[request.request_id].generated_tokens) == ref(model, prompt, 5)


class Agreeing(Alone):
    """The other processes have room for as many blocks as `most` says, each time that they are asked."""

    def __init__(self, most: list[int]) -> None:
        self.most = most
        self.own: list[int] = []

    def agree_settings(self, resolve: Callable[[], Settings]) -> Settings:
        settings = resolve()
        self.own.append(settings.num_blocks)
        return dataclasses.replace(settings, num_blocks=min(settings.num_blocks, self.most[len(self.own) - 1]))


def test_processes_that_share_a_model_measure_the_same_steps_and_take_what_fits_all(
    tiny: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.manager.device_memory", lambda *_: FakeMemory(GIB, (0, 0)))
    measured: list[Settings] = []
    monkeypatch.setattr("engine.profiling.measure", lambda settings, *_: measured.append(settings) or (0, 0))
    others = Agreeing([70, 50])
    manager = ContinuousBatchingManager(tiny, coordinator=others)
    assert others.own[1] > 70 and [settings.num_blocks for settings in measured] == [70]
    assert manager.settings.num_blocks == 50


def test_a_manager_of_a_model_whose_step_does_not_fit(tiny: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ModelRunner, "launch", fail)
    facts, config = model_facts(tiny), ContinuousBatchingConfig()
    settings = resolve(config, facts, memory=GIB)
    with pytest.raises(MemoryError, match="lower max_batch_tokens"):
        fit_to_device(tiny, facts, config, settings, FakeMemory(GIB))


# The device


def test_which_devices_have_memory_of_their_own() -> None:
    assert isinstance(device_memory("cuda", 0), CudaMemory)
    assert device_memory("cpu") is None is device_memory("mps")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What torch tells of a device that is not there."""
    numbers = {"free": 1000, "reserved": 300, "allocated": 100, "peak": 100}
    calls: dict[str, Callable[..., Any]] = {
        "mem_get_info": lambda index: (numbers["free"], 5000),
        "memory_reserved": lambda index: numbers["reserved"],
        "memory_allocated": lambda index: numbers["allocated"],
        "max_memory_allocated": lambda index: numbers["peak"],
        "reset_peak_memory_stats": lambda index: numbers.update(peak=numbers["allocated"]),
        "empty_cache": lambda: numbers.update(reserved=numbers["allocated"]),
    }
    for name, call in calls.items():
        monkeypatch.setattr(torch.cuda, name, call)
    return numbers


def test_cuda(cuda: dict[str, int]) -> None:
    memory = CudaMemory(0)
    assert memory.available() == memory_module.available_memory("cuda", 0) == 1200
    memory.start()
    cuda |= {"peak": 900, "allocated": 250}
    assert memory.peak() == 800
    assert memory.peak() == 150, "what has stayed counts in the next one, too"
    memory.release()
    assert cuda["reserved"] == 250


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (ValueError("the tokens of 'out of memory' are not in the vocabulary"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of range"), False),
    ],
)
def test_errors_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
    masking = RuntimeError("the recording was broken off")
    masking.__context__ = error
    assert is_out_of_memory(masking) is expected


def test_what_a_failed_function_held_is_dropped() -> None:
    class Large:
        alive = 0

        def __init__(self) -> None:
            Large.alive += 1

        def __del__(self) -> None:
            Large.alive -= 1

    def fail() -> None:
        held = Large()
        raise MemoryError(str(held.alive))

    try:
        fail()
    except MemoryError as error:
        assert Large.alive == 1
        forget_frames(error)
        assert Large.alive == 0


def test_no_torch_is_loaded_where_there_is_no_device() -> None:
    code = "import sys, engine.memory as memory; memory.available_memory(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
