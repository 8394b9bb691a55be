"""Notices where a model's own forward pass has the host wait for the device, which no recorded graph can contain.

Used by profiling, on a CUDA device, for models that do not run in the engine's kernels. Routers that count tokens and
rotary frequencies that follow the longest row do so.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

_WARNING = "synchronizing CUDA operation"


class WaitWatch:
    """Watches the forward passes of one module.

    Attributes:
        waits: whether the last one waited; False before there was one.
    """

    def __init__(self) -> None:
        self.waits = False
        self._context = ExitStack()
        self._warned: list[warnings.WarningMessage] = []

    def attach(self, module: nn.Module) -> None:
        """From now on its passes are watched."""
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end, always_call=True)

    def _begin(self, *_: Any) -> None:
        self._warned = self._context.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        self._context.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
        torch.cuda.set_sync_debug_mode("warn")

    def _end(self, *_: Any) -> None:
        self._context.close()
        self.waits = any(_WARNING in str(each.message) for each in self._warned)
