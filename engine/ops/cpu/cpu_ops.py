"""The operations on CPU: `Ops` of the compiled kernels, which the models of transformers call layer by layer.

Made by `make_ops` where the library can be built. Knows nothing of requests or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from engine.cache.groups import LayerGroup
from engine.execution.kv_tensors import KVTensors
from engine.ops.cpu.attention import (
    AttendArguments,
    Rows,
    WriteArguments,
    attend_op,
    check_kernels,
    set_attend,
    set_write,
    write_op,
)
from engine.ops.cpu.library import Op, Step, Tape
from engine.ops.interface import PackedRows
from engine.sampling.kernels import SamplingKernels


class CpuOps:
    """`Ops` for a cache in main memory. Blocks hold K and V in the kernels' layouts.

    Attributes:
        kv_shape: (kv_heads, head_dim) of the cache.
        sampling, supports_graphs: there are none.

    Raises:
        NotImplementedError: there is no kernel for such a cache.
        BuildError: the library cannot be built here.
    """

    sampling: SamplingKernels | None = None
    supports_graphs = (False, False)

    def __init__(self, kv: KVTensors, groups: Sequence[LayerGroup] | None = None) -> None:
        check_kernels(kv.page_size, kv.head_dim, kv.dtype)
        groups = groups or [LayerGroup(tuple(range(len(kv.keys))))]
        self.kv_shape = (kv.num_kv_heads, kv.head_dim)
        self._kv, self._spare = kv, SpareBlocks(kv)
        self._windows = [group.window for group in groups]
        self._layers = {
            layer: _Layer(kv.keys[tensor], kv.values[tensor], number)
            for number, group in enumerate(groups)
            for tensor, layer in enumerate(group.layers)
        }

    def window(self, layer: int) -> int | None:
        """See `Ops.window`."""
        return self._windows[self._layers[layer].group]

    def write_op(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Op:
        """An op for a tape of the caller's; see `attention.write_op`."""
        own = self._layers[layer]
        return write_op(own.keys, own.values, own.group, key, value)

    def attend_op(
        self, layer: int, query: torch.Tensor, out: torch.Tensor, *, scaling: float, softcap: float | None
    ) -> Op:
        """An op for a tape of the caller's; see `attention.attend_op`."""
        own = self._layers[layer]
        return attend_op(own.keys, own.values, own.group, query, out, scaling=scaling, softcap=softcap)

    def plan(self, rows: PackedRows) -> Rows:
        """The rows as the kernels take them. Rows without blocks get some of a cache that no request has.

        Raises:
            ValueError: a token has no block.
        """
        page = self._kv.page_size
        if rows.block_tables is not None:
            return Rows(rows, self._windows, page)
        table, *cache = self._spare.take(rows.counts)
        rows = replace(rows, block_tables=[table] * len(self._windows), table_of=np.arange(len(table)))
        plan = Rows(rows, self._windows, page)
        plan.use_cache(*cache)
        return plan

    def plan_decode(self, rows: PackedRows, num_rows: int, max_blocks: int) -> Any:
        """See `Ops.plan_decode`."""
        raise NotImplementedError("the compiled kernels have no plan of fixed shapes")

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor, plan: Rows) -> None:
        """See `Ops.write_kv`."""
        self._layers[layer].write(key, value, plan)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: Rows,
        scaling: float | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Ops.attend`. K and V are those that `write_kv` was given."""
        scaling = self.kv_shape[1] ** -0.5 if scaling is None else scaling
        return self._layers[layer].attend(query, plan, scaling, softcap, sinks)


class _Layer:
    """The two tapes of a layer, of one op each, which take other tensors in every call."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, group: int) -> None:
        self.keys, self.values, self.group = keys, values, group
        nothing = keys.new_empty((0, keys.shape[1], keys.shape[3]), dtype=torch.float32)
        self._write = write_op(keys, values, group, nothing, nothing)
        self._attend = attend_op(keys, values, group, nothing, nothing.flatten(1), scaling=1.0)
        self._tapes = Tape([self._write]), Tape([self._attend])

    def write(self, key: torch.Tensor, value: torch.Tensor, plan: Rows) -> None:
        key, value = (_readable(x.transpose(0, 1)) for x in (key, value))
        if key.dtype != value.dtype:
            key, value = key.float(), value.float()
        arguments = self._write.arguments
        assert isinstance(arguments, WriteArguments)
        set_write(arguments, key, value)
        _run(self._tapes[0], plan)

    def attend(
        self,
        query: torch.Tensor,
        plan: Rows,
        scaling: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        query_read = _readable(query)
        out = torch.empty(query.shape, dtype=query_read.dtype)
        sinks = None if sinks is None else sinks.float().contiguous()
        arguments = self._attend.arguments
        assert isinstance(arguments, AttendArguments)
        set_attend(arguments, query_read, out.flatten(1), scaling, softcap, sinks)
        _run(self._tapes[1], plan)
        return out.to(query.dtype)


class SpareBlocks:
    """Blocks that rows without a cache get for one step. Made when they are needed, and grown to the most so far."""

    def __init__(self, kv: KVTensors) -> None:
        self._kv = kv
        self._tensors: tuple[torch.Tensor, torch.Tensor] | None = None

    def take(self, counts: np.ndarray) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
        """A block table for rows of so many tokens, int32 [rows, width], and the K and V that it speaks of."""
        pages = -(-counts // self._kv.page_size)
        table = (1 + np.cumsum(pages) - pages)[:, None] + np.arange(int(pages.max(initial=0)))
        needed = 1 + int(table.max(initial=0))
        if self._tensors is None or len(self._tensors[0]) < needed:
            shape = (needed, *self._kv.keys[0].shape[1:])
            with torch.inference_mode(False):
                self._tensors = (torch.zeros(shape, dtype=self._kv.dtype), torch.zeros(shape, dtype=self._kv.dtype))
        return table.astype(np.int32), *self._tensors


def _run(tape: Tape, plan: Rows) -> None:
    tape.run(Step(tokens=plan.tokens, groups=plan.groups), torch.get_num_threads())


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied only if a kernel cannot read it."""
    if tensor.dtype not in (torch.bfloat16, torch.float32):
        tensor = tensor.float()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
