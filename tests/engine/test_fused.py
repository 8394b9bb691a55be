"""The fused decoder: which models run by it, its logits and tokens against the model's own, weights that change."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from engine import generate_batch
from engine.cache.groups import LayerGroup
from engine.execution.forward import FusedForward
from engine.execution.model_runner import ModelRunner
from engine.model import layer
from engine.model.families import FAMILIES, NotFusedError
from engine.model.layer import RotaryTable
from engine.model.recognition import describe
from engine.model.shadow import make_shadow
from engine.sampling.params import SamplingParams
from tests.architectures import _HEADS, ARCHITECTURES, VISION, WINDOW, build
from tests.engine import rows as plain_rows
from tests.engine.tables import packed_rows
from tests.engine.test_architectures import LENGTHS, Rows, make_runner, run_in_pieces
from tests.harness import NO_EOS, collect, config, core_of, running, tokens
from tests.models import build_tiny, ref, reference

Build = Callable[[], PreTrainedModel]

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.5] * 8,
    "long_factor": [3.0] * 8,
    "original_max_position_embeddings": 192,
}
# Beside those of tests/architectures.py: the rest of the table, and what its columns can be besides the defaults.
MORE: dict[str, Build] = {
    "smollm3": lambda: build("smollm3", seed=1, no_rope_layers=[1, 1, 0, 1]),
    "gemma": lambda: build("gemma", seed=1, **_HEADS),
    "tied": lambda: build("llama", tie_word_embeddings=True),
    "biases": lambda: with_biases(build("llama", attention_bias=True, mlp_bias=True)),
    "llama3 rope": lambda: build("llama", seed=1, rope_parameters=LLAMA3),
    "yarn rope": lambda: build("qwen3", seed=1, rope_parameters=YARN, **_HEADS),
    "long rope": lambda: build("phi3", seed=2, rope_parameters=LONG),
    "gelu": lambda: build("llama", seed=2, hidden_act="gelu"),
    "gemma3 softcap": lambda: build(
        "gemma3_text", seed=1, final_logit_softcapping=3.0, sliding_window=WINDOW, **_HEADS
    ),
    "odd sizes": lambda: build("qwen2", hidden_size=60, intermediate_size=90, num_attention_heads=6, vocab_size=259),
    "one head": lambda: build("llama", num_attention_heads=1, num_key_value_heads=1, hidden_size=32),
}
KNOWN = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "phi3_partial", "olmo2")
FUSED: dict[str, Build] = {name: ARCHITECTURES[name] for name in KNOWN} | MORE


def with_biases(model: PreTrainedModel) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def is_fused(model: PreTrainedModel, **options: Any) -> bool:
    return isinstance(make_runner(model, **options)[0]._mixed._forward, FusedForward)


# ---- Which


@pytest.mark.parametrize("name", [*ARCHITECTURES, *VISION, *MORE])
def test_which_models_are_fused(name: str) -> None:
    model = (ARCHITECTURES | VISION | MORE)[name]()
    assert is_fused(model) == (name in FUSED)
    if name in FUSED:
        assert is_fused(model.bfloat16())


def test_every_family_is_tested() -> None:
    assert {describe(make_shadow(make())).family for make in FUSED.values()} == set(FAMILIES)


def change_hook(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output)


def change_pre_hook(model: Any) -> None:
    model.model.norm.register_forward_pre_hook(lambda module, args: args)


def change_forward(model: Any) -> None:
    own = model.model.layers[2].self_attn.forward
    model.model.layers[2].self_attn.forward = lambda *args, **kwargs: own(*args, **kwargs)


def change_linear(model: Any) -> None:
    class Linear(nn.Linear):
        pass

    other = Linear(64, 96, bias=False)
    model.model.layers[0].mlp.up_proj = other


def change_epsilon(model: Any) -> None:
    model.model.norm.variance_epsilon = 0.1


def change_order(model: Any) -> None:
    model.model.layers[0].self_attn.layer_idx = 1


def change_count(model: Any) -> None:
    model.config.num_hidden_layers = 3


def change_child(model: Any) -> None:
    model.model.layers[3].adapter = nn.Linear(3, 3)


def change_attribute(model: Any) -> None:
    model.model.layers[3].self_attn.gate = 0.5


def change_dtype(model: Any) -> None:
    model.model.norm.bfloat16()


def change_head(model: Any) -> None:
    model.lm_head = nn.Linear(64, 256)


def change_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.Tanh()


def change_strides(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.zeros(64, 96).T, requires_grad=False)


@pytest.mark.parametrize(
    "change",
    [
        change_hook,
        change_pre_hook,
        change_forward,
        change_linear,
        change_epsilon,
        change_order,
        change_child,
        change_attribute,
        change_dtype,
        change_head,
        change_activation,
        change_strides,
        change_count,
    ],
)
def test_a_model_that_was_changed_is_not(change: Callable[[PreTrainedModel], None]) -> None:
    model = ARCHITECTURES["llama"]()
    describe(make_shadow(model))
    change(model)
    with pytest.raises(NotFusedError):
        describe(make_shadow(model))


def test_a_subclass_is_not() -> None:
    class Own(LlamaForCausalLM):
        pass

    model = build_tiny()
    model.__class__ = Own
    with pytest.raises(NotFusedError, match="Own is not among"):
        describe(make_shadow(model))
    Own.__module__ = LlamaForCausalLM.__module__
    with pytest.raises(NotFusedError, match="Own is not LlamaForCausalLM"):
        describe(make_shadow(model))


def test_a_class_with_another_forward_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build_tiny()
    own = type(model.model.norm).forward
    monkeypatch.setattr(type(model.model.norm), "forward", lambda self, x: own(self, x))
    with pytest.raises(NotFusedError, match="LlamaRMSNorm has hooks or another forward"):
        describe(make_shadow(model))


def test_a_field_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build_tiny()
    kind = type(model.config)
    monkeypatch.setitem(kind.__annotations__, "residual_scale", float)
    monkeypatch.setattr(kind, "residual_scale", 1.0, raising=False)
    describe(make_shadow(model))
    model.config.residual_scale = 2.0
    with pytest.raises(NotFusedError, match="residual_scale"):
        describe(make_shadow(model))


def test_half_precision_is_not() -> None:
    with pytest.raises(NotFusedError, match="parameters are torch.float16"):
        describe(make_shadow(build_tiny().half()))


def test_other_attention_that_is_asked_for() -> None:
    assert not is_fused(build_tiny(), attention="eager", auto_switch=False)


def test_copies_that_do_not_fit_are_not_made(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = build_tiny()
    size = sum(p.nbytes for name, p in model.named_parameters() if "norm" not in name)
    monkeypatch.setattr(layer, "available_memory", lambda device: 4 * size - 1)
    with caplog.at_level(logging.INFO):
        assert not is_fused(model)
    assert "runs by transformers' own forward: packed weights take" in caplog.text
    monkeypatch.setattr(layer, "available_memory", lambda device: 4 * size)
    with caplog.at_level(logging.INFO):
        assert is_fused(model)
    assert "runs fused, as llama" in caplog.text


# ---- Logits and tokens


def check_closely(rows: Rows, limit: float = 2e-5) -> int:
    """Every logit within `limit` of the largest, against one plain forward pass of each sequence."""
    rows.model.set_attn_implementation("eager")  # the others leave softcaps out in some versions of transformers
    for request, kept in zip(rows.requests, rows.logits, strict=True):
        with torch.no_grad():
            expected = rows.model(input_ids=torch.tensor([request.token_ids]), use_cache=False).logits[0]
        for position, logits in kept:
            assert logits.dtype == torch.float32
            assert (logits - expected[position]).abs().max() <= limit * expected[position].abs().max()
    return sum(map(len, rows.logits))


@pytest.mark.parametrize("name", FUSED)
def test_logits_are_those_of_the_plain_forward(name: str) -> None:
    """Chunks and decodes in any mix, with pages full of NaN; more tokens in a step than was said at first."""
    rows = Rows(FUSED[name](), LENGTHS)
    run_in_pieces(rows, seed=1, steps=20)
    assert check_closely(rows) > 60
    assert not any(tensor[0].any() for tensor in rows.tensors)


@pytest.mark.parametrize("name", FUSED)
def test_tokens_are_those_of_generate(name: str) -> None:
    model = FUSED[name]()
    prompts = [tokens(i, n, model.config.vocab_size) for i, n in enumerate([1, 9, 33, 60, 17])]
    outputs = generate_batch(
        model, prompts, NO_EOS, config(max_batch_tokens=32, max_requests_per_batch=4), max_new_tokens=24
    )
    compared = 0
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        truth = reference(model, prompt, 24)
        known = next((i for i, gap in enumerate(truth.gaps) if gap < 1e-3), 24)  # behind a tie anything may follow
        assert output.generated_tokens[:known] == truth.token_ids[:known]
        compared += known
    assert compared > 60


@pytest.fixture(scope="module")
def smol_bf16(smol_path: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(smol_path, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


TEXT = (
    "The lighthouse keeper counted the ships twice. In 1893 the harbour froze for forty days, and letters came by "
    "sledge; one of them, from a botanist in Lyon, asked for seeds of the plant that grows below the tower. "
    "def area(radius): return 3.14159 * radius ** 2 # the area of a circle. Water boils at 100 degrees Celsius, "
    "but on a mountain it boils earlier, since the air presses less. She wrote: I will come when the snow is gone, "
    "and bring the map, the rope and the two books that you lent me last autumn. Nobody knew where the road went."
)


class Exactness(NamedTuple):
    """Of logits at 200 positions against those of the model in float32."""

    error: float  # mean, absolute
    plain_error: float  # of the same model's own forward in bfloat16
    same_best: float  # share of positions


@pytest.fixture(scope="module")
def exactness(
    smol: PreTrainedModel, smol_bf16: PreTrainedModel, smol_tokenizer: PreTrainedTokenizerFast
) -> Callable[..., Exactness]:
    """Of the fused decoder with some settings: a text in two chunks, then token by token."""
    ids = torch.tensor((smol_tokenizer.encode(TEXT) * 2)[:200])
    with torch.inference_mode():
        truth = smol(input_ids=ids[None]).logits[0]
        plain = smol_bf16(input_ids=ids[None]).logits[0].float()

    def measure(**fields: Any) -> Exactness:
        runner = plain_rows.make_runner(smol_bf16, context_length=256, max_batch_tokens=64, num_blocks=20, **fields)
        counts = [50, 60] + [1] * 90
        own = torch.cat([all_logits(runner, ids, sum(counts[:i]), count) for i, count in enumerate(counts)])
        assert own.shape == truth.shape == (200, truth.shape[1])
        errors = [(logits - truth).abs().mean().item() for logits in (own, plain)]
        return Exactness(*errors, (own.argmax(-1) == truth.argmax(-1)).float().mean().item())

    return measure


def test_bfloat16_is_as_close_to_float32_as_the_model_itself(exactness: Callable[..., Exactness]) -> None:
    found = exactness()
    assert found.error <= found.plain_error and found.same_best > 0.97, found


def test_8_bits_are_about_twice_as_far(exactness: Callable[..., Exactness]) -> None:
    found = exactness(weight_quantization="int8")
    assert 1.2 * found.plain_error < found.error < 3 * found.plain_error and found.same_best > 0.95, found


def all_logits(runner: ModelRunner, ids: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Of `count` tokens of one row, whose blocks are 1, 2, ..."""
    assert runner._fused is not None
    numbers = (np.array([number]) for number in (start, count, 0))
    plan: Any = runner._ops.plan(packed_rows(*numbers, [[list(range(1, 17))]], int(count == 1)))
    positions = torch.arange(start, start + count)
    return runner._fused(ids[positions], positions, torch.arange(count), plan.groups).clone()


