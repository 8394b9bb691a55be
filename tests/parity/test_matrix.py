"""Greedy tokens of many architectures equal those of a plain `generate()`, whatever the engine does on the way.

Pairwise choice by default: every two values of two factors meet in one run. All combinations are marked slow.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.architectures import ARCHITECTURES, VOCAB
from tests.harness import Stepper
from tests.models import reference
from tests.parity.pairwise import pairwise

TIE = 2e-3  # see test_parity.py
MAX_NEW = 20

FACTORS: dict[str, Sequence[Any]] = {
    "architecture": list(ARCHITECTURES),
    "attention": ["kernel", "sdpa", "eager"],
    "scheduler": ["fifo", "prefill_first"],
    "memory": ["plenty", "few", "few and host"],
    "budget": [256, 21],
    "overlap": [False, True],
    "sharing": [True, False],
    "copies": [1, 2],
    "page_size": [16, 4, 32],
}


def is_possible(case: dict[str, Any]) -> bool:
    return case["sharing"] or case["memory"] != "few and host"


CASES = [case for case in pairwise(FACTORS) if is_possible(case)]
# Page sizes take turns: they are crossed with everything in the tests of the operations and of the cache.
ALL_CASES = [
    case
    for number, values in enumerate(itertools.product(*list(FACTORS.values())[:-1]))
    if is_possible(case := dict(zip(FACTORS, (*values, FACTORS["page_size"][number % 3]), strict=True)))
]


def name_of(case: dict[str, Any]) -> str:
    return "-".join(map(str, case.values())).replace(" ", "_")


@cache
def model_of(architecture: str) -> PreTrainedModel:
    return ARCHITECTURES[architecture]()


@cache
def requests() -> list[tuple[list[int], int]]:
    """Prompts of 1 to 100 tokens, which cross windows of 16 and pages of any size; some begin alike."""
    rng = random.Random(0)
    head = rng.choices(range(VOCAB - 2), k=50)
    asked = []
    for i, length in enumerate((1, 15, 16, 31, 33, 70, 30, 100, 14, 47, 62, 29)):
        prompt = rng.choices(range(VOCAB - 2), k=length)
        if i % 2:
            prompt[: length // 2] = head[: length // 2]
        asked.append((prompt, MAX_NEW if i % 3 else 3))
    asked.append(([*asked[-1][0][:90], 7], MAX_NEW))
    return asked


def check(case: dict[str, Any]) -> int:
    """Runs all requests and compares their tokens; how often one was preempted."""
    model = model_of(case["architecture"])
    stepper = make_stepper(model, case)
    asked = [(prompt, n) for prompt, n in requests() for _ in range(case["copies"])]
    added = []
    for i, (prompt, n) in enumerate(asked):
        added.append(stepper.add(prompt, n))
        if i % 3 == 2:
            stepper.step()
    stepper.drain()
    cache, results = stepper.core.scheduler.cache, stepper.results()
    if case["memory"] == "few and host":
        assert cache.num_host_blocks > 0
    compared = 0
    for request, (prompt, n) in zip(added, asked, strict=True):
        wanted, output = reference(model, prompt, MAX_NEW), results[request.request_id]
        tie = next((i for i, gap in enumerate(wanted.gaps[:n]) if gap < TIE), n)
        assert output.error is None
        assert output.num_generated_tokens == n
        assert output.generated_tokens[:tie] == wanted.token_ids[:tie]
        compared += tie
    assert compared > 0.8 * sum(n for _, n in asked)
    return stepper.core.scheduler.num_preemptions


def make_stepper(model: PreTrainedModel, case: dict[str, Any]) -> Stepper:
    page, memory = case["page_size"], case["memory"]
    own = model.config._attn_implementation
    settings = {
        "page_size": page,
        "max_batch_tokens": case["budget"],
        "scheduler_type": case["scheduler"],
        "safety_margin": 0.0,
        "allow_block_sharing": case["sharing"],
        "auto_switch_to_flash": case["attention"] == "kernel",
        "cpu_offload_space": 0.01 if memory == "few and host" else 0.0,
    }
    try:
        if case["attention"] == "eager":
            model.set_attn_implementation("eager")
        probe = Stepper(model, overlap=case["overlap"], **settings, num_blocks=2000)
        if memory == "plenty":
            stepper = probe
        else:
            # Just enough for the longest request alone.
            blocks = probe.manager.settings.layout.need(0, 100 + MAX_NEW)
            stepper = Stepper(model, overlap=case["overlap"], **settings, num_blocks=blocks)
    finally:
        model.set_attn_implementation(own)
    return stepper


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_pairs(case: dict[str, Any]) -> None:
    preemptions = check(case)
    # What windows give back in a step may be all that the step asks for.
    spared = case["architecture"] == "gemma3"
    assert preemptions or spared or case["memory"] == "plenty", "nothing was preempted, so this shows too little"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_combinations(architecture: str) -> None:
    cases = [case for case in ALL_CASES if case["architecture"] == architecture]
    preempted = sum(check(case) > 0 for case in cases)
    assert preempted > len(cases) / 3
