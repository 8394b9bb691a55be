"""The device of the tests in this folder, and the mark `gpu`, by which they are skipped where there is none.

GPU_TESTS_ON=cpu in the environment runs them on CPU instead, to see that the tests themselves are sound: graphs and
async batching are off there, and Triton's kernels run where TRITON_INTERPRET=1 is set too.
"""

from __future__ import annotations

import os

import pytest
import torch

from engine.gpu_check.backends import Backend, backends

DEVICE = torch.device(os.environ.get("GPU_TESTS_ON", "cuda"))
IS_THERE = DEVICE.type != "cuda" or torch.cuda.is_available()

on_device = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

_KNOWN = ("flash-attn-3", "flash-attn", "torch", "triton", "cpu", "sdpa", "eager")


def backend(name: str) -> Backend:
    """The attention of this name; skips the test where the device does not have it."""
    found, missing = backends(DEVICE)
    for each in found:
        if each.name == name:
            return each
    pytest.skip(f"{name}: {missing.get(name, f'not for {DEVICE.type}')}")


@pytest.fixture(params=_KNOWN)
def attention(request: pytest.FixtureRequest) -> Backend:
    """Every attention of the device, one after another."""
    return backend(request.param)