def test_bfloat16_tokens_do_not_depend_on_neighbours(smol_bf16: PreTrainedModel) -> None:
    """Alone, and among 63 others that come and go, in chunks of any size, on pages of another size."""
    prompts = [tokens(i, 3 + 7 * i % 90, 40000) for i in range(64)]
    chosen = [0, 13, 40, 63]
    with running(smol_bf16, max_batch_tokens=512, num_blocks=200) as manager:
        assert isinstance(core_of(manager).runner._mixed._forward, FusedForward)  # type: ignore[attr-defined]
        alone = []
        for i in chosen:
            name = manager.add_request(prompts[i], max_new_tokens=6)
            alone += collect(manager, [str(name)])
    sizes = {"max_batch_tokens": 100, "num_blocks": 500, "page_size": 32, "max_requests_per_batch": 64}
    with running(smol_bf16, **sizes) as manager:
        names = [
            str(manager.add_request(prompt, max_new_tokens=6 if i in chosen else 1 + i % 6))
            for i, prompt in enumerate(prompts)
        ]
        among = collect(manager, names, seconds=120)
    for i, output in zip(chosen, alone, strict=True):
        assert among[i].generated_tokens == output.generated_tokens


def test_rows_of_logits_do_not_depend_on_neighbours() -> None:
    """Bit for bit, whatever is computed beside a row and however its prompt is cut."""
    lone = Rows(build("qwen3", **_HEADS).bfloat16(), LENGTHS)
    for _ in range(8):
        for row in range(len(LENGTHS)):
            lone.step({row: lone.requests[row].remaining})
    for seed in range(3):
        rows = Rows(build("qwen3", **_HEADS).bfloat16(), LENGTHS)
        run_in_pieces(rows, seed=seed, steps=20)
        compared = 0
        for ours, theirs in zip(rows.logits, lone.logits, strict=True):
            for (position, logits), (other, expected) in zip(ours, theirs, strict=False):
                assert position == other and torch.equal(logits, expected)
                compared += 1
        assert compared > 30


