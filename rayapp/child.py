"""A process that lives as long as the one that started it, and not a moment longer: both ends of that.

`Child` is for the parent, `end_with_parent` for the child. Knows nothing of what they are for; imports nothing else of
Convoy, as a child is to call it before it does anything that takes time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1


class Child:
    """A process that is not expected to end, and the thread that waits until it does.

    The process is to call `end_with_parent`. Linux ties that to the thread that started it, so this one does, and
    lives as long as both.

    Args:
        name: for messages.
        command: what on its standard output is said why it ended.
        content: of its standard input.

    Attributes:
        pid: None before it was started.
        error: why it ended; None while it lives.
    """

    def __init__(self, name: str, command: list[str], content: bytes = b"") -> None:
        self._name = name
        self._command = command
        self._content = content
        self.pid: int | None = None
        self.error: str | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            self.error = f"{self._name} {self._outcome()}"
        except Exception as error:
            self.error = f"{self._name} could not be watched: {error!r}"

    def _outcome(self) -> str:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with subprocess.Popen(self._command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            self.pid = process.pid
            told, _ = process.communicate(self._content)
        if text := told.decode(errors="replace").strip():
            return f"failed: {text}"
        if process.returncode < 0:
            return f"was ended by {signal.Signals(-process.returncode).name}"
        return f"ended with exit status {process.returncode}"


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, and so when `parent` does."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended before
        os._exit(1)
