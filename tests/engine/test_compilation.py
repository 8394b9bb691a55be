"""The forward pass through `torch.compile`: what it is asked for, for which steps, and the tokens that come out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.acceleration import CompileSettings
from engine.execution.compilation import compile_forward
from engine.model.packed import PackedLinear, pack_linears
from engine.model.shadow import make_shadow
from engine.ops.torch_ops import TorchOps
from tests.engine.fixed_ops import FakeGraphs, FixedOps
from tests.engine.rows import Rows, expected, make_runner
from tests.harness import Stepper, tokens
from tests.models import build_tiny, ref


class Compiler:
    """Stands for `torch.compile`: notes what it was asked for, and the shapes that run through what it returned."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.shapes: list[list[tuple[int, int]]] = []

    def __call__(self, model: Any, **arguments: Any) -> Callable[..., Any]:
        shapes: list[tuple[int, int]] = []
        self.asked.append(arguments)
        self.shapes.append(shapes)

        def compiled(**inputs: Any) -> Any:
            shapes.append((inputs["input_ids"].shape[1], len(inputs["logits_to_keep"])))
            return model(**inputs)

        return compiled


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(torch, "compile", made)
    return made


def check(model: PreTrainedModel, rows: Rows, counts: dict[int, int]) -> None:
    for request_id, logits in rows.step(counts).items():
        request = rows.requests[int(request_id)]
        torch.testing.assert_close(logits, expected(model, request, request.computed), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("level", "mode", "dynamic"),
    [(1, "default", True), (2, "max-autotune-no-cudagraphs", True), (3, "max-autotune-no-cudagraphs", False)],
)
def test_a_level_from_the_config_to_torch(
    level: int, mode: str, dynamic: bool, compiler: Compiler, tiny: PreTrainedModel
) -> None:
    engine = Stepper(tiny, default_compile_level=level)
    (asked,) = compiler.asked  # there is no decode fast path on CPU
    assert asked == {"mode": mode, "dynamic": dynamic, "fullgraph": False, "backend": "inductor", "options": None}
    engine.add(tokens(1, 9), 4, "a")
    engine.drain()
    assert engine.results()["a"].generated_tokens == ref(tiny, tokens(1, 9), 4)
    found = {(64, 1)} if level == 3 else {(9, 2), (2, 2)}
    assert set(compiler.shapes[0]) == found


def test_level_0_compiles_nothing(compiler: Compiler, tiny: PreTrainedModel) -> None:
    Stepper(tiny)
    assert not compiler.asked


def test_an_explicit_config_reaches_torch_whole(compiler: Compiler, tiny: PreTrainedModel) -> None:
    Stepper(tiny, varlen_compile_config={"backend": "eager", "options": {"a": 1}, "dynamic": None})
    assert compiler.asked == [
        {"mode": None, "dynamic": None, "fullgraph": False, "backend": "eager", "options": {"a": 1}}
    ]


def test_mixed_and_decode_steps_have_forms_of_their_own(compiler: Compiler, tiny: PreTrainedModel) -> None:
    runner = make_runner(
        tiny,
        ops=FixedOps,
        mixed_compile=CompileSettings("default", True),
        decode_compile=CompileSettings("max-autotune", dynamic=False),
        max_blocks_per_request=4,
    )
    mixed, decode = compiler.shapes
    assert [asked["mode"] for asked in compiler.asked] == ["default", "max-autotune"]
    mixed.clear()
    rows = Rows(runner, 512, [5, 20, 7])
    check(tiny, rows, {0: 5, 1: 20, 2: 7})
    check(tiny, rows, {0: 1, 1: 1, 2: 1})
    check(tiny, rows, {1: 1})
    assert mixed == [(32, 3)]
    assert decode == [(4, 4), (1, 1)]  # padded to powers of two


def test_only_decode_steps(compiler: Compiler, tiny: PreTrainedModel) -> None:
    runner = make_runner(tiny, ops=FixedOps, decode_compile=CompileSettings("default"), max_blocks_per_request=4)
    rows = Rows(runner, 512, [5, 4, 3])
    check(tiny, rows, {0: 5, 1: 4, 2: 3})
    check(tiny, rows, {0: 1})
    check(tiny, rows, {0: 1, 1: 1, 2: 1})
    assert compiler.shapes == [[(2, 2), (3, 3)]]  # sizes of 1 would be compiled apart


def test_static_shapes_are_padded_up_to_the_largest_step(compiler: Compiler, tiny: PreTrainedModel) -> None:
    runner = make_runner(
        tiny, mixed_compile=CompileSettings("default", False), q_padding=24, max_batch_tokens=40, max_requests=3
    )
    (shapes,) = compiler.shapes
    shapes.clear()
    rows = Rows(runner, 512, [5, 20, 10])
    check(tiny, rows, {0: 5, 1: 4})
    check(tiny, rows, {0: 1, 1: 16, 2: 10})
    check(tiny, rows, {0: 1, 1: 1, 2: 1})
    assert shapes == [(24, 1), (40, 3), (24, 3)]


def test_compiled_steps_are_recorded(compiler: Compiler, tiny: PreTrainedModel) -> None:
    backend = FakeGraphs()
    runner = make_runner(
        tiny,
        ops=FixedOps,
        graph_backend=backend,
        graphs=(False, True),
        decode_compile=CompileSettings("default"),
        max_blocks_per_request=4,
    )
    rows = Rows(runner, 512, [5])
    check(tiny, rows, {0: 5})
    for _ in range(3):
        check(tiny, rows, {0: 1})
    assert [graph.replays for graph in backend.graphs] == [3] and compiler.shapes[0]


def test_attention_and_packed_layers_stay_outside() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = build_tiny(num_hidden_layers=1).bfloat16()
    shadow = pack_linears(make_shadow(model))
    assert any(isinstance(module, PackedLinear) for module in shadow.modules())
    compiled = compile_forward(shadow, CompileSettings(None, True, backend))
    runner = make_runner(model, ops=TorchOps)
    runner._mixed._forward._run = compiled  # type: ignore[union-attr]
    runner.probe()
    code = "\n".join(graph.code for graph in graphs)
    assert "rsqrt" in code  # the norms are inside
    assert not any(name in code for name in ("linear", "attend", "index_copy", "scaled_dot_product"))


def test_really_compiled_steps_give_the_same_tokens() -> None:
    """Inductor on a small model: levels differ only in the arguments that the other tests see."""
    model = build_tiny(num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    engine = Stepper(model, default_compile_level=1)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled > before
    prompts = {str(i): tokens(i, length) for i, length in enumerate([5, 9, 30])}
    for name, prompt in prompts.items():
        engine.add(prompt, 6, name)
    engine.drain()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled  # one form serves every size
    for name, prompt in prompts.items():
        assert engine.results()[name].generated_tokens == ref(model, prompt, 6)
