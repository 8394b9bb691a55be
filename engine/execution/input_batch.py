"""Turns a `ScheduledBatch` into the arrays of one forward pass.

Called by the model runner once a step. Reads requests and block tables, changes nothing; everything stays on the host.
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


def make_input_batch(batch: ScheduledBatch, previous: Sequence[Request] = (), *, cached: bool = True) -> InputBatch:
    """Packs the rows: those of one token first, in the order of `neighbours`, then the others as scheduled.

    Args:
        previous: requests that the step before this one is sampling, in its order.
        cached: False leaves the cache alone: every row must start at 0.

    Raises:
        RuntimeError: a token is not known and nobody is sampling it.
    """
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
    token_ids, unknown = _token_ids(requests, starts.tolist(), counts.tolist(), num_single)
    positions = starts
    if num_single < len(requests):
        positions = np.arange(len(token_ids)) + np.repeat(starts - offsets, counts)
    lasts = np.empty_like(offsets)
    lasts[order] = offsets + counts - 1
    keep = lasts if len(batch.sampled) == len(lasts) else lasts[np.array(batch.sampled, dtype=np.int64)]
    prompts, prompt_keep = _prompt_parts(batch, lasts, len(keep))
    rows = PackedRows(
        starts=starts,
        counts=counts,
        offsets=offsets,
        block_tables=batch.block_tables if cached else None,
        table_of=table_of,
        num_single=num_single,
    )
    return InputBatch(
        input_ids=np.array(token_ids, dtype=np.int64),
        position_ids=positions,
        keep=np.concatenate([keep, *prompt_keep]) if prompts else keep,
        rows=rows,
        prompts=prompts,
        carried=_carried(unknown, previous) if unknown else None,
    )


def pad(inputs: InputBatch, num_tokens: int, trash_block: int, page_size: int) -> InputBatch:
    """The batch with a last row of its own so that it has `num_tokens` tokens; its K/V goes to the trash block."""
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
        position_ids=np.concatenate([inputs.position_ids, np.arange(missing)]),
        rows=PackedRows(
            starts=np.append(rows.starts, 0),
            counts=np.append(rows.counts, missing),
            offsets=np.append(rows.offsets, inputs.num_tokens),
            block_tables=tables,
            table_of=table_of,
            num_single=rows.num_single,
        ),
    )


def _token_ids(
    requests: list[Request], starts: list[int], counts: list[int], num_single: int
) -> tuple[list[int], list[tuple[int, Request]]]:
    """The tokens of rows in packed order, 0 where one is not known yet, and where these are; raises RuntimeError."""
    try:
        token_ids = [request.token_ids[start] for request, start in zip(requests[:num_single], starts, strict=False)]
    except IndexError:  # some are not known
        token_ids = []
    unknown: list[tuple[int, Request]] = []
    for row in range(len(token_ids), len(requests)):
        request, start = requests[row], starts[row]
        known = request.token_ids[start : start + counts[row]]
        token_ids += known
        if len(known) < counts[row]:
            if len(known) < counts[row] - 1:
                raise RuntimeError(f"request {request.request_id!r} is scheduled beyond its tokens")
            unknown.append((len(token_ids), request))
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


def _carried(unknown: list[tuple[int, Request]], previous: Sequence[Request]) -> Carried:
    places = {id(request): i for i, request in enumerate(previous)}
    for _, request in unknown:
        if id(request) not in places:
            raise RuntimeError(f"a token of request {request.request_id!r} is not known and no step is sampling it")
    return Carried(
        at=np.array([at for at, _ in unknown]),
        source=np.array([places[id(request)] for _, request in unknown]),
    )


def _with_trash(table: np.ndarray, num_blocks: int, trash_block: int) -> np.ndarray:
    """int32 [rows, width] and below it a line that is `num_blocks` times the trash block."""
    lines, width = table.shape
    longer = np.zeros((lines + 1, max(width, num_blocks)), dtype=np.int32)
    longer[:-1, :width] = table
    longer[-1, :num_blocks] = trash_block
    return longer
