"""Token constraints: masks from the output so far, in any company, under preemption, and when they go wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampler
from tests.harness import Stepper, tokens
from tests.models import ref

VOCAB = 512


class Classes:
    """The i-th token leaves i modulo 3 when divided by 3; after `length` tokens only `end` may come."""

    def __init__(self, length: int, end: int = 0) -> None:
        self.length, self.end = length, end

    def allowed(self, output_ids: Sequence[int]) -> npt.NDArray[np.bool_] | None:
        if len(output_ids) == 2:
            return None
        ids = np.arange(VOCAB)
        return ids == self.end if len(output_ids) >= self.length else ids % 3 == len(output_ids) % 3


class Answers:
    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer = answer

    def allowed(self, output_ids: Sequence[int]) -> Any:
        return self.answer()


def obeys(output: list[int], length: int) -> bool:
    body = all(token % 3 == i % 3 for i, token in enumerate(output[:length]) if i != 2)
    return body and output[length:] == [0] and len(output) == length + 1


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("num_blocks", [64, 8])
def test_the_output_obeys_also_under_preemption(tiny: PreTrainedModel, sampled: bool, num_blocks: int) -> None:
    config = GenerationConfig(do_sample=sampled, top_k=0, eos_token_id=0)
    stepper = Stepper(tiny, config, per_request_processors=True, num_blocks=num_blocks, safety_margin=0.0)
    shared = Classes(20)
    requests = [stepper.add(tokens(i, 40), 40, constraint=shared, seed=i) for i in range(4)]
    plain = stepper.add(tokens(9, 20), 30, do_sample=False, eos_token_id=-1)
    stepper.drain()
    assert num_blocks == 64 or stepper.core.scheduler.num_preemptions > 0
    for request in requests:
        assert obeys(request.output_ids, 20)
        assert stepper.results()[request.request_id].finish_reason == "stop"
    assert plain.output_ids == ref(tiny, tokens(9, 20), 30)
    alone = Stepper(tiny, config, per_request_processors=True)
    again = alone.add(tokens(2, 40), 40, constraint=Classes(20), seed=2)
    alone.drain()
    assert again.output_ids == requests[2].output_ids


def outcome(logits: torch.Tensor, *fields: dict[str, Any]) -> tuple[list[int], dict[int, str]]:
    sampler = Sampler(logits.shape[1])
    requests = [Request("r", [1], 1, SamplingParams(max_new_tokens=9, **each)) for each in fields]
    output = sampler(logits.clone(), sampler.plan(requests)).read()
    return output.token_ids, output.errors


def mask(*ids: int, size: int = 10) -> npt.NDArray[np.bool_]:
    return np.isin(np.arange(size), ids)


def test_masks_of_other_sizes_and_with_other_settings() -> None:
    logits = torch.arange(10.0).expand(6, -1)
    found, errors = outcome(
        logits,
        {"constraint": Answers(lambda: mask(2, 4))},
        {"constraint": Answers(lambda: mask(2, 3, size=5))},  # ids beyond the mask are out
        {"constraint": Answers(lambda: mask(3, 7, 15, size=20))},  # and there is nothing beyond the vocabulary
        {"constraint": Answers(lambda: mask(2, 4, 6)), "allowed_token_ids": (4, 5), "logit_bias": ((9, 100.0),)},
        {"constraint": Answers(lambda: None)},
        {"allowed_token_ids": (1, 8)},
    )
    assert (found, errors) == ([4, 3, 7, 4, 9, 8], {})


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda: 1 / 0, "the constraint failed: ZeroDivisionError"),
        (lambda: [True] * 10, "returned list; expected a NumPy array bool"),
        (lambda: np.ones(10), r"returned float64 \[10\]; expected a NumPy array bool"),
        (lambda: np.ones((1, 10), np.bool_), r"returned bool \[1, 10\]; expected"),
        (lambda: mask(), "the constraint failed: ValueError: it allows no token"),
    ],
)
def test_what_goes_wrong_stays_with_its_request(tiny: PreTrainedModel, answer: Callable[[], Any], reason: str) -> None:
    import re

    logits = torch.arange(10.0).expand(3, -1)
    found, errors = outcome(logits, {}, {"constraint": Answers(answer)}, {"allowed_token_ids": (1, 2)})
    assert (found[0], found[2]) == (9, 2)
    assert list(errors) == [1] and re.search(reason, errors[1])

    stepper = Stepper(tiny, per_request_processors=True)
    broken = stepper.add(tokens(0, 10), 5, constraint=Answers(answer))
    plain = stepper.add(tokens(1, 10), 5)
    stepper.drain()
    outputs = stepper.results()
    assert outputs[plain.request_id].generated_tokens == ref(tiny, tokens(1, 10), 5)
    assert outputs[broken.request_id].status.name == "FAILED"
    assert re.search(reason, str(outputs[broken.request_id].error))
    assert not outputs[broken.request_id].generated_tokens


def test_the_mask_that_was_returned_is_not_changed() -> None:
    kept = mask(2, 4)
    before = kept.copy()
    for _ in range(2):
        assert outcome(torch.arange(10.0)[None], {"constraint": Answers(lambda: kept)})[0] == [4]
    assert (kept == before).all()
