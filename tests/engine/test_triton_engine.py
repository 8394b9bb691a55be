"""Engines on the Triton kernels, in Triton's interpreter: the tokens of generate(), and recorded steps."""

from __future__ import annotations

import pytest

from tests.engine import triton_engine as cases
from tests.engine.triton_processes import Run


def test_the_tokens_of_generate(interpreted: Run) -> None:
    own, expected, fused = interpreted(cases.generated, 3)
    assert own == expected and fused


@pytest.mark.slow
def test_steps_of_fixed_shapes_are_replayed(interpreted: Run) -> None:
    replayed, error = interpreted(cases.replayed_steps)
    assert replayed >= 2 and error < 1e-4


def test_decode_steps_past_a_window_are_replayed(interpreted: Run) -> None:
    own, expected, replays = interpreted(cases.recorded_windows)
    assert own == expected and replays >= 5
