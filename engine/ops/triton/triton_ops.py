"""The operations on a GPU in Triton: `Ops` that the models of transformers call layer by layer.

Made by `make_ops` where `probe_cache` allows it. Every step has a plan whose shapes can be fixed, so that graphs can
record it. Knows nothing of requests or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from engine.cache.groups import LayerGroup
from engine.execution.kv_tensors import KVTensors
from engine.ops.triton import probe_cache
from engine.ops.triton.plan import StepPlan
from engine.ops.triton.step_plans import StepPlans

if TYPE_CHECKING:
    from engine.sampling.kernels import SamplingKernels


class TritonOps(StepPlans):
    """`Ops` for a cache on a CUDA device, or on CPU in Triton's interpreter.

    Attributes:
        kv_shape: (kv_heads, head_dim) of the cache.
        supports_graphs: all of them.
        sampling: kernels for the sampler.

    Raises:
        NotImplementedError: the kernels do not run here, or not on such a cache; the text says why.
    """

    supports_graphs: tuple[bool, bool] = (True, True)

    def __init__(self, kv: KVTensors, groups: Sequence[LayerGroup] | None = None) -> None:
        if (why := probe_cache(kv.device, kv.dtype, kv.head_dim)) is not None:
            raise NotImplementedError(why)
        from engine.ops.triton import decode, prefill, rotary, sampling, tile, write

        super().__init__(kv, groups)
        self.sampling: SamplingKernels | None = sampling
        self._decode, self._prefill, self._rule = decode.decode, prefill.prefill, tile.ScoreRule.of
        self._write, self._rotate_and_write = write.write, rotary.rotate_and_write

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor, plan: StepPlan) -> None:
        """See `Ops.write_kv`."""
        group, tensor = self._places[layer]
        part = plan.groups[group]
        if part.paged:
            self._before_writing(group, tensor, part)
            self._write(_inner(key), _inner(value), self._kv.keys[tensor], self._kv.values[tensor], part)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: StepPlan,
        scaling: float | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Ops.attend`."""
        group, tensor = self._places[layer]
        keys, values = self._kv.keys[tensor], self._kv.values[tensor]
        if not plan.groups[group].paged:
            keys, values = key.to(keys.dtype).contiguous(), value.to(keys.dtype).contiguous()
        return self._attend(group, _inner(query), keys, values, plan.groups, (scaling, softcap), sinks)

    def rotate_and_attend(
        self,
        layer: int,
        projected: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        table: torch.Tensor,
        groups: Sequence[Any],
        *,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        epsilon: float,
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Norms, rotates, writes K and V and attends, for models that run fused.

        Args:
            projected: query [tokens, heads * dim], key and value [tokens, kv_heads * dim], the last dimension
                contiguous.
            positions, table, norms, epsilon: as of `rotate_and_write`.
            groups: of the step's plan.
            scaling, softcap: as of `Ops.attend`, whose result this has.
        """
        group, tensor = self._places[layer]
        cache = self._kv.keys[tensor], self._kv.values[tensor]
        self._before_writing(group, tensor, groups[group])
        rotated = self._rotate_and_write(*projected, positions, table, cache, groups[group], norms, epsilon)
        return self._attend(group, *rotated, groups, (scaling, softcap), None)

    def _before_writing(self, group: int, tensor: int, part: Any) -> None:
        """Called once for each layer of a step."""

    def _attend(
        self,
        group: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        groups: Sequence[Any],
        scores: tuple[float | None, float | None],
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        part, window = groups[group], self._windows[group]
        out = query.new_empty(query.shape)
        rule = self._rule(query.shape[2], *scores)
        sinks = None if sinks is None else sinks.contiguous()
        if part.capacity.splits:
            self._decode(query, keys, values, part, out, window=window, rule=rule, sinks=sinks)
        if part.capacity.chunked:
            self._prefill(query, keys, values, part, out, window=window, rule=rule, sinks=sinks)
        return out


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    """With a contiguous last dimension."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
