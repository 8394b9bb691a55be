"""Which `ContinuousBatchingConfig` counts: the argument, what a GenerationConfig carries, or the defaults.

Called when a manager is made or used again. Knows the config's class and that of transformers by their fields alone.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING

from engine.config import ContinuousBatchingConfig

if TYPE_CHECKING:
    from transformers import GenerationConfig


def config_in_force(
    config: object | None, generation_config: GenerationConfig | None = None
) -> ContinuousBatchingConfig | None:
    """The config that was asked for, as ours; None when none was.

    Args:
        config: the argument, of our class or transformers' class of the same name.
        generation_config: may carry one, which is deprecated and counts when there is no argument.

    Raises:
        TypeError: the config is no such object.
        NotImplementedError, ValueError: it sets what the engine cannot follow.
    """
    carried = getattr(generation_config, "continuous_batching_config", None)
    if carried is not None:
        warnings.warn(
            "continuous_batching_config inside a GenerationConfig is deprecated: pass it as the argument "
            "continuous_batching_config" + ("" if config is None else ", which is there and counts"),
            FutureWarning,
            stacklevel=2,
        )
    asked = carried if config is None else config
    return None if asked is None else ContinuousBatchingConfig.from_transformers(asked)


def differing_fields(asked: ContinuousBatchingConfig, in_force: ContinuousBatchingConfig) -> list[str]:
    """Names of the fields whose values differ."""
    names = [field.name for field in dataclasses.fields(asked)]
    return [name for name in names if getattr(asked, name) != getattr(in_force, name)]
