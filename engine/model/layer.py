"""The fused decoder of CPUs: a whole forward pass of a known model as one tape of compiled kernels.

Made and called by the model runner, for models that families.py describes, on CPU. Reads the parameters that the
shadow's modules have, when it is made and at each `refresh`; keeps packed copies of the matrices and float32 copies of
all else. Knows nothing of requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from engine.memory import available_memory
from engine.model.families import Decoder, Layer, Norm, NotFusedError, Rows, rotary_lines
from engine.model.file_pages import release_file_pages
from engine.ops.cpu.cpu_ops import CpuOps
from engine.ops.cpu.layers import HeadNorms, gather_op, norm_op, rotate_op
from engine.ops.cpu.library import Op, Step, Tape
from engine.ops.cpu.linear import PackedWeight, activation_dtype, embed_op, linear_op

_MEMORY_SHARE = 4  # the copies may take 1/4 of the memory that is free
_PIECE = 1024  # positions whose cosines and sines are made at once
_ALIGNMENT = 64


class FusedDecoder:
    """Packed tokens in, logits out, through the cache of `ops`.

    Args:
        decoder: what `describe` returned.
        ops: bound to the cache, with the windows of its layers.
        tokens, kept, positions: what a step has at most; where one has more, buffers grow.
        quantize: matrices are kept in 8 bits.
        release: the model's matrices are given up once all are copied.

    Attributes:
        family: of the decoder.

    Raises:
        NotFusedError: the cache does not fit the model, or the copies do not fit the memory.
    """

    def __init__(
        self,
        decoder: Decoder,
        ops: CpuOps,
        tokens: int,
        kept: int,
        positions: int,
        *,
        quantize: bool = False,
        release: bool = False,
    ) -> None:
        if ops.kv_shape != (decoder.num_kv_heads, decoder.head_dim):
            raise NotFusedError(f"the cache is for {ops.kv_shape[0]} heads of {ops.kv_shape[1]}")
        for number, layer in enumerate(decoder.layers):
            if layer.window != ops.window(number):
                raise NotFusedError(f"layer {number} has a window of {layer.window}, the cache {ops.window(number)}")
        if not release:
            _check_memory(decoder)
        self._decoder, self._ops = decoder, ops
        self.family = decoder.family
        self._quantize, self._release = quantize, release
        self._floats: list[_Floats] = []
        self._layers = [self._copy_layer(layer) for layer in decoder.layers]
        self._norm = self._copy_norm(decoder.norm)
        self._copy_head()
        self._ropes = {
            rope: RotaryTable(lambda at, rope=rope: rotary_lines(decoder, rope, at), positions)  # type: ignore[misc]
            for rope in {layer.rope for layer in decoder.layers}
            if rope is not None
        }
        self._tokens, self._kept = tokens, kept
        self._build()
        if release:
            release_file_pages([decoder.head.weight, decoder.embedding.weight])  # the file stays mapped for the norms
            for module in self._packed_modules():
                module.weight.data = module.weight.data.new_empty(0)  # for everybody who has it

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, groups: Any) -> torch.Tensor:
        """Writes the step's K/V; the logits of `keep`, float32 [kept, vocab_size], valid until the next call.

        Args:
            ids, positions: int64 [tokens]; `keep`: int64 [kept].
            groups: `GroupRows` of every layer group.

        Raises:
            IndexError: an id is not in the vocabulary.
        """
        tokens, kept = len(ids), len(keep)
        vocabulary = self._embedding.out_features
        if tokens and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise IndexError(f"a token id is not in the vocabulary of {vocabulary}")
        self._reserve(tokens, kept, int(positions.max()) + 1 if tokens else 0)
        step = Step(tokens, kept, ids.data_ptr(), positions.data_ptr(), keep.data_ptr(), groups)
        self._tape.run(step, torch.get_num_threads())
        return self._logits[:kept]

    def refresh(self) -> None:
        """Copies again what has changed, but for what the model has given up. Cost: one read of the weights."""
        for floats in self._floats:
            floats.refresh()
        if self._release:
            return
        if (self._embedding is self._head) != self._decoder.is_tied:
            self._copy_head()
            self._build()
        for weight in {self._embedding, self._head, *(part for layer in self._layers for part in layer.weights)}:
            weight.refresh()

    def _packed_modules(self) -> Iterator[nn.Linear | nn.Embedding]:
        for layer in self._decoder.layers:
            yield from (part.linear for part in _projections(layer))
        yield from (self._decoder.head, self._decoder.embedding)

    def ops(self) -> list[Op]:
        """The tape's, in their order; valid until the next call."""
        return self._list

    # Copies of parameters

    def _copy_layer(self, layer: Layer) -> _LayerCopies:
        inputs = (layer.query, layer.key, layer.value)
        heads = None
        if layer.query_norm is not None and layer.key_norm is not None:
            weights = self._copy_norm(layer.query_norm), self._copy_norm(layer.key_norm)
            heads = HeadNorms(*weights, self._decoder.epsilon)
        copies = _LayerCopies(
            qkv=self._pack(*inputs),
            output=self._pack(layer.output),
            gate_up=self._pack(layer.gate, layer.up, interleave=True),
            down=self._pack(layer.down),
            qkv_bias=self._copy_bias(*inputs),
            output_bias=self._copy_bias(layer.output),
            gate_up_bias=self._copy_bias(layer.gate, layer.up),
            down_bias=self._copy_bias(layer.down),
            before_attention=self._copy_norm(layer.before_attention),
            after_attention=self._copy_norm(layer.after_attention),
            before_mlp=self._copy_norm(layer.before_mlp),
            after_mlp=self._copy_norm(layer.after_mlp),
            heads=heads,
        )
        if self._release:
            release_file_pages(part.linear.weight for part in _projections(layer))  # else there are two copies
        return copies

    def _copy_head(self) -> None:
        """A head that shares the embedding's parameter shares its copy."""
        decoder = self._decoder
        self._head = self._pack(Rows(decoder.head, 0, decoder.head.out_features))
        self._embedding = self._head
        if not decoder.is_tied:
            self._embedding = PackedWeight([lambda: decoder.embedding.weight])

    def _pack(self, *parts: Rows, interleave: bool = False) -> PackedWeight:
        return PackedWeight([part.weight for part in parts], self._quantize, interleave)

    def _copy_norm(self, norm: Norm | None) -> Any:
        return None if norm is None else self._copy_floats(norm.weight)

    def _copy_bias(self, *parts: Rows) -> torch.Tensor | None:
        if all(part.bias() is None for part in parts):
            return None

        def joined() -> torch.Tensor:
            biases = [(part.bias(), part.last - part.first) for part in parts]
            return torch.cat([torch.zeros(size) if bias is None else bias.float() for bias, size in biases])

        return self._copy_floats(joined)

    def _copy_floats(self, source: Callable[[], torch.Tensor]) -> torch.Tensor:
        floats = _Floats(source)
        self._floats.append(floats)
        return floats.copy

    # The tape

    def _reserve(self, tokens: int, kept: int, positions: int) -> None:
        for rope in self._ropes.values():
            if rope.cover(positions):
                self._tokens = max(self._tokens, tokens)
                self._build()
        if tokens > self._tokens or kept > self._kept:
            self._tokens, self._kept = max(self._tokens, tokens), max(self._kept, kept)
            self._build()

    def _build(self) -> None:
        all_rows, kept_rows = (_Buffers(self._decoder, count) for count in (self._tokens, self._kept))
        self._logits = zeros((self._kept, self._head.out_features), torch.float32)
        self._list = list(self._make_ops(all_rows, kept_rows))
        self._tape = Tape(self._list)

    def _make_ops(self, rows: _Buffers, kept: _Buffers) -> Iterator[Op]:
        """Behind the attention of the last layer only rows whose logits are wanted go on."""
        epsilon = self._decoder.epsilon
        yield embed_op(self._embedding, rows.hidden, scale=self._decoder.embedding_scale)
        added: dict[str, Any] = {}  # what the next norm adds to the residual stream
        for number, (layer, copies) in enumerate(zip(self._decoder.layers, self._layers, strict=True)):
            yield norm_op(rows.hidden, rows.normed, weight=copies.before_attention, epsilon=epsilon, **added)
            yield from self._attention_ops(number, layer, copies, rows)
            is_last = number == len(self._layers) - 1
            if is_last:
                yield gather_op(rows.attended, kept.attended)
                yield gather_op(rows.hidden, kept.hidden)
                rows = kept
            op, added = _add(copies.output, rows.attended, rows, copies.output_bias, copies.after_attention, is_last)
            yield op
            weight = copies.before_mlp
            yield norm_op(rows.hidden, rows.normed, weight=weight, epsilon=epsilon, kept=is_last, **added)
            bias, act = copies.gate_up_bias, layer.activation
            yield linear_op(copies.gate_up, rows.normed, rows.gated, bias=bias, kept=is_last, act=act)
            op, added = _add(copies.down, rows.gated, rows, copies.down_bias, copies.after_mlp, is_last)
            yield op
        yield norm_op(rows.hidden, rows.normed, weight=self._norm, epsilon=epsilon, kept=True, **added)
        yield linear_op(self._head, rows.normed, self._logits, kept=True, softcap=self._decoder.logits_softcap)

    def _attention_ops(self, number: int, layer: Layer, copies: _LayerCopies, rows: _Buffers) -> Iterator[Op]:
        decoder = self._decoder
        heads, kv_heads, dim = decoder.num_heads, decoder.num_kv_heads, decoder.head_dim
        yield linear_op(copies.qkv, rows.normed, rows.qkv, bias=copies.qkv_bias)
        table = None if layer.rope is None else self._ropes[layer.rope].lines
        if table is not None or copies.heads is not None:
            yield rotate_op(rows.qkv, heads, kv_heads, dim, table=table, norms=copies.heads)
        query, key, value = rows.qkv.view(-1, heads + 2 * kv_heads, dim).split((heads, kv_heads, kv_heads), dim=1)
        yield self._ops.write_op(number, key, value)
        yield self._ops.attend_op(number, query, rows.attended, scaling=layer.scaling, softcap=layer.softcap)


