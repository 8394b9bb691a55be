"""Whole engines whose attention runs in flash kernels: the tokens of `generate()`, whatever the steps are.

The packages are fakes on CPU, models are in float16. Prompts are those on which the two most likely tokens of every
position differ by more than rounding.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine import generate_batch
from engine.cache.groups import LayerGroup
from engine.execution.kv_tensors import KVTensors
from engine.ops.flash.kernels import FlashAttention2, FlashAttention3
from engine.ops.flash.ops import FlashOps
from tests.architectures import build
from tests.engine import fake_flash
from tests.engine.fixed_ops import FakeGraphs
from tests.engine.recorded import generate_recorded
from tests.engine.rows import Rows, make_runner
from tests.harness import NO_EOS, Stepper, config
from tests.models import build_tiny, reference

GAP = 0.05  # of two logits; those of float16 are exact to about 0.01
NEW = 8


class Counted:
    """A fake package, and how often each of its functions was called."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.calls: dict[str, int] = {}
        for name, function in vars(module).copy().items():
            if callable(function):
                setattr(module, name, self._counted(name, function))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            return function(*args, **kwargs)

        call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return call


@pytest.fixture(params=[fake_flash.flash_attn, fake_flash.flash_attn_interface])
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """The only flash package that there is."""
    counted = Counted(request.param())
    fake_flash.install(monkeypatch, counted.module)
    return counted


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build_tiny(max_position_embeddings=2048, num_hidden_layers=2).half()


