"""Turns a `ScheduledBatch` into the arrays of one forward pass.

Called by the model runner once a step. Reads requests and block tables and changes neither; everything stays on the
host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.execution.row_order import neighbours
from engine.ops.interface import PackedRows
from engine.request import Request
from engine.scheduling.batch import ScheduledBatch


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Prompt positions of one row whose logits are kept, for log-probabilities of the tokens that follow them.

    Attributes:
        row: of the batch.
        first: where its logits begin among all that are kept; `count` of them.
        next_ids: the token after each position.
        k: most likely tokens to list with each.
    """

    row: int
    first: int
    next_ids: list[int]
    k: int


@dataclass(frozen=True, slots=True)
class Carried:
    """Tokens that the step before this one is still sampling.

    Attributes:
        at: int64 [n], where they belong in `input_ids`.
        source: int64 [n], which sampled row of the step before each is.
    """

    at: np.ndarray
    source: np.ndarray


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step, packed into a single sequence.

    Attributes:
        input_ids: int64 [tokens]; 0 where a token is carried.
        position_ids: int64 [tokens], position of each token in its own request.
        keep: int64 [kept], tokens whose logits are wanted: first the last one of each sampled row, in the order of
            `batch.sampled`, then those of `prompts`.
        rows: the same rows for the ops.
        prompts: rows that keep logits at prompt positions.
        carried: None when every token is known.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    keep: np.ndarray
    rows: PackedRows
    prompts: list[PromptPart]
    carried: Carried | None

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


class InputPacker:
    """Packs steps one after another, and keeps what a step has in common with the one before."""

    def __init__(self) -> None:
        self._decodes: _DecodeOrder | None = None

    def pack(self, batch: ScheduledBatch, previous: Sequence[Request] = (), *, cached: bool = True) -> InputBatch:
        """Packs the rows: those of one token first, in the order of `neighbours`, then the others as scheduled.

        Rows that all went one token further since the last call keep their order.

        Args:
            previous: requests that the step before this one is sampling, in its order.
            cached: False leaves the cache alone: every row must start at 0.

        Returns:
            Arrays that may be shared with the next call's: they are to be read only.

        Raises:
            RuntimeError: a token is not known and nobody is sampling it.
        """
        if cached and len(batch.sampled) == len(batch.requests) == batch.num_tokens:
            return self._pack_decodes(batch, previous)
        return _pack(batch, previous, cached)

    def _pack_decodes(self, batch: ScheduledBatch, previous: Sequence[Request]) -> InputBatch:
        """`_pack` for rows of one token that are all sampled: so no prompt of theirs is left to be scored."""
        starts, decodes = np.array(batch.starts, dtype=np.int64), self._decodes
        if decodes is None or not decodes.goes_on(batch.table_of, starts):
            self._decodes = decodes = _DecodeOrder.of(batch, starts)
        decodes.starts = starts
        token_ids, unknown = _next_ids(batch.requests, batch.starts)
        positions = starts[decodes.order]
        return InputBatch(
            input_ids=np.array(token_ids, dtype=np.int64)[decodes.order],
            position_ids=positions,
            keep=decodes.places,
            rows=PackedRows(
                starts=positions,
                counts=decodes.counts,
                offsets=decodes.offsets,
                block_tables=batch.block_tables,
                table_of=decodes.table_of,
                num_single=len(starts),
            ),
            prompts=[],
            carried=_carried(decodes.places[unknown], [batch.requests[row] for row in unknown], previous),
        )


@dataclass(slots=True)
class _DecodeOrder:
    """How a step of one-token rows is packed, which holds for as long as the same rows go on.

    Attributes:
        lines: of the block tables, of each row of the batch.
        starts: int64 [rows], of each row of the batch in the last step.
        order: int64 [rows], the row of the batch at each place.
        places: int64 [rows], the place of each row of the batch.
        table_of, counts, offsets: as in `PackedRows`.
    """

    lines: list[int]
    starts: np.ndarray
    order: np.ndarray
    places: np.ndarray
    table_of: np.ndarray
    counts: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, batch: ScheduledBatch, starts: np.ndarray) -> _DecodeOrder:
        """For the rows of a batch."""
        lines, offsets = np.array(batch.table_of, dtype=np.int64), np.arange(len(starts))
        order = neighbours(batch.block_tables[0], lines, starts)
        places = np.empty_like(order)
        places[order] = offsets
        return cls(batch.table_of, starts, order, places, lines[order], np.ones_like(starts), offsets)

    def goes_on(self, lines: list[int], starts: np.ndarray) -> bool:
        """Whether these are the same rows, one token further.

        Or others that took over their lines just there: they are packed right, and perhaps not next to their like.
        """
        return lines == self.lines and np.array_equal(starts, self.starts + 1)


