"""The Triton sampling kernels in Triton's interpreter: the choices of engine/sampling for the same random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine import triton_sampling as cases
from tests.engine.triton_processes import Run

slow = pytest.mark.slow


def assert_same(interpreted: Run, function: Any, *arguments: Any, **options: Any) -> cases.Compared:
    found = cases.Compared(*interpreted(function, *arguments, **options))
    assert found.own == found.expected and found.kept == found.expected_kept
    assert found.difference < 1e-6
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocab", [1, 37, 4096, 4097, 9001])
def test_the_most_likely_token(interpreted: Run, vocab: int, dtype: torch.dtype) -> None:
    """To the bit what max() gives; rows of NaN, +inf or nothing else than -inf are bad."""
    assert interpreted(cases.best_differences, vocab, dtype) == []


@pytest.mark.parametrize(
    ("vocab", "top_k", "top_p", "min_p", "options"),
    [
        (500, 40, 0.9, 0.0, {"dtype": torch.float16}),
        (61, 61, 0.5, 0.1, {"temperature": 0.3}),
        (500, None, 0.8, 0.0, {}),
        (4200, 2500, 0.9, 0.0, {"spread": 0.7, "rows": 1}),  # too many to be put in order
        pytest.param(1300, 1100, 0.9, 0.0, {"spread": 0.7}, marks=slow),
        pytest.param(1300, 1300, 1.0, 0.2, {"ties": True}, marks=slow),
        pytest.param(500, 40, 1.0, 0.0, {"temperature": 1e30}, marks=slow),
        pytest.param(500, 40, 1.0, 0.0, {"temperature": 1e-5}, marks=slow),
    ],
)
def test_choices_are_those_of_the_processors(
    interpreted: Run, vocab: int, top_k: int | None, top_p: float, min_p: float, options: dict[str, Any]
) -> None:
    assert_same(interpreted, cases.compare, vocab, top_k, top_p, min_p, **options)


def test_more_ties_with_the_last_than_there_is_room_for(interpreted: Run) -> None:
    found = assert_same(interpreted, cases.compare, 4200, 7, 1.0, ties=True, spread=0.3, rows=1)
    assert found.kept[0] > 128


@slow
@pytest.mark.parametrize("min_p", [0.0, 0.9])
def test_a_nucleus_that_is_wider_than_the_candidates(interpreted: Run, min_p: float) -> None:
    """Unless min-p cuts it short again."""
    found = assert_same(interpreted, cases.compare, 2500, None, 0.9, min_p, rows=1, spread=0.1)
    assert (found.kept[0] > 1024) == (min_p == 0.0)


@pytest.mark.parametrize("top_k", [4, pytest.param(None, marks=slow)])
def test_the_ends_of_the_random_numbers(interpreted: Run, top_k: int | None) -> None:
    """The smallest one gives the most likely token, 1 the last of those that are kept."""
    uniform = [2.0**-53, 0.5, 1.0]
    found = assert_same(interpreted, cases.compare, 90, top_k, 0.9, uniform=uniform, ties=True)
    assert found.own[0] != found.own[2]


@pytest.mark.parametrize(
    ("vocab", "min_p", "options"),
    [
        (1, 0.0, {}),
        (500, 0.0, {"uniform": [2.0**-53, 0.5, 1.0]}),
        (2048, 0.0, {"uniform": [2.0**-53, 0.5, 1.0], "temperature": 1e30}),
        (4100, 0.0, {"rows": 12, "spread": 1.0, "dtype": torch.float16}),
        (4100, 0.2, {"rows": 6, "temperature": 2.0}),
        (4100, 1.0, {"ties": True, "uniform": [2.0**-53, 0.5, 1.0]}),
    ],
)
def test_draws_in_the_order_of_ids(interpreted: Run, vocab: int, min_p: float, options: dict[str, Any]) -> None:
    assert_same(interpreted, cases.compare_in_vocabulary_order, vocab, min_p, **options)


def test_a_row_draws_the_same_alone_and_beside_others(interpreted: Run) -> None:
    assert interpreted(cases.drawn_alone_and_together, 2500)


@pytest.mark.parametrize("vocab", [60, 64, 2500])
def test_bad_rows_draw_a_token_that_there_is(interpreted: Run, vocab: int) -> None:
    """Its log-probability may be looked up before the row is known to be bad: on a GPU another id would end all."""
    tokens = interpreted(cases.tokens_of_bad_rows, vocab)
    assert len(tokens) == 12 and all(0 <= token < vocab for token in tokens)


@pytest.mark.parametrize("fields", [{}, {"logit_bias": ((3, 2.0),)}, {"logprobs": True}], ids=str)
def test_a_step_of_all_kinds_of_rows(interpreted: Run, fields: dict[str, Any]) -> None:
    """Bad rows are told and hurt themselves alone; whether the kernels read float16, or a float32 copy."""
    (own, own_bad), (tokens, bad) = interpreted(cases.sampled_with_and_without, torch.float16, **fields)
    assert own == tokens and own_bad == bad == [0] * 5 + [1] * 2 + [0]
