"""Builds the C++ sources beside it on first use, with the system's compiler, and loads them as one library.

The library is kept in the user's cache under a name that tells sources, flags and processor, so that a later start, or
another machine on the same home folder, never loads a wrong one. Knows nothing of torch, nor of what the sources do.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
_COMPILERS = ("c++", "g++", "clang++")
# The sources say themselves what is to be unrolled: -O3 takes a third longer, on code that is not in inner loops.
_FLAGS = ("-O2", "-march=native", "-std=gnu++17", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-Wall")
_TIMEOUT_S = 300.0  # a few seconds are usual
_lock = threading.Lock()
_failures: dict[Path, BuildError] = {}  # of this process: who asks next need not wait for the same words


class BuildError(RuntimeError):
    """The library cannot be had here; the text says why."""


def load_library(*, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """The compiled sources, built if this machine has not built them yet.

    With torch imported before, its OpenMP runtime serves the library too.

    Args:
        flags: more of the compiler's, for a library of its own: sanitizers, another instruction set.

    Raises:
        BuildError: no compiler, a compiler that fails, or a cache folder or library that cannot be used.
    """
    path = build_library(flags=flags)
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()  # damaged: a new one takes its place
    try:
        return ctypes.CDLL(str(build_library(flags=flags)))
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from error


def build_library(*, flags: Sequence[str] = ()) -> Path:
    """Compiles the sources if this machine has not yet; the library's path. Raises as `load_library`.

    A thread that calls while another one compiles waits for it. What failed is not tried again in this process.
    """
    path = library_path(flags=flags)
    with _lock:
        if path in _failures:
            raise _failures[path]
        try:
            if not path.exists():
                _build(path, (*_FLAGS, *flags))
        except BuildError as error:
            _failures[path] = error
            raise
        except OSError as error:
            raise BuildError(f"{path} cannot be made ($CONVOY_CACHE chooses another folder): {error}") from error
    return path


def library_path(*, flags: Sequence[str] = ()) -> Path:
    """Where the library of these sources belongs on this machine."""
    key = hashlib.sha256()
    for source in sorted((*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h"))):
        key.update(source.name.encode() + source.read_bytes())
    key.update(repr(((*_FLAGS, *flags), platform.system(), platform.machine(), _processor())).encode())
    return _cache_folder() / f"convoy-{key.hexdigest()[:20]}.so"


def _cache_folder() -> Path:
    if own := os.environ.get("CONVOY_CACHE"):
        return Path(own).expanduser().absolute() / "ops"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "convoy" / "ops"


def _processor() -> str:
    """What `-march=native` depends on: the instruction sets, in Linux's words."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())


def _build(path: Path, flags: Sequence[str]) -> None:
    """Of several processes that build at once each puts a whole file in place; the last one stays."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler is installed (looked for {', '.join(_COMPILERS)})")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        objects = {source: Path(folder, source.stem + ".o") for source in sorted(FOLDER.glob("*.cpp"))}
        _run_all([[compiler, *flags, "-c", str(source), "-o", str(made)] for source, made in objects.items()])
        target = Path(folder, path.name)
        _run_all([[compiler, *flags, "-shared", *map(str, objects.values()), "-o", str(target)]])
        target.replace(path)


def _run_all(commands: list[list[str]]) -> None:
    """As many at a time as there are cores; BuildError with the words of the first that fails."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, commands))


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} did not end within {_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed:\n{(done.stderr or done.stdout).strip()[-2000:]}")
