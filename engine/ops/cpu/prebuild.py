"""Builds the C++ library ahead of its use, in the background, while Python imports and loads weights.

Begun by whoever is about to make an engine on CPU. Loading the library where it is needed waits for it, and says what
went wrong, which this does not. Loads neither torch nor the library, which must find torch's OpenMP in the process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading

from engine.ops.cpu import build

_NICENESS = 5  # the imports meanwhile are what the first token waits for; compilers take the cores that are left

_lock = threading.Lock()
_thread: threading.Thread | None = None


def start() -> None:
    """Begin to build, unless that was begun before in this process."""
    global _thread
    with _lock:
        if _thread is None:
            # No daemon: an interpreter that exits now lets the compiler end and tidy up, which takes seconds.
            _thread = threading.Thread(target=_build, name="build-ops")
            _thread.start()


def wait() -> None:
    """Return when nothing is being built."""
    thread = _thread
    if thread is not None:
        thread.join()


def _build() -> None:
    if sys.platform == "linux":  # where a thread has a niceness of its own, which the processes that it starts inherit
        own = os.getpriority(os.PRIO_PROCESS, 0)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, own + _NICENESS))
    with contextlib.suppress(OSError, build.BuildError):
        build.build_library()
