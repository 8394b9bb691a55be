"""What the tests of the Triton kernels around attention run in the interpreter's process."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from engine.execution.forward import FusedForward
from engine.execution.kv_tensors import KVTensors, allocate
from engine.model.shadow import model_facts
from engine.ops.interface import Ops
from engine.ops.triton.triton_ops import TritonOps
from tests.architectures import WINDOW
from tests.engine import test_architectures
from tests.engine.tables import packed_rows
from tests.engine.test_fused import FUSED


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest one, relative to numbers beyond 1; NaN and other shapes are errors too."""
    if out.shape != expected.shape:
        return math.inf
    return ((out.double() - expected).abs() / expected.abs().clamp(min=1)).max().item()


def normed(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """In float64."""
    x = x.double()
    return x if weight is None else x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()


def norm_errors(rows: int, width: int, dtype: torch.dtype) -> list[float]:
    """Of the norm alone, and of sums and norms with and without each of the weights, on views of wider rows."""
    from engine.ops.triton.norms import add_norm, rms_norm

    x, added = (random(rows, width + 5, dtype=dtype, seed=seed)[:, :width] for seed in (1, 2))
    weight, other = random(width, seed=3), random(width, seed=4)
    errors = [error(rms_norm(x, weight, 1e-6), normed(x, weight))]
    for first, second in ((weight, None), (None, None), (weight, other), (None, other)):
        total, out = add_norm(x, added, first, 1e-6, second)
        expected = x.double() + normed(added, second)
        errors += [error(total, expected), error(out, normed(total if dtype != torch.float32 else expected, first))]
    return errors


def gate_error(rows: int, width: int, activation: Any, dtype: torch.dtype) -> float:
    """Also of gates so far from 0 that exp() overflows."""
    from engine.ops.triton.gate import gated

    both = random(rows, 2 * width, dtype=dtype) * 3
    both[0, :4] = torch.tensor([-200.0, 200.0, -30.0, 30.0])
    gate, up = both.chunk(2, dim=1)
    functions = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }
    return error(gated(gate, up, activation), functions[activation](gate.double()) * up.double())


def rotary_errors(
    heads: int, kv_heads: int, dim: int, pairs: int, with_norms: bool, dtype: torch.dtype, paged: bool
) -> list[float]:
    """Of queries, and of K and V where they were written: in blocks among NaN, or beside each other."""
    from engine.ops.triton.plan import Planner
    from engine.ops.triton.rotary import rotate_and_write

    page, starts, counts = 4, np.array([6, 3]), np.array([1, 5])
    kv = allocate(1, 6, kv_heads, page, dim, dtype)
    for tensor in (kv.keys[0], kv.values[0]):
        tensor[1:] = math.nan
    tables = [[3, 5], [1, 4]]
    rows = packed_rows(starts if paged else 0 * starts, counts, np.array([0, 1]), [tables] if paged else None, 1)
    planner = Planner(page)
    plan = planner.exact(rows, rows.block_tables[0], None) if rows.block_tables else planner.without_cache(rows)
    positions = torch.tensor([6, 3, 4, 5, 6, 7])
    table = random(8, 2, pairs, seed=5)
    projected = random(6, (heads + 2 * kv_heads) * dim, dtype=dtype)
    query, key, value = projected.split((heads * dim, kv_heads * dim, kv_heads * dim), dim=1)
    norms = (random(dim, seed=6), random(dim, seed=7)) if with_norms else None
    cache = kv.keys[0], kv.values[0]
    out, keys, values = rotate_and_write(query, key, value, positions, table, cache, plan, norms, 1e-6)
    if paged:
        slots = torch.tensor([5, 1, 4, 4, 4, 4]), torch.tensor([2, 3, 0, 1, 2, 3])
        keys, values = (tensor[slots[0], :, slots[1]] for tensor in (keys, values))
    else:
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    weights = norms or (None, None)
    return [
        error(out, turned(query.unflatten(1, (heads, dim)), weights[0], table[positions])),
        error(keys, turned(key.unflatten(1, (kv_heads, dim)), weights[1], table[positions])),
        error(values, value.unflatten(1, (kv_heads, dim)).double()),
    ]


def turned(x: torch.Tensor, weight: torch.Tensor | None, lines: torch.Tensor) -> torch.Tensor:
    """Heads [tokens, heads, dim] normed and turned, in float64."""
    x, pairs = normed(x, weight), lines.shape[2]
    cosines, sines = lines.double()[:, :, None].unbind(1)
    left, right, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    return torch.cat((left * cosines - right * sines, right * cosines + left * sines, rest), dim=-1)


def run_model(name: str) -> bool:
    """Runs a model in pieces and compares its logits with its own; whether it ran fused."""

    def triton_ops(kv: KVTensors, groups: Any, **options: Any) -> Ops:
        return TritonOps(kv, groups)

    model = FUSED[name]()
    has_window = any(window is not None for window in model_facts(model).windows)
    length = WINDOW + 4 if has_window else 5
    own, test_architectures.make_ops = test_architectures.make_ops, triton_ops
    try:
        rows = test_architectures.Rows(model, [length, 2])
    finally:
        test_architectures.make_ops = own
    for counts in ({0: length - 3, 1: 2}, {0: 3, 1: 1}, {0: 1, 1: 1}):
        rows.step(counts)
    assert rows.check() == 5
    return isinstance(rows.runner._mixed._forward, FusedForward)
