"""Whole engines on `device_on_cpu`, in its process: the tokens, and what happens on the device in each step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from engine.cache.groups import plan_groups
from engine.cache.host_tier import BlockCopies
from engine.cache.kv_cache import KVCache
from engine.core import EngineCore
from engine.execution.forward import FusedForward
from engine.execution.model_runner import ModelRunner, Pending
from engine.execution.staging import Staging
from engine.model.shadow import make_shadow, model_facts
from engine.ops.flash.fused import FlashTritonOps
from engine.ops.triton.triton_ops import TritonOps
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.scheduling.batch import ScheduledBatch
from engine.scheduling.scheduler import Scheduler
from engine.transfers import Transfers
from tests.architectures import _HEADS, ARCHITECTURES, build
from tests.engine import device_on_cpu as device
from tests.engine.device_on_cpu import Told
from tests.engine.device_sampling import VOCAB
from tests.engine.rows import make_settings
from tests.engine.triton_engine import on_triton
from tests.engine.triton_flash import make_kernel
from tests.harness import tokens
from tests.models import build_tiny, ref

PAGE, BUDGET, RECORDED = 4, 12, 8  # tokens
_MAX_STEPS = 300
# An interpreted kernel takes milliseconds for each layer, head and row.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
_FLASH = partial(FlashTritonOps, make_kernel("flash-attn-3"))
_WINDOWS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
}
# Of each, a model and the operations for it.
MODELS: dict[str, tuple[Callable[[], PreTrainedModel], Callable[..., TritonOps]]] = {
    "llama": (partial(build_tiny, **_SIZES), TritonOps),
    "qwen3": (partial(build, "qwen3", **_SIZES, **_HEADS), TritonOps),
    "gemma3": (partial(build, "gemma3_text", seed=2, **_SIZES | _HEADS | _WINDOWS), TritonOps),
    "flash": (lambda: build_tiny(**_SIZES).half(), _FLASH),
    "its own forward": (partial(build, "starcoder2", sliding_window=None, **_SIZES), TritonOps),
}


@dataclass
class Step:
    """What happened in a step.

    Attributes:
        is_decode: every row has one token.
        is_recorded: it was replayed, and not recorded just now.
        carries: tokens that the step before was sampling.
        launch, sample: on the device.
        to_host, from_host: blocks that are copied.
    """

    is_decode: bool
    is_recorded: bool
    carries: bool
    to_host: int
    from_host: int
    launch: Told
    sample: Told = field(default_factory=Told)


class WatchedRunner(ModelRunner):
    """Keeps what happens on the device in each step, between its launch and its being sampled."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.steps: list[Step] = []
        super().__init__(*args, **named)

    def launch(self, batch: ScheduledBatch, previous: Pending | None = None) -> Pending:
        graphs = self._mixed._graphs, self._decode and self._decode._graphs
        before = [each.num_recordings for each in graphs if each]
        carried = set(map(id, previous.requests)) if previous else set()
        carries = any(id(request) in carried for request in batch.requests)
        with device.told() as told:
            pending = super().launch(batch, previous)
        is_recorded = "graph" in told.launched and before == [each.num_recordings for each in graphs if each]
        copies = batch.copies or BlockCopies()
        sizes = len(copies.to_host), len(copies.from_host)
        self.steps.append(Step(set(batch.counts) == {1}, is_recorded, carries, *sizes, told))
        return pending

    def sample(self, pending: Pending) -> None:
        with device.told() as told:
            super().sample(pending)
        if self.steps:  # else the engine's own step
            self.steps[-1].sample = told


@dataclass
class Run:
    """What came of requests.

    Attributes:
        outcomes: of each request, when it has ended.
        steps: of the engine; none on CPU.
        reading: waits of the host outside of launching and sampling.
        preemptions: of requests.
        is_fused: the model does not run by its own forward.
    """

    outcomes: list[Outcome]
    steps: list[Step]
    reading: list[str]
    preemptions: int
    is_fused: bool

    @property
    def tokens(self) -> list[list[int]]:
        return [outcome.tokens for outcome in self.outcomes]

    def waits(self) -> list[str]:
        """Of the host, between the launch of a step and the reading of its tokens, and that are not for a step."""
        own = [wait for step in self.steps for wait in step.launch.waits + step.sample.waits]
        return own + [wait for wait in self.reading if not wait.startswith("an event")]


@dataclass
class Outcome:
    """Of a request; `top` are token ids alone."""

    tokens: list[int]
    error: str | None
    logprobs: list[float]
    top: list[list[int]]
    prompt_logprobs: list[float]
    cached: int

    @classmethod
    def of(cls, request: Request) -> Outcome:
        top = [[token for token, _ in each] for each in request.top_logprobs]
        prompt = [each.logprob for each in request.prompt_logprobs]
        return cls(request.output_ids, request.error, request.logprobs, top, prompt, request.cached_tokens or 0)


