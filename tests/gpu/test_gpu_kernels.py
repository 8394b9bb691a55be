"""What tests/engine shows of Triton's attention in the interpreter, on a device, where bfloat16 can be tested too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.ops.triton import probe
from tests.engine import triton_attention, triton_flash
from tests.engine.triton_attention import Step
from tests.gpu.device import DEVICE, IS_THERE, on_device

_WHY = probe(DEVICE) if IS_THERE else None
pytestmark = [*on_device, pytest.mark.skipif(_WHY is not None, reason=str(_WHY))]

LIMITS = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
MIXED = [(0, 1), (1, 1), (2, 19), (3, 18)]


def errors_of(lengths: list[int], steps: Any, dtype: torch.dtype, **options: Any) -> list[float]:
    if DEVICE.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter does not compute bfloat16 products right")
    return triton_attention.errors_of(lengths, steps, dtype=dtype, device=DEVICE, **options)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("page", [4, 16, 256])
def test_decodes_and_chunks_in_one_step(page: int, dtype: torch.dtype) -> None:
    lengths = [page, page + 1, page - 1, 2 * page, 0, 40]
    steps = [[(0, 1), (1, 1), (2, 1), (3, 1), (4, 9), (5, 7)], [(0, 1), (1, 2), (4, 1)]]
    errors = errors_of(lengths, steps, dtype, page=page)
    assert errors and max(errors) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (32, 8, 128), (16, 8, 128), (2, 2, 80), (2, 1, 256)]
)
def test_heads_and_head_sizes(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    errors = errors_of([40, 7, 0, 20], [MIXED], dtype, page=16, heads=heads, kv_heads=kv_heads, dim=dim)
    assert errors and max(errors) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("window", "softcap", "with_sinks"), [(24, 2.0, False), (None, 50.0, True), (24, None, True)])
def test_rules_of_scores(window: int | None, softcap: float | None, with_sinks: bool, dtype: torch.dtype) -> None:
    sinks = torch.tensor([-3.0, 0.5, 4.0, float("-inf")], device=DEVICE) if with_sinks else None
    steps = [[(0, 1), (1, 1), (2, 30), (3, 9)]]
    errors = errors_of([50, 1, 0, 40], steps, dtype, page=16, window=window, softcap=softcap, sinks=sinks)
    assert errors and max(errors) < LIMITS[dtype]


@pytest.mark.parametrize("page", [16, 256, 512])
@pytest.mark.parametrize("window", [None, 250])
def test_contexts_around_the_borders_of_splits(page: int, window: int | None) -> None:
    lengths = [254, 255, 256, 511, 512, 1100]
    steps = [[(sequence, 1) for sequence in range(len(lengths))]]
    errors = errors_of(lengths, steps, torch.float16, page=page, heads=2, kv_heads=1, window=window)
    assert errors and max(errors) < LIMITS[torch.float16]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("window", [None, 70])
def test_a_row_has_the_same_bits_alone_and_beside_others(window: int | None, dtype: torch.dtype) -> None:
    step = Step([300, 40, 7, 90, 0], [1, 1, 1, 13, 9])
    assert triton_attention.alone_and_together(step, window, dtype, DEVICE)


@pytest.mark.parametrize("kind", ["decode", "mixed"])
@pytest.mark.parametrize("window", [None, 70])
def test_a_recorded_plan_serves_later_steps_bit_by_bit(kind: str, window: int | None) -> None:
    steps = [Step([9, 5], [1, 1]), Step([300], [1]), Step([0, 590, 3, 256], [1, 1, 1, 1])]
    if kind == "mixed":
        steps = [Step([9, 5, 20], [1, 1, 12]), Step([300, 0], [1, 13]), Step([280], [14]), Step([0], [14])]
    assert all(triton_attention.replayed(steps, kind, window, DEVICE))


def test_blocks_are_cleared() -> None:
    triton_flash.cleared(DEVICE)
