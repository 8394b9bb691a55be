"""The Triton kernels compiled for sm_90 (H100, H200) by their own launchers, with the registers and memory they take.

Nothing runs: these tests hold on machines without a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine import triton_launches as launches
from tests.engine.triton_processes import Run

slow = pytest.mark.slow
BF16, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
SHARED = 227 * 1024  # bytes that a program may have
ATTENTION = {"_split_kernel", "_merge_kernel", "_prefill_kernel"}
OTHERS = {
    "_norm_kernel",
    "_gate_kernel",
    "_rotary_kernel",
    "_write_kernel",
    "_best_of_part_kernel",
    "_best_kernel",
    "_sum_kernel",
    "_draw_kernel",
    "_clear_kernel",
    "_gather_kernel",
    "_order_kernel",
    "_choose_kernel",
    "_wide_kernel",
}


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "options", "spilled"),
    [
        (BF16, 32, 8, 128, {}, 0),  # Llama 3.1 8B
        (BF16, 64, 8, 64, {"window": 128, "with_sinks": True}, 0),  # gpt-oss
        pytest.param(BF16, 8, 4, 256, {"window": 4096, "softcap": 50.0}, 64, marks=slow),  # Gemma 2
        pytest.param(BF16, 16, 8, 128, {"page": 256}, 16, marks=slow),  # Qwen3 0.6B
        pytest.param(BF16, 9, 3, 64, {}, 16, marks=slow),
        pytest.param(BF16, 32, 32, 80, {}, 0, marks=slow),
        pytest.param(BF16, 32, 32, 96, {"window": 2047}, 0, marks=slow),
        pytest.param(HALF, 32, 8, 128, {"page": 48}, 0, marks=slow),
        pytest.param(FLOAT, 32, 8, 128, {}, 384, marks=slow),
        pytest.param(FLOAT, 9, 3, 64, {}, 64, marks=slow),
        pytest.param(FLOAT, 8, 4, 256, {}, 64, marks=slow),
    ],
)
def test_attention(
    compiled: Run,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    options: dict[str, Any],
    spilled: int,
) -> None:
    used = compiled(launches.attention, dtype, heads, kv_heads, dim, **options)
    assert {kernel.name for kernel in used} == ATTENTION
    for kernel in used:
        assert kernel.spilled <= spilled and kernel.shared <= SHARED // 2, kernel  # two programs fit an SM
        if kernel.name == "_split_kernel":
            assert kernel.registers <= 65536 // (2 * 128), kernel


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "width", "vocab"),
    [(32, 8, 128, 4096, 128256), pytest.param(9, 3, 64, 576, 49152, marks=slow)],
)
def test_other_kernels(compiled: Run, heads: int, kv_heads: int, dim: int, width: int, vocab: int) -> None:
    used = compiled(launches.others, BF16, heads, kv_heads, dim, width, vocab)
    assert {kernel.name for kernel in used} == OTHERS
    for kernel in used:
        assert kernel.spilled <= 16 and kernel.registers <= 160 and kernel.shared <= SHARED // 4, kernel


@pytest.mark.parametrize("page", [256, pytest.param(16, marks=slow)])
@pytest.mark.parametrize("heads", [32, pytest.param(16, marks=slow)])
def test_decode_reads_keys_while_it_computes(compiled: Run, heads: int, page: int) -> None:
    """Two tiles of K and of V lie in shared memory, and three programs share a multiprocessor."""
    used = compiled(launches.attention, BF16, heads, 8, 128, page=page)
    (split,) = (kernel for kernel in used if kernel.name == "_split_kernel")
    tile = 64 * 128 * 2
    assert 4 * tile < split.shared <= SHARED // 3 and split.registers <= 65536 // (3 * 128), split


def test_steps_of_any_size_share_the_kernels(compiled: Run) -> None:
    """Compiling takes a second a kernel, which no step may wait for once the first ones have run."""
    found = compiled(launches.variants, [2, 3, 5, 8, 16, 17, 31])
    assert len(found) == 13 and set(found.values()) == {1}, found


def test_a_sampler_that_is_warm_compiles_nothing(compiled: Run) -> None:
    draw = {"do_sample": True}
    fields = [
        {},
        {"repetition_penalty": 2.0},
        *(draw | {"top_k": top_k, "top_p": 0.8} for top_k in (2, 20, 50, 64)),
        draw | {"top_p": 0.9, "min_p": 0.1, "logit_bias": ((3, 1.0),)},
        draw | {"temperature": 0.7, "min_p": 0.1},
        draw | {"allowed_token_ids": (1, 2)},
    ]
    count, late = compiled(launches.sampling_after_warm_up, BF16, fields)
    assert count > 10 and late == set()
