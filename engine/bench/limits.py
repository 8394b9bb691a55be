"""How fast this machine could be: operations and bytes of a workload, over rates measured here.

`Costs` counts what a model takes for a token, `bounds` what a workload takes at least, `measure` how fast this host
multiplies matrices and reads memory. The bound holds for any scheduler, so a share of 100 % is out of reach: small
matrices run below the best rate, and computing and reading take turns.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from engine.bench.workloads import Work

_ROWS = 512  # enough for the best rate of the matrix multiplications
_STREAM_BYTES = 512 * 2**20  # far beyond any cache
_ROUNDS = 5
_SLOW = 4.0  # what takes so many times the best found so far is not tried again


@dataclass(frozen=True)
class Costs:
    """What the model takes, counted from its config.

    Attributes:
        linears: (rows, columns) of each weight that every token is multiplied with, and how many there are.
        head: numbers in the output layer, which only tokens that are sampled from are multiplied with.
        weight_bytes: of the linears and the head.
        kv_bytes: K and V of one token over all layers.
        attention_flops: of one query with one key, over all heads of one layer.
        windows: of each attention layer; None sees all.
    """

    linears: tuple[tuple[tuple[int, int], int], ...]
    head: int
    weight_bytes: float
    kv_bytes: int
    attention_flops: int
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, folder: str | Path, dtype: str, weight_bits: float | None = None) -> Costs:
        """Costs of the model in `folder`.

        Args:
            dtype: of weights (unless `weight_bits`) and KV.
            weight_bits: of the weights, where they are quantised.

        Experts that are no `nn.Linear` are not counted, which keeps the bound a bound.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        output = model.get_output_embeddings()
        shapes = Counter(
            tuple(module.weight.shape)
            for module in model.modules()
            if isinstance(module, nn.Linear) and module is not output
        )
        text = config.get_text_config()
        size = getattr(torch, dtype).itemsize
        head = output.weight.numel()
        numbers = head + sum(rows * columns * count for (rows, columns), count in shapes.items())
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
        window = getattr(text, "sliding_window", None)
        return cls(
            linears=tuple(shapes.items()),  # type: ignore[arg-type]
            head=head,
            weight_bytes=numbers * (size if weight_bits is None else weight_bits / 8),
            kv_bytes=2 * len(kinds) * kv_heads * head_dim * size,
            attention_flops=4 * text.num_attention_heads * head_dim,
            windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        )

    @property
    def layers(self) -> int:
        """Numbers in the linears."""
        return sum(rows * columns * count for (rows, columns), count in self.linears)


@dataclass(frozen=True)
class Needs:
    """Operations and bytes that a workload takes at least."""

    flops: float
    bytes: float


def needs(work: Sequence[Work], costs: Costs) -> Needs:
    """What greedy decoding of `work` takes with a perfect prefix cache and everything in one batch.

    Shared prefixes are computed once and, in each step, read once; the last token of a request is not fed back; the
    weights are read once a step, and there are as many steps as the longest output has tokens.
    """
    ordered = sorted(work)
    shared = [0, *(_common(a.prompt, b.prompt) for a, b in pairwise(ordered))]
    computed, flops = 0, 0.0
    for item, known in zip(ordered, shared, strict=True):
        end = len(item.prompt) + item.new_tokens - 1
        computed += end - known
        flops += costs.attention_flops * sum(_pairs(known, end, window) for window in costs.windows)
    flops += 2.0 * costs.layers * computed + 2.0 * costs.head * sum(item.new_tokens for item in work)
    steps = max((item.new_tokens for item in work), default=0)
    read = sum(_kv_tokens(ordered, shared, step) for step in range(1, steps)) * _mean_visible(ordered, costs.windows)
    return Needs(flops, steps * costs.weight_bytes + read * costs.kv_bytes)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _pairs(start: int, end: int, window: int | None) -> int:
    """Pairs of a query in [start, end) and a key that it sees, itself included."""
    full = min(end, max(start, window)) if window else end
    pairs = (full * (full + 1) - start * (start + 1)) // 2
    return pairs + (end - full) * (window or 0)


