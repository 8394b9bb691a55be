"""How the engine threads of several processes take the same turns; alone, there is nothing to agree on.

Called by the loop once a turn, between steps. Loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from engine.request import Request


@dataclass(slots=True)
class Turn:
    """What one turn of the loop starts from.

    Attributes:
        items: requests to add and ids to cancel, in order.
        stop: how the session shall end, as the loop counts it; 0 is not at all.
        pausing: someone waits for the loop to park, or holds it parked.
        forget: someone who held it may have written into the weights: what was computed before is worthless.
    """

    items: list[Request | str] = field(default_factory=list)
    stop: int = 0
    pausing: bool = False
    forget: bool = False


class Coordinator(Protocol):
    """Makes every process act on the same turns.

    Attributes:
        is_driver: this process takes requests.
        heartbeat_s: seconds after which an idle loop must agree on an empty turn; None: no need to.
    """

    is_driver: bool
    heartbeat_s: float | None

    def agree(self, turn: Turn) -> Turn:
        """The turn that all processes take: the driver's items, and the greatest of what any of them says elsewhere.

        Raises:
            RuntimeError: another process is gone or too late.
        """
        ...


class Alone:
    """One process."""

    is_driver: bool = True
    heartbeat_s: float | None = None

    def agree(self, turn: Turn) -> Turn:
        return turn
