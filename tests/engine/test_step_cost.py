"""What the host does in a step grows with the rows of the step and with nothing else. Work is counted, not timed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest

from engine.bench import step
from engine.bench.scripted import PAGE, ScriptedEngine


def calls_of(action: Callable[[], object]) -> int:
    """Python and C functions that are called."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # what is called when garbage is collected would count too
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def calls_of_a_page(rows: int, context: int, waiting: int = 0, *, overlap: bool = False) -> int:
    """In so many steps that each row begins one block and fills one."""
    engine = ScriptedEngine(rows, context, waiting, steps=10 * PAGE, overlap=overlap)
    for _ in range(2 * PAGE):  # until the block tables are wide enough
        engine.step()
    outputs: list[int] = []
    calls = calls_of(lambda: outputs.extend(engine.step() for _ in range(PAGE)))
    assert outputs == [rows] * PAGE
    return calls


@pytest.mark.parametrize("overlap", [False, True])
def test_waiting_requests_and_long_contexts_cost_nothing(overlap: bool) -> None:
    expected = calls_of_a_page(8, 100, overlap=overlap)
    assert calls_of_a_page(8, 100, waiting=10_000, overlap=overlap) - expected <= 25 * PAGE, "one that does not fit"
    assert calls_of_a_page(8, 100, waiting=10_000, overlap=overlap) == calls_of_a_page(
        8, 100, waiting=10, overlap=overlap
    )
    assert calls_of_a_page(8, 10_004, overlap=overlap) == expected


def test_a_decode_between_page_borders_costs_few_calls() -> None:
    small, large = calls_of_a_page(8, 100), calls_of_a_page(108, 100)
    assert (large - small) / (100 * PAGE) < 15


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    step.main(["--rows", "2", "--context", "20", "--waiting", "0", "3", "--rounds", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["rows", "context", "waiting"]
    assert [line.split()[:3] for line in lines[1:]] == [["2", "20", "0"], ["2", "20", "3"]]
    step.main(["--sampling", "--rows", "2", "--vocab", "3000", "--history", "20", "--rounds", "1"])
    assert "top-p" in capsys.readouterr().out
