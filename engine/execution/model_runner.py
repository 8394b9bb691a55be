"""Runs the model on scheduled batches: prepares the input, runs the forward pass, samples, hands the tokens back.

Made and called by the core, in the engine thread. Owns the KV memory and the ops; knows nothing of scheduling or of
whom a block belongs to. Whatever raises leaves the runner as usable as before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.execution.input_batch import make_input_batch
from engine.execution.kv_tensors import allocate
from engine.model.attention import CONTEXT_ARGUMENT, StepContext
from engine.model.packed import refresh_packed
from engine.model.shadow import model_facts
from engine.ops import make_ops
from engine.ops.interface import Ops
from engine.outputs import StepOutput
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampled, Sampler
from engine.scheduling.batch import ScheduledBatch
from engine.settings import Settings


class Pending:
    """A launched step.

    Attributes:
        requests: those that get a token, in the order of `batch.sampled`.
        logits: [len(requests), vocab_size] in the model's dtype.
    """

    __slots__ = ("_sampled", "logits", "requests")

    def __init__(self, requests: list[Request], logits: torch.Tensor) -> None:
        self.requests = requests
        self.logits = logits
        self._sampled: Sampled | None = None

    def set_sampled(self, sampled: Sampled) -> None:
        self._sampled = sampled

    def result(self) -> StepOutput:
        """Waits for the device and returns the tokens.

        Raises:
            RuntimeError: the step was not sampled.
        """
        if not self.requests:
            return StepOutput([])
        if self._sampled is None:
            raise RuntimeError("result() before sample()")
        return self._sampled.read()


class ModelRunner:
    """The model, its KV cache and its sampler on one device.

    Args:
        model: what `make_shadow` returned.
        settings: sizes of the cache and of a step.
        sampler: chooses tokens from logits; made for the model's vocabulary when None.
        ops: operations bound to a cache; made for the model's device when None.

    Raises:
        NotImplementedError: the engine cannot run this architecture; found by running one token.
        MemoryError, torch.OutOfMemoryError: the cache does not fit.
    """

    def __init__(
        self, model: nn.Module, settings: Settings, sampler: Sampler | None = None, ops: Ops | None = None
    ) -> None:
        self._model = model
        self._facts = facts = model_facts(model)
        self._sampler = sampler or Sampler(facts.vocab_size)
        weight = next(model.parameters())
        self._device = weight.device
        self._max_warmup_tokens = min(settings.max_batch_tokens, settings.context_length)
        self._ops = ops or make_ops(
            allocate(
                max(len(group.layers) for group in settings.groups),
                settings.num_blocks,
                facts.num_kv_heads,
                settings.page_size,
                facts.head_dim,
                model.dtype,  # type: ignore[arg-type]
                self._device,
            ),
            settings.groups,
        )
        self.probe()

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch, previous: Pending | None = None) -> Pending:
        """Runs the forward pass of a batch that is not empty: writes its K/V, computes the sampled rows' logits.

        Raises:
            Exception: whatever the model raises; the blocks of the batch then hold anything.
        """
        return self._launch(batch, cached=True)

    @torch.inference_mode()
    def sample(self, pending: Pending, masks: torch.Tensor | None = None) -> None:
        """Chooses the tokens of a launched step.

        Args:
            masks: bool [rows, vocab_size], True where a token may be chosen; None allows all.
        """
        if not pending.requests:
            return
        logits = pending.logits
        if masks is not None:
            logits = logits.masked_fill(~masks.to(self._device), float("-inf"))
        pending.set_sampled(self._sampler(logits, self._sampler.plan(pending.requests)))

    def probe(self) -> None:
        """Runs the model on one throw-away token that leaves the cache alone; raises what the model raises."""
        self._dry_run(1)

    def warmup(self) -> None:
        """Runs a largest and a smallest step through the real path, so that no request pays for first-time set-up."""
        for tokens in {self._max_warmup_tokens, 1}:
            self._dry_run(tokens)

    def refresh_weights(self) -> None:
        """Makes what was written into the weights since the last call count. Only while no step runs."""
        refresh_packed(self._model)

    @torch.inference_mode()
    def _dry_run(self, tokens: int) -> None:
        request = Request("dry-run", [0] * tokens, tokens, SamplingParams(max_new_tokens=1))
        pending = self._launch(ScheduledBatch([request], [0], [tokens], [[[]]], [0]), cached=False)
        self.sample(pending)
        pending.result()

    def _launch(self, batch: ScheduledBatch, cached: bool) -> Pending:
        inputs = make_input_batch(batch, self._device, cached=cached)
        context = StepContext(self._ops, self._ops.plan(inputs.rows))
        arguments: dict[str, Any] = {CONTEXT_ARGUMENT: context}
        output = self._model(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            use_cache=False,
            logits_to_keep=inputs.keep,
            **arguments,
        )
        if context.layers != self._facts.num_layers:
            raise NotImplementedError(
                f"{context.layers} of {self._facts.num_layers} layers of {type(self._model).__name__} ran the engine's "
                "attention; the engine cannot run this architecture"
            )
        return Pending([batch.requests[row] for row in batch.sampled], output.logits[0])
