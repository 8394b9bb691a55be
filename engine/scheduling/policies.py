"""In which order running requests get the tokens of a step.

Pure functions from the running requests, oldest first, to the order in which the scheduler serves them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.request import Request

Policy = Callable[[Sequence[Request]], list[Request]]


def fifo(running: Sequence[Request]) -> list[Request]:
    """Decoding ones, then prefilling ones. Fully scheduled ones, whose next token is not known yet, are left out."""
    decoding: list[Request] = []
    prefilling: list[Request] = []
    for request in running:
        remaining = request.remaining
        if remaining == 1:
            decoding.append(request)
        elif remaining > 1:
            prefilling.append(request)
    return decoding + prefilling


POLICIES: dict[str, Policy] = {"fifo": fifo}
