"""The shadow's forward pass on packed tokens, and what it is given of a step.

Used by the paths. Knows tensors and the step's plan; nothing of requests or recorded graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from engine.execution.input_batch import InputBatch
from engine.model.attention import CONTEXT_ARGUMENT, StepContext
from engine.ops.interface import Ops

if TYPE_CHECKING:
    from engine.model.gpu_layer import GpuDecoder
    from engine.model.layer import FusedDecoder


class Forward:
    """Packed tokens and a plan in, logits out.

    Args:
        model: what `make_shadow` returned.
        ops: what the plans are for.
        num_layers: attention layers that every pass must go through.
        run: what is called in the place of `model`, for example its compiled form.
    """

    def __init__(self, model: nn.Module, ops: Ops, num_layers: int, run: Callable[..., Any] | None = None) -> None:
        self._name = type(model).__name__
        self._run = model if run is None else run
        self._ops = ops
        self._num_layers = num_layers

    def __call__(self, inputs: StepInputs, plan: Any) -> torch.Tensor:
        """Writes the step's K/V and returns the logits of `inputs.keep`, [kept, vocab_size] in the model's dtype.

        Raises:
            NotImplementedError: not every layer ran the engine's attention.
        """
        context = StepContext(self._ops, plan)
        arguments: dict[str, Any] = {CONTEXT_ARGUMENT: context}
        output = self._run(
            input_ids=inputs.input_ids[None],
            position_ids=inputs.position_ids[None],
            use_cache=False,
            logits_to_keep=inputs.keep,
            **arguments,
        )
        if context.layers != self._num_layers:
            raise NotImplementedError(
                f"{context.layers} of {self._num_layers} layers of {self._name} ran the engine's attention; the engine "
                "cannot run this architecture"
            )
        logits: torch.Tensor = output.logits[0]
        return logits


class FusedForward:
    """`Forward` for models that run in the kernels of their device."""

    def __init__(self, decoder: FusedDecoder | GpuDecoder) -> None:
        self._decoder = decoder

    def __call__(self, inputs: StepInputs, plan: Any) -> torch.Tensor:
        """As `Forward`; on CPU float32, valid until the next call.

        Raises:
            IndexError: on CPU, an id is not in the vocabulary.
        """
        return self._decoder(inputs.input_ids, inputs.position_ids, inputs.keep, plan.groups)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a model is given of a step, padded with zeros; int64.

    Attributes:
        ids: [tokens + 1]; the last one is nobody's: where there is less to carry than room for it, that goes there.
        position_ids: [tokens].
        keep: [kept], tokens whose logits are wanted.
        carried_to, carried_from: [kept], where in `ids` tokens belong that the step before has sampled, and which of
            its rows each is.
    """

    ids: torch.Tensor
    position_ids: torch.Tensor
    keep: torch.Tensor
    carried_to: torch.Tensor
    carried_from: torch.Tensor

    @classmethod
    def of(cls, inputs: InputBatch, tokens: int, kept: int) -> StepInputs:
        """On the host, for so many tokens and kept rows, at least as many as there are."""
        to, source = np.full(kept, tokens, dtype=np.int64), np.zeros(kept, dtype=np.int64)
        if inputs.carried is not None:
            to[: len(inputs.carried.at)] = inputs.carried.at
            source[: len(inputs.carried.source)] = inputs.carried.source
        arrays = _padded(inputs.input_ids, tokens + 1), _padded(inputs.position_ids, tokens), _padded(inputs.keep, kept)
        return cls(*(torch.from_numpy(array) for array in (*arrays, to, source)))

    @property
    def input_ids(self) -> torch.Tensor:
        """[tokens]."""
        return self.ids[:-1]

    def carry(self, previous_ids: torch.Tensor) -> None:
        """Put the tokens that the step before has sampled where they belong. On the device."""
        self.ids.index_copy_(0, self.carried_to, previous_ids.index_select(0, self.carried_from))


def carried_ids(inputs: InputBatch, previous_ids: torch.Tensor | None) -> torch.Tensor | None:
    """`previous_ids` where the step needs some of them.

    Raises:
        RuntimeError: it does, and that step was not sampled.
    """
    if inputs.carried is None:
        return None
    if previous_ids is None:
        raise RuntimeError("a step needs tokens of the step before, which was not sampled")
    return previous_ids


def _padded(array: np.ndarray, size: int) -> np.ndarray:
    """A copy with zeros behind."""
    padded = np.zeros(size, dtype=np.int64)
    padded[: len(array)] = array
    return padded
