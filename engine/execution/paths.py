"""The two ways of a step through the model: mixed rows, and decode-only steps by block tables of a fixed width.

Chosen between and called by the model runner. A path pads the step where its shapes are fixed, has the ops plan it,
and runs it directly or by a recording.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from engine.acceleration import CompileSettings
from engine.execution.forward import Forward, FusedForward, StepInputs, carried_ids
from engine.execution.graphs import GraphRunner, StepShape, decode_sizes, next_power_of_two, powers_of_two, round_up
from engine.execution.input_batch import InputBatch, pad
from engine.execution.staging import Staging
from engine.ops.interface import Ops, PackedRows

# What the compiler calls dynamic begins at 2: sizes of 0 and 1 would be compiled apart.
_LEAST_DYNAMIC = 2
_LEAST_KEPT = 64  # rows of logits in recorded mixed steps


@dataclass(frozen=True, slots=True)
class PathSizes:
    """What the shapes of padded steps follow from.

    Attributes:
        page_size, trash_block: of the cache; padding writes its K/V to the trash block.
        max_tokens, max_rows: of a step.
        max_length: of a request.
        max_blocks: width of the block table of decode-only steps.
        recorded_tokens: mixed steps of more tokens run directly; None: none do.
        q_padding, kv_padding: multiples to which the tokens, and the cached tokens, of mixed steps are padded.
    """

    page_size: int
    trash_block: int
    max_tokens: int
    max_rows: int
    max_length: int
    max_blocks: int
    recorded_tokens: int | None
    q_padding: int
    kv_padding: int


class FixedMixedOps(Ops, Protocol):
    """What ops with `supports_graphs[0]` have besides."""

    def plan_mixed(self, rows: PackedRows, num_tokens: int, num_kv: int, num_rows: int, most_length: int) -> Any:
        """A plan whose tensors have shapes that depend on the four numbers alone, and whose other values are constant.

        Args:
            rows: of `num_tokens` tokens together; the last one may be padding, in the trash block.
            num_kv: at least the contexts of all rows after this step, together.
            num_rows: at least the rows.
            most_length: at least the context of any row after this step; matters where block tables are rectangles.
        """
        ...


class MixedPath:
    """Takes any step.

    Args:
        forward: for such steps.
        ops: that plan them; with `graphs` they are `FixedMixedOps`.
        staging: sends steps to the device; None where that is the host.
        graphs: where to replay; None runs directly.
        compiled: how `forward` is compiled, if it is.
    """

    def __init__(
        self,
        forward: Forward | FusedForward,
        ops: Ops,
        sizes: PathSizes,
        staging: Staging | None = None,
        graphs: GraphRunner | None = None,
        compiled: CompileSettings | None = None,
    ) -> None:
        self._forward = forward
        self._ops = ops
        self._sizes = sizes
        self._staging = staging
        self._graphs = graphs
        self._compiled = compiled

    def run(self, inputs: InputBatch, previous_ids: torch.Tensor | None = None) -> torch.Tensor:
        """The logits of `inputs.keep`; K/V of the step is written. See `GraphRunner.run` for `previous_ids`."""
        sizes, kept = self._sizes, len(inputs.keep)
        tokens = max(inputs.num_tokens, min(round_up(inputs.num_tokens, sizes.q_padding), sizes.max_tokens))
        most = min(tokens, sizes.max_rows)
        graphs = self._graphs if inputs.rows.block_tables is not None and self._may_record(tokens) else None
        if graphs is not None and kept <= most:  # more logits are kept where a prompt is scored
            inputs = pad(inputs, tokens, sizes.trash_block, sizes.page_size)
            shape = StepShape(tokens, min(most, max(_LEAST_KEPT, next_power_of_two(kept))), self._kv_room(inputs.rows))
            longest = min(shape.kv, max(sizes.max_length, tokens))
            plan = cast(FixedMixedOps, self._ops).plan_mixed(inputs.rows, tokens, shape.kv, most + 1, longest)
            return graphs.run(shape, inputs, plan, previous_ids)
        if self._compiled is not None:
            if self._compiled.dynamic is False:
                kept = _size_for(kept, powers_of_two(max(kept, sizes.max_rows)))
            else:
                tokens, kept = max(inputs.num_tokens, _LEAST_DYNAMIC), max(kept, _LEAST_DYNAMIC)
            inputs = pad(inputs, tokens, sizes.trash_block, sizes.page_size)
        plan = self._ops.plan(inputs.rows)
        step = StepInputs.of(inputs, inputs.num_tokens, kept), plan
        return _run_directly(self._forward, self._staging, step, carried_ids(inputs, previous_ids))[: len(inputs.keep)]

    @property
    def recorded_sizes(self) -> list[int]:
        """Numbers of tokens that recorded steps have, ascending, where they are few: to record them in advance."""
        sizes = self._sizes
        if self._graphs is None or sizes.recorded_tokens is None:
            return []
        possible = round_up(sizes.max_rows * sizes.max_length, sizes.q_padding)
        most = min(sizes.recorded_tokens, sizes.max_tokens, possible)
        return list(range(sizes.q_padding, most + 1, sizes.q_padding))

    def _may_record(self, tokens: int) -> bool:
        return self._sizes.recorded_tokens is None or tokens <= self._sizes.recorded_tokens

    def _kv_room(self, rows: PackedRows) -> int:
        """A power of 2 of padding intervals, so that contexts which grow soon have a recording."""
        interval = self._sizes.kv_padding
        return interval * next_power_of_two(-(-int((rows.starts + rows.counts).sum()) // interval))


class DecodePath:
    """Takes steps in which every row has one token and a context of at most `max_blocks` blocks.

    Args:
        forward: for such steps.
        ops: that have a `plan_decode`.
        staging: sends steps to the device; None where that is the host.
        graphs: where to replay; None runs directly.
        compiled: how `forward` is compiled, if it is.

    Attributes:
        padded_sizes: numbers of rows that steps of fixed shapes are padded to, ascending; empty without.
    """

    def __init__(
        self,
        forward: Forward | FusedForward,
        ops: Ops,
        sizes: PathSizes,
        staging: Staging | None = None,
        graphs: GraphRunner | None = None,
        compiled: CompileSettings | None = None,
    ) -> None:
        self._forward, self._ops = forward, ops
        self._max_rows, self._max_blocks = sizes.max_rows, sizes.max_blocks
        self._max_context = sizes.max_blocks * sizes.page_size
        self._staging = staging
        self._graphs = graphs
        self._least = 1 if compiled is None else _LEAST_DYNAMIC
        self.padded_sizes: list[int] = []
        if compiled is not None and compiled.dynamic is False:  # which takes minutes for each size
            self.padded_sizes = powers_of_two(sizes.max_rows)
        elif graphs is not None:
            self.padded_sizes = decode_sizes(sizes.max_rows)

    def takes(self, rows: PackedRows) -> bool:
        """Whether a step is of this kind."""
        count = len(rows.starts)
        if rows.block_tables is None or rows.num_single != count or count > self._max_rows:
            return False
        return bool((rows.starts < self._max_context).all())

    def run(
        self, inputs: InputBatch, previous_ids: torch.Tensor | None = None, *, size: int | None = None
    ) -> torch.Tensor:
        """As `MixedPath.run`, for a step that this path takes. `size`: pad to so many rows."""
        if size is None:
            count = inputs.num_tokens
            size = _size_for(count, self.padded_sizes) if self.padded_sizes else max(count, self._least)
        plan = self._ops.plan_decode(inputs.rows, size, self._max_blocks)
        if self._graphs is not None:
            return self._graphs.run(StepShape(size, size), inputs, plan, previous_ids)
        step = StepInputs.of(inputs, size, size), plan
        return _run_directly(self._forward, self._staging, step, carried_ids(inputs, previous_ids))[: len(inputs.keep)]


def _run_directly(
    forward: Forward | FusedForward,
    staging: Staging | None,
    step: tuple[StepInputs, Any],
    carried: torch.Tensor | None,
) -> torch.Tensor:
    inputs, plan = step if staging is None else staging.send(step)[0]
    if carried is not None:
        inputs.carry(carried)
    return forward(inputs, plan)


def _size_for(count: int, sizes: list[int]) -> int:
    return next(size for size in sizes if size >= count)
