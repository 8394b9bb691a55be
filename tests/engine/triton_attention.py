"""What the tests of the Triton attention kernels run in the interpreter's process: caches, steps and their errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from engine.cache.groups import LayerGroup
from engine.execution.kv_tensors import allocate
from engine.execution.staging import Staging, to_device
from engine.ops import triton
from engine.ops.interface import PackedRows
from engine.ops.triton import probe
from engine.ops.triton.triton_ops import TritonOps
from tests.engine.tables import packed_rows
from tests.engine.test_ops_attention import Sequences

Growth = list[tuple[int, int]]


class Filled(Sequences):
    """`Sequences` whose first tokens are put into the cache by plain copies: only what is tested is interpreted."""

    def add(self, *lengths: int) -> None:
        for length in lengths:
            sequence = self.new()
            self.keys[sequence], self.values[sequence] = self.random_kv(length)
            table = self.tables[sequence]
            table += [self.free.pop(0) for _ in range(-(-length // self.page))]
            for caches, new in ((self.kv.keys, self.keys), (self.kv.values, self.values)):
                for index, block in enumerate(table):
                    part = new[sequence][:, index * self.page : (index + 1) * self.page]
                    caches[0][block, :, : part.shape[1]] = part


def errors_of(lengths: list[int], steps: list[Growth], scaling: float | None = None, **options: Any) -> list[float]:
    """The largest error of each sequence in each step; the rest of the cache is NaN."""
    sequences = Filled(TritonOps, **options)
    sequences.add(*lengths)
    errors = [error for step in steps for error in sequences.step(step, scaling).values()]
    if sequences.kv.keys[0][0].any() or sequences.kv.values[0][0].any():
        raise AssertionError("the null block was written to")
    return errors


def errors_beside_a_row_of_nan() -> tuple[float, list[float]]:
    """The error of a row whose new K and V are NaN; those of its neighbours, and of who gets its blocks later."""
    sequences = Filled(TritonOps, 16)
    sequences.add(30, 5, 0)
    key, value = sequences.random_kv(24)
    key[:, 4:], value[:, 4:] = float("nan"), float("nan")
    errors = sequences.step([(0, 1), (1, 3), (2, 20)], kv=(key, value))
    own, others = errors.pop(2), list(errors.values())
    sequences.drop(2)
    sequences.add(0, 0)
    for _ in range(2):
        others += sequences.step([(0, 1), (1, 1), (3, 17), (4, 1)]).values()
    return own, others


def error_without_cache(window: int | None) -> tuple[float, bool]:
    """Of rows that see themselves alone, and whether the cache is what it was."""
    sequences = Filled(TritonOps, 16, window=window)
    query, key, value = (sequences.random(heads, 9) for heads in (4, 2, 2))
    rows = packed_rows(np.array([0, 0]), np.array([1, 8]), np.array([0, 1]), None, 0)
    plan = sequences.ops.plan(rows)
    sequences.ops.write_kv(0, key, value, plan)
    out = sequences.ops.attend(0, query.transpose(0, 1), key, value, plan, None)
    sequences.new()
    sequences.keys[0], sequences.values[0] = key[:, 1:], value[:, 1:]
    error = (out[1:].double() - sequences.expected(0, query.transpose(0, 1)[1:], None)).abs().max().item()
    return error, bool(sequences.kv.keys[0][1:].isnan().all())


# Plans of fixed shapes


@dataclass
class Step:
    """Rows of one step by their contexts before it and their new tokens; those of one token first."""

    starts: list[int]
    counts: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.counts)


class Cache:
    """One layer's cache in which the same row always holds the same numbers; all else is NaN."""

    heads, kv_heads, dim, page, row_blocks = 3, 1, 16, 4, 150

    def __init__(
        self,
        rows: int,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        blocks = rows * self.row_blocks
        self.kv = allocate(1, blocks, self.kv_heads, self.page, self.dim, dtype, device, trash=True)
        self.window, self.trash = window, self.kv.num_blocks_allocated - 1
        self.ops = TritonOps(self.kv, [LayerGroup((0,), window)])
        generator = torch.Generator().manual_seed(0)
        for tensor in (self.kv.keys[0], self.kv.values[0]):
            tensor[1:] = torch.randn(tensor[1:].shape, generator=generator).to(dtype)

    def rows(self, step: Step, of: list[int]) -> PackedRows:
        """The rows `of` the cache; what lies behind their contexts is NaN now."""
        tables = [list(range(1 + row * self.row_blocks, 1 + (row + 1) * self.row_blocks)) for row in of]
        for table, start in zip(tables, step.starts, strict=True):
            for tensor in (self.kv.keys[0], self.kv.values[0]):
                tensor[table[start // self.page], :, start % self.page :] = float("nan")
                tensor[table[start // self.page + 1] : table[-1] + 1] = float("nan")
        counts = np.array(step.counts)
        return packed_rows(np.array(step.starts), counts, np.cumsum(counts) - counts, [tables], step.counts.count(1))

    def run(self, plan: Any, step: Step, of: list[int], tokens: int) -> torch.Tensor:
        """The step's first tokens are those that the rows `of` the cache always have; others are random."""
        generator = torch.Generator().manual_seed(1)
        numbers = torch.randn(tokens, self.heads + 2 * self.kv_heads, self.dim, generator=generator)
        at = 0
        for row, start, count in zip(of, step.starts, step.counts, strict=True):
            own = torch.Generator().manual_seed(1000 * row + start)
            numbers[at : at + count] = torch.randn(count, *numbers.shape[1:], generator=own)
            at += count
        query, key, value = numbers.to(self.kv.device, self.kv.dtype).split(
            (self.heads, self.kv_heads, self.kv_heads), dim=1
        )
        key, value, plan = key.transpose(0, 1), value.transpose(0, 1), to_device(plan, self.kv.device)
        self.ops.write_kv(0, key, value, plan)
        return self.ops.attend(0, query, key, value, plan, None)


def alone_and_together(step: Step, window: int | None, dtype: torch.dtype, device: torch.device | str = "cpu") -> bool:
    """Whether each row gives the same bits alone and beside the others."""
    of = list(range(len(step.starts)))
    cache = Cache(len(of), window, dtype, device)
    together = cache.run(cache.ops.plan(cache.rows(step, of)), step, of, step.tokens)
    at, same = 0, True
    for row, start, count in zip(of, step.starts, step.counts, strict=True):
        cache, one = Cache(len(of), window, dtype, device), Step([start], [count])
        alone = cache.run(cache.ops.plan(cache.rows(one, [row])), one, [row], count)
        same &= torch.equal(alone, together[at : at + count])
        at += count
    return same and bool(together.isfinite().all())


def replayed(steps: list[Step], kind: str, window: int | None, device: torch.device | str = "cpu") -> list[bool]:
    """Whether a plan of fixed shapes, made once and given each step's numbers, has the bits of an exact plan."""
    staging = Staging(torch.device(device))
    static, same = None, []
    for step in steps:
        of = list(range(len(step.starts)))
        exact, fixed = (Cache(len(of), window, device=device) for _ in range(2))
        expected = exact.run(exact.ops.plan(exact.rows(step, of)), step, of, step.tokens)
        rows = fixed.rows(step, of)
        if kind == "decode":
            tokens, plan = 4, fixed.ops.plan_decode(rows, 4, fixed.row_blocks)
        else:
            tokens, plan = step.tokens, fixed.ops.plan_mixed(rows, step.tokens, 2048, 6, 2048)
        if static is None:
            static, memory = staging.send(plan)
        else:
            staging.send_again(static, memory, plan)
        out = fixed.run(static, step, of, tokens)
        same.append(torch.equal(out[: step.tokens], expected) and bool(out.isfinite().all()))
        others = [row * fixed.row_blocks + 1 + step.starts[row] // fixed.page + step.counts[row] for row in of]
        same.append(all(bool(fixed.kv.keys[0][block].isnan().all()) for block in others))
        same.append(not fixed.kv.keys[0][0].any())
    return same


def sampling_of_ops() -> list[bool]:
    """Whether Triton's ops have kernels for the sampler, plain ones on CPU none; whether the latter alone are plain."""
    from engine.ops.interface import PlainOps
    from engine.ops.torch_ops import TorchOps
    from engine.ops.triton import sampling

    kv = allocate(1, 4, 1, 4, 16, torch.float32)
    own, plain = TritonOps(kv), TorchOps(kv)
    return [own.sampling is sampling, plain.sampling is None, isinstance(plain, PlainOps), isinstance(own, PlainOps)]


def unusable() -> list[str | None]:
    """What is said of a CPU with and without the interpreter, another device, a dtype and a head that are not known."""
    said = [probe(torch.device("cpu")), probe(torch.device("meta"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET")
        said.insert(1, probe(torch.device("cpu")))
    for dim, dtype in ((16, torch.float64), (512, torch.float32)):
        try:
            TritonOps(allocate(1, 4, 1, 4, dim, dtype))
            said.append("nothing")
        except NotImplementedError as error:
            said.append(str(error))
    return said


def failing() -> list[str | None]:
    """What is said where the first kernel cannot be built, or gives other numbers."""
    said = []
    for kernel in (lambda *given: 1 / 0, lambda x, *given: x):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("engine.ops.triton.norms.rms_norm", kernel)
            triton._try_out.cache_clear()
            said.append(probe(torch.device("cpu")))
    triton._try_out.cache_clear()
    return said


def refusals() -> list[str]:
    """What plans that cannot be made say."""
    cache, said = Cache(3), []
    rows = cache.rows(Step([23, 8, 4], [1, 1, 1]), [0, 1, 2])
    longer = cache.rows(Step([0], [2]), [0])
    for refused in (
        lambda: cache.ops.plan_decode(rows, 2, 9),
        lambda: cache.ops.plan_decode(rows, 4, 5),
        lambda: cache.ops.plan_decode(longer, 4, 9),
        lambda: cache.ops.plan_mixed(rows, 2, 64, 3, 64),
        lambda: cache.ops.plan(packed_rows(np.array([4]), np.array([1]), np.array([0]), [[[5]]], 1)),
        lambda: cache.ops.plan(packed_rows(np.array([4]), np.array([1]), np.array([0]), [[[5, 0]]], 1)),
    ):
        try:
            refused()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said
