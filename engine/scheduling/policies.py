"""In which order running requests get the tokens of a step.

Pure functions from the running requests, oldest first, to the order in which the scheduler serves them. Requests
without anything to compute are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.request import Request

Policy = Callable[[Sequence[Request]], list[Request]]

MAX_SKIPPED_STEPS = 3  # a decode that got nothing in so many steps goes before every prefill


def fifo(running: Sequence[Request]) -> list[Request]:
    """Decoding ones, then prefilling ones."""
    decoding, prefilling = _split(running)
    return decoding + prefilling


def prefill_first(running: Sequence[Request]) -> list[Request]:
    """Prefilling ones, then decoding ones; but a stream never stands still for more than `MAX_SKIPPED_STEPS`."""
    decoding, prefilling = _split(running)
    due = [request for request in decoding if request.skipped_steps >= MAX_SKIPPED_STEPS]
    return due + prefilling + [request for request in decoding if request.skipped_steps < MAX_SKIPPED_STEPS]


def _split(running: Sequence[Request]) -> tuple[list[Request], list[Request]]:
    """Requests with one token to compute, and those with more."""
    decoding: list[Request] = []
    prefilling: list[Request] = []
    for request in running:
        remaining = request.remaining
        if remaining == 1:
            decoding.append(request)
        elif remaining > 1:
            prefilling.append(request)
    return decoding, prefilling


POLICIES: dict[str, Policy] = {"fifo": fifo, "prefill_first": prefill_first}
