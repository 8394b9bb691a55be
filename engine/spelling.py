"""`install()`: the public functions in the spelling of transformers, as methods of every model.

The only place that changes what belongs to others, and `uninstall()` changes it back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.generate import (
    continuous_batching_context_manager,
    destroy_cached_continuous_batching_manager,
    generate_batch,
    init_continuous_batching,
)
from engine.paged_generate import is_paged, paged_generate

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def install() -> None:
    """Make the spelling of transformers run here: `model.generate_batch(...)`, `model.init_continuous_batching(...)`,
    `model.continuous_batching_context_manager(...)`, `model.destroy_cached_continuous_batching_manager()` and
    `model.generate(..., cache_implementation="paged")` of every transformers model, with either config class."""
    from transformers import GenerationMixin

    for name, function in _METHODS.items():
        setattr(GenerationMixin, name, function)
    if not hasattr(GenerationMixin.generate, _ROUTED):
        GenerationMixin.generate = _route_paged(GenerationMixin.generate)  # type: ignore[method-assign]


def uninstall() -> None:
    """Undo `install`. No effect when it was not called."""
    from transformers import GenerationMixin

    for name, function in _METHODS.items():
        if GenerationMixin.__dict__.get(name) is function:
            delattr(GenerationMixin, name)
    GenerationMixin.generate = getattr(GenerationMixin.generate, _ROUTED, GenerationMixin.generate)  # type: ignore[method-assign]


def _open_context(model: PreTrainedModel, *args: Any, **kwargs: Any) -> continuous_batching_context_manager:
    """`continuous_batching_context_manager` as a method: a class would not be bound to the model."""
    return continuous_batching_context_manager(model, *args, **kwargs)


def _route_paged(original: Callable[..., Any]) -> Callable[..., Any]:
    """`generate` of transformers, which hands calls for paged generation to the engine."""

    @functools.wraps(original)
    def generate(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return (paged_generate if is_paged(self, args, kwargs) else original)(self, *args, **kwargs)

    setattr(generate, _ROUTED, original)
    return generate


_ROUTED = "_without_engine"  # attribute of the routed `generate`: the original

_METHODS: dict[str, Callable[..., Any]] = {
    "generate_batch": generate_batch,
    "init_continuous_batching": init_continuous_batching,
    "continuous_batching_context_manager": _open_context,
    "destroy_cached_continuous_batching_manager": destroy_cached_continuous_batching_manager,
}
