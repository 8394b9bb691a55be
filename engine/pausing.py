"""Parking the engine thread between two steps for as long as anyone holds it: the state behind `pause()`.

Part of the loop and guarded by its lock. Knows threads and nothing of requests or the core.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class PauseGate:
    """Who holds the engine thread parked. Every method is called with the loop's lock held.

    Args:
        lock: the loop's.
        wake: makes the engine thread look here.

    Attributes:
        parked: no step runs, and none will while anyone is in.
    """

    def __init__(self, lock: threading.Lock, wake: Callable[[], None]) -> None:
        self._changed = threading.Condition(lock)
        self._wake = wake
        self._holders: list[int] = []
        self._told = False
        self._released = False
        self._forget = False
        self._closed = False
        self.parked = False

    @property
    def is_due(self) -> bool:
        """Whether the engine thread must take a turn because of what changed here."""
        return self._released or bool(self._holders) != self._told

    @property
    def is_held(self) -> bool:
        """True while a thread is in, or waits to be."""
        return bool(self._holders)

    def is_held_here(self) -> bool:
        """True when the calling thread is in."""
        return threading.get_ident() in self._holders

    def enter(self, keep_cache: bool) -> int:
        """Wait until the engine thread is parked, and hold it there.

        Returns:
            What `leave` wants.

        Raises:
            RuntimeError: the engine thread ended before it parked.
        """
        holder = threading.get_ident()
        self._holders.append(holder)
        self._wake()
        try:
            self._changed.wait_for(lambda: self.parked or self._closed)
            if not self.parked:
                raise RuntimeError("the engine thread ended before it could pause")
        except BaseException:  # an interrupted wait too
            self.leave(holder)
            raise
        self._forget |= not keep_cache
        return holder

    def leave(self, holder: int) -> None:
        """Let go. Once everyone has, the engine thread takes a turn before it parks again, whoever waits for that."""
        self._holders.remove(holder)
        if not self._holders:
            self.parked = False
            self._released = True
        self._wake()

    def tell(self) -> tuple[bool, bool]:
        """For the next turn: whether to park or stay parked, and whether one who was in may have changed weights.

        If not, whoever comes from now on waits until the engine thread parks again.
        """
        self._told = bool(self._holders) and not self._released
        self._released = False
        self.parked = self.parked and self._told
        forget, self._forget = self._forget, False
        return self._told, forget

    def park(self) -> None:
        """The engine thread stands between two steps."""
        self.parked = True
        self._changed.notify_all()

    def close(self) -> None:
        """The engine thread ends: whoever waits for it to park is told."""
        self._closed = True
        self.parked = False
        self._changed.notify_all()
