"""The operations that differ by device; `make_ops` chooses.

Loaded on first use, so that the compiled ones can be built by a process that has not loaded torch yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.ops.choose import ATTENTIONS, make_ops

__all__ = ["ATTENTIONS", "make_ops"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'engine.ops' has no attribute {name!r}")
    from engine.ops import choose

    return getattr(choose, name)
