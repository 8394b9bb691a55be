"""One switch of NCCL, thrown before the processes connect. Called when a config is made; loads no torch."""

from __future__ import annotations

import os


def disable_graph_mixing() -> None:
    """Tell NCCL that it is used either inside CUDA graphs or outside, never both: steps get faster that way.

    Only in a process of several, and only where the user has not set it. NCCL reads it when processes connect, so a
    config made after the model was loaded comes too late.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
