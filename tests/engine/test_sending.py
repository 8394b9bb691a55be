"""What a step sends to the device: arrays of any kind in one copy, whose memory may serve the next step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampler
from engine.sampling.sending import send

CPU = torch.device("cpu")
ARRAYS: list[npt.NDArray[Any]] = [
    np.array([3, -1, 2**62], np.int64),
    np.array([0.5], np.float32),
    np.array([], np.float64),
    np.array([1e300, -0.0, np.inf], np.float64),
    np.array([7, 8, 9], np.int32),
    np.array([], np.int64),
]


class OneMemory:
    """A copy to the device that uses the same memory each time."""

    def __init__(self) -> None:
        self.memory = torch.zeros(10_000, dtype=torch.int64)
        self.sizes: list[int] = []

    def __call__(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        self.sizes.append(len(array))
        self.memory.fill_(-1)
        self.memory[: len(array)] = torch.from_numpy(array)
        return self.memory[: len(array)]


def test_arrays_of_all_kinds_in_one_copy() -> None:
    copy = OneMemory()
    sent = send(ARRAYS, CPU, copy)
    assert copy.sizes == [3 + 1 + 3 + 2]
    for tensor, array in zip(sent, ARRAYS, strict=True):
        assert tensor.dtype == torch.from_numpy(array).dtype and tensor.numpy().tobytes() == array.tobytes()


def test_nothing_is_not_sent() -> None:
    copy = OneMemory()
    empty = [array for array in ARRAYS if not len(array)]
    assert [(len(tensor), tensor.dtype) for tensor in send(empty, CPU, copy)] == [(0, torch.float64), (0, torch.int64)]
    assert send([], CPU, copy) == [] and copy.sizes == []


def test_on_cpu_nothing_is_copied() -> None:
    array = np.zeros(3)
    (tensor,) = send([array], CPU)
    array[1] = 5
    assert tensor.tolist() == [0, 5, 0]


def test_steps_whose_numbers_come_through_the_same_memory() -> None:
    """What stays on the device from step to step must not lie there."""
    kinds: list[dict[str, Any]] = [
        {},
        {"do_sample": True, "top_k": 5, "logprobs": True, "top_logprobs": 2},
        {"do_sample": True, "top_p": 0.5, "repetition_penalty": 1.3},
        {"do_sample": True, "min_p": 0.1, "logit_bias": ((3, 5.0),)},
        {"do_sample": True, "temperature": 3.0, "allowed_token_ids": tuple(range(30))},
    ]
    requests = [
        Request(str(i), [1, 2, 3], 1, SamplingParams(max_new_tokens=99, seed=i, **kind)) for i, kind in enumerate(kinds)
    ]
    copy = OneMemory()
    own, plain = Sampler(50, to_device=copy), Sampler(50)
    for step in range(4):
        logits = torch.randn(len(kinds), 50, generator=torch.Generator().manual_seed(step)) * 2
        output = own(logits.clone(), own.plan(requests)).read()
        assert output == plain(logits.clone(), plain.plan(requests)).read()
        assert len(copy.sizes) == step + 1
        for request, token in zip(requests, output.token_ids, strict=True):
            request.token_ids.append(token)
