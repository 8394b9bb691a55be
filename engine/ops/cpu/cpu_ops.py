"""The operations on CPU: `TorchOps`, but the cache write and the attention of one-token rows are compiled C++.

Made by `make_ops` where the library can be built. Longer rows stay with torch. Knows nothing of requests or models.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from engine.execution.kv_tensors import KVTensors
from engine.ops.cpu.build import load_library
from engine.ops.interface import PackedRows
from engine.ops.torch_ops import Bucket, Plan, TorchOps

_KERNELS = {torch.bfloat16: "attend_bf16", torch.float32: "attend_fp32"}
_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64


@dataclass(slots=True)
class CpuPlan(Plan):
    """One step for `CpuOps`; the arrays belong to the rows of one token.

    Attributes:
        tables: int32, the rows' blocks one after another.
        offsets: int64 [rows], where a row's blocks begin in `tables`.
        lengths: int64 [rows], tokens of each row after this step.
    """

    tables: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray


class CpuOps(TorchOps):
    """`Ops` for a cache in main memory.

    Raises:
        NotImplementedError: there is no kernel for the cache's dtype.
        BuildError: the library cannot be built here.
    """

    def __init__(self, kv: KVTensors) -> None:
        super().__init__(kv)
        if kv.dtype not in _KERNELS:
            raise NotImplementedError(f"no attention kernel for {kv.dtype} on CPU")
        library = load_library()
        self._attend_rows = getattr(library, _KERNELS[kv.dtype])
        self._attend_rows.argtypes = (
            [_POINTER, _INT64, _INT64] + [_POINTER] * 5 + [_INT64] * 5 + [ctypes.c_float, ctypes.c_int32, _POINTER]
        )
        self._write_lines = library.write_lines
        self._write_lines.argtypes = [_POINTER, _INT64, _INT64, _POINTER, _INT64, _INT64, _INT64, _POINTER]
        self._attend_rows.restype = self._write_lines.restype = None

    def plan(self, rows: PackedRows) -> CpuPlan:
        """Cost: as `TorchOps.plan`."""
        plan = super().plan(rows)
        single = rows.num_single
        tables = rows.block_tables[0][:single] if rows.block_tables is not None else []
        sizes = np.fromiter(map(len, tables), np.int64, len(tables))
        return CpuPlan(
            slots=plan.slots,
            begun=None,  # nothing beyond a row's end is ever read
            buckets=[],
            chunks=plan.chunks,
            tables=np.fromiter(chain.from_iterable(tables), np.int32, int(sizes.sum())),
            offsets=np.cumsum(sizes) - sizes,
            lengths=(rows.starts + rows.counts)[: len(tables)],
        )

    def _plan_buckets(self, ends: np.ndarray, tables: list[list[int]]) -> list[Bucket]:
        return []  # the kernel takes these rows

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor, plan: Plan) -> None:
        """See `Ops.write_kv`."""
        if plan.slots is None:
            return
        size = self._dtype.itemsize
        for cache, new in zip(self._slots[layer], (key, value), strict=True):
            lines = _with_whole_lines(new.to(self._dtype))
            heads, tokens, dim = lines.shape
            strides = lines.stride(0) * size, lines.stride(1) * size
            slots, target = plan.slots.data_ptr(), cache.data_ptr()
            self._write_lines(lines.data_ptr(), *strides, slots, heads, tokens, dim * size, target)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: CpuPlan,  # type: ignore[override]
        scaling: float | None,
    ) -> torch.Tensor:
        """See `Ops.attend`."""
        out = super().attend(layer, query, key, value, plan, scaling)
        rows = len(plan.lengths)
        if not rows:
            return out
        single = _with_whole_lines(query[:rows].to(self._dtype))
        # `out` is contiguous, so its first rows can be written in place, unless the query's dtype is another.
        result = out[:rows] if out.dtype == self._dtype else torch.empty_like(single)
        keys, values = self._blocks[layer]
        self._attend_rows(
            single.data_ptr(),
            single.stride(0),
            single.stride(1),
            keys.data_ptr(),
            values.data_ptr(),
            plan.tables.ctypes.data,
            plan.offsets.ctypes.data,
            plan.lengths.ctypes.data,
            rows,
            self._heads,
            query.shape[1] // self._heads,
            self._page,
            self._dim,
            self._dim**-0.5 if scaling is None else scaling,
            torch.get_num_threads(),
            result.data_ptr(),
        )
        if result.dtype != out.dtype:
            out[:rows] = result
        return out


def _with_whole_lines(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied only if its last dimension is not contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