@dataclass(frozen=True, slots=True)
class _LayerCopies:
    """What is computed with in the place of a layer's parameters."""

    qkv: PackedWeight
    output: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    qkv_bias: torch.Tensor | None
    output_bias: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    before_attention: torch.Tensor | None
    after_attention: torch.Tensor | None
    before_mlp: torch.Tensor | None
    after_mlp: torch.Tensor | None
    heads: HeadNorms | None

    @property
    def weights(self) -> tuple[PackedWeight, ...]:
        return self.qkv, self.output, self.gate_up, self.down


def _add(
    weight: PackedWeight, x: torch.Tensor, rows: _Buffers, bias: torch.Tensor | None, norm: Any, kept: bool
) -> tuple[Op, dict[str, Any]]:
    """A projection onto the residual stream, and what is left for the next norm to add, since it is normed before."""
    if norm is None:
        return linear_op(weight, x, rows.hidden, bias=bias, kept=kept, add=True), {}
    return linear_op(weight, x, rows.delta, bias=bias, kept=kept), {"added": rows.delta, "added_weight": norm}


class _Buffers:
    """What `count` rows pass through between kernels; memory is taken as it is written to."""

    def __init__(self, decoder: Decoder, count: int) -> None:
        dtype = activation_dtype(decoder.head.weight.dtype)
        width, layer = decoder.head.in_features, decoder.layers[0]
        heads, kv_heads, dim = decoder.num_heads, decoder.num_kv_heads, decoder.head_dim
        self.hidden = zeros((count, width), torch.float32)  # the residual stream
        self.delta = zeros((count, width), torch.float32)
        self.normed = zeros((count, width), dtype)
        self.qkv = zeros((count, (heads + 2 * kv_heads) * dim), dtype)
        self.attended = zeros((count, heads * dim), dtype)
        self.gated = zeros((count, layer.gate.last - layer.gate.first), dtype)


