"""What rows may ask of the sampler, and its steps on `device_on_cpu`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.outputs import StepOutput
from engine.request import TokenLogprobs
from engine.sampling.logprobs import prompt_logprobs, score_prompt
from engine.sampling.sampler import Sampler
from tests.engine import device_on_cpu as device
from tests.engine.device_on_cpu import Told
from tests.engine.test_sampling import request

VOCAB = 200


class EveryThird:
    """A constraint; of more tokens than half, or of fewer."""

    def __init__(self, keep: bool) -> None:
        self.keep = keep

    def allowed(self, output_ids: Sequence[int]) -> npt.NDArray[np.bool_]:
        return (np.arange(VOCAB) % 3 == 0) == self.keep


DRAW: dict[str, Any] = {"do_sample": True}
KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}, {}],
    "top-k": [DRAW | {"top_k": 9}, DRAW | {"top_k": 5, "top_p": 0.8, "temperature": 2.0}],
    "top-p": [DRAW | {"top_p": 0.7}, DRAW | {"top_p": 0.5, "min_p": 0.1}],
    "vocabulary": [DRAW, DRAW | {"temperature": 0.5}],
    "min-p": [DRAW | {"min_p": 0.1}, DRAW],
    "large top-k": [DRAW | {"top_k": 190}, DRAW | {"top_k": 150, "top_p": 0.9}],
}
EVERY = [rows[-1] for rows in KINDS.values()]
EDITS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.5},
    "biases": {"logit_bias": ((3, 2.0), (9, -1.0)), "sequence_bias": (((1, 5), 3.0), ((4,), -2.0))},
    "bad words": {"bad_words_ids": ((7,), (5, 8)), "no_repeat_ngram_size": 2},
    "minimum": {"min_new_tokens": 9, "eos_token_ids": (8, 11)},
    "suppressed": {"suppress_tokens": (1, 2)},
    "forced": {"max_new_tokens": 3, "forced_eos_token_ids": (4, 6)},
    "allowed": {"allowed_token_ids": tuple(range(40))},
    "few allowed by a constraint": {"constraint": EveryThird(True)},
    "many allowed by a constraint": {"constraint": EveryThird(False)},
}
LOGPROBS = {"logprobs": True, "top_logprobs": 4}


class Step(NamedTuple):
    """What happened on the device in one step, its outcome, and that of plain torch on CPU."""

    told: Told
    own: StepOutput
    expected: StepOutput


def steps(kinds: list[dict[str, Any]], dtype: torch.dtype, count: int = 2) -> list[Step]:
    """The steps of requests of these parameters by one sampler."""
    from engine.ops.triton import sampling

    own, plain, found = Sampler(VOCAB, sampling), Sampler(VOCAB), []
    requests = [request(seed=i, token_ids=(1, 2, 1, 5), position=2, **kind) for i, kind in enumerate(kinds)]
    for step in range(count):
        logits = torch.randn(len(kinds), VOCAB, generator=torch.Generator().manual_seed(step)).mul(2).to(dtype)
        expected = plain(logits.clone(), plain.plan(requests)).read()
        on_device = device.to_device(logits)
        with torch.no_grad(), device.told() as told:
            sampled = own(on_device, own.plan(requests))
        found.append(Step(told, sampled.copied(device.to_cpu).read(), expected))
        for each, token in zip(requests, expected.token_ids, strict=True):
            each.token_ids.append(token)
    return found


def scored_prompt(k: int, dtype: torch.dtype) -> tuple[Told, list[TokenLogprobs], list[TokenLogprobs]]:
    """What happened on the device, and the scores of 70 positions there and on CPU."""
    logits = torch.randn(70, VOCAB, generator=torch.Generator().manual_seed(0)).mul(2).to(dtype)
    next_ids = torch.arange(70) * 2
    on_device = device.to_device(logits)
    with torch.no_grad(), device.told() as told:
        scores = score_prompt(on_device, next_ids, k)
    return told, scores.copied(device.to_cpu).read(), prompt_logprobs(logits, next_ids, k)


def unnoticed() -> list[str]:
    """Operations that wait for a GPU and are neither told of nor refused here."""
    tensor, found = device.to_device(torch.arange(4.0)), []
    operations = {
        "item": lambda: tensor.sum().item(),
        "bool": lambda: bool((tensor > 1).any()),
        "nonzero": lambda: tensor.nonzero(),
        "mask": lambda: tensor[tensor > 1],
        "masked write": lambda: tensor.index_put_((tensor > 1,), tensor[:2]),
        "list": lambda: tensor[[1, 2]],
        "numbers": lambda: torch.tensor([1, 2], device=tensor.device),
        "host index": lambda: tensor[torch.tensor([1, 2])],
        "to the host": lambda: tensor.cpu(),
        "to numpy": lambda: tensor.numpy(),
        "to a list": lambda: tensor.tolist(),
        "to the device": lambda: torch.ones(2).to(tensor.device),
    }
    for name, operation in operations.items():
        with torch.no_grad(), device.told() as told:
            try:
                operation()
            except (RuntimeError, TypeError, NotImplementedError):
                continue
        if not told.waits:
            found.append(name)
    return found
