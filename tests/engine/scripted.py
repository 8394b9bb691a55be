"""A runner without a model: it "writes" to every slot which token prefix belongs there, and "attends" by checking
that each slot that a row sees holds exactly its own prefix, in every layer group and whatever was copied to the host
and back. Stale, unwritten or foreign pages cannot pass.

Used by the cache and scheduler tests. The next token is a function of the token list, as with a real greedy model.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from engine.cache.block_pool import NULL_BLOCK
from engine.cache.groups import LayerGroup
from engine.cache.host_tier import BlockCopies
from engine.cache.kv_cache import KVCache
from engine.request import FinishReason, Request
from engine.sampling.params import SamplingParams
from engine.scheduling.batch import ScheduledBatch
from engine.scheduling.scheduler import Scheduler
from tests.engine.tables import tables_of

VOCAB = 3
GARBAGE = (-1, -1)
FULL = (LayerGroup((0,)),)

Page = dict[int, tuple[tuple[int, int], Request]]  # slot -> (layer group and prefix written there, who wrote it)


def next_token(token_ids: Sequence[int]) -> int:
    return zlib.crc32(bytes(token_ids)) % VOCAB


def reference(prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """What a request generates when nothing disturbs it."""
    token_ids = list(prompt)
    for _ in range(max_new_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


class Requests:
    """Makes requests with ascending arrival."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(
        self, prompt: Sequence[int], max_new_tokens: int = 4, *, output: Sequence[int] = (), priority: int = 0,
        salt: bytes = b"", request_id: str | None = None,
    ) -> Request:  # fmt: skip
        self.made += 1
        return Request(
            request_id=request_id or f"r{self.made}",
            token_ids=[*prompt, *output],
            num_prompt_tokens=len(prompt),
            params=SamplingParams(max_new_tokens=max_new_tokens),
            arrival=self.made,
            priority=priority,
            salt=salt,
        )