def test_a_token_that_is_not_in_the_vocabulary() -> None:
    rows = Rows(build("llama", seed=3), [5])
    rows.requests[0].token_ids[2] = 256
    with pytest.raises(IndexError, match="vocabulary of 256"):
        rows.step({0: 5})
    rows.requests[0].token_ids[2], rows.requests[0].computed = 255, 0
    rows.step({0: 5})
    check_closely(rows)


def test_a_step_without_logits_and_one_with_many() -> None:
    model = build("gemma2", seed=4, sliding_window=WINDOW, **_HEADS)
    runner = plain_rows.make_runner(model, groups=(LayerGroup((0, 2), WINDOW), LayerGroup((1, 3))))
    rows = plain_rows.Rows(runner, 256, [40, 30], num_groups=2)
    assert runner.launch(rows.batch({0: 20})).logits.shape == (0, 256)
    rows.requests[1].params = SamplingParams(max_new_tokens=9, prompt_logprobs=0)
    pending = runner.launch(rows.batch({1: 29, 0: 20}))  # keeps more rows than there are requests at most
    runner.sample(pending)
    found = [entry.logprob for entry in pending.result().prompt_logprobs[0]]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([rows.requests[1].token_ids])).logits[0].log_softmax(-1)
    expected = [logits[i, token].item() for i, token in enumerate(rows.requests[1].token_ids[1:])]
    assert found == pytest.approx(expected, abs=1e-4)


