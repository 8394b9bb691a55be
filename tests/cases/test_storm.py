"""Thousands of random events at a running engine: whoever survives has the tokens of a plain `generate()`.

Two token ids are poison: one makes the model raise, the other makes every number that depends on it NaN.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine import ContinuousBatchingManager, GenerationOutput, RequestStatus
from tests.architectures import WINDOW, build
from tests.harness import Stepper, before_forward, check_whole, collect, core_of, running, tokens
from tests.models import build_tiny, ref

RAISES, IS_NAN = 510, 511
MAX_NEW = 12
HICCUP_AFTER = 30  # forward passes: by then all that failed together has run again

CONFIGS: dict[str, dict[str, Any]] = {
    "plenty": {},
    "few blocks": {"num_blocks": 12, "max_batch_tokens": 24, "max_requests_per_batch": 6},
    "few blocks, host": {"num_blocks": 12, "safety_margin": 0.0, "cpu_offload_space": 0.002},
    "prefill first": {"scheduler_type": "prefill_first", "num_blocks": 20, "max_batch_tokens": 19},
    "no sharing, small pages": {"allow_block_sharing": False, "page_size": 4, "num_blocks": 60},
    "two steps in flight": {"num_blocks": 16, "max_batch_tokens": 40},
    "windows": {"num_blocks": 20, "max_batch_tokens": 24},
    "windows, host, two steps in flight": {"num_blocks": 20, "max_batch_tokens": 24, "cpu_offload_space": 0.002},
}


@dataclass
class Asked:
    """A request of the storm and what may become of it."""

    prompt: list[int]
    max_new_tokens: int
    outputs: list[GenerationOutput] = field(default_factory=list)
    poisoned: bool = False
    cancelled: bool = False


class Storm:
    def __init__(self, seed: int, manager: ContinuousBatchingManager, model: PreTrainedModel) -> None:
        self.rng = random.Random(seed)
        self.manager, self.model = manager, model
        self.asked: dict[str, Asked] = {}
        families = [[self.rng.randrange(500) for _ in range(48)] for _ in range(4)]
        self.prompts = [
            [
                *self.rng.choice(families)[: self.rng.randrange(48)],
                *self.rng.choices(range(500), k=self.rng.randint(1, 9)),
            ]
            for _ in range(30)
        ]

    def blow(self, events: int) -> None:
        kinds = [self.add] * 12 + [self.add_poisoned] * 2 + [self.cancel] * 3 + [self.pause, self.refused, self.take]
        for _ in range(events):
            self.rng.choice(kinds)()
            while sum(not asked.outputs for asked in self.asked.values()) > 40:
                self.take()

    def add(self, **fields: Any) -> None:
        prompt = self.rng.choice(self.prompts)
        self._submit(Asked(prompt, self.rng.randint(1, MAX_NEW)))

    def add_poisoned(self) -> None:
        prompt = list(self.rng.choice(self.prompts))
        prompt.insert(self.rng.randrange(len(prompt) + 1), self.rng.choice([RAISES, IS_NAN]))
        self._submit(Asked(prompt, self.rng.randint(1, MAX_NEW), poisoned=True))

    def _submit(self, asked: Asked) -> None:
        n = self.rng.choice([1, 1, 1, 1, 2])
        request_id = self.manager.add_request(
            asked.prompt,
            max_new_tokens=asked.max_new_tokens,
            streaming=self.rng.random() < 0.3,
            num_return_sequences=n,
        )
        assert request_id is not None
        self.asked[request_id] = asked
        for index in range(n - 1):
            child = Asked(asked.prompt, asked.max_new_tokens, poisoned=asked.poisoned)
            self.asked[f"{request_id}__child#{index}"] = child

    def cancel(self) -> None:
        if not self.asked:
            return
        recent = list(self.asked)[-20:]
        request_id = self.rng.choice(recent)
        for name in self.asked:
            if name == request_id or name.startswith(f"{request_id}__child#"):
                self.asked[name].cancelled = True
        for _ in range(self.rng.choice([1, 1, 2])):
            self.manager.cancel_request(request_id)

    def pause(self) -> None:
        with self.manager.pause(keep_cache=self.rng.random() < 0.5):
            pass

    def refused(self) -> None:
        bad: list[tuple[list[int], dict[str, Any]]] = [
            ([1] * 5000, {}),
            ([], {}),
            ([1, 512], {}),
            ([1, 2], {"max_new_tokens": 0}),
            ([1, 2], {"temperature": -1.0}),
            ([1, 2], {"top_p": 2.0}),
        ]
        prompt, arguments = self.rng.choice(bad)
        with pytest.raises(ValueError):
            self.manager.add_request(prompt, **arguments)

    def take(self) -> None:
        """The outcome of one request."""
        open_ids = [request_id for request_id, asked in self.asked.items() if not asked.outputs]
        if open_ids:
            request_id = self.rng.choice(open_ids[:10])
            self.asked[request_id].outputs += collect(self.manager, [request_id])

    def check(self) -> dict[str, int]:
        """Takes what is left and compares all; how many ended how."""
        counts = dict.fromkeys(("finished", "failed", "cancelled"), 0)
        for request_id, asked in self.asked.items():
            if not asked.outputs:
                asked.outputs += collect(self.manager, [request_id])
            (output,) = asked.outputs
            with pytest.raises(KeyError):
                self.manager.get_result(request_id)  # there is no second terminal result
            assert output.request_id == request_id
            assert output.prompt_ids == asked.prompt
            counts[output.status.name.lower()] += 1
            if output.status is RequestStatus.FINISHED:
                assert not asked.poisoned
                assert output.generated_tokens == ref(self.model, asked.prompt, MAX_NEW)[: asked.max_new_tokens]
            elif output.status is RequestStatus.FAILED:
                assert asked.poisoned, output.error
                assert output.error
            else:
                assert asked.cancelled
        return counts


@cache
def build_poisonous(windows: bool) -> PreTrainedModel:
    """A model that computes NaN from one token id, and generates neither that one nor the one that raises."""
    model = build_tiny()
    if windows:
        model = build("qwen2", 4, vocab_size=512, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)
    with torch.no_grad():
        model.get_input_embeddings().weight[IS_NAN] = float("nan")
        model.lm_head.weight[[RAISES, IS_NAN]] = 0
    return model


class Poison:
    """Makes forward passes raise on one token id, and now and then on any while `hiccups`."""

    def __init__(self, manager: ContinuousBatchingManager) -> None:
        self.hiccups = True
        self._calms = 0  # forward passes since the last with poison or a hiccup
        before_forward(manager, self._raise_now_and_then)

    def _raise_now_and_then(self, input_ids: torch.Tensor) -> None:
        self._calms = 0 if (input_ids == IS_NAN).any() else self._calms + 1
        poisoned = bool((input_ids == RAISES).any())
        if poisoned or (self.hiccups and self._calms > HICCUP_AFTER):
            self._calms = 0
            raise RuntimeError("poison" if poisoned else "a hiccup of the device")


def storm(seed: int, name: str, events: int) -> None:
    model = build_poisonous(windows="windows" in name)
    with running(model, per_request_processors=True, **CONFIGS[name]) as manager:
        core = core_of(manager)
        core._overlap = "two steps in flight" in name
        poison = Poison(manager)
        storm = Storm(seed, manager, model)
        storm.blow(events)
        poison.hiccups = False
        counts = storm.check()
        if CONFIGS[name].get("num_blocks", 99) < 20:
            assert core.scheduler.num_preemptions > 0
    check_whole(core)
    assert min(counts.values()) > 0, counts


@pytest.mark.parametrize("name", CONFIGS)
def test_survivors_of_a_storm_have_the_tokens_of_a_calm_day(name: str) -> None:
    storm(1, name, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("name", CONFIGS)
def test_many_long_storms(name: str, seed: int) -> None:
    storm(seed, name, 1500)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("later", [False, True], ids=["in the same step", "in a later step"])
def test_a_prefix_spoiled_by_a_nan_behind_it_is_computed_again(later: bool, overlap: bool) -> None:
    """Attention may spread a NaN to tokens before it, whose blocks others can hit before anyone knows."""
    model = build_poisonous(windows=False)
    stepper = Stepper(model, overlap=overlap, max_batch_tokens=256 if not later else 30)
    head = tokens(0, 20, 500)
    poisoned = stepper.add([*head, IS_NAN, *tokens(1, 30, 500)], 8)
    if later:
        stepper.step()
    healthy = [stepper.add([*head, *tokens(seed, 5, 500)], 8) for seed in range(3)]
    stepper.drain()
    results = stepper.results()
    assert results[poisoned.request_id].status is RequestStatus.FAILED
    for request in healthy:
        assert results[request.request_id].generated_tokens == ref(model, request.prompt_ids, 8)
    assert any(request.cached_tokens for request in healthy), "nobody hit what was spoiled"