class Pages:
    """The K/V memory, on the device and on the host."""

    def __init__(self, page_size: int, groups: Sequence[LayerGroup] = FULL) -> None:
        self.page_size = page_size
        self.windows = [group.window for group in groups]
        self.device: dict[int, Page] = {}
        self.host: dict[int, Page] = {}
        self.sampled: dict[Request, list[int]] = {}  # tokens that only the device knows so far
        self._prefixes: dict[tuple[object, int], int] = {}
        self._paths: dict[Request, list[int]] = {}

    def path(self, request: Request) -> list[int]:
        """For each position a number that stands for the salt and all tokens up to there."""
        path = self._paths.setdefault(request, [])
        for token in self.token_ids(request)[len(path) :]:
            parent: object = path[-1] if path else request.salt
            path.append(self._prefixes.setdefault((parent, token), len(self._prefixes)))
        return path

    def token_ids(self, request: Request) -> list[int]:
        """All tokens, those included whose ids the host does not know yet."""
        return request.token_ids + self.sampled.get(request, [])

    def write(
        self, request: Request, tables: Sequence[Sequence[int]], start: int, end: int, garbage: bool = False
    ) -> None:
        path = self.path(request)
        for group, table in enumerate(tables):
            for position in range(start, end):
                block, slot = table[position // self.page_size], position % self.page_size
                assert block != NULL_BLOCK, f"{request.request_id} writes position {position} to the null block"
                content = GARBAGE if garbage else (group, path[position])
                self.device.setdefault(block, {})[slot] = content, request

    def attend(self, request: Request, tables: Sequence[Sequence[int]], start: int, end: int) -> None:
        """Reads all that the queries at [start, end) see: in a group with a window not what lies behind it."""
        path = self.path(request)
        for group, (table, window) in enumerate(zip(tables, self.windows, strict=True)):
            for position in range(0 if window is None else max(0, start - window + 1), end):
                block, slot = table[position // self.page_size], position % self.page_size
                found, writer = self.device.get(block, {}).get(slot, (None, None))
                assert found == (group, path[position]), (
                    f"{request.request_id} at position {position} of group {group} reads slot {slot} of block {block}: "
                    f"{found} by {writer and writer.request_id} instead of {path[position]}"
                )

    def copy(self, copies: BlockCopies | None, garbage: bool = False) -> None:
        """Between device and host, in the order that is promised. With garbage nonsense arrives."""
        if copies is None:
            return
        for block, slot in copies.to_host:
            self.host[slot] = _spoilt(self.device.get(block, {}), garbage)
        for slot, block in copies.from_host:
            self.device[block] = _spoilt(self.host.get(slot, {}), garbage)

    def run(self, batch: ScheduledBatch, garbage: bool = False) -> None:
        """Copies, then all rows write, then all rows attend. With garbage nonsense is written and nobody attends."""
        self.copy(batch.copies, garbage)
        tables = [tables_of(batch, row) for row in range(len(batch.requests))]
        rows = list(zip(batch.requests, tables, batch.starts, batch.counts, strict=True))
        for request, tables, start, count in rows:
            self.write(request, tables, start, start + count, garbage)
        if not garbage:
            for request, tables, start, count in rows:
                self.attend(request, tables, start, start + count)

    def spoil_all(self) -> None:
        for page in [*self.device.values(), *self.host.values()]:
            page.update(_spoilt(page, True))

    def spoil(self, writer: Request, in_use: set[int]) -> None:
        """Turns to garbage all that a request has written, but for device blocks that another request uses."""
        for page in [page for block, page in self.device.items() if block not in in_use] + [*self.host.values()]:
            page.update({slot: (GARBAGE, who) for slot, (_, who) in page.items() if who is writer})


def _spoilt(page: Page, garbage: bool) -> Page:
    """A copy of a page, or what is left of it in a crash."""
    return {slot: (GARBAGE if garbage else content, who) for slot, (content, who) in page.items()}


class Engine:
    """Scheduler, cache and scripted pages in one loop, as the core runs them."""

    def __init__(
        self, num_blocks: int, page_size: int, *, budget: int = 512, max_requests: int = 8, margin: float = 0.0,
        sharing: bool = True, policy: str = "fifo", overlap: bool = False, groups: Sequence[LayerGroup] = FULL,
        host_slots: int = 0,
    ) -> None:  # fmt: skip
        self.cache = KVCache(
            num_blocks, page_size, groups, sharing, max_step_tokens=budget, host_slots=host_slots if sharing else 0
        )
        self.scheduler = Scheduler(
            self.cache, max_batch_tokens=budget, max_requests=max_requests, safety_margin=margin, policy=policy
        )
        self.pages = Pages(page_size, groups)
        self.new = Requests()
        self.overlap = overlap
        self.flights: list[ScheduledBatch] = []  # launched, results not taken
        self.steps = 0

    def add(self, prompt: Sequence[int], max_new_tokens: int = 4, **more: object) -> Request:
        request = self.new(prompt, max_new_tokens, **more)  # type: ignore[arg-type]
        self.scheduler.add(request)
        return request

    def schedule(self) -> ScheduledBatch:
        """A batch that keeps its block tables, so that it can be looked at, or run, later."""
        batch = self.scheduler.schedule()
        batch.block_tables = [array.copy() for array in batch.block_tables]
        return batch

    def step(self) -> ScheduledBatch:
        batch = self.schedule()
        self.complete(batch)
        return batch

    def complete(self, batch: ScheduledBatch) -> None:
        """What the core does with a batch that runs."""
        self.steps += 1
        self.end_outgrown(batch)
        self.pages.run(batch)
        for row in batch.sampled:
            request = batch.requests[row]
            self.pages.sampled.setdefault(request, []).append(next_token(self.pages.token_ids(request)))
        self.land(0)
        if batch:
            self.flights.append(batch)
        self.land(1 if self.overlap and not self.scheduler.has_suspects else 0)
        self.cache.check_integrity(self.scheduler.live())

    def land(self, keep: int) -> None:
        """Takes results, oldest first, until `keep` launched batches are left."""
        while len(self.flights) > keep:
            batch = self.flights.pop(0)
            for row in batch.sampled:
                request = batch.requests[row]
                token = self.pages.sampled[request].pop(0)
                if not self.scheduler.is_live(request) or not request.unknown:
                    continue
                self.scheduler.clear(request)
                request.token_ids.append(token)
                request.unknown -= 1
                if request.num_output_tokens >= request.params.max_new_tokens:
                    request.finish_reason = FinishReason.LENGTH
                    self.scheduler.finish(request)

    def crash(self, batch: ScheduledBatch) -> list[Request]:
        """What the core does with a batch that raises; the requests that are to blame."""
        self.end_outgrown(batch)
        self.pages.run(batch, garbage=True)
        was_suspect = bool(batch) and self.scheduler.is_suspect(batch.requests[0])
        for failed in [*self.flights, batch]:
            self.scheduler.on_step_failed(failed)
        self.flights.clear()
        self.pages.sampled.clear()
        if was_suspect:
            (request,) = batch.requests
            self.fail(request)
            return [request]
        self.cache.check_integrity(self.scheduler.live())
        return []

    def fail(self, request: Request) -> None:
        """Ends a request whose pages are rotten."""
        self.scheduler.fail(request)
        self.pages.spoil(request, self.blocks_in_use())
        request.finish_reason = FinishReason.ERROR
        self.cache.check_integrity(self.scheduler.live())

    def rot(self, request: Request) -> list[Request]:
        """Its scores turn out to be unusable, and so do those of all that share a block with it; who these are."""
        rotten = set(self.tables_of(request))
        sharing = [
            other
            for other in self.scheduler.live()
            if self.cache.holds(other) and rotten.intersection(self.tables_of(other))
        ]
        for other in sharing:
            self.scheduler.mistrust(other)
        for block in rotten:
            page = self.pages.device.get(block, {})
            page.update(_spoilt(page, True))
        self.land(0)
        self.cache.check_integrity(self.scheduler.live())
        return sharing

    def tables_of(self, request: Request) -> list[int]:
        """All blocks that it holds."""
        return [block for table in self.cache.tables(request) for block in table if block]

    def end_outgrown(self, batch: ScheduledBatch) -> None:
        for request in batch.outgrown:
            request.finish_reason = FinishReason.LENGTH

    def blocks_in_use(self) -> set[int]:
        running = [request for request in self.scheduler.live() if self.cache.holds(request)]
        return {block for request in running for table in self.cache.tables(request) for block in table}

    def drain(self, each: Callable[[ScheduledBatch], None] | None = None) -> None:
        """Steps until nothing is left; every step must bring something on."""
        while self.scheduler.has_work or self.flights:
            flying = len(self.flights)
            batch = self.step()
            assert batch or batch.outgrown or flying, "there is work, but nothing was scheduled"
            if each is not None:
                each(batch)
        self.cache.check_integrity([])
        assert self.cache.num_free_blocks == self.cache.num_blocks
