"""`python -m engine.bench attention`: milliseconds of attention and of the cache write on CPU, by page size.

The layers of a step run as one tape, as in a forward pass, over a cache of random blocks. Knows the ops alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.bench.rows import spread_rows
from engine.cache.groups import LayerGroup
from engine.execution.kv_tensors import KVTensors, allocate
from engine.ops.cpu.attention import Rows, attend_op, write_op
from engine.ops.cpu.library import Step, Tape
from engine.ops.interface import PackedRows
from engine.ops.torch_ops import TorchOps

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Case(NamedTuple):
    """Rows of `new` tokens after about `start` cached ones; `spread`: contexts differ by half to either side."""

    name: str
    rows: int
    start: int
    new: int = 1
    spread: bool = False

    def packed(self, page: int) -> tuple[PackedRows, int]:
        """The rows, and how many blocks they have. Blocks of a row lie apart."""
        generator = np.random.default_rng(0)
        starts = np.full(self.rows, self.start)
        if self.spread:
            starts = np.sort(generator.integers(self.start // 2, self.start * 3 // 2 + 1, self.rows))[::-1]
        return spread_rows(starts, np.full(self.rows, self.new), page)


CASES = (
    Case("decode 1 x 100", 1, 100),
    Case("decode 1 x 1000", 1, 1000),
    Case("decode 8 x 100", 8, 100, spread=True),
    Case("decode 8 x 1000", 8, 1000, spread=True),
    Case("decode 64 x 100", 64, 100, spread=True),
    Case("decode 64 x 1000", 64, 1000, spread=True),
    Case("prefill 512", 1, 0, 512),
    Case("prefill 2048", 1, 0, 2048),
    Case("512 after 1536", 1, 1536, 512),
)


class Result(NamedTuple):
    """Of all layers together. gflops and gbytes are a second's."""

    attend_ms: float
    write_ms: float
    gflops: float
    gbytes: float
    torch_ms: float | None


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table. Returns the exit status, 0."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench attention", description=__doc__)
    parser.add_argument("--pages", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, nargs=2, default=[9, 3], metavar=("QUERY", "KV"))
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure, which is the best within them")
    parser.add_argument("--cases", nargs="+", default=[""], metavar="TEXT", help="cases whose names contain one")
    parser.add_argument("--torch", action="store_true", help="torch's attention, too")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    print(f"ms of {options.layers} layers, {options.threads} threads, {options.dtype}")
    print(f"{'':18}{'page':>5}{'attend':>10}{'write':>8}{'GFLOP/s':>9}{'GB/s':>7}" + "     torch" * options.torch)
    for case in CASES:
        for page in options.pages if any(text in case.name for text in options.cases) else ():
            result = measure(case, page, options)
            line = f"{case.name:18}{page:5}{result.attend_ms:10.2f}{result.write_ms:8.2f}"
            line += f"{result.gflops:9.1f}{result.gbytes:7.1f}"
            print(line + (f"{result.torch_ms:10.2f}" if result.torch_ms is not None else ""), flush=True)
    return 0


@torch.inference_mode()
def measure(case: Case, page: int, options: argparse.Namespace) -> Result:
    """Times one case; `options` as of the command line."""
    (heads, kv_heads), layers, dim, dtype = options.heads, options.layers, options.dim, DTYPES[options.dtype]
    packed, num_blocks = case.packed(page)
    kv = allocate(layers, num_blocks, kv_heads, page, dim, dtype)
    for tensor in (*kv.keys, *kv.values):
        tensor.normal_()
    tokens = int(packed.counts.sum())
    query = torch.randn(tokens, heads, dim)
    key, value = torch.randn(tokens, kv_heads, dim), torch.randn(tokens, kv_heads, dim)
    rows = Rows(packed, [None], page)
    step, out = Step(tokens=rows.tokens, groups=rows.groups), torch.empty(tokens, heads * dim)
    pairs = list(zip(kv.keys, kv.values, strict=True))
    attend = Tape(attend_op(keys, values, 0, query, out, scaling=dim**-0.5) for keys, values in pairs)
    write = Tape(write_op(keys, values, 0, key, value) for keys, values in pairs)
    attend_s = _best(lambda: attend.run(step, options.threads), options)
    write_s = _best(lambda: write.run(step, options.threads), options)
    seen = int((packed.counts * packed.starts + packed.counts * (packed.counts + 1) // 2).sum())
    read = int((packed.starts + packed.counts).sum()) * kv_heads * dim * dtype.itemsize * 2
    return Result(
        attend_ms=attend_s * 1e3,
        write_ms=write_s * 1e3,
        gflops=4 * heads * dim * seen * layers / attend_s / 1e9,
        gbytes=read * layers / attend_s / 1e9,
        torch_ms=_torch_ms(kv, packed, query.to(dtype), key.to(dtype), value.to(dtype), options)
        if options.torch
        else None,
    )


def _torch_ms(
    kv: KVTensors,
    packed: PackedRows,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: argparse.Namespace,
) -> float:
    ops = TorchOps(kv, [LayerGroup(tuple(range(options.layers)))])
    plan, key, value = ops.plan(packed), key.transpose(0, 1), value.transpose(0, 1)

    def attend() -> None:
        for layer in range(options.layers):
            ops.attend(layer, query, key, value, plan, None)

    return _best(attend, options) * 1e3


def _best(run: Callable[[], None], options: argparse.Namespace) -> float:
    """Seconds of the fastest call; of one thread its own time, which a busy neighbour does not lengthen as much."""
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    best, end = float("inf"), time.perf_counter() + options.seconds
    while best == float("inf") or time.perf_counter() < end:
        begin = clock()
        run()
        best = min(best, clock() - begin)
    return best


if __name__ == "__main__":
    raise SystemExit(main())
