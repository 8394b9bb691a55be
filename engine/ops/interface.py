"""What a device must be able to do for the engine: one implementation of `Ops` a device.

The runner describes a step as `PackedRows`, the ops make their own plan of it once, and every attention layer uses
that plan. Knows nothing of requests or models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from engine.sampling.kernels import SamplingKernels


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The rows of one step in the order in which their tokens are packed.

    Rows of one token come first: those that share blocks side by side, else the longest context first. Then the longer
    ones.

    Attributes:
        starts: int64 [rows], tokens of the row in the cache before this step.
        counts: int64 [rows], tokens of the row in this step.
        offsets: int64 [rows], where the row's tokens begin in the packed order.
        block_tables: one int32 array [lines, width] a layer group, all C-contiguous and of one shape. They are the
            engine's own, without a copy: read them while the step is planned and run, change nothing. None: nothing is
            read from or written to the cache, and every start is 0.
        table_of: int64 [rows], the line of `block_tables` that is the row's, the same in every group. Its first
            ceil((start + count) / page) entries are the blocks of the row's context after this step; in groups with a
            window, those that lie wholly behind it are 0. What follows in the line are blocks for later steps, or 0.
            Lines of no row exist; no two rows have the same one.
        num_single: rows of one token.
    """

    starts: np.ndarray
    counts: np.ndarray
    offsets: np.ndarray
    block_tables: list[np.ndarray] | None
    table_of: np.ndarray
    num_single: int


class Ops(Protocol):
    """The operations of one device, bound to one cache.

    A plan is dataclasses, lists and tuples, in which tensors lie on the host. It is sent to the device as a whole; what
    `write_kv` and `attend` are given is the plan that has arrived there.

    Layers are numbered as in the model. Which window a layer has is known from its group: a query at position p sees
    the keys at (p - window, p], itself included.

    Attributes:
        kv_shape: (kv_heads, head_dim) of the cache.
        sampling: the device's own ways to choose tokens; None: there are none.
        supports_graphs: whether steps of (mixed rows, one-token rows only) can have a plan of fixed shapes, which a
            graph needs. The second one is `plan_decode`.
    """

    kv_shape: tuple[int, int]
    sampling: SamplingKernels | None
    supports_graphs: tuple[bool, bool]

    def window(self, layer: int) -> int | None:
        """Tokens that a query of the layer sees, itself included; None sees all."""
        ...

    def plan(self, rows: PackedRows) -> Any:
        """Indices, masks and the order of work, shared by all layers of the step."""
        ...

    def plan_decode(self, rows: PackedRows, num_rows: int, max_blocks: int) -> Any:
        """A plan whose tensors have shapes that depend on `num_rows` and `max_blocks` alone, for one-token rows.

        The step is padded with rows of one token without a context, which write to the trash block: the last one of
        the cache, which no request owns.

        Args:
            rows: at most `num_rows`, all of one token.
            max_blocks: blocks a row may have.

        Raises:
            NotImplementedError: `supports_graphs[1]` is False.
            ValueError: the rows do not fit.
        """
        ...

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor, plan: Any) -> None:
        """Stores K and V, each [kv_heads, tokens, head_dim], in the rows' blocks."""
        ...

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: Any,
        scaling: float | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of each row over its own context, after `write_kv` of the same layer.

        Args:
            query: [tokens, heads, head_dim].
            key: this step's K, [kv_heads, tokens, head_dim]; `value` likewise.
            scaling: factor of the scores; None means head_dim ** -0.5.
            softcap: scaled scores become softcap * tanh(score / softcap).
            sinks: [heads], one more score per head, which takes its share of the softmax and has no value.

        Returns:
            [tokens, heads, head_dim]. What blocks hold outside of a row's visible context never reaches it, not even
            NaN.
        """
        ...


@runtime_checkable
class PlainOps(Protocol):
    """Operations for any device, which the engine's own kernels would replace where they could.

    Attributes:
        why_plain: what keeps these from being used.
    """

    why_plain: str