# ---- Rotary tables


def test_positions_are_covered_in_pieces() -> None:
    asked: list[tuple[int, int]] = []

    def make(positions: torch.Tensor) -> torch.Tensor:
        asked.append((int(positions[0]), int(positions[-1])))
        return positions[:, None, None].float().expand(-1, 2, 3)

    table = RotaryTable(make, 1500)
    assert not table.cover(10)
    assert not table.cover(1024)
    assert asked[1:] == [(0, 1023)]
    assert not table.cover(1025)
    assert asked[2:] == [(1024, 1499)]  # and not beyond what the model knows
    before = table.lines
    assert table.cover(1600) and table.lines is not before
    for position in range(1600):
        assert (table.lines[position] == position).all()


# ---- Weights that change


def noise(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """The same model with all its parameters, norms and biases too, changed a little."""
    other = type(model)(model.config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for old, new in zip(model.parameters(), other.parameters(), strict=True):
            new.copy_(old + 0.1 * torch.randn(old.shape, generator=generator))
    return other.requires_grad_(False)


def write(model: PreTrainedModel, other: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter, source in zip(model.parameters(), other.parameters(), strict=True):
            parameter.copy_(source)


def write_data(model: PreTrainedModel, other: PreTrainedModel) -> None:
    for parameter, source in zip(model.parameters(), other.parameters(), strict=True):
        parameter.data.copy_(source)


def replace(model: PreTrainedModel, other: PreTrainedModel) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in other.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [write, write_data, replace])
@pytest.mark.parametrize("name", ["biases", "gemma3", "olmo2", "phi3", "qwen2"])
def test_weights_that_change_in_a_pause_are_seen(name: str, change: Callable[..., None]) -> None:
    model = FUSED[name]()
    before, other = noise(model, 1), noise(model, 2)
    write(model, before)
    prompt = tokens(1, 20, 256)
    with running(model) as manager:
        assert isinstance(core_of(manager).runner._mixed._forward, FusedForward)  # type: ignore[attr-defined]
        name = str(manager.add_request(prompt, max_new_tokens=8))
        assert collect(manager, [name])[0].generated_tokens == ref(before, prompt, 8)
        with manager.pause():
            change(model, other)
        name = str(manager.add_request(prompt, max_new_tokens=8))
        assert collect(manager, [name])[0].generated_tokens == ref(other, prompt, 8) != ref(before, prompt, 8)


def test_an_embedding_that_is_no_longer_the_head() -> None:
    model: Any = build("llama", seed=3, tie_word_embeddings=True)
    prompt = tokens(1, 20, 256)
    with running(model) as manager:
        assert collect(manager, [str(manager.add_request(prompt, max_new_tokens=4))])[0].generated_tokens
        with manager.pause():
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.flip(0).clone(), requires_grad=False)
        name = str(manager.add_request(prompt, max_new_tokens=8))
        assert collect(manager, [name])[0].generated_tokens == ref(model, prompt, 8)
