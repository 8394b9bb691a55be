"""The compiled attention and cache write under the address sanitizer, in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.ops.cpu import library
from engine.ops.cpu.build import load_library
from tests.conftest import wait_limit
from tests.engine.test_cpu_attention import BUILDS, DTYPES, Model, Rows, in_pieces


@pytest.mark.slow
def test_no_byte_beyond_a_buffer_is_touched() -> None:
    """Under the address sanitizer, whose allocator puts forbidden bytes around every tensor."""
    compiler = shutil.which("g++")
    runtime = (
        compiler
        and subprocess.run(
            [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    if not runtime or not Path(runtime).is_absolute():
        pytest.skip("no address sanitizer to be found")
    environment = {**os.environ, "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "2"}
    for flags in BUILDS.values():
        code = f"from tests.engine import test_cpu_sanitizer; test_cpu_sanitizer.touch_everything({flags!r})"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=wait_limit(300)
        )
        assert done.returncode == 0, done.stderr[-3000:]


def touch_everything(flags: Sequence[str]) -> None:
    """Cases of every path, with a library of its own that the address sanitizer watches."""
    watched = load_library(flags=(*flags, "-DINTRINSICS", "-O1", "-g", "-fsanitize=address"))
    watched.run_tape.argtypes = library._library().run_tape.argtypes
    watched.run_tape.restype = None
    library._library = lambda: watched  # type: ignore[assignment]
    lengths = [1, 2, 17, 64, 100, 131]
    for dtype in DTYPES:
        for page in (4, 12, 16, 64, 256):
            for group, dim, window in ((1, 64, None), (3, 64, 20), (5, 72, None), (8, 6, 65), (2, 256, 3)):
                model = Model(2 * group, 2, dim, dtype, window, 5.0 if window == 20 else None, window == 65)
                rows = Rows(model, lengths)
                rows.check(rows.run(page, in_pieces(lengths, [1, 40, 3])))