@pytest.fixture(scope="module")
def sliding() -> PreTrainedModel:
    """Windows of 40 tokens in one of two layers."""
    sizes: dict[str, Any] = {
        "max_position_embeddings": 2048,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    return build("qwen2", seed=4, use_sliding_window=True, sliding_window=40, max_window_layers=1, **sizes).half()


def clear_prompts(model: PreTrainedModel, lengths: list[int], prefix: list[int] | None = None) -> list[list[int]]:
    """Prompts of these lengths whose answers no rounding changes."""
    generator = random.Random(0)
    prompts = []
    for length in lengths:
        for _ in range(50):
            known = (prefix or [])[:length]
            prompt = known + [generator.randrange(model.config.vocab_size) for _ in range(length - len(known))]
            if min(reference(model, prompt, NEW).gaps) > GAP:
                break
        else:
            raise AssertionError(f"no prompt of {length} tokens without a near tie")
        prompts.append(prompt)
    return prompts


def check_tokens(model: PreTrainedModel, prompts: list[list[int]], **fields: Any) -> Stepper:
    stepper = Stepper(model, **fields)
    requests = [stepper.add(prompt, NEW) for prompt in prompts]
    stepper.drain()
    assert stepper.manager.settings.flash_package is not None
    results = stepper.results()
    for request, prompt in zip(requests, prompts, strict=True):
        assert list(results[request.request_id].generated_tokens) == reference(model, prompt, NEW).token_ids
    return stepper


PAGES = {"page_size": 256, "num_blocks": 40}


def test_chunks_and_decode_steps(package: Counted, model: PreTrainedModel) -> None:
    """Prompts over page borders, in chunks beside decoding rows, by both paths."""
    prompts = clear_prompts(model, [5, 256, 300, 520])
    check_tokens(model, prompts, **PAGES, max_batch_tokens=200)
    if package.module.__name__ == "flash_attn":
        by_both = dict(package.calls)
        assert by_both["flash_attn_with_kvcache"] > 2 and by_both["flash_attn_varlen_func"] > 2
        package.calls.clear()
        check_tokens(model, prompts[:2], **PAGES, max_batch_tokens=200, max_blocks_per_request=0)
        assert package.calls["flash_attn_with_kvcache"] > package.calls["flash_attn_varlen_func"] > 2


def test_rows_of_one_token_are_apart_from_the_others(model: PreTrainedModel) -> None:
    """Where a kernel splits long contexts only in steps that have no other rows, in calls of their own."""
    counted = Counted(fake_flash.flash_attn())
    kernel = FlashAttention2(counted.module, "flash-attn", "FlashAttention 2")
    rows = Rows(make_runner(model, ops=lambda kv: FlashOps(kernel, kv), page_size=256), 512, [20, 9, 33])
    calls = []
    for counts in ({0: 20, 1: 9}, {0: 1, 1: 1, 2: 33}, {0: 1, 1: 1, 2: 1}):
        counted.calls.clear()
        rows.step(counts)
        calls.append(tuple(counted.calls.get(f"flash_attn_{name}", 0) for name in ("varlen_func", "with_kvcache")))
    layers = model.config.num_hidden_layers
    assert calls == [(layers, 0), (layers, layers), (0, layers)]


def test_varlen_attn(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    fake_flash.install(monkeypatch, fake_flash.torch_varlen())
    stepper = check_tokens(model, clear_prompts(model, [5, 256, 300, 520]), **PAGES, max_batch_tokens=200)
    assert stepper.manager.settings.flash_package == "torch"


def test_prefix_hits(package: Counted, model: PreTrainedModel) -> None:
    (long,) = clear_prompts(model, [530])
    prompts = clear_prompts(model, [540, 600, 530], prefix=long[:520])
    stepper = check_tokens(model, [long, *prompts, long], **PAGES, max_batch_tokens=1024)
    cached = [output.cached_tokens for output in stepper.results().values()]
    assert sum(cached) >= 3 * 512, cached


def test_preemption(package: Counted, model: PreTrainedModel) -> None:
    prompts = clear_prompts(model, [250, 251, 252])
    stepper = check_tokens(model, prompts, page_size=256, num_blocks=4, safety_margin=0.0, allow_block_sharing=False)
    assert stepper.core.scheduler.num_preemptions > 0


def test_windows(package: Counted, sliding: PreTrainedModel) -> None:
    prompts = clear_prompts(sliding, [5, 39, 41, 300])
    check_tokens(sliding, prompts, **PAGES, max_batch_tokens=200)


def test_small_pages(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, sliding: PreTrainedModel) -> None:
    """Which only FlashAttention 3 reads."""
    fake_flash.install(monkeypatch, fake_flash.flash_attn_interface())
    for each in (model, sliding):
        prompts = clear_prompts(each, [5, 47, 48, 49, 100])
        stepper = check_tokens(each, prompts, page_size=16, num_blocks=24, max_batch_tokens=40, safety_margin=0.0)
        assert stepper.manager.settings.flash_package == "flash-attn-3"
    assert stepper.core.scheduler.num_preemptions > 0


def test_by_the_public_function(package: Counted, model: PreTrainedModel) -> None:
    (prompt,) = clear_prompts(model, [20])
    outputs = generate_batch(model, [prompt], NO_EOS, continuous_batching_config=config(**PAGES), max_new_tokens=NEW)
    assert list(outputs["req_0"].generated_tokens) == reference(model, prompt, NEW).token_ids
    assert sum(package.calls.values()) >= NEW - 1


# Recorded steps


Groups = Sequence[LayerGroup] | None


def flash_2(kv: KVTensors, groups: Groups = None) -> FlashOps:
    return FlashOps(FlashAttention2(fake_flash.flash_attn(), "flash-attn", "FlashAttention 2"), kv, groups)


def flash_3(kv: KVTensors, groups: Groups = None) -> FlashOps:
    return FlashOps(FlashAttention3(fake_flash.flash_attn_interface(), "flash-attn-3", "FlashAttention 3"), kv, groups)


def run(
    model: PreTrainedModel, make: Callable[[KVTensors], FlashOps], graphs: FakeGraphs | None, page: int
) -> list[torch.Tensor]:
    """The logits of mixed steps and of decode-only ones."""
    which = (make is flash_3, True) if graphs is not None else (False, False)
    runner = make_runner(
        model,
        ops=make,
        graph_backend=graphs,
        graphs=which,
        max_blocks_per_request=4,
        max_requests=6,
        q_padding=16,
        kv_padding=512,
        page_size=page,
    )
    rows = Rows(runner, 512, [3, 20, 9, 33, 14])
    steps = [{0: 3, 1: 20, 2: 9}, *[{0: 1, 1: 1, 2: 1, 3: 11}] * 3, {0: 1, 1: 1, 2: 1, 3: 1, 4: 12}, {0: 1, 4: 2}]
    steps += [dict.fromkeys(range(5), 1)] * 4 + [{0: 1, 3: 1}, {1: 1, 2: 1, 4: 1}]
    return [logits for step in steps for logits in rows.step(step).values()]


@pytest.mark.parametrize("make", [flash_2, flash_3])
def test_recorded_steps_are_those_that_run_directly(
    model: PreTrainedModel, make: Callable[[KVTensors], FlashOps]
) -> None:
    """The recorder refuses whatever launches anything else when it is replayed, or on other memory."""
    backend = FakeGraphs()
    recorded, direct = run(model, make, backend, PAGE_OF[make]), run(model, make, None, PAGE_OF[make])
    for a, b in zip(recorded, direct, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    assert sum(graph.replays > 1 for graph in backend.graphs) >= (2 if make is flash_3 else 1)


@pytest.mark.parametrize("make", [flash_2, flash_3])
def test_layers_with_windows_are_recorded(
    sliding: PreTrainedModel, make: Callable[[KVTensors, Groups], FlashOps]
) -> None:
    """Contexts beyond the window, whose blocks behind it have been given back."""
    prompts = clear_prompts(sliding, [5, 39, 41, 300])
    backend, page = FakeGraphs(), PAGE_OF[make]
    sizes = {"page_size": page, "num_blocks": 60, "max_blocks": -(-320 // page)}
    own = generate_recorded(sliding, make, backend, prompts, NEW, **sizes)
    assert own == [reference(sliding, prompt, NEW).token_ids for prompt in prompts]
    assert sum(graph.replays for graph in backend.graphs) >= NEW - 1


PAGE_OF = {flash_2: 256, flash_3: 16}
