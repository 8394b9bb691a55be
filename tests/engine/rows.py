"""Requests with blocks of their own that a test runs through a `ModelRunner` in pieces of its choice, no scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.cache.groups import LayerGroup
from engine.execution.graphs import GraphBackend
from engine.execution.kv_tensors import KVTensors, allocate
from engine.execution.model_runner import ModelRunner, Pending
from engine.model.shadow import make_shadow, model_facts
from engine.ops.interface import Ops
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.scheduling.batch import ScheduledBatch
from engine.settings import Settings
from tests.engine.tables import set_tables

PAGE = 16


def make_settings(model: PreTrainedModel, **fields: Any) -> Settings:
    facts = model_facts(model)
    defaults: dict[str, Any] = {
        "page_size": PAGE,
        "num_blocks": 120,
        "max_batch_tokens": 64,
        "max_requests": 16,
        "safety_margin": 0.0,
        "sharing": True,
        "return_logprobs": False,
        "per_request_processors": True,
        "seed": 0,
        "scheduler_type": "fifo",
        "context_length": 128,
        "vocab_size": facts.vocab_size,
        "kv_bytes_per_block": facts.kv_bytes_per_token * PAGE,
        "device_type": "cpu",
        "groups": (LayerGroup(tuple(range(facts.num_layers))),),
    }
    return Settings(**(defaults | fields))


def make_runner(
    model: PreTrainedModel,
    *,
    ops: Callable[[KVTensors], Ops] | None = None,
    graph_backend: GraphBackend | None = None,
    **fields: Any,
) -> ModelRunner:
    """A runner with these operations, and with `fields` of its settings."""
    settings, facts = make_settings(model, **fields), model_facts(model)
    kv = made = None
    if ops is not None:
        sizes = facts.num_layers, settings.num_blocks, facts.num_kv_heads, settings.page_size, facts.head_dim
        kv = allocate(*sizes, model.dtype, trash=True)
        made = ops(kv)
    return ModelRunner(make_shadow(model), settings, ops=made, kv=kv, graph_backend=graph_backend)


class Rows:
    """Requests of the given prompt lengths."""

    def __init__(
        self, runner: ModelRunner, vocab_size: int, lengths: Sequence[int], blocks_each: int = 8, num_groups: int = 1
    ) -> None:
        self.runner = runner
        generator = random.Random(0)
        self.requests = [
            Request(
                str(i),
                [generator.randrange(vocab_size) for _ in range(length)],
                length,
                SamplingParams(max_new_tokens=100),
            )
            for i, length in enumerate(lengths)
        ]
        total = len(lengths) * blocks_each * num_groups
        blocks = generator.sample(range(1, total + 1), total)
        self.tables = [
            [blocks[(i * num_groups + g) * blocks_each :][:blocks_each] for g in range(num_groups)]
            for i in range(len(lengths))
        ]

    def batch(self, counts: dict[int, int]) -> ScheduledBatch:
        """Counts by row; a row may take one token more than is known, which the step before is still sampling."""
        batch = ScheduledBatch()
        for row, count in counts.items():
            request = self.requests[row]
            batch.starts.append(request.computed)
            request.computed += count
            if request.computed >= len(request.token_ids):
                batch.sampled.append(len(batch.requests))
            batch.requests.append(request)
            batch.counts.append(count)
        set_tables(batch, [self.tables[row] for row in counts])
        return batch

    def step(self, counts: dict[int, int]) -> dict[str, torch.Tensor]:
        """Runs so many tokens of each row and appends the most likely token to those that are complete.

        Returns the logits of these by request id.
        """
        pending = self.runner.launch(self.batch(counts))
        logits = {
            request.request_id: row.clone() for request, row in zip(pending.requests, pending.logits, strict=True)
        }
        self.runner.sample(pending)
        for request, token in zip(pending.requests, self.finish(pending), strict=True):
            assert token == logits[request.request_id].argmax().item()
        return logits

    def finish(self, pending: Pending) -> list[int]:
        """Appends the tokens of a sampled step."""
        tokens = pending.result().token_ids
        for request, token in zip(pending.requests, tokens, strict=True):
            request.token_ids.append(token)
        return tokens


def expected(model: PreTrainedModel, request: Request, upto: int) -> torch.Tensor:
    """Logits after the first `upto` tokens, from a plain forward without cache."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([request.token_ids[:upto]]), use_cache=False).logits[0, -1]
