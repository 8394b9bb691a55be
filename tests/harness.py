"""Engines for tests: a running manager that is checked when it ends, and one that is stepped by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from engine import (
    ContinuousBatchingConfig,
    ContinuousBatchingManager,
    GenerationOutput,
    continuous_batching_context_manager,
    init_continuous_batching,
)
from engine.core import EngineCore
from engine.execution.forward import StepInputs
from engine.request import Request
from tests.conftest import wait_limit
from tests.serving import wait_until

NO_EOS = GenerationConfig(do_sample=False, eos_token_id=-1)


def config(**fields: Any) -> ContinuousBatchingConfig:
    """Small pages and a small cache unless `fields` say otherwise."""
    return ContinuousBatchingConfig(**({"page_size": 16, "num_blocks": 128, "max_batch_tokens": 256} | fields))


@contextmanager
def running(
    model: PreTrainedModel, generation_config: GenerationConfig = NO_EOS, **fields: Any
) -> Iterator[ContinuousBatchingManager]:
    """A running manager whose block pool must be whole, and empty of requests, when the block ends."""
    with continuous_batching_context_manager(
        model, generation_config, continuous_batching_config=config(**fields)
    ) as manager:
        yield manager
        wait_idle(manager)
        check_whole(core_of(manager))


def core_of(manager: ContinuousBatchingManager) -> EngineCore:
    return manager._build()


def before_forward(manager: ContinuousBatchingManager, hook: Callable[[torch.Tensor], None]) -> None:
    """Calls `hook` with the input ids before every forward pass, whichever way the model runs; it may raise."""
    path: Any = core_of(manager).runner._mixed  # type: ignore[attr-defined]
    forward = path._forward

    class Hooked:
        def __call__(self, inputs: StepInputs, plan: Any) -> torch.Tensor:
            hook(inputs.input_ids)
            logits: torch.Tensor = forward(inputs, plan)
            return logits

    path._forward = Hooked()


def check_whole(core: EngineCore) -> None:
    """The pool is consistent and every block is free (cached blocks that nobody references are)."""
    cache = core.scheduler.cache
    cache.check_integrity(list(core.scheduler.live()))
    assert not list(core.scheduler.live())
    assert cache.num_free_blocks == cache.num_blocks


def wait_idle(manager: ContinuousBatchingManager, seconds: float = 10) -> None:
    wait_until(lambda: not manager._loop._live and not manager._loop._inbox, seconds)
    wait_until(lambda: not core_of(manager).has_work or not manager.is_running(), seconds)


def collect(manager: ContinuousBatchingManager, ids: Sequence[str], seconds: float = 30) -> list[GenerationOutput]:
    """The terminal outputs of these requests, in this order."""
    outputs = []
    for request_id in ids:
        while True:
            output = manager.get_result(request_id, timeout=wait_limit(seconds))
            assert output is not None, f"{request_id} hangs"
            if output.is_finished():
                outputs.append(output)
                break
    return outputs


class Stepper:
    """An engine without a thread: requests are added and steps are taken by the test."""

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig = NO_EOS,
        overlap: bool = False,
        **fields: Any,
    ) -> None:
        self.manager = init_continuous_batching(model, generation_config, config(**fields))
        self.core = core_of(self.manager)
        self.core._overlap = overlap  # on CPU no setting asks for it
        self.outputs: list[GenerationOutput] = []
        self.steps = 0

    def add(
        self, prompt: Sequence[int], max_new_tokens: int, request_id: str | None = None, **arguments: Any
    ) -> Request:
        streaming = arguments.pop("streaming", False)
        request = self.manager._intake.request(
            request_id or self.manager._name(),
            prompt,
            {"max_new_tokens": max_new_tokens, **arguments},
            streaming=streaming,
        )
        self.core.add(request)
        return request

    def cancel(self, request_id: str) -> None:
        if (output := self.core.cancel(request_id)) is not None:
            self.outputs.append(output)

    def step(self) -> list[GenerationOutput]:
        outputs = self.core.step()
        self.core.scheduler.cache.check_integrity(list(self.core.scheduler.live()))
        self.outputs += outputs
        self.steps += 1
        return outputs

    def drain(self, limit: int = 5000) -> None:
        while self.core.has_work:
            self.step()
            assert self.steps < limit, "the engine makes no progress"
        check_whole(self.core)

    def results(self) -> dict[str, GenerationOutput]:
        """Terminal outputs by request; exactly one each."""
        ended = [output for output in self.outputs if output.is_finished()]
        by_id = {output.request_id: output for output in ended}
        assert len(by_id) == len(ended), "a request has two terminal outputs"
        return by_id


def tokens(seed: int, length: int, vocab: int = 512) -> list[int]:
    """A reproducible random prompt."""
    import random

    rng = random.Random(f"{seed}-{length}")
    return [rng.randrange(vocab) for _ in range(length)]
