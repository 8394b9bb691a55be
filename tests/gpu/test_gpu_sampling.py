"""Sampling on a CUDA device: the choices of engine/sampling on CPU, without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from engine.ops.triton import probe
from engine.sampling.sampler import Sampler
from tests.engine import triton_sampling
from tests.engine.device_sampling import DRAW, EDITS, EVERY, KINDS, LOGPROBS, VOCAB
from tests.engine.test_sampling import request
from tests.gpu.device import DEVICE, IS_THERE, on_device

_WHY = probe(DEVICE) if IS_THERE else None
pytestmark = [*on_device, pytest.mark.skipif(_WHY is not None, reason=str(_WHY))]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGE = 151936 if DEVICE.type == "cuda" else 9001
STEPS: dict[str, list[dict[str, Any]]] = {
    **KINDS,
    **{name: [kind | edit for kind in EVERY] for name, edit in EDITS.items()},
    "log-probabilities": [kind | LOGPROBS for kind in EVERY],
    "raw log-probabilities": [kind | LOGPROBS | {"raw_logprobs": True} for kind in EVERY],
    "everything": [
        *(kind | edit for kind, edit in zip(EVERY * 2, EDITS.values(), strict=False)),
        *(kind | LOGPROBS | EDITS["biases"] | {"raw_logprobs": True} for kind in EVERY),
        DRAW | LOGPROBS,
        {},
    ],
}


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    if DEVICE.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 37, 4097, LARGE])
def test_the_most_likely_token(vocab: int, dtype: torch.dtype) -> None:
    assert triton_sampling.best_differences(vocab, dtype, DEVICE) == []


@pytest.mark.parametrize(
    ("vocab", "top_k", "top_p", "min_p"),
    [(500, 40, 0.9, 0.0), (61, 61, 0.5, 0.1), (500, None, 0.8, 0.0), (LARGE, 50, 0.95, 0.0), (LARGE, None, 0.9, 0.0)],
)
def test_choices_of_the_most_likely(vocab: int, top_k: int | None, top_p: float, min_p: float) -> None:
    if DEVICE.type == "cpu" and vocab > 1000:
        pytest.skip("the interpreter takes minutes")
    check(triton_sampling.compare(vocab, top_k, top_p, min_p, device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "min_p"), [(500, 0.0), (4100, 0.2), (LARGE, 0.0), (LARGE, 0.01)])
def test_draws_in_the_order_of_ids(vocab: int, min_p: float, dtype: torch.dtype) -> None:
    check(triton_sampling.compare_in_vocabulary_order(vocab, min_p, rows=9, dtype=dtype, device=DEVICE))


def test_a_row_draws_the_same_alone_and_beside_others() -> None:
    assert triton_sampling.drawn_alone_and_together(LARGE, DEVICE)


@pytest.mark.parametrize("vocab", [64, LARGE])
def test_bad_rows_draw_a_token_that_there_is(vocab: int) -> None:
    assert all(0 <= token < vocab for token in triton_sampling.tokens_of_bad_rows(vocab, DEVICE))


@pytest.mark.parametrize("name", STEPS)
def test_steps_do_not_wait(name: str) -> None:
    from engine.ops.triton import sampling

    own, plain = Sampler(VOCAB, sampling), Sampler(VOCAB)
    requests = [request(seed=i, token_ids=(1, 2, 1, 5), position=2, **kind) for i, kind in enumerate(STEPS[name])]
    for step in range(3):
        logits = torch.randn(len(requests), VOCAB, generator=torch.Generator().manual_seed(step)) * 2
        expected = plain(logits.clone(), plain.plan(requests)).read()
        on_device = logits.to(DEVICE)
        own(on_device.clone(), own.plan(requests))  # what is new is compiled, which may wait
        with torch.inference_mode(), waiting_is_an_error():
            sampled = own(on_device, own.plan(requests))
        output = sampled.read()
        assert output.token_ids == expected.token_ids and output.errors == expected.errors
        if expected.logprobs is not None:
            assert output.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        for each, token in zip(requests, expected.token_ids, strict=True):
            each.token_ids.append(token)


def check(found: triton_sampling.Compared) -> None:
    assert found.own == found.expected and found.kept == found.expected_kept
    assert found.difference < 1e-5
