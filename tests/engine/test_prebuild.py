"""The library is built ahead in the background: once, without torch, and silent about what goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.ops.cpu import build, prebuild
from tests.conftest import wait_limit

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As in a process that has not begun yet, with an empty cache folder."""
    prebuild.wait()
    monkeypatch.setattr(prebuild, "_thread", None)
    monkeypatch.setenv("CONVOY_CACHE", str(tmp_path))
    yield
    prebuild.wait()


def test_what_was_built_ahead_is_what_is_loaded(tmp_path: Path) -> None:
    """In a process without torch, which does not load the library: that would bring an OpenMP that is not torch's."""
    code = (
        "import sys; from engine.ops.cpu import prebuild; prebuild.start(); prebuild.wait();"
        "maps = open('/proc/self/maps').read(); path = str(prebuild.build.library_path());"
        "sys.exit('torch' in sys.modules or path in maps)"
    )
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=wait_limit(120))
    assert child.returncode == 0
    assert [file.name for file in (tmp_path / "ops").iterdir()] == [build.library_path().name]


def test_begins_once_and_waiting_sees_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = [], threading.Event()

    def slow(path: Path, flags: object) -> None:
        begun.append(path)
        go.wait(wait_limit(30))

    monkeypatch.setattr(build, "_build", slow)
    starters = [threading.Thread(target=prebuild.start) for _ in range(4)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    waiter = threading.Thread(target=prebuild.wait)
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    go.set()
    waiter.join(wait_limit(30))
    assert not waiter.is_alive()
    prebuild.start()
    prebuild.wait()
    assert begun == [build.library_path()]


def test_the_caller_keeps_its_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(build, "_build", lambda *_: seen.append(os.getpriority(os.PRIO_PROCESS, 0)))
    own = os.getpriority(os.PRIO_PROCESS, 0)
    prebuild.start()
    prebuild.wait()
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
    assert seen == [min(19, own + prebuild._NICENESS)]


def test_failure_is_told_where_the_library_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    prebuild.start()
    prebuild.wait()
    assert capfd.readouterr() == ("", "")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.load_library()


def test_what_failed_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun = []

    def fail(path: Path, flags: object) -> None:
        begun.append(path)
        raise build.BuildError("c++ failed")

    monkeypatch.setattr(build, "_build", fail)
    prebuild.start()
    for _ in range(2):
        with pytest.raises(build.BuildError, match="c\\+\\+ failed"):
            build.build_library()
    assert begun == [build.library_path()]
    monkeypatch.setenv("CONVOY_CACHE", str(tmp_path / "other"))
    with pytest.raises(build.BuildError):
        build.build_library()
    assert len(begun) == 2


def test_nothing_is_built_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    path = build.library_path()
    path.parent.mkdir(parents=True)
    path.touch()
    monkeypatch.setattr(build, "_build", lambda *_: pytest.fail("built again"))
    prebuild.start()
    prebuild.wait()
