"""An engine whose model costs nothing: scheduler, cache, input, plans, update and delivery are the real ones.

Made by the step benchmark and by the tests that count a step's work. Knows no model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from engine.cache.kv_cache import KVCache
from engine.core import EngineCore
from engine.delivery import Delivery
from engine.execution.input_batch import InputPacker
from engine.execution.kv_tensors import allocate
from engine.execution.model_runner import Pending
from engine.ops import make_ops
from engine.ops.interface import Ops
from engine.request import Request
from engine.sampling.logprobs import LogprobRows
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampled, Sampler
from engine.scheduling.batch import ScheduledBatch
from engine.scheduling.scheduler import Scheduler

PAGE = 16
VOCAB = 49152
_PREFILL_TOKENS = 1 << 20  # a step; what runs is prefilled in few of them
_TOKEN = 7  # what is generated

PARTS = ("schedule", "input", "plan", "sample plan", "update", "deliver")
_MODEL = "model"  # what stands for it and for the tensor work of the sampler: no part of the host's time


class Clock:
    """Seconds of the thread's processor time spent in each part: what others do on a busy machine does not count.

    Attributes:
        spent: by part.
    """

    spent: dict[str, float]

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was spent, and begin."""
        self.spent = dict.fromkeys((*PARTS, _MODEL), 0.0)
        self._last = time.thread_time()

    def lap(self, part: str) -> None:
        """What was spent since the last call belongs to `part`."""
        now = time.thread_time()
        self.spent[part] += now - self._last
        self._last = now


class ScriptedRunner:
    """A `Runner` that prepares a step as the model runner does and generates the same token for ever.

    Attributes:
        prepares: whether it prepares steps at all; without it prompts of any length cost nothing.
    """

    def __init__(self, ops: Ops, clock: Clock) -> None:
        self.prepares = False
        self._ops = ops
        self._clock = clock
        self._packer = InputPacker()
        self._sampler = Sampler(VOCAB)

    def launch(self, batch: ScheduledBatch, previous: Any = None) -> Pending:
        """See `Runner.launch`."""
        self._clock.lap("update")
        prompts = []
        if self.prepares:
            inputs = self._packer.pack(batch, previous.requests if previous else ())
            prompts = inputs.prompts
            self._clock.lap("input")
            self._ops.plan(inputs.rows)
            self._clock.lap("plan")
        logits = torch.empty(len(batch.sampled), 0)
        self._clock.lap(_MODEL)
        return Pending(batch.sampled_requests, logits, prompts)

    def sample(self, pending: Pending) -> None:
        """See `Runner.sample`."""
        self._clock.lap("update")
        if self.prepares:
            self._sampler.plan(pending.requests)
            self._clock.lap("sample plan")
        rows = len(pending.requests)
        tokens, bad = torch.full((rows,), _TOKEN), torch.zeros(rows, dtype=torch.bool)
        self._clock.lap(_MODEL)
        pending.set_sampled(Sampled(tokens, bad, None, LogprobRows(), {}), {})

    def probe(self) -> None:
        """Nothing to probe."""

    def warmup(self) -> None:
        """Nothing to warm up."""

    def check_weights(self) -> None:
        """No weights."""

    def refresh_weights(self) -> None:
        """No weights."""


class _NoLoop:
    """In the place of a subscriber's event loop: a step's outputs reach it in one call."""

    def call_soon_threadsafe(self, handler: Callable[..., None], *arguments: object) -> None:
        """What the engine thread does ends here."""


class ScriptedEngine:
    """`rows` streaming requests that decode after a context of `context` tokens, while `waiting` others do not fit.

    Args:
        steps: decode steps for which there is room.
        params: of the requests that run; greedy when None.
        overlap: of the core.

    Attributes:
        clock: what the parts of the steps cost so far.
    """

    def __init__(
        self, rows: int, context: int, waiting: int = 0, *, steps: int = 1000, params: SamplingParams | None = None,
        overlap: bool = False,
    ) -> None:  # fmt: skip
        self.clock = Clock()
        blocks_each = -(-(context + steps) // PAGE)
        num_blocks = rows * blocks_each
        self._cache = KVCache(num_blocks, PAGE, max_step_tokens=_PREFILL_TOKENS)
        scheduler = Scheduler(
            self._cache, max_batch_tokens=_PREFILL_TOKENS, max_requests=rows + 1, safety_margin=0.0
        )  # fmt: skip
        kv = allocate(1, num_blocks, 1, PAGE, 8, torch.float32)
        self._runner = ScriptedRunner(make_ops(kv), self.clock)
        self._core = EngineCore(scheduler, self._runner, overlap=overlap)
        self._delivery = Delivery()
        self._receiver: Any = (lambda output: None, _NoLoop())
        params = params or SamplingParams(max_new_tokens=context + 10 * steps, eos_token_ids=(0,))
        for row in range(rows):
            self._add(Request(f"running {row}", [row, *[_TOKEN] * (context - 1)], context, params, row, streaming=True))
        while scheduler.num_running < rows or any(request.remaining > 1 for request in scheduler.live()):
            self._core.step()
        prompt = [_TOKEN] * (num_blocks * PAGE - 1)
        for number in range(waiting):
            self._add(Request(f"waiting {number}", prompt, len(prompt), params, rows + number, streaming=True))
        self._runner.prepares = True
        self._schedule = scheduler.schedule
        scheduler.schedule = self._timed_schedule  # type: ignore[method-assign]

    def step(self) -> int:
        """One step and the delivery of what it brings; how many outputs that is."""
        outputs = self._core.step()
        self.clock.lap("update")  # what is left of the step
        self._delivery.publish(outputs)
        self.clock.lap("deliver")
        return len(outputs)

    def _add(self, request: Request) -> None:
        self._delivery.open(request.request_id, self._receiver)
        self._core.add(request)

    def _timed_schedule(self) -> ScheduledBatch:
        self.clock.lap("update")
        batch = self._schedule()
        self.clock.lap("schedule")
        return batch
