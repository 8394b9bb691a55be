"""The manager that a model keeps for its next session (`persistent_manager=True`).

Called by the manager and the public functions. The model's attribute is never copied or pickled with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from engine.manager import ContinuousBatchingManager

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_convoy_manager"


class _Kept:
    """Holds the manager; in a copy of the model, pickled or not, False takes its place."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return bool, ()


def keep(model: PreTrainedModel, manager: object) -> None:
    """Keep this manager for the next session, in place of any other: that is destroyed, unless it runs."""
    before = kept(model)
    if before is not None and before is not manager:
        if before.is_running():
            logger.warning("the model keeps another manager, which is running: this one is not kept")
            return
        before.destroy()
    setattr(model, _ATTRIBUTE, _Kept(manager))


def kept(model: PreTrainedModel) -> ContinuousBatchingManager | None:
    """The manager kept for this model."""
    found = model.__dict__.get(_ATTRIBUTE)
    manager: ContinuousBatchingManager | None = found.manager if isinstance(found, _Kept) else None
    return manager


def release(model: PreTrainedModel, manager: object) -> None:
    """Keep this manager no longer; no effect if another one is kept."""
    if kept(model) is manager:
        delattr(model, _ATTRIBUTE)