def _pack(batch: ScheduledBatch, previous: Sequence[Request], cached: bool) -> InputBatch:
    """See `InputPacker.pack`."""
    counts = np.array(batch.counts, dtype=np.int64)
    starts = np.array(batch.starts, dtype=np.int64)
    single = counts == 1 if cached else np.zeros(len(counts), dtype=bool)
    num_single = int(single.sum())
    table_of = np.array(batch.table_of, dtype=np.int64)
    order = np.argsort(~single, kind="stable")
    if num_single > 1:
        first = order[:num_single]
        order[:num_single] = first[neighbours(batch.block_tables[0], table_of[first], starts[first])]
    counts, starts, table_of = counts[order], starts[order], table_of[order]
    offsets = np.cumsum(counts) - counts
    requests = [batch.requests[row] for row in order.tolist()]
    token_ids, unknown = _token_ids(requests, starts.tolist(), counts.tolist())
    lasts = np.empty_like(offsets)
    lasts[order] = offsets + counts - 1
    keep = lasts[np.array(batch.sampled, dtype=np.int64)]
    prompts, prompt_keep = _prompt_parts(batch, lasts, len(keep))
    rows = PackedRows(
        starts=starts,
        counts=counts,
        offsets=offsets,
        block_tables=batch.block_tables if cached else None,
        table_of=table_of,
        num_single=num_single,
    )
    lasts = offsets + counts - 1
    return InputBatch(
        input_ids=np.array(token_ids, dtype=np.int64),
        position_ids=np.arange(len(token_ids)) + np.repeat(starts - offsets, counts),
        keep=np.concatenate([keep, *prompt_keep]) if prompts else keep,
        rows=rows,
        prompts=prompts,
        carried=_carried(lasts[unknown], [requests[row] for row in unknown], previous),
    )


def pad(inputs: InputBatch, num_tokens: int, trash_block: int, page_size: int) -> InputBatch:
    """The batch with a last row of its own so that it has `num_tokens` tokens; its K/V goes to the trash block.

    All its positions are 0: there may be more of them than a request may have.
    """
    missing = num_tokens - inputs.num_tokens
    if not missing:
        return inputs
    rows = inputs.rows
    tables, table_of = rows.block_tables, np.append(rows.table_of, 0)
    if tables is not None:
        tables = [_with_trash(group[rows.table_of], -(-missing // page_size), trash_block) for group in tables]
        table_of = np.arange(len(table_of))
    return replace(
        inputs,
        input_ids=np.concatenate([inputs.input_ids, np.zeros(missing, dtype=np.int64)]),
        position_ids=np.concatenate([inputs.position_ids, np.zeros(missing, dtype=np.int64)]),
        rows=PackedRows(
            starts=np.append(rows.starts, 0),
            counts=np.append(rows.counts, missing),
            offsets=np.append(rows.offsets, inputs.num_tokens),
            block_tables=tables,
            table_of=table_of,
            num_single=rows.num_single,
        ),
    )


def _next_ids(requests: list[Request], starts: list[int]) -> tuple[list[int], list[int]]:
    """The one token of each row, 0 where it is not known yet, and the rows where it is not; raises RuntimeError."""
    try:
        return [request.token_ids[start] for request, start in zip(requests, starts, strict=True)], []
    except IndexError:
        return _token_ids(requests, starts, [1] * len(starts))


def _token_ids(requests: list[Request], starts: list[int], counts: list[int]) -> tuple[list[int], list[int]]:
    """The tokens of rows one after another, 0 where one is not known yet, and the rows whose last one is not.

    Raises:
        RuntimeError: more than the last token of a row is not known.
    """
    token_ids: list[int] = []
    unknown: list[int] = []
    for row, (request, start, count) in enumerate(zip(requests, starts, counts, strict=True)):
        missing = start + count - len(request.token_ids)
        token_ids += request.token_ids[start : start + count]
        if missing > 0:
            if missing > 1:
                raise RuntimeError(f"request {request.request_id!r} is scheduled beyond its tokens")
            unknown.append(row)
            token_ids.append(0)
    return token_ids, unknown


def _prompt_parts(batch: ScheduledBatch, lasts: np.ndarray, kept: int) -> tuple[list[PromptPart], list[np.ndarray]]:
    """Rows whose prompt is to be scored, and where in the packed order the logits for it are."""
    parts: list[PromptPart] = []
    keep: list[np.ndarray] = []
    asking = [row for row, request in enumerate(batch.requests) if request.params.prompt_logprobs is not None]
    for row in asking:
        request = batch.requests[row]
        if not request.needs_prompt_logprobs:
            continue
        start = batch.starts[row]
        next_ids = request.prompt_ids[start + 1 : start + 1 + batch.counts[row]]
        if next_ids:
            parts.append(PromptPart(row, kept, next_ids, request.params.prompt_logprobs or 0))
            keep.append(lasts[row] + 1 - batch.counts[row] + np.arange(len(next_ids)))
            kept += len(next_ids)
    return parts, keep


def _carried(at: np.ndarray, requests: list[Request], previous: Sequence[Request]) -> Carried | None:
    """The tokens of these requests, which belong to places `at`; None when there are none."""
    if not requests:
        return None
    if requests == previous:
        return Carried(at, np.arange(len(at)))
    places = {id(request): i for i, request in enumerate(previous)}
    for request in requests:
        if id(request) not in places:
            raise RuntimeError(f"a token of request {request.request_id!r} is not known and no step is sampling it")
    return Carried(at, np.array([places[id(request)] for request in requests]))


def _with_trash(table: np.ndarray, num_blocks: int, trash_block: int) -> np.ndarray:
    """int32 [rows, width] and below it a line that is `num_blocks` times the trash block."""
    lines, width = table.shape
    longer = np.zeros((lines + 1, max(width, num_blocks)), dtype=np.int32)
    longer[:-1, :width] = table
    longer[-1, :num_blocks] = trash_block
    return longer
