"""Convoy's engine: continuous batching of any causal language model of transformers on a paged KV cache.

The public names, loaded on first use, so that importing `engine` itself costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import ContinuousBatchingConfig, WorkloadHints
    from engine.generate import (
        continuous_batching_context_manager,
        destroy_cached_continuous_batching_manager,
        generate_batch,
        init_continuous_batching,
    )
    from engine.manager import ContinuousBatchingManager
    from engine.outputs import GenerationOutput
    from engine.request import FinishReason, RequestStatus, TokenLogprobs
    from engine.sampling.constraint import TokenConstraint
    from engine.spelling import install, uninstall

__version__ = "0.1.0"

_HOME = {
    "ContinuousBatchingConfig": "engine.config",
    "WorkloadHints": "engine.config",
    "continuous_batching_context_manager": "engine.generate",
    "destroy_cached_continuous_batching_manager": "engine.generate",
    "generate_batch": "engine.generate",
    "init_continuous_batching": "engine.generate",
    "install": "engine.spelling",
    "uninstall": "engine.spelling",
    "ContinuousBatchingManager": "engine.manager",
    "GenerationOutput": "engine.outputs",
    "FinishReason": "engine.request",
    "RequestStatus": "engine.request",
    "TokenConstraint": "engine.sampling.constraint",
    "TokenLogprobs": "engine.request",
}

__all__ = [
    "ContinuousBatchingConfig",
    "ContinuousBatchingManager",
    "FinishReason",
    "GenerationOutput",
    "RequestStatus",
    "TokenConstraint",
    "TokenLogprobs",
    "WorkloadHints",
    "continuous_batching_context_manager",
    "destroy_cached_continuous_batching_manager",
    "generate_batch",
    "init_continuous_batching",
    "install",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
