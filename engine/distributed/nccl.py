"""What NCCL must be told, and spared, where several processes record their steps as CUDA graphs.

The switch is thrown when a config is made, before the processes connect; the shadow of a shared model is kept in order
when a runner is made. Importing this loads no torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_MIXING = "NCCL_GRAPH_MIXING_SUPPORT"


def disable_graph_mixing() -> None:
    """Tell NCCL that while a CUDA graph with its operations runs, none is launched outside of graphs: steps get faster.

    Only in a process of several, and only where the user has not set it. NCCL reads it when processes connect, so a
    config made after the model was loaded comes too late.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        os.environ.setdefault(_MIXING, "0")


def keep_graphs_apart(model: nn.Module) -> None:
    """Keeps what NCCL was told: a forward pass that is not being recorded waits for the graphs launched before it.

    So a step that is not replayed begins once the device has done the one before.

    Args:
        model: the engine's own, which no compiled kernel replaces; on a CUDA device.
    """
    import torch

    @torch.compiler.disable
    def wait(*_: Any) -> None:
        if os.environ.get(_MIXING) == "0" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()

    model.register_forward_pre_hook(wait)