class _Floats:
    """A float32 copy of small parameters, at an address that stays."""

    def __init__(self, source: Callable[[], torch.Tensor]) -> None:
        self._source = source
        self.copy = source().clone()

    def refresh(self) -> None:
        self.copy.copy_(self._source())


class RotaryTable:
    """Cosines and sines of positions, made as far as they are used.

    Args:
        make: int64 [n] positions -> float32 [n, 2, pairs].
        positions: for how many there is room at first.

    Attributes:
        lines: float32 [positions, 2, pairs].
    """

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor], positions: int) -> None:
        self._make = make
        self._pairs = make(torch.arange(1)).shape[2]
        self._made, self._limit = 0, positions
        self.lines = zeros((positions, 2, self._pairs), torch.float32)

    def cover(self, positions: int) -> bool:
        """Makes what is missing of the first `positions` lines; whether `lines` is another tensor now."""
        grows = positions > len(self.lines)
        if grows:
            old, self.lines = self.lines, zeros((2 * positions, 2, self._pairs), torch.float32)
            self.lines[: self._made] = old[: self._made]
        while self._made < positions:
            # Frequencies may change with the largest position of a call, so none beyond the context is asked for.
            end = min(self._made + _PIECE, max(positions, self._limit))
            self.lines[self._made : end] = self._make(torch.arange(self._made, end))
            self._made = end
        return grows


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Aligned zeros that the system gives page by page, as they are written to."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    with torch.inference_mode(False):
        return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)


def _check_memory(decoder: Decoder) -> None:
    layer_rows = (r for layer in decoder.layers for r in _projections(layer))
    matrices = [part.weight() for part in layer_rows]
    tables = [decoder.head.weight] if decoder.is_tied else [decoder.head.weight, decoder.embedding.weight]
    size = sum(matrix.nbytes for matrix in (*matrices, *tables))
    memory = available_memory("cpu")
    if memory is not None and size > memory // _MEMORY_SHARE:
        raise NotFusedError(
            f"packed weights take {size / 2**30:.1f} GiB, more than 1/{_MEMORY_SHARE} of the {memory / 2**30:.1f} GiB "
            "of memory that are free"
        )


def _projections(layer: Layer) -> tuple[Rows, ...]:
    return layer.query, layer.key, layer.value, layer.output, layer.gate, layer.up, layer.down
