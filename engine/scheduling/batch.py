"""`ScheduledBatch`: the only thing that crosses from the scheduler to the runner."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.cache.block_tables import Blocks
from engine.cache.host_tier import BlockCopies
from engine.request import Request


@dataclass(slots=True)
class ScheduledBatch:
    """The tokens of one step, one row a request.

    Row i covers tokens [starts[i], starts[i] + counts[i]) of requests[i]; their K/V goes to the blocks of its block
    table, line table_of[i] of each group's array, whose first ceil((starts[i] + counts[i]) / page_size) entries hold
    the row's whole context (in groups with a window: what the row still sees of it, behind that the null block).

    Attributes:
        requests: scheduled requests, each once.
        starts: tokens of the request that are in the cache before this step.
        counts: tokens of the request in this step, at least 1.
        table_of: each row's line of the block tables.
        block_tables: int32 [lines, width], one a layer group: no copies, valid until the next schedule.
        sampled: rows whose last known token is in this step, ascending; each yields one token.
        hashed: blocks that became findable by this step, and must not be if it fails.
        copies: between device and host, to run before the step.
        outgrown: requests that are no row and have left the scheduler: they need more blocks than the cache has.
    """

    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    table_of: list[int] = field(default_factory=list)
    block_tables: list[Blocks] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    hashed: list[int] = field(default_factory=list)
    copies: BlockCopies | None = None
    outgrown: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def sampled_requests(self) -> list[Request]:
        """Those that get a token, in the order of `sampled`; perhaps `requests` itself."""
        if len(self.sampled) == len(self.requests):
            return self.requests
        return [self.requests[row] for row in self.sampled]

    def __bool__(self) -> bool:
        return bool(self.requests)
