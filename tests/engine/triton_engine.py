"""Whole engines on the Triton kernels, in the interpreter's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from engine.execution.forward import FusedForward
from engine.execution.kv_tensors import KVTensors
from engine.ops.triton.triton_ops import TritonOps
from tests.engine.rows import Rows, expected, make_runner
from tests.harness import collect, core_of, running, tokens
from tests.models import build_tiny, ref

_SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 1.5, "seed": 7}


@contextmanager
def on_triton(make: Callable[..., TritonOps] = TritonOps) -> Iterator[None]:
    """Engines take these operations for the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.execution.model_runner.make_ops", lambda kv, groups, **options: make(kv, groups))
        yield


def generated(new_tokens: int) -> tuple[list[list[int]], list[list[int]], bool]:
    """Greedy tokens, then a sampled request's: of the engine, and of generate() and the engine on CPU kernels.

    Also whether the model ran fused. The second prompt begins as the first one, whose block it finds.
    """
    model = build_tiny(num_hidden_layers=2)
    prompts = [tokens(1, 7), [*tokens(1, 7)[:5], 5], tokens(3, 1)]
    expected_tokens = [ref(model, prompt, new_tokens) for prompt in prompts]
    expected_tokens += run(model, [prompts[2]], new_tokens, **_SAMPLED)[0]
    with on_triton():
        own, fused = run(model, prompts, new_tokens)
        own += run(model, [prompts[2]], new_tokens, **_SAMPLED)[0]
        assert len(set(map(tuple, own))) == 4
    return own, expected_tokens, fused


def run(model: Any, prompts: list[list[int]], new_tokens: int, **params: Any) -> tuple[list[list[int]], bool]:
    with running(model, page_size=4, per_request_processors=True) as manager:
        ids = [manager.add_request(prompt, max_new_tokens=new_tokens, **params) for prompt in prompts]
        outputs = [list(output.generated_tokens) for output in collect(manager, ids, 200)]
        return outputs, isinstance(core_of(manager).runner._mixed._forward, FusedForward)  # type: ignore[attr-defined]


class Reruns:
    """A `GraphBackend` that does what was recorded once more: on the same tensors, with what they hold then."""

    def __init__(self) -> None:
        self.replays: list[int] = []

    def capture(self, run: Callable[[], None]) -> Rerun:
        run()
        self.replays.append(0)
        return Rerun(self.replays, len(self.replays) - 1, run)


@dataclass
class Rerun:
    """A recording."""

    replays: list[int]
    number: int
    run: Callable[[], None]

    def replay(self) -> None:
        self.replays[self.number] += 1
        self.run()


def replayed_steps() -> tuple[int, float]:
    """Recordings of mixed and of decode-only steps that were replayed, and the largest error of their logits."""
    model, backend = build_tiny(num_hidden_layers=2), Reruns()

    def ops(kv: KVTensors) -> TritonOps:
        return TritonOps(kv)

    runner = make_runner(
        model,
        ops=ops,
        graph_backend=backend,
        graphs=(True, True),
        max_blocks_per_request=4,
        max_requests=3,
        q_padding=8,
        kv_padding=64,
    )
    rows, error = Rows(runner, 512, [5, 9, 3]), 0.0
    for counts in ({0: 5, 1: 2}, {1: 6, 0: 1}, {1: 1, 0: 1, 2: 3}, {0: 1, 1: 1}, {1: 1, 2: 1}, {0: 1, 1: 1, 2: 1}):
        for request_id, logits in rows.step(counts).items():
            request = rows.requests[int(request_id)]
            error = max(error, (logits - expected(model, request, request.computed)).abs().max().item())
    return sum(count > 1 for count in backend.replays), error
