"""The fused decoder of GPUs: what a layer launches, whose weights it computes with, on which device."""

from __future__ import annotations

import pytest

from tests.engine import triton_fused as cases
from tests.engine.triton_processes import Run

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "own", "flash", "most"),
    [
        ("llama", True, False, 10),
        ("llama", True, True, 9),
        ("llama", False, False, 13),
        ("qwen3", True, False, 10),
        ("qwen3", True, True, 9),
        ("qwen2", True, False, 10),
        ("gemma2", True, False, 10),
        ("gemma3", True, False, 10),
        ("phi3", False, False, 10),
        ("olmo2", True, False, 12),
    ],
)
def test_what_a_layer_launches(interpreted: Run, model: str, own: bool, flash: bool, most: int) -> None:
    found = interpreted(cases.launches_of_a_layer, model, own, flash)
    listed = "\n".join(f"{count} x {name}" for name, count in found.items())
    assert found.total() == most, f"a layer launches {found.total()} kernels:\n{listed}"


@pytest.mark.parametrize(
    ("model", "half"),
    [
        ("biases", False),
        ("qwen3", True),
        ("phi3_partial", False),
        pytest.param("tied", False, marks=slow),
        pytest.param("odd sizes", False, marks=slow),
        pytest.param("olmo2", False, marks=slow),
        pytest.param("gemma", False, marks=slow),
        pytest.param("llama3 rope", True, marks=slow),
    ],
)
def test_the_weights_of_an_owned_model_lie_in_one_place(interpreted: Run, model: str, half: bool) -> None:
    interpreted(cases.owned, model, half)


def test_a_model_of_others_is_left_alone(interpreted: Run) -> None:
    interpreted(cases.left_alone)


def test_without_memory_for_one_matrix_there_are_several(interpreted: Run) -> None:
    interpreted(cases.without_room)


@pytest.mark.parametrize(
    ("way", "own", "recorded"),
    [
        ("in place", True, True),
        ("new data", True, False),
        pytest.param("assigned", True, False, marks=slow),
        ("new data", False, False),
        pytest.param("in place", True, False, marks=slow),
        pytest.param("in place", False, True, marks=slow),
        pytest.param("assigned", False, False, marks=slow),
    ],
)
def test_changed_weights_count(interpreted: Run, way: str, own: bool, recorded: bool) -> None:
    right, stale = interpreted(cases.changed_weights, way, own, recorded)
    assert right < 1e-3 < stale


@pytest.mark.parametrize(("way", "own"), [("new data", True), ("new data", False), ("assigned", True)])
def test_recorded_steps_refuse_parameters_that_lie_elsewhere(interpreted: Run, way: str, own: bool) -> None:
    interpreted(cases.replaced_under_recordings, way, own)


def test_weights_that_are_replaced_in_a_pause(interpreted: Run) -> None:
    interpreted(cases.in_a_pause)


def test_layers_that_share_modules(interpreted: Run) -> None:
    interpreted(cases.shared_modules)


@pytest.mark.parametrize("rope", ["longrope", "dynamic"])
def test_frequencies_that_change_behind_the_context(interpreted: Run, rope: str) -> None:
    assert interpreted(cases.is_fused, rope, 128)
    assert not interpreted(cases.is_fused, rope, 400)
