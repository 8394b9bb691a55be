"""What sizes and plans depend on of a model. Made from a model by `engine.model.shadow`; knows no model itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelFacts:
    """What sizing needs to know of a model.

    Attributes:
        num_layers: layers with a KV cache.
        num_kv_heads: of one attention layer in this process.
        num_heads, head_dim: of one attention layer of the whole model.
        dtype_bytes: bytes of one K or V number.
        context_length: positions the model knows; None when its config does not say.
        vocab_size: rows of the embedding, which is also the width of the logits.
        device_type: "cpu", "cuda", ...
        windows: of each layer: tokens that a query sees, itself included; None sees all.
        device_index: which device of that type; None for the current one.
    """

    num_layers: int
    num_kv_heads: int
    num_heads: int
    head_dim: int
    dtype_bytes: int
    context_length: int | None
    vocab_size: int
    device_type: str
    windows: tuple[int | None, ...]
    device_index: int | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token over all layers, bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes
