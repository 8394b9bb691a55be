"""The operations on CPU: `TorchOps`, but the cache write and the attention of one-token rows are compiled C++.

Made by `make_ops` where the library can be built. Longer rows stay with torch. Knows nothing of requests or models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from engine.cache.groups import LayerGroup
from engine.execution.kv_tensors import KVTensors
from engine.ops.cpu.build import load_library
from engine.ops.interface import PackedRows
from engine.ops.plan import GroupPlan
from engine.ops.torch_ops import TorchOps

_KERNELS = {torch.bfloat16: "attend_bf16", torch.float32: "attend_fp32"}
_POINTER, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@dataclass(slots=True)
class CpuPlan(GroupPlan):
    """One step for the layers of one group; the arrays belong to the rows of one token.

    Attributes:
        tables: int32, the group's `PackedRows.block_tables`.
        offsets: int64 [rows], where in the flattened `tables` a row's line begins.
        lengths: int64 [rows], tokens of each row after this step.
        window: of the group; 0 for none.
    """

    tables: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    offsets: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    lengths: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    window: int = 0


class CpuOps(TorchOps):
    """`Ops` for a cache in main memory.

    Raises:
        NotImplementedError: there is no kernel for the cache's dtype.
        BuildError: the library cannot be built here.
    """

    def __init__(self, kv: KVTensors, groups: Sequence[LayerGroup] | None = None) -> None:
        super().__init__(kv, groups)
        if kv.dtype not in _KERNELS:
            raise NotImplementedError(f"there is no attention kernel for {kv.dtype} on CPU")
        self.supports_graphs = (False, False)
        library = load_library()
        self._attend_rows = getattr(library, _KERNELS[kv.dtype])
        self._attend_rows.argtypes = (
            [_POINTER, _INT64, _INT64] + [_POINTER] * 6 + [_INT64] * 6 + [_FLOAT, _FLOAT, ctypes.c_int32, _POINTER]
        )
        self._write_lines = library.write_lines
        self._write_lines.argtypes = [_POINTER, _INT64, _INT64, _POINTER, _INT64, _INT64, _INT64, _POINTER]
        self._attend_rows.restype = self._write_lines.restype = None

    def _plan_group(self, rows: PackedRows, tables: np.ndarray, window: int | None) -> CpuPlan:
        """Nothing is cleared, since nothing that a row does not see is read; the kernel takes what would be buckets."""
        return CpuPlan(
            chunks=self._planner.chunks(rows, tables, window),
            slots=self._planner.slots(rows, tables),
            tables=tables,
            offsets=rows.table_of[: rows.num_single] * tables.shape[1],
            lengths=rows.starts[: rows.num_single] + 1,
            window=window or 0,
        )

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor, plan: Any) -> None:
        """See `Ops.write_kv`."""
        group, tensor = self._places[layer]
        slots = plan[group].slots
        if slots is None:
            return
        size = self._dtype.itemsize
        for cache, new in zip(self._slots[tensor], (key, value), strict=True):
            lines = _with_whole_lines(new.to(self._dtype))
            heads, tokens, dim = lines.shape
            strides = lines.stride(0) * size, lines.stride(1) * size
            self._write_lines(lines.data_ptr(), *strides, slots.data_ptr(), heads, tokens, dim * size, cache.data_ptr())

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
        """See `Ops.attend`."""
        out = super().attend(layer, query, key, value, plan, scaling, softcap, sinks)
        group, tensor = self._places[layer]
        part = plan[group]
        rows = len(part.lengths) if isinstance(part, CpuPlan) else 0
        if not rows:
            return out
        single = _with_whole_lines(query[:rows].to(self._dtype))
        # `out` is contiguous, so its first rows can be written in place, unless the query's dtype is another.
        result = out[:rows] if out.dtype == self._dtype else torch.empty_like(single)
        keys, values = self._blocks[tensor]
        sinks = None if sinks is None else sinks.float().contiguous()
        self._attend_rows(
            single.data_ptr(),
            single.stride(0),
            single.stride(1),
            keys.data_ptr(),
            values.data_ptr(),
            part.tables.ctypes.data,
            part.offsets.ctypes.data,
            part.lengths.ctypes.data,
            None if sinks is None else sinks.data_ptr(),
            rows,
            self._heads,
            query.shape[1] // self._heads,
            self._page,
            self._dim,
            part.window,
            self._dim**-0.5 if scaling is None else scaling,
            softcap or 0.0,
            torch.get_num_threads(),
            result.data_ptr(),
        )
        if result.dtype != out.dtype:
            out[:rows] = result
        return out


def _with_whole_lines(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied only if its last dimension is not contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
