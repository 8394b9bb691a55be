"""`ScheduledBatch`: the only thing that crosses from the scheduler to the runner."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import Request


@dataclass(slots=True)
class ScheduledBatch:
    """The tokens of one step, one row a request.

    Row i covers tokens [starts[i], starts[i] + counts[i]) of requests[i]; their K/V goes to the blocks of
    block_tables[i], whose first ceil((starts[i] + counts[i]) / page_size) entries hold the row's whole context.

    Attributes:
        requests: scheduled requests, each once.
        starts: tokens of the request that are in the cache before this step.
        counts: tokens of the request in this step, at least 1.
        block_tables: the request's live block table (not a copy: it only grows while the request runs).
        sampled: rows whose last known token is in this step, ascending; each yields one token.
        outgrown: requests that are no row and have left the scheduler: they need more blocks than the cache has.
    """

    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    block_tables: list[list[int]] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    outgrown: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    def __bool__(self) -> bool:
        return bool(self.requests)
