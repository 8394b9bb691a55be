"""Flash kernels and the Triton kernels at once: the contract of attention, the tokens of generate(), recorded steps.

In Triton's interpreter, with fakes of the flash packages.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine import triton_flash as cases
from tests.engine.triton_processes import Run

slow = pytest.mark.slow
CONTRACT: list[Any] = [
    ("test_contexts_that_end_at_the_borders_of_pages", "flash-attn-3"),
    ("test_windows_one_token_around_tiles_and_pages", "flash-attn-3", 15),
    ("test_softcap_and_sinks", "flash-attn-3", "softcap", 20),
    ("test_softcap_and_sinks", "flash-attn-3", "sinks", None),
    ("test_reused_blocks_carry_nothing_over", "flash-attn-3"),
    ("test_reused_blocks_carry_nothing_over", "flash-attn"),
    ("test_a_row_reads_what_another_row_of_its_step_writes", "flash-attn"),
    ("test_padded_decode_plans_give_the_numbers_of_plain_ones", "flash-attn"),
    ("test_padded_decode_plans_give_the_numbers_of_plain_ones", "flash-attn-3"),
    ("test_padded_decode_plans_give_the_numbers_of_plain_ones", "torch"),
    ("test_padded_mixed_plans_give_the_numbers_of_plain_ones", "flash-attn-3"),
    pytest.param(("test_contexts_that_end_at_the_borders_of_pages", "flash-attn"), marks=slow),
]


@pytest.mark.parametrize("case", CONTRACT, ids=str)
def test_the_contract(interpreted: Run, case: Any) -> None:
    interpreted(cases.contract, *case)


@pytest.mark.parametrize(
    ("package", "model", "lengths"),
    [
        ("flash-attn-3", "llama", [5, 47, 48, 49, 5]),
        ("flash-attn", "llama", [5, 61]),
        ("flash-attn-3", "windows", [39, 41, 5]),
        ("flash-attn-3", "softcaps", [5, 17, 40]),
        ("torch", "windows", [39, 5]),
        pytest.param("flash-attn", "windows", [5, 39, 41, 300], marks=slow),
    ],
)
def test_the_tokens_of_generate(interpreted: Run, package: str, model: str, lengths: list[int]) -> None:
    interpreted(cases.generated, package, model, lengths)


@pytest.mark.parametrize(("package", "mixed"), [("flash-attn", False), ("flash-attn-3", True)])
def test_steps_of_fixed_shapes_are_replayed(interpreted: Run, package: str, mixed: bool) -> None:
    """On a cache of NaN, of which each step clears the blocks that it begins."""
    replayed, error = interpreted(cases.replayed_steps, package, mixed)
    assert replayed >= 1 + mixed and error < 0.05


def test_blocks_are_cleared(interpreted: Run) -> None:
    interpreted(cases.cleared)
