"""Why a generation could not be done, as exceptions that cross process borders.

Raised by the engine actor, the replica and `link.py`, turned into HTTP errors by the Router. They keep all their
arguments in `args`, because exceptions are pickled on their way. Knows nothing of HTTP or Ray.
"""

from __future__ import annotations


class GenerationError(Exception):
    """Base of everything a replica may answer instead of tokens."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class InvalidRequest(GenerationError):
    """The engine refuses this request, and every replica would; `param` names the field where there is one."""


class Overloaded(GenerationError):
    """All replicas are full and the queue is too; worth another try later."""


class EngineUnavailable(GenerationError):
    """The engine that should serve this request failed, is gone or is stopping; another may serve it."""


class DeadlineExceeded(GenerationError):
    """The time that the caller gave this request was over before it was done."""


class GenerationFailed(GenerationError):
    """This request failed in a working engine, and would again."""
