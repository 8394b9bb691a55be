"""Whole steps on a device: nothing waits for it before the tokens are read, and little is copied and launched.

What the device is told runs as late as it may, so the tokens are also those of memory that was overwritten at the
worst time.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.architectures import ARCHITECTURES
from tests.engine import device_steps as cases
from tests.engine.device_sampling import DRAW, EDITS, EVERY, LOGPROBS, VOCAB
from tests.engine.device_steps import MODELS, Run, Step
from tests.engine.triton_processes import Run as Call
from tests.harness import tokens


def check(own: Run, plain: Run) -> Run:
    """No step waits, and what comes of it is what comes of it on CPU."""
    assert own.waits() == []
    for one, other in zip(own.outcomes, plain.outcomes, strict=True):
        assert one.error is None and one.tokens == other.tokens and one.top == other.top
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
        assert one.prompt_logprobs == pytest.approx(other.prompt_logprobs, abs=1e-3)
    return own


def kinds(steps: list[Step]) -> set[tuple[str, str]]:
    return {("decode" if step.is_decode else "mixed", "again" if step.is_recorded else "") for step in steps}


KINDS = {("mixed", ""), ("mixed", "again"), ("decode", ""), ("decode", "again")}
TOP_K: dict[str, Any] = DRAW | {"top_k": 9}


@pytest.mark.parametrize("name", MODELS)
def test_no_step_waits(on_device: Call, name: str) -> None:
    """Mixed steps and decode steps, recorded and not, with two in flight."""
    own = check(*on_device(cases.compared, name, [{}, TOP_K, {}], [17, 3, 4], 6))
    assert kinds(own.steps) == KINDS
    assert sum(step.carries for step in own.steps) >= 5
    assert own.is_fused == (name != "its own forward")


def test_no_step_waits_for_what_rows_ask(on_device: Call) -> None:
    """Rows of every kind with everything that changes logits, log-probabilities of theirs and of prompts."""
    rows = [kind | edit for kind, edit in zip(EVERY * 2, EDITS.values(), strict=False)]
    rows = [row | (LOGPROBS | {"raw_logprobs": i % 2 == 0} if i % 3 else {}) for i, row in enumerate(rows)]
    rows += [{"prompt_logprobs": 2} | LOGPROBS, DRAW | {"prompt_logprobs": 0}]
    lengths = [1 + i % 3 for i in range(len(rows) - 2)] + [9, 5]
    own = check(*on_device(cases.compared, "llama", rows, lengths, 4, max_requests=len(rows), at_once=True))
    assert [len(each.logprobs) for each in own.outcomes[:3]] == [0, 4, 4]
    assert [len(each.prompt_logprobs) for each in own.outcomes[-2:]] == [8, 4]
    assert all(step.carries for step in own.steps[1:])


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_architecture_waits(on_device: Call, name: str) -> None:
    check(*on_device(cases.compared, name, [{}, TOP_K], [17, 2], 4))


def test_what_is_copied(on_device: Call) -> None:
    """A greedy step sends one copy, one with other rows a second one; the tokens of both come back in one."""
    for rows, most in (([{}, {}], 1), ([{}, TOP_K], 2)):
        own, _ = on_device(cases.compared, "llama", rows, [3, 3], 6)
        steps = [step for step in own.steps if step.is_decode and step.is_recorded]
        assert len(steps) >= 2
        for step in steps:
            assert len(step.launch.sent) == 1 and len(step.launch.sent + step.sample.sent) == most
            assert step.launch.received == [] and len(step.sample.received) == 1


def test_what_is_launched(on_device: Call) -> None:
    """Around the layers of a greedy decode step; `test_what_a_layer_launches` counts what each of them launches."""
    own, _ = on_device(cases.compared, "llama", [{}, {}], [3, 3], 6)
    recorded = [step for step in own.steps if step.is_decode and step.is_recorded]
    assert recorded and all(step.carries for step in recorded)
    for step in recorded:
        assert step.launch.launched == ["index_select", "index_copy_", "graph"]
        assert step.sample.launched == ["_best_of_part_kernel", "_best_kernel"]
    one, two = (on_device(cases.launched, layers) for layers in (1, 2))
    assert 2 * len(one) - len(two) == len(["embedding", "norm", "rows", "rows", "head"])


FIRST = tokens(1, 9, VOCAB)
PROMPTS = [FIRST, tokens(2, 7, VOCAB), [*FIRST[:8], 5], tokens(3, 10, VOCAB)]


def test_the_tokens_of_generate(on_device: Call) -> None:
    """With preemption, prefix hits, blocks that go to the host and come back, and recorded steps of both kinds."""
    own, expected = on_device(cases.generated, PROMPTS, 8, num_blocks=11, host_slots=16)
    assert own.tokens == expected and own.waits() == []
    assert own.preemptions and own.outcomes[2].cached == 8
    assert any(step.to_host for step in own.steps) and any(step.from_host for step in own.steps)
    assert {("mixed", "again"), ("decode", "again")} <= kinds(own.steps)


@pytest.mark.slow
def test_everything_under_pressure(on_device: Call) -> None:
    """Rows of every kind that are preempted and whose blocks are kept on the host meanwhile."""
    rows = [kind | edit for kind, edit in zip(EVERY * 2, EDITS.values(), strict=False)]
    rows = [row | (LOGPROBS | {"raw_logprobs": i % 2 == 0} if i % 3 else {}) for i, row in enumerate(rows)]
    options = {"num_blocks": 12, "host_slots": 12, "max_requests": 6}
    own = check(*on_device(cases.compared, "llama", rows, [3 + i % 4 for i in range(len(rows))], 14, **options))
    assert own.preemptions > 2 and any(step.from_host for step in own.steps)


# Memory that is overwritten too early


def test_steps_that_are_sent_before_others_arrived(on_device: Call) -> None:
    assert on_device(cases.sent_thrice, True) == [[0] * 3, [1] * 3, [2] * 3]
    assert on_device(cases.sent_thrice, False)[0] != [0] * 3


@pytest.mark.parametrize("module", ["staging", "model_runner"])
def test_without_events_the_tokens_are_others(on_device: Call, module: str) -> None:
    """Of what is sent, if there is a single place for it, and of what comes back."""
    slots = 1 if module == "staging" else 2
    is_right, _ = on_device(cases.generated_without, module, slots)
    assert not is_right
    is_right, waits = on_device(cases.generated_without, None, slots)
    assert is_right
    assert bool(waits) == (slots == 1), "two places are enough for two steps in flight"


def test_without_marks_blocks_come_too_late(on_device: Call) -> None:
    options: dict[str, Any] = {"num_blocks": 10, "host_slots": 16, "recorded": False}
    own, expected = on_device(cases.generated, PROMPTS, 8, **options)
    assert own.tokens == expected
    assert not on_device(cases.generated_without_marks, PROMPTS, 8, **options)
