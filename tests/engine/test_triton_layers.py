"""The Triton kernels around attention in Triton's interpreter, against float64; whole models against their own forward.

float32 and float16 alone: the interpreter does not compute bfloat16 products right.
"""

from __future__ import annotations

import pytest
import torch

from tests.engine import triton_layers as cases
from tests.engine.test_fused import FUSED
from tests.engine.triton_processes import Run

slow = pytest.mark.slow
LIMITS = {torch.float32: 2e-6, torch.float16: 2e-3}
QUICK = ("qwen3", "gemma2")


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("width", [64, 96])
def test_norms(interpreted: Run, width: int, dtype: torch.dtype) -> None:
    assert max(interpreted(cases.norm_errors, 3, width, dtype)) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_gates(interpreted: Run, activation: str, dtype: torch.dtype) -> None:
    assert interpreted(cases.gate_error, 2, 1100, activation, dtype) < 2 * LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "pairs", "with_norms", "paged"),
    [
        (9, 3, 64, 32, False, True),
        (4, 2, 128, 64, True, True),
        (2, 1, 80, 40, True, True),
        (2, 2, 96, 24, True, True),  # a part of the head is turned
        (5, 1, 16, 8, True, False),
    ],
)
def test_heads_on_their_way_into_the_cache(
    interpreted: Run,
    heads: int,
    kv_heads: int,
    dim: int,
    pairs: int,
    with_norms: bool,
    paged: bool,
    dtype: torch.dtype,
) -> None:
    errors = interpreted(cases.rotary_errors, heads, kv_heads, dim, pairs, with_norms, dtype, paged)
    assert max(errors) < 4 * LIMITS[dtype]


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=slow) for name in FUSED])
def test_models_have_their_own_logits(interpreted: Run, name: str) -> None:
    assert interpreted(cases.run_model, name)
