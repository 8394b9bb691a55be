"""The shadow's forward pass on packed tokens, and how a step's arrays get to the device.

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

    Attributes:
        device: of the model.
    """

    def __init__(self, model: nn.Module, ops: Ops, num_layers: int, run: Callable[..., Any] | None = None) -> None:
        self.device = next(model.parameters()).device
        self._name = type(model).__name__
        self._run = model if run is None else run
        self._ops = ops
        self._num_layers = num_layers

    def __call__(self, inputs: DeviceInputs, plan: Any) -> torch.Tensor:
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
    """`Forward` for models that run in the kernels of their device.

    Attributes:
        device: of the model.
    """

    def __init__(self, decoder: FusedDecoder | GpuDecoder) -> None:
        self.device = decoder.device
        self._decoder = decoder

    def __call__(self, inputs: DeviceInputs, plan: Any) -> torch.Tensor:
        """As `Forward`; on CPU float32, valid until the next call.

        Raises:
            IndexError: on CPU, an id is not in the vocabulary.
        """
        return self._decoder(inputs.input_ids, inputs.position_ids, inputs.keep, plan.groups)


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """Views of one int64 vector on the device, one after another: [tokens], [tokens], [kept]."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    keep: torch.Tensor

    @classmethod
    def of(cls, vector: torch.Tensor, tokens: int, kept: int) -> DeviceInputs:
        """Views of the first numbers of `vector`."""
        return cls(vector[:tokens], vector[tokens : 2 * tokens], vector[2 * tokens : 2 * tokens + kept])

    def carry(self, inputs: InputBatch, previous_ids: torch.Tensor | None) -> None:
        """Put the tokens that the step before has sampled where they belong, on the device.

        Raises:
            RuntimeError: tokens are to be carried and that step was not sampled.
        """
        if inputs.carried is None:
            return
        if previous_ids is None:
            raise RuntimeError("a step needs tokens of the step before, which was not sampled")
        device = self.input_ids.device
        at, source = (torch.from_numpy(each).to(device) for each in (inputs.carried.at, inputs.carried.source))
        self.input_ids.index_copy_(0, at, previous_ids.index_select(0, source))


def as_vector(inputs: InputBatch, tokens: int, kept: int) -> torch.Tensor:
    """The arrays in the order of `DeviceInputs`, on the host, padded with zeros to `tokens` and `kept`."""
    vector = np.zeros(2 * tokens + kept, dtype=np.int64)
    vector[: inputs.num_tokens] = inputs.input_ids
    vector[tokens : tokens + inputs.num_tokens] = inputs.position_ids
    vector[2 * tokens : 2 * tokens + len(inputs.keep)] = inputs.keep
    return torch.from_numpy(vector)
