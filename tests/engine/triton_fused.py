"""The fused decoder of GPUs in the interpreter's process: how much it launches, and with whose memory it computes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from engine.execution.forward import FusedForward
from engine.execution.model_runner import ModelRunner
from engine.model.shadow import ParameterSource, make_shadow
from engine.ops.flash.fused import FlashTritonOps
from engine.ops.triton.triton_ops import TritonOps
from tests.architectures import _HEADS, build
from tests.engine.launches import launched
from tests.engine.rows import Rows, expected, make_settings
from tests.engine.test_fused import FUSED, LONG
from tests.engine.triton_engine import Reruns, on_triton
from tests.engine.triton_flash import make_kernel
from tests.harness import Stepper, collect, core_of, running, tokens
from tests.models import build_tiny, ref

SHAPES: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": build_tiny,
    "qwen2": partial(build, "qwen2"),
    "qwen3": partial(build, "qwen3", **_HEADS),
    "gemma2": partial(build, "gemma2", attn_logit_softcapping=5.0, **_HEADS),
    "gemma3": partial(build, "gemma3_text", **_HEADS),
    "phi3": partial(build, "phi3"),
    "olmo2": partial(build, "olmo2"),
}


def launches_of_a_layer(name: str, own: bool, flash: bool) -> Counter[str]:
    """Of a decode step: what a model of three layers launches more than one of two."""
    three, two = (_launches(SHAPES[name](num_hidden_layers=count), own, flash) for count in (3, 2))
    assert not two - three, (two, three)
    return three - two


def _launches(model: PreTrainedModel, own: bool, flash: bool) -> Counter[str]:
    make = partial(FlashTritonOps, make_kernel("flash-attn-3")) if flash else TritonOps
    with on_triton(make):
        stepper = Stepper(model.half() if flash else model, page_size=8, release_weights=own)
        stepper.add([5, 6, 7], 4)
        stepper.step()
        with launched() as names:
            stepper.step()
    assert isinstance(stepper.core.runner._mixed._forward, FusedForward)  # type: ignore[attr-defined]
    return Counter(names)


# Weights


def owned(name: str, half: bool) -> None:
    """A model that is the engine's: the same logits from the same parameters, of which there are no copies.

    In the interpreter, 16 bits are float16.
    """
    model = FUSED[name]()
    model = model.half() if half else model
    before, size = copy.deepcopy(model.state_dict()), _bytes(model)
    rows = _rows(model, own=True)
    assert _bytes(model) == size and all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert _error(rows, model) < (0.1 if half else 1e-3)
    packed = {"qkv_proj", "gate_up_proj"} if name.startswith("phi3") else {"q_proj", "k_proj", "v_proj", "gate_proj"}
    layer: Any = model.model.layers[0]
    modules = {key: part for key, part in layer.named_modules() if key.rpartition(".")[2] in packed}
    assert len(modules) == len(packed)
    if not name.startswith("phi3"):
        storages = {part.weight.untyped_storage().data_ptr() for part in modules.values()}
        assert len(storages) == 2


def left_alone() -> None:
    """A model that the engine does not own."""
    model = build_tiny(num_hidden_layers=2)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    assert _error(_rows(model), model) < 1e-3
    assert before == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def without_room() -> None:
    """A model that is the engine's, where its matrices do not fit beside what they are made of."""

    def full(parameters: Any) -> Any:
        raise torch.OutOfMemoryError("no")

    model = build_tiny(num_hidden_layers=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.model.products._one_below_another", full)
        assert _error(_rows(model, own=True), model) < 1e-3


def _bytes(model: nn.Module) -> int:
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in model.parameters()}
    return sum(storages.values())


def _rows(model: PreTrainedModel, own: bool = False, graphs: Reruns | None = None) -> Rows:
    """Three requests on a runner that follows what is put in the place of the model's parameters."""
    settings = make_settings(
        model,
        release_weights=own,
        graphs=(graphs is not None, graphs is not None),
        max_blocks_per_request=4 if graphs else 0,
        max_requests=4,
        q_padding=8,
        kv_padding=64,
    )
    shadow = make_shadow(model)
    with on_triton():
        runner = ModelRunner(shadow, settings, source=ParameterSource(model, shadow), graph_backend=graphs)
    assert isinstance(runner._mixed._forward, FusedForward)
    return Rows(runner, model.config.vocab_size, [5, 3, 4])


