"""Two steps in flight change when results come, and nothing else: every kind of request, against one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from engine import GenerationOutput
from tests.harness import Stepper, tokens
from tests.models import ref


class OnlyEven:
    """A constraint: even token ids, and of these only multiples of 4 behind a multiple of 4."""

    def allowed(self, output_ids: Sequence[int]) -> np.ndarray | None:
        step = 4 if output_ids and output_ids[-1] % 4 == 0 else 2
        return np.arange(512) % step == 0


def requests(model: PreTrainedModel) -> list[tuple[list[int], int, dict[str, Any]]]:
    """Prompt, most new tokens, further arguments."""
    prompts = [tokens(seed, length) for seed, length in enumerate((1, 15, 16, 17, 31, 40, 40, 60))]
    ends = [ref(model, prompt, 12) for prompt in prompts]
    return [
        (prompts[0], 20, {}),
        (prompts[1], 20, {"eos_token_id": ends[1][0]}),
        (prompts[2], 20, {"eos_token_id": [ends[2][4], ends[2][9]]}),
        (prompts[3], 1, {}),
        (prompts[4], 20, {"stop_token_ids": [ends[4][7]], "min_new_tokens": 3, "streaming": True}),
        (prompts[5], 20, {"temperature": 1.2, "seed": 5}),
        (prompts[5], 20, {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 6, "top_logprobs": 2}),
        (prompts[6], 20, {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2}),
        (prompts[6], 20, {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logprobs": True}),
        (prompts[7], 9, {"prompt_logprobs": 1}),
        (prompts[7], 9, {"bad_words_ids": [ends[7][:2], [ends[7][3]]]}),
        (prompts[7], 9, {"constraint": OnlyEven()}),
    ]


def run(model: PreTrainedModel, overlap: bool, **fields: Any) -> tuple[Stepper, list[GenerationOutput]]:
    stepper = Stepper(model, overlap=overlap, per_request_processors=True, safety_margin=0.0, **fields)
    added = []
    for prompt, most, arguments in requests(model):
        added.append(stepper.add(prompt, most, **arguments))
        stepper.step()
    stepper.drain()
    results = stepper.results()
    return stepper, [results[request.request_id] for request in added]


@pytest.mark.parametrize("budget", [256, 17])
@pytest.mark.parametrize("num_blocks", [128, 9])
def test_results_are_those_of_one_step_at_a_time(tiny: PreTrainedModel, num_blocks: int, budget: int) -> None:
    fields = {"num_blocks": num_blocks, "max_batch_tokens": budget}
    plain_stepper, plain = run(tiny, False, **fields)
    stepper, overlapped = run(tiny, True, **fields)
    if num_blocks == 9:
        assert stepper.core.scheduler.num_preemptions > 0
    for one, other in zip(plain, overlapped, strict=True):
        assert other.error is None
        assert (other.generated_tokens, other.finish_reason) == (one.generated_tokens, one.finish_reason)
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)
        assert [[token for token, _ in top] for top in other.top_logprobs] == [
            [token for token, _ in top] for top in one.top_logprobs
        ]
        assert len(other.prompt_logprobs) == len(one.prompt_logprobs)
    stops = [output.finish_reason for output in overlapped].count("stop")
    assert stops == 3, "three end before their limit, with a step in flight that goes beyond"
    streamed = [len(s.outputs) for s in (plain_stepper, stepper)]
    assert streamed[0] == streamed[1]


def test_results_come_one_step_later(tiny: PreTrainedModel) -> None:
    plain, overlapped = Stepper(tiny), Stepper(tiny, overlap=True)
    for stepper in (plain, overlapped):
        stepper.add(tokens(0, 20), 5, streaming=True)
    steps = [[len(stepper.step()) for _ in range(7)] for stepper in (plain, overlapped)]
    assert steps == [[1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 0]]
