"""The fused decoder of GPUs: a known model's forward pass of matrix products and five or six other kernels a layer.

Made and called by the model runner, for models that families.py describes, on the Triton operations. Computes with the
parameters of the shadow's modules, so what is written into them counts at once; what is put in their place counts from
the next `refresh` on, as does what is written into norms. Knows nothing of requests.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from engine.model.families import Decoder, Layer, Norm, NotFusedError, rotary_lines
from engine.model.products import Product, refresh_products

if TYPE_CHECKING:
    from engine.ops.triton.triton_ops import TritonOps

logger = logging.getLogger(__name__)

_FEW, _PIECE = 16, 8192  # positions


class GpuDecoder:
    """Packed tokens in, logits out, through the cache of `ops`.

    Args:
        decoder: what `describe` returned.
        ops: bound to the cache, with the windows of its layers.
        positions: what a request has at most.
        own: the engine owns the model, and may move its parameters to other memory.

    Attributes:
        device: of the model.
        family: of the decoder.

    Raises:
        NotFusedError: the cache does not fit the model, or its positions are encoded in a way that is not known.
    """

    def __init__(self, decoder: Decoder, ops: TritonOps, positions: int, *, own: bool = False) -> None:
        if ops.kv_shape != (decoder.num_kv_heads, decoder.head_dim):
            raise NotFusedError(f"the cache is for {ops.kv_shape[0]} heads of {ops.kv_shape[1]}")
        for number, layer in enumerate(decoder.layers):
            if layer.window != ops.window(number):
                raise NotFusedError(f"layer {number} has a window of {layer.window}, the cache {ops.window(number)}")
        self._decoder, self._ops = decoder, ops
        self.device, self.family = decoder.head.weight.device, decoder.family
        self._tables = {rope: self._table(rope, positions) for rope in {layer.rope for layer in decoder.layers}}
        moved: set[int] | None = set() if own else None
        self._products = [self._make_products(layer, moved) for layer in decoder.layers]
        self._weights = [_NormWeights.of(layer) for layer in decoder.layers]
        self._final = decoder.norm.weight()

    def refresh(self) -> None:
        """Makes parameters that were replaced count, and what was written into norms, of which there are copies."""
        refresh_products([product for products in self._products for product in products.all()])
        # Recorded graphs read the copies where they are.
        weights = [_NormWeights.of(layer) for layer in self._decoder.layers]
        for old, new in zip(self._weights, weights, strict=True):
            for name in _NormWeights.__slots__:
                if (copy := getattr(old, name)) is not None:
                    copy.copy_(getattr(new, name))
        self._final.copy_(self._decoder.norm.weight())

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, groups: Sequence[Any]
    ) -> torch.Tensor:
        """Writes the step's K/V; the logits of `keep`, [kept, vocab_size] in the model's dtype.

        Args:
            ids, positions: int64 [tokens]; `keep`: int64 [kept].
            groups: what `ops` planned for each layer group.
        """
        from engine.ops.triton.gate import gated
        from engine.ops.triton.norms import add_norm, rms_norm

        decoder = self._decoder
        hidden = F.embedding(ids, decoder.embedding.weight)
        if decoder.embedding_scale != 1.0:
            hidden = hidden * decoder.embedding_scale
        first = self._weights[0].before_attention
        normed = hidden if first is None else rms_norm(hidden, first, decoder.epsilon)
        last = len(decoder.layers) - 1
        for number, (layer, products) in enumerate(zip(decoder.layers, self._products, strict=True)):
            weights = self._weights[number]
            attended = self._attend(number, normed, positions, groups)
            if number == last:  # behind it only rows whose logits are wanted go on
                attended, hidden = attended.index_select(0, keep), hidden.index_select(0, keep)
            (added,) = products.output(attended)
            hidden, normed = add_norm(hidden, added, weights.before_mlp, decoder.epsilon, weights.after_attention)
            gate, up = products.gate_up(normed)
            (added,) = products.down(gated(gate, up, layer.activation))
            following = self._final if number == last else self._weights[number + 1].before_attention
            hidden, normed = add_norm(hidden, added, following, decoder.epsilon, weights.after_mlp)
        logits = F.linear(normed, decoder.head.weight)
        cap = decoder.logits_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _attend(
        self, number: int, normed: torch.Tensor, positions: torch.Tensor, groups: Sequence[Any]
    ) -> torch.Tensor:
        """[tokens, heads * head_dim], before the output projection."""
        from engine.ops.triton.norms import rms_norm

        layer, weights = self._decoder.layers[number], self._weights[number]
        query, key, value = self._products[number].qkv(normed)
        norms = None
        if weights.query is not None and weights.key is not None:
            if len(weights.query) == self._decoder.head_dim:
                norms = weights.query, weights.key
            else:  # of all heads at once
                query = rms_norm(query, weights.query, self._decoder.epsilon)
                key = rms_norm(key, weights.key, self._decoder.epsilon)
        if layer.rope is None:
            positions = torch.zeros_like(positions)
        out = self._ops.rotate_and_attend(
            number,
            (query, key, value),
            positions,
            self._tables[layer.rope],
            groups,
            norms=norms,
            epsilon=self._decoder.epsilon,
            scaling=layer.scaling,
            softcap=layer.softcap,
        )
        return out.flatten(1)

    def _make_products(self, layer: Layer, moved: set[int] | None) -> _Products:
        try:
            products = _Products.of(layer, moved)
        except torch.OutOfMemoryError:
            logger.info("the projections of a layer stay apart: there is no memory to put them together in")
            products = _Products.of(layer, None)
        if moved and self.device.type == "cuda":
            torch.cuda.empty_cache()  # where the parameters were: the next layer's would not fit there
        return products

    def _table(self, rope: str | None, positions: int) -> torch.Tensor:
        """Float32 [positions, 2, pairs]; one line that turns nothing where positions are not encoded."""
        decoder = self._decoder
        if rope is None:
            pairs = decoder.head_dim // 2
            return torch.stack((torch.ones(pairs), torch.zeros(pairs)))[None].to(self.device)
        make = partial(rotary_lines, decoder, rope)
        few = torch.arange(min(positions, _FEW), device=self.device)
        first = make(few)
        lines = first.new_empty(positions, *first.shape[1:])
        for start in range(0, positions, _PIECE):  # the module takes several times the memory of what it makes
            lines[start : start + _PIECE] = make(
                torch.arange(start, min(start + _PIECE, positions), device=self.device)
            )
        # Some change with the largest position of a call, beyond a limit that no request may reach.
        beside_last = make(torch.cat((few, few.new_tensor([positions - 1]))))[:-1]
        if not all(torch.allclose(lines[few], other, atol=1e-3) for other in (first, beside_last)):
            raise NotFusedError("its rotary frequencies change with the context")
        return lines


@dataclass(frozen=True, slots=True)
class _Products:
    """Of one layer."""

    qkv: Product
    output: Product
    gate_up: Product
    down: Product

    @classmethod
    def of(cls, layer: Layer, moved: set[int] | None) -> _Products:
        return cls(
            Product(layer.query, layer.key, layer.value, moved=moved),
            Product(layer.output),
            Product(layer.gate, layer.up, moved=moved),
            Product(layer.down),
        )

    def all(self) -> tuple[Product, ...]:
        return self.qkv, self.output, self.gate_up, self.down


@dataclass(slots=True)
class _NormWeights:
    """Float32, of one layer; None: there is no such norm."""

    before_attention: torch.Tensor | None
    after_attention: torch.Tensor | None
    before_mlp: torch.Tensor | None
    after_mlp: torch.Tensor | None
    query: torch.Tensor | None
    key: torch.Tensor | None

    @classmethod
    def of(cls, layer: Layer) -> _NormWeights:
        """Copies of a layer's."""
        norms = layer.before_attention, layer.after_attention, layer.before_mlp, layer.after_mlp
        return cls(*map(_weight, (*norms, layer.query_norm, layer.key_norm)))


def _weight(norm: Norm | None) -> torch.Tensor | None:
    return None if norm is None else norm.weight().clone()