def run(
    model: PreTrainedModel,
    requests: Sequence[Request],
    make_ops: Callable[..., TritonOps] | None = TritonOps,
    *,
    num_blocks: int = 60,
    host_slots: int = 0,
    max_requests: int = 4,
    recorded: bool = True,
    at_once: bool = False,
) -> Run:
    """Requests, on the device with two steps in flight; without `make_ops` on CPU, one step at a time.

    Args:
        recorded: small mixed steps and decode steps are.
        at_once: all come before the first step, else one a step.
    """
    groups = plan_groups(model_facts(model).windows)
    settings = make_settings(
        model,
        device_type=device.NAME if make_ops else "cpu",
        groups=groups,
        page_size=PAGE,
        num_blocks=num_blocks,
        host_slots=host_slots,
        max_batch_tokens=BUDGET,
        max_requests=max_requests,
        **_recording(bool(make_ops) and recorded),
    )
    if make_ops is None:
        runner: ModelRunner = ModelRunner(make_shadow(model), settings)
    else:
        graphs = device.Graphs() if recorded else None
        with on_device(make_ops):
            runner = WatchedRunner(make_shadow(placed(model)), settings, graph_backend=graphs)
    cache = KVCache(num_blocks, PAGE, groups, max_step_tokens=BUDGET, host_slots=host_slots)
    scheduler = Scheduler(cache, max_batch_tokens=BUDGET, max_requests=max_requests, safety_margin=0.0)
    core = EngineCore(scheduler, runner, overlap=make_ops is not None)
    reading, coming = [], list(requests)
    for _ in range(_MAX_STEPS):
        if coming:
            core.add(coming.pop(0))
            while at_once and coming:
                core.add(coming.pop(0))
        elif not core.has_work:
            break
        with device.told() as told:
            core.step()
        cache.check_integrity(list(scheduler.live()))
        reading += told.waits
    outcomes = [Outcome.of(request) for request in requests]
    is_fused = isinstance(runner._mixed._forward, FusedForward)
    return Run(outcomes, getattr(runner, "steps", []), reading, scheduler.num_preemptions, is_fused)


def _recording(recorded: bool) -> dict[str, Any]:
    sizes = {"recorded_tokens": RECORDED, "q_padding": 4, "kv_padding": 16}
    return {"max_blocks_per_request": 8, "graphs": (recorded, recorded), **(sizes if recorded else {})}


def placed(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model on the device."""
    model = copy.deepcopy(model)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(device.to_device(parameter.detach()), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = device.to_device(buffer)
    return model


@contextmanager
def on_device(make_ops: Callable[..., TritonOps]) -> Iterator[None]:
    """Engines take these operations for the device, which to them is like a GPU."""
    with on_triton(make_ops), pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.ops.triton.triton_ops.probe_cache", lambda *sizes: None)
        patch.setattr("engine.execution.kv_tensors.lanes_of", lambda kind: device.TwoLanes())
        patch.setattr("engine.model.recognition._check_parameters", lambda *model: None)
        yield


def requests_of(fields: Sequence[dict[str, Any]], lengths: Sequence[int], new_tokens: int) -> list[Request]:
    """Requests with these parameters and prompt lengths."""
    made = []
    for i, (each, length) in enumerate(zip(fields, lengths, strict=True)):
        params = SamplingParams(**({"max_new_tokens": new_tokens, "seed": i} | each))
        made.append(Request(str(i), tokens(i, length, VOCAB), length, params, arrival=i))
    return made


def compared(
    name: str, fields: Sequence[dict[str, Any]], lengths: Sequence[int], new_tokens: int, **options: Any
) -> tuple[Run, Run]:
    """Of requests by an engine on the device, and by one on CPU that has room for all of them.

    Args:
        name: of `MODELS` or `ARCHITECTURES`.
    """
    make_model, make_ops = MODELS[name] if name in MODELS else (ARCHITECTURES[name], TritonOps)
    model = make_model()
    own = run(model, requests_of(fields, lengths, new_tokens), make_ops, **options)
    return own, run(model, requests_of(fields, lengths, new_tokens), None)


class NoEvent:
    """Of a device that is taken to have done everything."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@contextmanager
def without_events(module: str) -> Iterator[None]:
    """In one module of the engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"engine.execution.{module}.transfers_of", lambda kind: Transfers(device.pinned, NoEvent))
        yield


def sent_thrice(events: bool) -> list[list[int]]:
    """What arrives of three steps that are sent one after another."""
    with nullcontext() if events else without_events("staging"):
        staging = Staging(torch.device(device.NAME, 0))
    sent = [staging.send([torch.full((3,), number)])[0][0] for number in range(3)]
    return [each.tolist() for each in device.to_cpu(sent)]


def generated_without(module: str | None, slots: int) -> tuple[bool, list[str]]:
    """Whether the tokens are right where a module takes no events and steps are sent from so many places; waits."""
    with without_events(module) if module else nullcontext(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.execution.staging._NUM_SLOTS", slots)
        try:
            own, expected = generated([tokens(1, 3, VOCAB), tokens(2, 2, VOCAB)], 3, recorded=False)
        except Exception:  # whatever comes of numbers that are not there
            device.drop()
            return False, []
    return own.tokens == expected, own.waits()


def generated_without_marks(prompts: Sequence[list[int]], new_tokens: int, **options: Any) -> bool:
    """Whether the tokens are right where blocks that come from the host are not waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device.TwoLanes, "wait", lambda lanes, mark, *, beside: None)
        own, expected = generated(prompts, new_tokens, **options)
    device.drop()
    return own.tokens == expected


def generated(prompts: Sequence[list[int]], new_tokens: int, **options: Any) -> tuple[Run, list[list[int]]]:
    """Greedy requests that come one a step, and the tokens of generate()."""
    model = MODELS["llama"][0]()
    params = SamplingParams(max_new_tokens=new_tokens)
    made = [Request(str(i), list(prompt), len(prompt), params, arrival=i) for i, prompt in enumerate(prompts)]
    return run(model, made, **options), [ref(model, prompt, new_tokens) for prompt in prompts]


def launched(layers: int) -> list[str]:
    """By the forward pass of a decode step that is not recorded and in which every token is known."""
    model = build_tiny(**_SIZES | {"num_hidden_layers": layers})
    own = run(model, requests_of([{}], [1], 1), recorded=False)
    (step,) = own.steps
    return step.launch.launched
