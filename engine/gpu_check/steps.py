"""Decode steps of whole engines as a share of their floor, how long the device waits within them, and long prompts.

A stage a model. Engines are the real ones but for their thread: steps are taken here, so that they can be timed.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from engine import ContinuousBatchingConfig, init_continuous_batching
from engine.gpu_check.device import Bench
from engine.gpu_check.floors import ModelCosts, busy, share
from engine.gpu_check.models import build, costs_of
from engine.gpu_check.stages import Progress, SkipStage
from engine.request import Request
from engine.sampling.params import SamplingParams

_WARM, _TIMED, _PROFILED = 4, 24, 8
_ROOM = 64  # tokens that a request may generate
_JOINED_US = 5.0  # a kernel that begins so soon after another one has not waited for the host
# Relative error of two ways through the same model in bfloat16, each of which is off float32 by 2e-2 (32 layers).
_LOGITS_LIMIT = 5e-2


@dataclass(frozen=True)
class Sizes:
    """Of one stage."""

    batches: tuple[int, ...]
    context: int
    page: int
    prefill: int
    step_tokens: int

    @classmethod
    def of(cls, small: bool) -> Sizes:
        return cls((1, 2, 4), 40, 32, 100, 256) if small else cls((1, 32, 256), 1024, 256, 8192, 8192)

    @property
    def blocks_each(self) -> int:
        return -(-(self.context + _ROOM) // self.page)

    @property
    def num_blocks(self) -> int:
        return max(max(self.batches) * self.blocks_each, 2 * -(-(self.prefill + _ROOM) // self.page))


@dataclass(frozen=True)
class Variant:
    """How an engine runs its steps."""

    name: str
    graphs: bool
    overlap: bool


MAIN = Variant("graphs and async batching", graphs=True, overlap=True)
OTHERS = (Variant("graphs", graphs=True, overlap=False), Variant("neither", graphs=False, overlap=False))


class SteppedEngine:
    """An engine without its thread."""

    def __init__(self, bench: Bench, model: Any, sizes: Sizes, variant: Variant) -> None:
        self._bench, self._sizes, self._vocab = bench, sizes, model.config.vocab_size
        config = ContinuousBatchingConfig(
            page_size=sizes.page,
            num_blocks=sizes.num_blocks,
            max_batch_tokens=sizes.step_tokens,
            max_requests_per_batch=max(sizes.batches),
            max_blocks_per_request=sizes.blocks_each if bench.is_cuda else None,
            use_cuda_graph=(False, variant.graphs and bench.is_cuda),
            use_async_batching=variant.overlap and bench.is_cuda,
            allow_block_sharing=False,
            safety_margin=0.0,
            release_weights=bench.is_cuda,  # as in serving; there the model stays of use to the next engine
        )
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1)
        self.core = init_continuous_batching(model, greedy, config)._build()
        self.core.runner.warmup()
        self._count = 0
        self._requests: list[Request] = []
        self.logits = torch.empty(0)  # of the step that was sampled last
        self._sample = self.core.runner.sample
        self.core.runner.sample = self._keep_and_sample  # type: ignore[method-assign]

    def _keep_and_sample(self, pending: Any) -> None:
        self.logits = pending.logits
        self._sample(pending)

    def add(self, batch: int, length: int) -> None:
        """Requests with prompts of their own."""
        for _ in range(batch):
            self._count += 1
            ids = random.Random(self._count).choices(range(self._vocab), k=length)
            request = Request(str(self._count), ids, length, SamplingParams(max_new_tokens=1 << 20), self._count)
            self._requests.append(request)
            self.core.add(request)

    def run_until_all_decode(self) -> None:
        while any(not request.num_output_tokens for request in self._requests):
            self.step()

    def step(self) -> None:
        """Raises RuntimeError where a request has ended."""
        for output in self.core.step():
            if output.is_finished():
                raise RuntimeError(f"request {output.request_id} ended: {output.error or output.finish_reason}")

    def timed_steps(self, count: int) -> list[float]:
        """Seconds of each; every request has got a token in each."""
        before = sum(request.num_output_tokens for request in self._requests)
        self._bench.wait()
        stamps = [time.perf_counter()]
        for _ in range(count):
            self.step()
            stamps.append(time.perf_counter())
        got = sum(request.num_output_tokens for request in self._requests) - before
        if got != count * len(self._requests):
            raise RuntimeError(f"{got} tokens came of {count} steps of {len(self._requests)} requests")
        return [later - earlier for earlier, later in itertools.pairwise(stamps)]

    @property
    def token_ids(self) -> list[list[int]]:
        return [request.token_ids for request in self._requests]

    @property
    def mean_context(self) -> float:
        return statistics.mean(len(request.token_ids) for request in self._requests)

    def clear(self) -> None:
        self.core.settle()
        for request in self._requests:
            self.core.cancel(request.request_id)
        self._requests.clear()


def steps(bench: Bench, progress: Progress, name: str, variants: bool) -> None:
    """Rows of one model. `variants`: also without async batching and without graphs, at one batch."""
    sizes = Sizes.of(bench.small)
    model = build(name, bench.device, bench.small)
    costs = costs_of(model)
    progress.add(
        "model", read_bytes=costs.weights * costs.dtype_bytes, kv_bytes_per_token=costs.kv_bytes, small=bench.small
    )
    engine = SteppedEngine(bench, model, sizes, MAIN)
    with progress.case("logits"):
        _compare_logits(progress, engine, model, sizes.context)
    engine.clear()
    for batch in sizes.batches:
        case = f"batch {batch}"
        if not progress.has_time(case):
            return
        with progress.case(case):
            _decode(bench, progress, engine, costs, batch, sizes.context, case=case, main=True)
        engine.clear()
    with progress.case("prefill"):
        _prefill(progress, engine, bench, costs, sizes.prefill)
    engine.clear()
    del engine
    for variant in OTHERS if variants else ():
        case = f"batch {sizes.batches[1]}, {variant.name}"
        if not progress.has_time(case):
            return
        bench.free()
        with progress.case(case):
            bench.need_cuda("another way of running steps")
            other = SteppedEngine(bench, model, sizes, variant)
            _decode(bench, progress, other, costs, sizes.batches[1], sizes.context, case=case, main=False)
            del other


@torch.inference_mode()
def _compare_logits(progress: Progress, engine: SteppedEngine, model: Any, length: int) -> None:
    """Of a prompt and of some tokens after it, with those of transformers' own forward.

    Raises:
        ArithmeticError: they differ by more than rounding.
    """
    engine.add(1, length)
    errors: list[float] = []
    for _ in range(1 + _WARM):
        engine.step()
        engine.core.settle()  # so that the last logits belong to the last token
        (ids,) = engine.token_ids
        given = torch.tensor([ids[:-1]], device=model.device)
        expected = model(input_ids=given, use_cache=False).logits[0, -1].float()
        errors.append(((engine.logits[0].float() - expected).norm() / expected.norm()).item())
    right = all(error < _LOGITS_LIMIT for error in errors)
    progress.add("logits", prompt_error=errors[0], decode_error=max(errors[1:]), limit=_LOGITS_LIMIT, right=right)
    if not right:
        raise ArithmeticError(f"logits differ from transformers' by {max(errors):.3g}, {_LOGITS_LIMIT:g} is the limit")


def _decode(
    bench: Bench,
    progress: Progress,
    engine: SteppedEngine,
    costs: ModelCosts,
    batch: int,
    context: int,
    *,
    case: str,
    main: bool,
) -> None:
    engine.add(batch, context)
    engine.run_until_all_decode()
    engine.timed_steps(_WARM)
    times = engine.timed_steps(_TIMED)
    tokens = engine.mean_context - _TIMED / 2
    seconds = statistics.median(times)
    floor = costs.decode_seconds(bench.limits, batch, tokens)
    waiting: dict[str, Any] = {}
    try:
        waiting = _waiting(bench, engine, seconds)
    except SkipStage as reason:
        waiting = {"gap": None, "gap_skipped": str(reason)}
    except Exception as error:  # a profiler that does not work costs this figure alone
        waiting = {"gap": None, "gap_error": repr(error)}
    progress.add(
        case,
        batch=batch,
        context=tokens,
        step_ms=1e3 * seconds,
        mean_ms=1e3 * statistics.mean(times),
        worst_ms=1e3 * max(times),
        floor_ms=None if floor is None else 1e3 * floor,
        share=share(floor, seconds),
        tokens_per_s=batch / seconds,
        main=main,
        **waiting,
    )


def _waiting(bench: Bench, engine: SteppedEngine, step_seconds: float) -> dict[str, Any]:
    """Which part of an unprofiled step the device waits for the host, from the kernels of profiled ones."""
    bench.need_cuda("the device's own time")
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    bench.wait()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        engine.timed_steps(_PROFILED)
        bench.wait()
    kernels = [event for event in profiled.events() or () if event.device_type == DeviceType.CUDA]
    if not kernels:
        raise RuntimeError("the profiler saw no kernels")
    spans = [(event.time_range.start, event.time_range.end) for event in kernels]
    kernels_ms, busy_ms = (1e-3 * busy(spans, joined) / _PROFILED for joined in (0.0, _JOINED_US))
    return {
        "kernels": len(kernels) / _PROFILED,
        "kernels_ms": kernels_ms,
        "busy_ms": busy_ms,
        "gap": max(0.0, 1 - 1e-3 * busy_ms / step_seconds),
    }


def _prefill(progress: Progress, engine: SteppedEngine, bench: Bench, costs: ModelCosts, tokens: int) -> None:
    """A prompt alone, from its first step to its first token; the second one counts."""
    seconds = 0.0
    for _ in range(2):
        engine.clear()
        engine.add(1, tokens)
        bench.wait()
        begin = time.perf_counter()
        engine.run_until_all_decode()
        seconds = time.perf_counter() - begin
    floor = costs.prefill_seconds(bench.limits, tokens)
    progress.add(
        f"prefill {tokens}",
        prefill_ms=1e3 * seconds,
        floor_ms=None if floor is None else 1e3 * floor,
        share=share(floor, seconds),
        tokens_per_s=tokens / seconds,
    )