def _error(rows: Rows, model: PreTrainedModel) -> float:
    """Of the logits of a mixed step and a decode-only one, of requests that begin anew."""
    for request in rows.requests:
        request.computed = 0
        del request.token_ids[request.num_prompt_tokens :]
    error = 0.0
    for counts in ({0: 5, 1: 3, 2: 3}, {0: 1, 1: 1, 2: 1}):
        for request_id, logits in rows.step(counts).items():
            request = rows.requests[int(request_id)]
            error = max(error, (logits - expected(model, request, request.computed)).abs().max().item())
    return error


def changed_weights(way: str, own: bool, recorded: bool) -> tuple[float, float]:
    """Errors against the changed model, and against what it was.

    Of what is written in place, nobody is told, but for norms, which are left alone then.
    """
    model, other, backend = build_tiny(num_hidden_layers=2), build_tiny(num_hidden_layers=2, seed=1), Reruns()
    if way == "in place":
        for part in other.modules():
            if part.__class__.__name__ == "LlamaRMSNorm":
                part.weight.data.fill_(1)
    rows, old = _rows(model, own, backend if recorded else None), copy.deepcopy(model)
    assert _error(rows, model) < 1e-3
    new = copy.deepcopy(other.state_dict())
    _change(model, new, way)
    if way != "in place":
        rows.runner.refresh_weights()
    assert all(torch.equal(value, new[name]) for name, value in model.state_dict().items())
    errors = _error(rows, other), _error(rows, old)
    assert not recorded or sum(count > 1 for count in backend.replays) == 2
    return errors


def replaced_under_recordings(way: str, own: bool) -> None:
    """Recorded steps cannot follow what lies elsewhere, and say so for as long as it does."""
    model = build_tiny(num_hidden_layers=2)
    runner = _rows(model, own, Reruns()).runner
    runner.refresh_weights()
    _change(model, copy.deepcopy(model.state_dict()), way)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="recorded steps read the old ones"):
            runner.refresh_weights()


def _change(model: nn.Module, new: dict[str, torch.Tensor], way: str) -> None:
    if way == "new data":
        for name, parameter in model.named_parameters():
            parameter.data = new[name].clone()
    else:
        model.load_state_dict(new, assign=way == "assigned")


def in_a_pause() -> None:
    """Weights that serving's engine gets while it runs."""
    model, other = (build_tiny(num_hidden_layers=2, seed=seed) for seed in (0, 1))
    prompt = tokens(1, 9)
    wanted = [ref(copy.deepcopy(model), prompt, 4), ref(copy.deepcopy(other), prompt, 4)]
    own = []
    with on_triton(), running(model, page_size=4, release_weights=True) as manager:
        for change in (lambda: None, lambda: model.load_state_dict(other.state_dict(), assign=True)):
            with manager.pause():
                change()
            (output,) = collect(manager, [str(manager.add_request(prompt, max_new_tokens=4))], 60)
            own.append(list(output.generated_tokens))
        assert isinstance(core_of(manager).runner._mixed._forward, FusedForward)  # type: ignore[attr-defined]
    assert own == wanted and own[0] != own[1]


def shared_modules() -> None:
    """Layers that share an MLP, and a whole layer's attention."""
    model = build_tiny(num_hidden_layers=3)
    model.model.layers[1].mlp = model.model.layers[0].mlp
    model.model.layers[2].self_attn.k_proj = model.model.layers[1].self_attn.k_proj
    rows = _rows(model, own=True)
    assert _error(rows, model) < 1e-3
    for parameter in model.model.layers[0].mlp.parameters():
        parameter.data.neg_()
    model.model.layers[1].self_attn.k_proj.weight.data.neg_()
    rows.runner.refresh_weights()
    assert _error(rows, model) < 1e-3


# Rotary positions


def is_fused(name: str, context: int) -> bool:
    """A model whose frequencies change at some length, in an engine of this context."""
    model = (
        build("phi3", seed=2, rope_parameters=LONG, original_max_position_embeddings=192)
        if name == "longrope"
        else build("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    )
    with on_triton():
        runner = ModelRunner(make_shadow(model), make_settings(model, context_length=context))
    if not isinstance(runner._mixed._forward, FusedForward):
        return False
    assert _error(Rows(runner, model.config.vocab_size, [5, 3, 4]), model) < 1e-3
    return True
