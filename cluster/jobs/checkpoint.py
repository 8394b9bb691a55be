"""`Checkpoint`: the answers of a batch while it runs, on disk, such that a killed process loses none and repeats none.

Used by batch.py. Answers are appended as they come, one JSON object a line with the number of the line it answers;
`finish` writes them in order. Knows nothing of Ray or of what an answer says, but for the key `retry`.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

SYNC_INTERVAL_S = 1.0  # what a crash of the machine, not of the process, may cost


class Checkpoint:
    """The file `OUTPUT.partial`; a context manager that holds it against a second process.

    Args:
        output: where the finished answers are to be.
        header: what the batch is: input and options. Kept as the first line.

    Attributes:
        done: numbers of the lines that are answered; not those to be tried again.

    Raises:
        RuntimeError: another process has the file, or it belongs to another batch.
    """

    def __init__(self, output: Path, header: dict[str, Any]) -> None:
        self.output = output
        self.partial = output.with_name(output.name + ".partial")
        self.done: set[int] = set()
        self._offsets: dict[int, int] = {}
        self._synced = 0.0
        self._file = self.partial.open("a+b")
        try:
            self._lock()
            self._read(header)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def add(self, line: int, answer: dict[str, Any]) -> None:
        """Keep the answer to one line. It is the kernel's when this returns, and soon the disk's."""
        self._offsets[line] = self._file.seek(0, os.SEEK_END)
        self._write({"line": line, **answer})
        if not answer.get("retry"):
            self.done.add(line)

    def finish(self) -> None:
        """Write the answers in the order of their lines to `output`, in one go, and forget the partial file."""
        target = self.output.with_name(self.output.name + ".new")
        with target.open("wb") as file:
            for line in sorted(self._offsets):
                self._file.seek(self._offsets[line])
                file.write(self._file.readline())
            file.flush()
            os.fsync(file.fileno())
        target.replace(self.output)
        self.partial.unlink()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"another process is writing {self.partial}") from None

    def _read(self, header: dict[str, Any]) -> None:
        """Take up what an earlier process has left, up to the last whole line."""
        self._file.seek(0)
        first = self._file.readline()
        if not first.endswith(b"\n"):
            self._file.truncate(0)
            self._write(header)
            return
        if json.loads(first) != header:
            raise RuntimeError(f"{self.partial} is of another batch (other lines or options); remove it to start anew")
        while True:
            offset = self._file.tell()
            text = self._file.readline()
            if not text.endswith(b"\n"):
                break
            answer = json.loads(text)
            self._offsets[answer["line"]] = offset
            if not answer.get("retry"):
                self.done.add(answer["line"])
        self._file.truncate(offset)

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        if time.monotonic() - self._synced > SYNC_INTERVAL_S:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()
