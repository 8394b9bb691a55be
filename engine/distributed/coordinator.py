"""How the engine threads of several processes take the same turns; alone, there is nothing to agree on.

Called by the loop once a turn, between steps, and by the manager where an engine is built. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from engine.deadlines import Expired
from engine.request import Request

if TYPE_CHECKING:
    from engine.settings import Settings

T = TypeVar("T")

Item = Request | str | Expired


@dataclass(slots=True)
class Turn:
    """What one turn of the loop starts from.

    Attributes:
        items: requests to add, ids to cancel and requests whose time is over, in order.
        stop: how the session shall end, as the loop counts it; 0 is not at all.
        pausing: someone waits for the loop to park, or holds it parked.
        forget: someone who held it may have written into the weights: what was computed before is worthless.
        checksum: of what the steps so far have sampled, 32 bits; processes that differ in it cannot go on together.
    """

    items: list[Item] = field(default_factory=list)
    stop: int = 0
    pausing: bool = False
    forget: bool = False
    checksum: int = 0


class Coordinator(Protocol):
    """Makes every process act on the same turns.

    Attributes:
        is_driver: this process takes requests.
        heartbeat_s: seconds after which an idle loop must agree on an empty turn; None: no need to.
    """

    is_driver: bool
    heartbeat_s: float | None

    def check(self, request: Request) -> None:
        """Raise ValueError when the other processes cannot be told of this request."""
        ...

    def agree(self, turn: Turn) -> Turn:
        """The turn that all processes take: the driver's items, and the greatest of what any of them says elsewhere.

        Raises:
            RuntimeError: another process is gone, too late, or has sampled something else.
        """
        ...

    def together(self, make: Callable[[], T]) -> T:
        """What `make` returns, once it has returned on every process.

        Raises:
            Exception: what `make` raised here; a RuntimeError that names its cause if it raised elsewhere only.
        """
        ...

    def agree_settings(self, resolve: Callable[[], Settings]) -> Settings:
        """The settings that all processes can run with: the driver's, sized for the one with the least memory.

        Raises:
            Exception: as `together`, for what `resolve` raises.
        """
        ...

    def leave(self, error: BaseException) -> None:
        """Tell the others that this process takes no more turns, because of `error`."""
        ...

    def close(self) -> None:
        """Give back what `agree` needs, when no session will follow."""
        ...


class Alone:
    """One process."""

    is_driver: bool = True
    heartbeat_s: float | None = None

    def check(self, request: Request) -> None:
        pass

    def agree(self, turn: Turn) -> Turn:
        return turn

    def together(self, make: Callable[[], T]) -> T:
        return make()

    def agree_settings(self, resolve: Callable[[], Settings]) -> Settings:
        return resolve()

    def leave(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        pass
