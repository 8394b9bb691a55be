"""Was the client the bottleneck? How late its event loop ran, how much processor it used, how late requests left.

A client that is short of processor time stamps tokens late and sends requests late, and the server gets the blame.
Used by `load.py`; what `Strain.warnings` says is in the report.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from types import TracebackType

import numpy as np

PERIOD_S = 0.01  # between two looks at the event loop
CPU_LIMIT = 0.8  # share of one core, which is all that an event loop can use
LAG_LIMIT_S = 0.03
LATE_LIMIT_S = 0.03


@dataclass(frozen=True)
class Strain:
    """How busy the client was during a run.

    Attributes:
        cpu_share: of one core.
        lag_p99_s: by how much the event loop ran late, at the 99th percentile.
        late_p99_s: how long after their planned arrival requests were started; None where none was planned.
    """

    cpu_share: float
    lag_p99_s: float
    late_p99_s: float | None

    def warnings(self) -> list[str]:
        """Why these figures may be the client's rather than the server's; empty when it had time to spare."""
        found = []
        if self.cpu_share >= CPU_LIMIT:
            found.append(f"the client used {self.cpu_share:.0%} of a core, and one core is all it can use")
        if self.lag_p99_s >= LAG_LIMIT_S:
            found.append(
                f"the client's event loop ran up to {1e3 * self.lag_p99_s:.0f} ms late (p99), so tokens seem later"
            )
        if self.late_p99_s is not None and self.late_p99_s >= LATE_LIMIT_S:
            found.append(f"requests were sent up to {1e3 * self.late_p99_s:.0f} ms later than planned (p99)")
        return found

    def figures(self) -> dict[str, float | None]:
        """For the result file."""
        return {
            "client_cpu_share": self.cpu_share,
            "client_loop_lag_p99_ms": 1e3 * self.lag_p99_s,
            "client_late_p99_ms": None if self.late_p99_s is None else 1e3 * self.late_p99_s,
        }


class ClientWatch:
    """Watches this process and its running event loop between entry and exit."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._late: list[float] = []

    async def __aenter__(self) -> ClientWatch:
        self._began, self._cpu = time.perf_counter(), time.process_time()
        self._sampling = asyncio.create_task(self._sample())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wall_s, self._cpu_s = time.perf_counter() - self._began, time.process_time() - self._cpu
        self._sampling.cancel()
        await asyncio.gather(self._sampling, return_exceptions=True)

    def late(self, seconds: float) -> None:
        """A request left so long after its time."""
        self._late.append(max(0.0, seconds))

    def strain(self, *, paced: bool) -> Strain:
        """After the exit.

        Args:
            paced: requests had a time to arrive at, other than all at once.
        """
        return Strain(
            self._cpu_s / self._wall_s if self._wall_s else 0.0,
            _p99(self._lags),
            _p99(self._late) if paced else None,
        )

    async def _sample(self) -> None:
        while True:
            due = time.perf_counter() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self._lags.append(max(0.0, time.perf_counter() - due))


def _p99(values: list[float]) -> float:
    return float(np.percentile(values, 99)) if values else 0.0
