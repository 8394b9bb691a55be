"""Forward passes of one model by the fused decoder, in milliseconds, whole and by kernel.

`python -m engine.bench forward FOLDER [--threads 1 2] [--steps decode1 prefill512 ...]`. Times are minima: what the
machine can do when nobody else asks for it.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine.bench.rows import spread_rows
from engine.cache.groups import LayerGroup
from engine.execution.kv_tensors import allocate
from engine.model.layer import FusedDecoder
from engine.model.loader import load_model
from engine.model.recognition import describe
from engine.model.shadow import make_shadow, model_facts
from engine.ops.cpu.cpu_ops import CpuOps
from engine.ops.cpu.library import Step, Tape

PAGE = 32
# name: rows, tokens of each row before the step, and in it
STEPS = {
    "decode1": (1, 100, 1),
    "decode8": (8, 100, 1),
    "decode64": (64, 100, 1),
    "decode64at1000": (64, 1000, 1),
    "prefill512": (1, 0, 512),
    "prefill2048": (1, 0, 2048),
    "mixed": (32, 300, 1),  # and a chunk of 480
}


class Case:
    """One step over a cache of random numbers."""

    def __init__(self, folder: str, most_blocks: int = 3000) -> None:
        shadow = make_shadow(load_model(folder))
        facts = model_facts(shadow)
        if any(facts.windows):
            raise NotImplementedError("models with windows are not measured")
        kv = allocate(facts.num_layers, most_blocks, facts.num_kv_heads, PAGE, facts.head_dim, shadow.dtype)  # type: ignore[arg-type]
        self._ops = CpuOps(kv, [LayerGroup(tuple(range(facts.num_layers)))])
        self._decoder = FusedDecoder(describe(shadow), self._ops, 2048, 64, 4096)
        for tensor in (*kv.keys, *kv.values):
            tensor.normal_()

    def prepare(self, name: str) -> Step:
        """The step's arrays live as long as this object, until the next call."""
        rows, before, count = STEPS[name]
        starts, counts = np.full(rows, before), np.full(rows, count)
        if name == "mixed":
            starts, counts = np.append(starts, 0), np.append(counts, 480)
        packed, _ = spread_rows(starts, counts, PAGE)
        self._plan: Any = self._ops.plan(packed)
        positions = np.arange(counts.sum()) + np.repeat(starts - packed.offsets, counts)
        self._arrays = [torch.from_numpy(positions % 1000), torch.from_numpy(positions)]
        self._arrays.append(torch.from_numpy(packed.offsets + counts - 1))
        ids, places, keep = self._arrays
        self._decoder(ids, places, keep, self._plan.groups)
        addresses = [array.data_ptr() for array in self._arrays]
        return Step(len(positions), len(starts), *addresses, self._plan.groups)

    def whole(self, name: str, threads: int, seconds: float) -> float:
        """Milliseconds of a pass."""
        step, tape = self.prepare(name), Tape(self._decoder.ops())
        return _least(lambda: tape.run(step, threads), seconds)

    def by_kernel(self, name: str, threads: int, seconds: float) -> dict[str, float]:
        """Milliseconds of each kernel's ops together, run in the order of the tape, one call an op."""
        step = self.prepare(name)
        tapes = [(_label(op), Tape([op])) for op in self._decoder.ops()]
        least = [float("inf")] * len(tapes)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for i, (_, tape) in enumerate(tapes):
                begin = time.perf_counter()
                tape.run(step, threads)
                least[i] = min(least[i], time.perf_counter() - begin)
        sums: dict[str, float] = defaultdict(float)
        for (label, _), best in zip(tapes, least, strict=True):
            sums[label] += best * 1e3
        return dict(sums)


def _label(op: Any) -> str:
    if not op.kernel.startswith("linear"):
        return str(op.kernel)
    weight = op.owners[0]
    return f"linear {weight.in_features}x{weight.out_features}"


def _least(run: Any, seconds: float) -> float:
    least, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - begin)
    return least * 1e3


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the figures. Returns the exit status, 0."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench forward", description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--seconds", type=float, default=3.0, help="that each figure is measured for")
    options = parser.parse_args(argv)
    with torch.inference_mode():
        case = Case(options.folder)
        for name in options.steps:
            for threads in options.threads:
                whole = case.whole(name, threads, options.seconds)
                print(f"{name}, {threads} threads: {whole:.2f} ms", flush=True)
                parts = case.by_kernel(name, threads, options.seconds)
                for label, part in sorted(parts.items(), key=lambda item: -item[1]):
                    print(f"    {label:24} {part:8.3f}")
    return 0
