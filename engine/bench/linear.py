"""How fast the linear layers of a model are: our own kernels, torch's, and what the machine could do.

Run by `python -m engine.bench`. A step is all linear layers of a model, one after another, with weights of their own,
so that they come from memory as in a real step; the last one, for the logits, has at most `LOGIT_ROWS` rows.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.ops.cpu.library import Address, Float, Int, Op, Step, Tape
from engine.ops.cpu.linear import PackedWeight, activation_dtype, linear_op

LOGIT_ROWS = 64
_ROUNDS = 200_000


class Shapes(NamedTuple):
    """Of a model's weights, (outputs, inputs); the defaults are those of SmolLM2-135M."""

    layer: tuple[tuple[int, int], ...] = ((960, 576), (576, 576), (3072, 576), (576, 1536))
    layers: int = 30
    logits: tuple[int, int] = (49152, 576)

    def operations(self, rows: int) -> int:
        """Floating point operations of a step."""
        inner = self.layers * sum(n * k for n, k in self.layer) * rows
        return 2 * (inner + self.logits[0] * self.logits[1] * min(rows, LOGIT_ROWS))


class Machine(NamedTuple):
    """What this machine can do with some threads, in 1/s.

    Attributes:
        fp32: floating point operations on fp32 numbers.
        bf16: on what bf16 weights are multiplied as.
        read: bytes from memory.
    """

    fp32: float
    bf16: float
    read: float


class _Probe(ctypes.Structure):
    """`Probe` of probe.cpp."""

    _fields_ = (("bytes", Address), ("count", Int), ("operations", Int), ("result", Float))


def main(argv: Sequence[str]) -> int:
    """Prints a line for each kind of weights and number of rows."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench linear", description="linear layers of SmolLM2-135M")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 512, 2048])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each line")
    parser.add_argument("--kinds", nargs="+", choices=_KINDS, default=["bf16", "int8", "fp32", "torch-fp32"])
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    machine = measure_machine(options.threads)
    print(
        f"machine: fp32 {machine.fp32 / 1e9:.0f} GFLOP/s, bf16 {machine.bf16 / 1e9:.0f} GFLOP/s, "
        f"memory {machine.read / 1e9:.1f} GB/s"
    )
    shapes = Shapes()
    for kind in options.kinds:
        make, peak = _KINDS[kind], machine.fp32 if "fp32" in kind else machine.bf16
        prepare, size = make(shapes)
        for rows in options.rows:
            seconds = shortest(prepare(rows, options.threads), options.seconds, options.threads)
            rate = shapes.operations(rows) / seconds
            print(
                f"{kind:10} rows {rows:5}  step {seconds * 1e3:9.2f} ms  {rate / 1e9:8.1f} GFLOP/s "
                f"({rate / peak:4.0%} of the peak)  weights {size / seconds / 1e9:6.1f} GB/s",
                flush=True,
            )
    return 0


def measure_machine(threads: int) -> Machine:
    """By loops that do nothing but multiply, or read 256 MiB."""
    memory = torch.ones(1 << 28, dtype=torch.uint8)

    def seconds(kernel: str, probe: _Probe) -> float:
        tape = Tape([Op(kernel, probe)])
        return shortest(lambda: tape.run(Step(), threads), 0.5, threads)

    def rate(dtype: str) -> float:
        probe = _Probe(None, _ROUNDS)
        duration = seconds(f"probe_multiply_{dtype}", probe)
        return threads * probe.operations / duration

    return Machine(
        rate("fp32"), rate("bf16"), memory.nbytes / seconds("probe_read", _Probe(memory.data_ptr(), len(memory)))
    )


def shortest(run: Callable[[], object], seconds: float, threads: int) -> float:
    """Of the times that `run` takes within about `seconds`. One thread's own time leaves out what others take."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        begin = clock()
        run()
        best = min(best, clock() - begin)
    return best


_Prepare = Callable[[int, int], Callable[[], object]]  # rows, threads -> a step


def _own(dtype: torch.dtype, quantize: bool = False) -> Callable[[Shapes], tuple[_Prepare, int]]:
    def make(shapes: Shapes) -> tuple[_Prepare, int]:
        sources = [torch.randn(n, k, dtype=dtype) for n, k in (*shapes.layer, shapes.logits)]
        weights = [_packed(source, quantize) for _ in range(shapes.layers) for source in sources[:-1]]
        weights.append(_packed(sources[-1], quantize))

        def prepare(rows: int, threads: int) -> Callable[[], object]:
            inputs = {w.in_features: torch.randn(rows, w.in_features).to(activation_dtype(dtype)) for w in weights}
            outputs = {w.out_features: torch.empty(rows, w.out_features) for w in weights[:-1]}
            logits = torch.empty(LOGIT_ROWS, weights[-1].out_features)
            ops = [linear_op(w, inputs[w.in_features], outputs[w.out_features]) for w in weights[:-1]]
            ops.append(linear_op(weights[-1], inputs[weights[-1].in_features], logits, kept=True))
            tape, step = Tape(ops), Step(tokens=rows, kept=min(rows, LOGIT_ROWS))
            return lambda: tape.run(step, threads)

        return prepare, sum(weight.nbytes for weight in weights)

    return make


def _packed(source: Tensor, quantize: bool) -> PackedWeight:
    return PackedWeight([lambda: source], quantize)


def _torch(dtype: torch.dtype) -> Callable[[Shapes], tuple[_Prepare, int]]:
    def make(shapes: Shapes) -> tuple[_Prepare, int]:
        weights = [torch.randn(n, k, dtype=dtype) for _ in range(shapes.layers) for n, k in shapes.layer]
        weights.append(torch.randn(*shapes.logits, dtype=dtype))

        def prepare(rows: int, threads: int) -> Callable[[], object]:
            inputs = {w.shape[1]: torch.randn(rows, w.shape[1]).to(dtype) for w in weights}
            counts = [rows] * (len(weights) - 1) + [min(rows, LOGIT_ROWS)]
            return lambda: [
                functional.linear(inputs[w.shape[1]][:count], w) for w, count in zip(weights, counts, strict=True)
            ]

        return prepare, sum(weight.nbytes for weight in weights)

    return make


_KINDS = {
    "bf16": _own(torch.bfloat16),
    "int8": _own(torch.bfloat16, quantize=True),
    "fp32": _own(torch.float32),
    "torch-fp32": _torch(torch.float32),
    "torch-bf16": _torch(torch.bfloat16),
}
