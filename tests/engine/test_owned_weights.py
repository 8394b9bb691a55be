"""Weights that the engine keeps in its own form: given up by the model, or in 8 bits."""

from __future__ import annotations

import copy
import logging
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine import generate_batch, init_continuous_batching
from engine.manager import ContinuousBatchingManager
from engine.ops.cpu.linear import PackedWeight
from tests.architectures import ARCHITECTURES
from tests.harness import NO_EOS, collect, config, core_of, running, tokens
from tests.models import build_tiny, ref

PROMPT = tokens(1, 20, 64)


def ask_twice(manager: ContinuousBatchingManager) -> None:
    """An engine that fails refuses the second request, with the cause."""
    for _ in range(2):
        manager.add_request(PROMPT, max_new_tokens=2)
        list(manager)


def test_a_model_that_is_the_engines_alone_gives_up_its_weights(tiny: PreTrainedModel, tmp_path: Path) -> None:
    """The tokens are the same, also after a pause; the model is of no use to anybody else, who is told so."""
    owned = build_tiny()
    size = sum(parameter.nbytes for parameter in owned.parameters())
    with running(owned, release_weights=True) as manager:
        for _ in range(2):
            (output,) = collect(manager, [str(manager.add_request(PROMPT, max_new_tokens=12))])
            assert output.generated_tokens == ref(tiny, PROMPT, 12)
            with manager.pause():
                pass
    assert sum(parameter.nbytes for parameter in owned.parameters()) < size / 20
    with pytest.raises(ValueError, match="release_weights"):
        generate_batch(owned, [PROMPT], NO_EOS, config())
    for use in (lambda: owned.generate(torch.tensor([PROMPT])), lambda: owned.save_pretrained(tmp_path)):
        with pytest.raises(RuntimeError, match="release_weights"):
            use()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tied", [False, True])
def test_with_a_head_that_is_the_embedding_or_is_not(tied: bool) -> None:
    model = build_tiny(tie_word_embeddings=tied)
    expected = ref(copy.deepcopy(model), PROMPT, 8)
    (output,) = generate_batch(model, [PROMPT], NO_EOS, config(release_weights=True), max_new_tokens=8).values()
    assert output.generated_tokens == expected


def test_weights_that_are_needed_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    """By a model that runs by its own forward."""
    model = ARCHITECTURES["gpt_neox"]()
    before = [parameter.clone() for parameter in model.parameters()]
    with caplog.at_level(logging.INFO):
        (output,) = generate_batch(model, [PROMPT], NO_EOS, config(release_weights=True), max_new_tokens=8).values()
    assert output.generated_tokens == ref(model, PROMPT, 8)
    assert all(map(torch.equal, before, model.parameters()))
    assert "release_weights=True has no effect" in caplog.text


def test_8_bits_need_a_model_that_runs_fused() -> None:
    with pytest.raises(NotImplementedError, match="weight_quantization='int8' needs a model that runs fused"):
        generate_batch(ARCHITECTURES["gpt_neox"](), [PROMPT], NO_EOS, config(weight_quantization="int8"))


def test_8_bits_are_the_tokens_of_a_model_with_such_weights() -> None:
    """Against the same model whose matrices were replaced by what their 8 bits stand for."""
    model = build_tiny()
    rounded = copy.deepcopy(model)
    for module in rounded.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.copy_(PackedWeight([lambda module=module: module.weight], quantize=True).unpack())  # type: ignore[misc]
    assert ref(rounded, PROMPT, 16) != ref(model, PROMPT, 16)
    for release in (False, True):
        fields = {"weight_quantization": "int8", "release_weights": release}
        (output,) = generate_batch(model, [PROMPT], NO_EOS, config(**fields), max_new_tokens=16).values()
        assert output.generated_tokens == ref(rounded, PROMPT, 16)


def test_8_bit_weights_follow_what_is_written_into_the_model() -> None:
    model, other = build_tiny(), build_tiny(seed=3)
    with running(model, weight_quantization="int8") as manager:
        with manager.pause():
            model.load_state_dict(other.state_dict())
        (output,) = collect(manager, [str(manager.add_request(PROMPT, max_new_tokens=12))])
    (expected,) = generate_batch(
        other, [PROMPT], NO_EOS, config(weight_quantization="int8"), max_new_tokens=12
    ).values()
    assert output.generated_tokens == expected.generated_tokens


def test_8_bits_are_half_of_bfloat16(smol_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(smol_path, dtype=torch.bfloat16)
    size = sum(parameter.nbytes for parameter in model.parameters())
    with running(model, weight_quantization="int8", num_blocks=16, max_requests_per_batch=1) as manager:
        fused = core_of(manager).runner._fused  # type: ignore[attr-defined]
        weights = {fused._embedding, fused._head, *(part for layer in fused._layers for part in layer.weights)}
        assert sum(weight.nbytes for weight in weights) < 0.52 * size


@pytest.mark.parametrize("which", ["head", "written head", "norm", "written norm"])
def test_no_weights_are_stale_unseen_after_a_release(which: str, tiny: PreTrainedModel) -> None:
    """What takes the place of weights that were given up is refused; norms, which were not, are followed."""
    model, changed = build_tiny(), build_tiny()
    size = model.config.hidden_size
    with running(model, release_weights=True) as manager:
        refused = pytest.raises(RuntimeError, match="release_weights") if "head" in which else nullcontext()
        with refused, manager.pause():
            if which == "head":
                model.lm_head.weight = torch.nn.Parameter(torch.zeros(512, size))
            elif which == "written head":
                with torch.no_grad():
                    model.lm_head.weight.zero_()
            elif which == "norm":
                model.model.norm.weight = torch.nn.Parameter(torch.linspace(0, 1, size))
            else:
                model.model.norm.weight.data.copy_(torch.linspace(0, 1, size))
        if "head" in which:
            with pytest.raises(RuntimeError, match="release_weights"):
                ask_twice(manager)
            return
        (output,) = collect(manager, [str(manager.add_request(PROMPT, max_new_tokens=12))])
    changed.model.norm.weight.data.copy_(torch.linspace(0, 1, size))
    assert output.generated_tokens == ref(changed, PROMPT, 12) != ref(tiny, PROMPT, 12)


def test_layers_that_share_a_module_are_given_up_once() -> None:
    model = build_tiny()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    expected = ref(copy.deepcopy(model), PROMPT, 8)
    (output,) = generate_batch(model, [PROMPT], NO_EOS, config(release_weights=True), max_new_tokens=8).values()
    assert output.generated_tokens == expected


def test_another_engine_of_a_model_that_gives_up_its_weights_says_why_it_ends() -> None:
    model = build_tiny()
    manager = init_continuous_batching(model, NO_EOS, config())
    manager.start()
    collect(manager, [str(manager.add_request(PROMPT, max_new_tokens=2))])
    generate_batch(model, [PROMPT], NO_EOS, config(release_weights=True), max_new_tokens=2)
    with pytest.raises(RuntimeError, match="release_weights"), manager.pause():
        pass
    with pytest.raises(RuntimeError, match="release_weights"):
        ask_twice(manager)
    manager.destroy()


def test_a_model_that_cannot_be_in_8_bits_says_why() -> None:
    with pytest.raises(NotImplementedError, match="even sizes, not pages of 33"):
        generate_batch(build_tiny().bfloat16(), [PROMPT], NO_EOS, config(weight_quantization="int8", page_size=33))
