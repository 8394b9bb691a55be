"""Packed weights: same results and parameters, remade when the weights have moved, left alone where they must be."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from engine import ContinuousBatchingConfig, continuous_batching_context_manager
from engine.manager import ContinuousBatchingManager
from engine.model import packed
from engine.model.packed import PackedLinear, pack_linears, refresh_packed
from engine.model.shadow import make_shadow
from engine.ops.cpu.build import BuildError
from tests.models import build_tiny


def linear(inputs: int = 48, outputs: int = 33, bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)


@pytest.fixture
def tiny_bf16() -> PreTrainedModel:
    return build_tiny().to(torch.bfloat16)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 64, 130])
def test_same_results_as_the_linear_layer(bias: bool, tokens: int) -> None:
    plain = linear(bias=bias)
    x = torch.randn(1, tokens, 48, dtype=torch.bfloat16)
    out = PackedLinear(plain)(x)
    expected = nn.functional.linear(
        x.double(), plain.weight.double(), None if plain.bias is None else plain.bias.double()
    )
    assert out.shape == expected.shape and out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-2)


def test_rows_that_do_not_follow_each_other() -> None:
    layer = PackedLinear(linear())
    x = torch.randn(2, 48, 5, dtype=torch.bfloat16).transpose(1, 2)
    assert torch.equal(layer(x), layer(x.contiguous())) and layer(x).shape == (2, 5, 33)


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    layer = PackedLinear(linear())
    x = torch.randn(70, 48, dtype=torch.bfloat16)
    together = layer(x)
    assert all(torch.equal(layer(x[i : i + 1])[0], together[i]) for i in range(len(x)))


def test_without_a_compiler_layers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(dtype: torch.dtype) -> torch.dtype:
        raise BuildError("no compiler")

    monkeypatch.setattr(packed, "activation_dtype", fail)
    assert type(pack_linears(nn.Sequential(linear()))[0]) is nn.Linear  # type: ignore[index]


def test_every_linear_layer_of_the_shadow_keeps_its_parameters(tiny_bf16: PreTrainedModel) -> None:
    shadow = pack_linears(make_shadow(tiny_bf16))
    linears = {name: module for name, module in shadow.named_modules() if isinstance(module, nn.Linear)}
    assert len(linears) > 7 and "lm_head" in linears
    assert all(type(module) is PackedLinear for module in linears.values())
    for name, parameter in tiny_bf16.named_parameters(remove_duplicate=False):
        assert shadow.get_parameter(name) is parameter
    assert not any(isinstance(module, PackedLinear) for module in tiny_bf16.modules())


def test_a_layer_in_two_places_stays_one() -> None:
    shared = linear(48, 48)
    model = pack_linears(nn.Sequential(shared, nn.Sequential(shared)))
    assert type(model[0]) is PackedLinear and model[0] is model[1][0]  # type: ignore[index]


@torch.no_grad()
@pytest.mark.parametrize("write", ["in place", "through data", "new storage", "in inference mode"])
def test_changed_weights_count_after_a_refresh(write: str) -> None:
    plain = linear(bias=False)
    model = pack_linears(nn.Sequential(plain))
    new = linear(bias=False).weight.neg()
    if write == "in place":
        plain.weight.copy_(new)
    elif write == "through data":
        plain.weight.data.copy_(new)
    elif write == "new storage":
        plain.weight.data = new
    else:
        with torch.inference_mode():
            plain.weight.copy_(new)
    refresh_packed(model)
    x = torch.randn(3, 48, dtype=torch.bfloat16)
    torch.testing.assert_close(model(x), x @ new.T, atol=1e-2, rtol=1e-2)


def test_unchanged_weights_are_not_packed_again(tiny_bf16: PreTrainedModel) -> None:
    shadow = pack_linears(make_shadow(tiny_bf16))
    layers = [module for module in shadow.modules() if isinstance(module, PackedLinear)]
    packs = [layer._packed for layer in layers]
    assert packs and not any(pack is None or pack.refresh() for pack in packs)
    layers[0].weight.data.neg_()
    assert packs[0] is not None and packs[0].refresh() and not packs[0].refresh()


@torch.no_grad()
def test_weights_of_another_dtype_are_computed_with_as_they_are() -> None:
    model = pack_linears(nn.Sequential(linear()))
    model.to(torch.float32)
    model[0].weight.data.neg_()  # type: ignore[index]
    refresh_packed(model)
    x = torch.randn(3, 48)
    assert torch.equal(model(x), nn.functional.linear(x, model[0].weight, model[0].bias))  # type: ignore[index]


def generated(manager: ContinuousBatchingManager) -> list[list[int]]:
    prompts = [[5, 6, 7], [300, 2, 9, 11, 40]]
    ids = [manager.add_request(prompt, max_new_tokens=8) for prompt in prompts]
    results = {result.request_id: result for result in manager}
    return [list(results[request_id].generated_tokens) for request_id in ids]  # type: ignore[index]


def test_weights_written_between_two_sessions_are_seen(tiny_bf16: PreTrainedModel) -> None:
    config: dict[str, Any] = {
        "generation_config": GenerationConfig(do_sample=False, eos_token_id=-1),
        "continuous_batching_config": ContinuousBatchingConfig(num_blocks=16),
    }
    with continuous_batching_context_manager(tiny_bf16, **config) as manager:
        before = generated(manager)
        manager.stop(block=True)
        for parameter in tiny_bf16.parameters():
            parameter.data.copy_(parameter.data.flip(0))
        manager.start()
        after = generated(manager)
    with continuous_batching_context_manager(tiny_bf16, **config) as manager:
        assert generated(manager) == after != before


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_only_plain_bfloat16_layers_are_packed() -> None:
    hooked, patched, subclass = linear(), linear(), Scaled(48, 33, dtype=torch.bfloat16)
    hooked.register_forward_hook(lambda module, args, output: 2 * output)
    patched.forward = lambda input: input  # type: ignore[method-assign]
    model = nn.ModuleList([hooked, patched, subclass, linear(dtype=torch.float32), linear(dtype=torch.float16)])
    kept = list(model)
    pack_linears(model)
    assert all(a is b for a, b in zip(kept, model, strict=True))


def test_copies_that_do_not_fit_are_not_made(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(linear(bias=False))
    monkeypatch.setattr(packed, "available_memory", lambda device: 4 * 48 * 33 * 2 - 1)
    with caplog.at_level(logging.INFO):
        assert type(pack_linears(model)[0]) is nn.Linear  # type: ignore[index]
    assert "not packed" in caplog.text
    monkeypatch.setattr(packed, "available_memory", lambda device: 4 * 48 * 33 * 2)
    assert type(pack_linears(model)[0]) is PackedLinear  # type: ignore[index]