def _kv_tokens(ordered: Sequence[Work], shared: Sequence[int], step: int) -> int:
    """Different tokens whose K and V the decoding of this step reads, without windows."""
    total, common = 0, 0
    for item, known in zip(ordered, shared, strict=True):
        common = min(common, known)  # with the last one that still runs
        if item.new_tokens > step:
            total += len(item.prompt) - common + step
            common = len(item.prompt)
    return total


def _mean_visible(work: Sequence[Work], windows: Sequence[int | None]) -> float:
    """At least this share of the KV of all layers is read: layers with a window read no more than that."""
    longest = max((len(item.prompt) + item.new_tokens for item in work), default=1)
    return sum(min(1.0, window / longest) if window else 1.0 for window in windows) / max(1, len(windows))


@dataclass(frozen=True)
class Limits:
    """Rates of this host: of matrix multiplication by kind, flop/s, and of reading memory, bytes/s."""

    gemm: dict[str, float]
    bandwidth: float

    @property
    def flops(self) -> float:
        return max(self.gemm.values())

    def seconds(self, need: Needs) -> tuple[float, float]:
        """The least time for the operations and for the bytes; no schedule beats the larger one."""
        return need.flops / self.flops, need.bytes / self.bandwidth


# A linear layer for one weight [rows, columns] in float32, as a function of x [tokens, columns]; None: not here.
Prepare = Callable[[torch.Tensor], Callable[[], object] | None]


def _plain(dtype: torch.dtype) -> Prepare:
    def prepare(weight: torch.Tensor) -> Callable[[], object]:
        x, w = torch.randn(_ROWS, weight.shape[1]).to(dtype), weight.to(dtype)
        return lambda: functional.linear(x, w)

    return prepare


def _engine(dtype: torch.dtype) -> Prepare:
    """The linear layer that the engine computes with instead of torch's, where it has one for the dtype here."""

    def prepare(weight: torch.Tensor) -> Callable[[], object] | None:
        from engine.model.packed import pack_linears

        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=dtype)
        packed, x = pack_linears(nn.Sequential(linear)), torch.randn(_ROWS, weight.shape[1]).to(dtype)
        return None if next(packed.children()) is linear else lambda: packed(x)

    return prepare


# The best of these is the limit.
GEMMS: dict[str, Prepare] = {
    "float32": _plain(torch.float32),
    "bfloat16": _plain(torch.bfloat16),
    "engine float32": _engine(torch.float32),
    "engine bfloat16": _engine(torch.bfloat16),
}


@torch.inference_mode()
def measure(costs: Costs) -> Limits:
    """Rates at the shapes of the model's linears, with all threads; the best of a few rounds. Takes some seconds."""
    best: dict[str, float] = {}
    for name, prepare in GEMMS.items():
        total = _gemm_seconds(costs, prepare, limit=_SLOW * min(best.values(), default=float("inf")))
        if total is not None:
            best[name] = total
    flops = 2.0 * _ROWS * costs.layers
    return Limits({name: flops / seconds for name, seconds in best.items()}, _bandwidth())


def _gemm_seconds(costs: Costs, prepare: Prepare, limit: float) -> float | None:
    """Seconds for `_ROWS` tokens through all linears; None where there is no such linear."""
    total = 0.0
    for shape, count in costs.linears:
        call = prepare(torch.randn(shape))
        if call is None:
            return None
        total += count * _best_seconds(call, rounds=1 if total > limit else _ROUNDS)
    return total


def _bandwidth() -> float:
    """Bytes a second that sums over memory read with all threads."""
    numbers = torch.ones(_STREAM_BYTES // 4)
    kinds = (numbers.sum, numbers.max, numbers.view(torch.float64).sum, lambda: torch.dot(numbers, numbers))
    return _STREAM_BYTES / min(_best_seconds(kind, _ROUNDS) for kind in kinds)


def _best_seconds(call: Callable[[], object], rounds: int) -> float:
    call()
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best
