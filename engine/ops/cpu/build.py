"""Builds the C++ source beside it on first use, with the system's compiler, and loads it.

Called by `CpuOps`. The library is kept in the user's cache under a name that tells source, flags and processor, so that
a later start, or another machine on the same home folder, never loads a wrong one. Knows nothing of torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("paged_attention.cpp")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-O3", "-march=native", "-std=gnu++17", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared")
_TIMEOUT_S = 300.0  # one second is usual


class BuildError(RuntimeError):
    """The library cannot be had here; the text says why."""


def load_library() -> ctypes.CDLL:
    """The compiled source, built if this machine has not built it yet.

    With torch imported before, its OpenMP runtime serves the library too.

    Raises:
        BuildError: no compiler, a compiler that fails, or a cache folder or library that cannot be used.
    """
    path = library_path()
    try:
        if not path.exists():
            _compile(path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} cannot be made or loaded ($CONVOY_CACHE chooses another folder): {error}") from error


def library_path() -> Path:
    """Where the library of this source belongs on this machine."""
    key = hashlib.sha256(SOURCE.read_bytes())
    key.update(repr((_FLAGS, platform.system(), platform.machine(), _processor())).encode())
    return _cache_folder() / f"{SOURCE.stem}-{key.hexdigest()[:20]}.so"


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


def _compile(path: Path) -> None:
    """Of several processes that build at once each puts a whole file in place; the last one stays."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler is installed (looked for {', '.join(_COMPILERS)})")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        target = Path(folder, path.name)
        command = [compiler, *_FLAGS, str(SOURCE), "-o", str(target)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{compiler} did not end within {_TIMEOUT_S:.0f} s") from error
        if done.returncode != 0:
            raise BuildError(f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}")
        target.replace(path)
