"""Engines on a CUDA device generate the tokens of generate(): by every attention, with graphs, overlap and offload."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine import ContinuousBatchingManager
from engine.gpu_check.backends import Backend
from tests.architectures import ARCHITECTURES
from tests.gpu.device import DEVICE, attention, backend, on_device
from tests.harness import collect, core_of, running, tokens
from tests.models import Reference, build_tiny, reference

__all__ = ["attention"]
pytestmark = on_device

LENGTHS = (1, 7, 40, 63, 64, 65, 100)
MODES: dict[str, dict[str, Any]] = {
    "directly": {"use_cuda_graph": False},
    "graphs": {"use_cuda_graph": (True, True), "use_async_batching": False},
    "graphs and async batching": {"use_cuda_graph": (True, True), "use_async_batching": True},
    "decode graphs and async batching": {"use_cuda_graph": (False, True), "use_async_batching": True},
}


@pytest.fixture
def engines_on(monkeypatch: pytest.MonkeyPatch, attention: Backend) -> Backend:
    return _use(monkeypatch, attention)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build_tiny().to(DEVICE)


def _use(monkeypatch: pytest.MonkeyPatch, chosen: Backend) -> Backend:
    """Engines take this attention, whatever they would choose."""
    monkeypatch.setattr("engine.execution.model_runner.make_ops", lambda kv, groups, **options: chosen.make(kv, groups))
    return chosen


def in_its_dtype(model: PreTrainedModel, chosen: Backend) -> PreTrainedModel:
    """The model, in bfloat16 where the attention does not compute float32."""
    if "float32" not in chosen.lacks:
        return model
    return copy.deepcopy(model).to(torch.bfloat16)


def assert_same(own: Sequence[int], expected: Reference, dtype: torch.dtype) -> int:
    """Tokens are equal up to the first one that rounding may change; how many were compared."""
    closest = 1e-4 if dtype == torch.float32 else 0.2
    assert len(own) == len(expected.token_ids)
    for i, (token, wanted, gap) in enumerate(zip(own, expected.token_ids, expected.gaps, strict=True)):
        if token != wanted:
            assert gap < closest, f"token {i} is {token}, not {wanted}, which leads by {gap}"
            return i
    return len(own)


def generate(manager: ContinuousBatchingManager, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    ids = [manager.add_request(prompt, max_new_tokens=count) for prompt in prompts]
    return [list(output.generated_tokens) for output in collect(manager, ids, 120)]


def check(model: PreTrainedModel, own: list[list[int]], prompts: list[list[int]], count: int) -> None:
    compared = sum(
        assert_same(tokens, reference(model, prompt, count), model.dtype)  # type: ignore[arg-type]
        for tokens, prompt in zip(own, prompts, strict=True)
    )
    assert compared >= count * len(prompts) // 2, "too few tokens could be compared"


@pytest.mark.parametrize("mode", MODES)
def test_tokens_of_generate(model: PreTrainedModel, engines_on: Backend, mode: str) -> None:
    """Prompts in chunks beside requests that decode, in steps that are replayed and in others."""
    model = in_its_dtype(model, engines_on)
    page = max(16, engines_on.page_multiple)
    prompts = [tokens(1, length) for length in LENGTHS]
    with running(
        model, page_size=page, max_batch_tokens=64, max_requests_per_batch=8, max_blocks_per_request=12, **MODES[mode]
    ) as manager:
        own = generate(manager, prompts, 24)
        own += generate(manager, prompts[:2], 24)  # found in the cache, and steps of other sizes
        if DEVICE.type == "cuda" and mode != "directly":
            decode = core_of(manager).runner._decode  # type: ignore[attr-defined]
            assert decode is not None and decode._graphs.num_recordings > 0, "nothing was recorded"
        if DEVICE.type == "cuda":
            assert manager.settings.async_batching == ("async" in mode)
    check(model, own, [*prompts, *prompts[:2]], 24)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "qwen3"])
def test_windows_and_other_layers(monkeypatch: pytest.MonkeyPatch, attention: Backend, name: str) -> None:
    """Windows of 16 tokens, softcaps and norms of heads."""
    lacks = {"mistral": {"window"}, "gemma2": {"window", "softcap"}, "qwen3": set()}[name]
    if attention.lacks & lacks:
        pytest.skip(f"{attention.name} does not compute {' and '.join(sorted(attention.lacks & lacks))}")
    chosen = _use(monkeypatch, attention)
    model = in_its_dtype(ARCHITECTURES[name]().to(DEVICE), chosen)
    prompts = [tokens(2, length, 256) for length in (1, 15, 16, 17, 40, 90)]
    with running(model, page_size=max(16, chosen.page_multiple), max_batch_tokens=32) as manager:
        own = generate(manager, prompts, 20)
    check(model, own, prompts, 20)


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_requests_come_back_from_the_host(model: PreTrainedModel, overlap: bool) -> None:
    """By the attention that the engine chooses: six requests in a cache for fewer than three."""
    prompts = [tokens(3 + i, 40) for i in range(6)]
    with running(
        model,
        page_size=16,
        num_blocks=18,
        safety_margin=0.0,
        cpu_offload_space=0.05,
        use_cuda_graph=(False, overlap),
        use_async_batching=overlap,
    ) as manager:
        own = generate(manager, prompts, 60)
        scheduler = core_of(manager).scheduler
        assert scheduler.num_preemptions > 0, "nothing was preempted, so this shows nothing"
        assert manager.settings.host_slots > 0
    check(model, own, prompts, 60)


@pytest.mark.parametrize("graphs", [False, True])
def test_what_is_written_into_an_owned_model_counts(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """Its parameters are views of the matrices that recorded steps read."""
    _use(monkeypatch, backend("triton"))
    owned, other = copy.deepcopy(model), build_tiny(seed=1).to(DEVICE)
    prompts = [tokens(1, length) for length in (5, 40)]
    steps: dict[str, Any] = {"use_cuda_graph": (graphs, graphs), "max_blocks_per_request": 12}
    with running(owned, page_size=16, release_weights=True, **steps) as manager:
        check(model, generate(manager, prompts, 12), prompts, 12)
        with manager.pause():
            owned.load_state_dict(other.state_dict())
        check(other, generate(manager, prompts, 12), prompts, 12)
    mlp = owned.model.layers[0].mlp
    assert len({part.weight.untyped_storage().data_ptr() for part in (mlp.gate_proj, mlp.up_proj)}) == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_sampled_tokens_do_not_depend_on_their_neighbours(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    _use(monkeypatch, backend("triton"))
    sampled: dict[str, Any] = {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 1.5, "seed": 7}
    graphs: dict[str, Any] = {"use_cuda_graph": (False, overlap), "use_async_batching": overlap}
    with running(model, per_request_processors=True, max_blocks_per_request=12, **graphs) as manager:
        ids = [manager.add_request(tokens(1, 9), max_new_tokens=24, **sampled)]
        (alone,) = collect(manager, ids, 120)
        ids = [manager.add_request(tokens(1, 9), max_new_tokens=24, **sampled)]
        ids += [manager.add_request(tokens(i, 5 * i), max_new_tokens=24, **sampled | {"seed": i}) for i in range(1, 6)]
        beside, *others = collect(manager, ids, 120)
    assert list(alone.generated_tokens) == list(beside.generated_tokens)
    assert len({tuple(output.generated_tokens) for output in (beside, *others)}) == 6
