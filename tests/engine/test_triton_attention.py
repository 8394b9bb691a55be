"""The Triton attention kernels in Triton's interpreter, against float64, on caches whose unused memory is NaN.

float32 and float16 alone: the interpreter does not compute bfloat16 products right.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.engine import triton_attention as cases
from tests.engine.triton_attention import Step
from tests.engine.triton_processes import Run

LIMIT = 2e-6
slow = pytest.mark.slow
MIXED = [(0, 1), (1, 1), (2, 19), (3, 18)]


def assert_close(errors: list[float], limit: float = LIMIT) -> None:
    assert errors and all(error < limit for error in errors), errors  # NaN fails too


@pytest.mark.parametrize(
    "page", [pytest.param(1, marks=slow), 4, pytest.param(16, marks=slow), 48, pytest.param(256, marks=slow)]
)
def test_decodes_and_chunks_in_one_step(interpreted: Run, page: int) -> None:
    lengths = [page, page + 1, max(page - 1, 1), 2 * page, 0, 40]
    steps = [[(0, 1), (1, 1), (2, 1), (3, 1), (4, 9), (5, 7)], [(0, 1), (1, 2), (4, 1)]]
    assert_close(interpreted(cases.errors_of, lengths, steps, page=page))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [
        (9, 3, 64),
        (2, 2, 80),
        (3, 1, 96),
        (2, 1, 256),
        *(pytest.param(*sizes, marks=slow) for sizes in ((5, 1, 33), (8, 2, 128), (1, 1, 8), (20, 1, 16))),
    ],
)
def test_heads_and_head_sizes(interpreted: Run, heads: int, kv_heads: int, dim: int) -> None:
    options = {"page": 16, "heads": heads, "kv_heads": kv_heads, "dim": dim}
    assert_close(interpreted(cases.errors_of, [40, 7, 0, 20], [MIXED], **options), 4e-6)


@pytest.mark.parametrize("scaling", [0.01, pytest.param(1.0, marks=slow)])
def test_scaling(interpreted: Run, scaling: float) -> None:
    assert_close(interpreted(cases.errors_of, [40, 0, 20], [[(0, 1), (1, 19), (2, 18)]], scaling, page=16), 1e-5)


@pytest.mark.parametrize("dim", [64, pytest.param(80, marks=slow)])
def test_float16(interpreted: Run, dim: int) -> None:
    options = {"page": 16, "heads": 6, "kv_heads": 2, "dim": dim, "dtype": torch.float16}
    assert_close(interpreted(cases.errors_of, [40, 7, 0, 20], [MIXED], **options), 2e-3)


@pytest.mark.parametrize("window", [None, 250])
def test_contexts_around_the_borders_of_splits(interpreted: Run, window: int | None) -> None:
    lengths = [254, 255, 256, 511, 512, 1100]
    steps = [[(sequence, 1) for sequence in range(len(lengths))]]
    options = {"page": 16, "heads": 2, "kv_heads": 1, "window": window}
    assert_close(interpreted(cases.errors_of, lengths, steps, **options))


@pytest.mark.parametrize(("page", "window"), [(256, None), (512, 300)])
def test_blocks_of_whole_splits(interpreted: Run, page: int, window: int | None) -> None:
    lengths = [0, 255, 256, 511, 700]
    steps = [[(sequence, 1) for sequence in range(len(lengths))]] * 2
    options = {"page": page, "heads": 2, "kv_heads": 1, "window": window}
    assert_close(interpreted(cases.errors_of, lengths, steps, **options))


@pytest.mark.parametrize(
    ("page", "window"),
    [
        (4, 3),
        (4, 5),
        *(pytest.param(*sizes, marks=slow) for sizes in ((4, 1), (4, 4), (4, 16), (16, 1), (16, 15), (16, 17))),
    ],
)
def test_windows_around_page_borders(interpreted: Run, page: int, window: int) -> None:
    around = sorted({max(0, length + d) for length in (0, page, window, window + page) for d in (-1, 0, 1)})
    counts = [1, window + 1, page]
    steps = [[(i, counts[i % 3]) for i in range(len(around))], [(i, 1) for i in range(3)]]
    assert_close(interpreted(cases.errors_of, around, steps, page=page, window=window, kv_heads=1, heads=2))


def test_a_chunk_that_is_longer_than_its_window(interpreted: Run) -> None:
    assert_close(interpreted(cases.errors_of, [0, 70], [[(0, 70), (1, 45)]], page=16, window=20, heads=2))


@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"),
    [
        (24, 2.0, False),
        (None, 50.0, True),
        *(pytest.param(*rule, marks=slow) for rule in ((None, 2.0, False), (24, 50.0, True), (24, None, True))),
    ],
)
def test_softcap_and_sinks(interpreted: Run, window: int | None, softcap: float | None, with_sinks: bool) -> None:
    sinks = torch.tensor([-3.0, 0.5, 4.0, float("-inf")]) if with_sinks else None
    options = {"page": 16, "window": window, "softcap": softcap, "sinks": sinks}
    steps = [[(0, 1), (1, 1), (2, 30), (3, 9)]]
    assert_close(interpreted(cases.errors_of, [50, 1, 0, 40], steps, 1.0, **options), 1e-5)  # scores of about 4


def test_a_row_of_nan_hurts_itself_alone(interpreted: Run) -> None:
    own, others = interpreted(cases.errors_beside_a_row_of_nan)
    assert math.isnan(own)
    assert_close(others)


@pytest.mark.parametrize("window", [None, 3])
def test_without_a_cache_nothing_is_read_or_written(interpreted: Run, window: int | None) -> None:
    error, untouched = interpreted(cases.error_without_cache, window)
    assert error < LIMIT and untouched


@pytest.mark.parametrize(
    ("window", "dtype"),
    [
        (None, torch.float16),
        (70, torch.float32),
        pytest.param(None, torch.float32, marks=slow),
        pytest.param(70, torch.float16, marks=slow),
    ],
)
def test_a_row_has_the_same_bits_alone_and_beside_others(
    interpreted: Run, window: int | None, dtype: torch.dtype
) -> None:
    assert interpreted(cases.alone_and_together, Step([300, 40, 7, 90, 0], [1, 1, 1, 13, 9]), window, dtype)


@pytest.mark.parametrize(
    ("kind", "window"),
    [
        ("decode", None),
        ("mixed", 70),
        pytest.param("decode", 70, marks=slow),
        pytest.param("mixed", None, marks=slow),
    ],
)
def test_a_recorded_plan_serves_later_steps_bit_by_bit(interpreted: Run, kind: str, window: int | None) -> None:
    """One plan of fixed shapes that takes over the numbers of each step; padding writes to the trash block alone."""
    steps = [Step([9, 5], [1, 1]), Step([300], [1]), Step([0, 590, 3, 256], [1, 1, 1, 1])]
    if kind == "mixed":
        steps = [Step([9, 5, 20], [1, 1, 12]), Step([300, 0], [1, 13]), Step([280], [14]), Step([0], [14])]
    assert all(interpreted(cases.replayed, steps, kind, window))


def test_what_does_not_fit_is_refused(interpreted: Run) -> None:
    said = interpreted(cases.refusals)
    assert said[0].startswith("2 rows of one token fit this plan, not 3")
    assert said[1].startswith("a row of 6 blocks does not fit a plan of 5")
    assert "of which 0 have one" in said[2]
    assert said[3].startswith("3 rows of 3 tokens and 11 blocks do not fit a plan for 3 rows, 2 tokens and 19 blocks")
    assert said[4] == said[5] == "a block table does not cover the tokens of its row"


def test_they_bring_kernels_for_the_sampler(interpreted: Run) -> None:
    assert interpreted(cases.sampling_of_ops) == [True, True, True, False]


def test_where_the_kernels_cannot_run_they_say_why(interpreted: Run) -> None:
    assert interpreted(cases.unusable) == [
        None,
        "Triton has no kernels for CPU",
        "the Triton kernels are for CUDA, not for meta",
        "there is no Triton kernel for torch.float64",
        "the Triton kernels are for heads of up to 256, not 512",
    ]


def test_what_fails_at_the_first_launch_is_found_before(interpreted: Run) -> None:
    assert interpreted(cases.failing) == [
        "Triton was tried and failed: division by zero",
        "Triton was tried and gave other numbers than torch",
    ]
