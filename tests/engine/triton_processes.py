"""Child processes in which Triton's kernels are interpreted on CPU, or compiled for a GPU that is not there.

Triton reads its mode from the environment when it is imported, so neither can be had in the tests' own process. The
fixtures of conftest.py hand out `run(function, *arguments)`: functions and what they return travel by pickle.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.conftest import wait_limit

Run = Callable[..., Any]


@contextmanager
def child(environment: dict[str, str]) -> Iterator[Run]:
    """A process of its own that has these variables before it imports anything."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_start, initargs=(environment,)) as pool:

        def run(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            return pool.submit(function, *arguments, **named).result(wait_limit(240))

        yield run


def _start(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
