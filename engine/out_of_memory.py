"""Where memory ran out: what to call so, how to get it back, and what to tell the caller to lower.

Used when an engine is made or measured, and by the core through a hook when a step raised. Loads no torch.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from engine.memory import DeviceMemory

_WHAT_TO_LOWER = (
    "to leave steps more memory, lower num_blocks or max_memory_percent; to have them take less, lower "
    "max_batch_tokens or max_requests_per_batch"
)
_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")  # what drivers and libraries say


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that it came from, says that there was not enough memory."""
    return any(
        isinstance(each, MemoryError)
        or type(each).__name__ == "OutOfMemoryError"  # torch's
        or (isinstance(each, RuntimeError) and any(text in str(each) for text in _OUT_OF_MEMORY))
        for each in _chain(error)
    )


def release_after(error: Exception, memory: DeviceMemory | None) -> str:
    """Where memory ran out: frees what the failed call held and `memory` keeps; what to lower, for the error's text."""
    if not is_out_of_memory(error):
        return ""
    forget_frames(error)
    if memory is not None:
        with suppress(RuntimeError):  # a recording that was broken off may have left torch unable to
            memory.release()
    return f" ({_WHAT_TO_LOWER})"


@contextmanager
def saying_what_to_lower() -> Iterator[None]:
    """Running out of memory inside is a MemoryError that says what leaves more."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(f"{str(error) or 'out of memory'} ({_WHAT_TO_LOWER})") from error


def forget_frames(error: BaseException) -> None:
    """Drops what the functions that raised an error held, so that its memory is free before the error is."""
    for each in _chain(error):
        traceback.clear_frames(each.__traceback__)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
