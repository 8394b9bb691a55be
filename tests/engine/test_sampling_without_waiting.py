"""Nothing between the forward pass and the reading of the tokens waits for the device, whatever the rows ask for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine import device_sampling as cases
from tests.engine.device_sampling import DRAW, EDITS, EVERY, KINDS, LOGPROBS
from tests.engine.triton_processes import Run


def check(steps: list[cases.Step]) -> list[cases.Step]:
    for told, own, expected in steps:
        assert told.waits == []
        assert own.token_ids == expected.token_ids and own.errors == expected.errors
        if expected.logprobs is not None:
            assert own.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        for one, other in zip(own.top_logprobs or (), expected.top_logprobs or (), strict=True):
            assert [token for token, _ in one] == [token for token, _ in other]
            assert [value for _, value in one] == pytest.approx([value for _, value in other], abs=1e-4)
    return steps


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_rows(on_device: Run, kind: str) -> None:
    """The random numbers are all that goes to the device, once it has those of the parameters."""
    rows = KINDS[kind]
    first, second = check(on_device(cases.steps, rows, torch.float16))
    assert len(first.told.sent) == (0 if kind == "greedy" else 2)
    assert second.told.sent == ([] if kind == "greedy" else [8 * len(rows)])


def test_greedy_rows_are_two_kernels(on_device: Run) -> None:
    (step,) = check(on_device(cases.steps, KINDS["greedy"], torch.float16, 1))
    assert step.told.launched == ["_best_of_part_kernel", "_best_kernel"]


@pytest.mark.parametrize("edit", EDITS)
def test_edits_of_the_logits_go_along(on_device: Run, edit: str) -> None:
    rows = [kind | EDITS[edit] for kind in EVERY] + [{}]
    _, second = check(on_device(cases.steps, rows, torch.float32))
    assert len(second.told.sent) == 1


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("edits", [{}, EDITS["biases"]], ids=["", "edited"])
def test_log_probabilities(on_device: Run, raw: bool, edits: dict[str, Any]) -> None:
    rows = [kind | LOGPROBS | edits | {"raw_logprobs": raw} for kind in EVERY]
    check(on_device(cases.steps, [*rows, {}, DRAW, LOGPROBS, LOGPROBS | {"raw_logprobs": True}], torch.float16))


def test_everything_at_once(on_device: Run) -> None:
    rows = [kind | edit for kind, edit in zip(EVERY * 2, EDITS.values(), strict=False)]
    rows += [rows[i] | LOGPROBS | {"raw_logprobs": i % 2 == 0} for i in range(len(rows))]
    check(on_device(cases.steps, rows, torch.float32))


@pytest.mark.parametrize("k", [0, 3])
def test_scores_of_a_prompt(on_device: Run, k: int) -> None:
    told, own, expected = on_device(cases.scored_prompt, k, torch.float16)
    assert told.waits == [] and len(told.sent) == 1
    assert len(own) == 70
    for one, other in zip(own, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_nothing_that_waits_goes_unnoticed(on_device: Run) -> None:
    assert on_device(cases.unnoticed) == []
