"""In which order running requests get the tokens of a step.

Pure functions from the running requests, those that decode and those with more than one token to compute, each oldest
first, to groups of either kind in the order in which the scheduler serves them.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.request import Request

Policy = Callable[[list[Request], list[Request]], list[list[Request]]]

MAX_SKIPPED_STEPS = 3  # a decode that got nothing in so many steps goes before every prefill


def fifo(decoding: list[Request], prefilling: list[Request]) -> list[list[Request]]:
    """Decoding ones, then prefilling ones."""
    return [decoding, prefilling]


def prefill_first(decoding: list[Request], prefilling: list[Request]) -> list[list[Request]]:
    """Prefilling ones, then decoding ones; but a stream never stands still for more than `MAX_SKIPPED_STEPS`."""
    if not prefilling:
        return [decoding]
    due = [request for request in decoding if request.skipped_steps >= MAX_SKIPPED_STEPS]
    return [due, prefilling, [request for request in decoding if request.skipped_steps < MAX_SKIPPED_STEPS]]


POLICIES: dict[str, Policy] = {"fifo": fifo, "prefill_first": prefill_first}
