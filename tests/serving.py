"""A real `serve run` as a child process, and small models to serve.

Each server has a port and a Ray folder of its own, and is started and ended by its own process ids.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tests.conftest import wait_limit

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until(condition: Callable[[], Any], seconds: float = 30, every: float = 0.05) -> Any:
    """The first true value of `condition`; an AssertionError when it has not come in time."""
    deadline = time.monotonic() + wait_limit(seconds)
    while True:
        if value := condition():
            return value
        assert time.monotonic() < deadline, f"did not come true within {seconds} s: {condition}"
        time.sleep(every)


def model_args(name: str, source: Path, **fields: Any) -> dict[str, Any]:
    """One entry of `models:` that computes in float32 and leaves CPUs to its neighbours."""
    return {
        "name": name,
        "source": str(source),
        "device": "cpu",
        "dtype": "float32",
        "num_cpus": 0.2,
        "graceful_shutdown_timeout_s": 5,
        "engine": {"page_size": 16, "num_blocks": 1024, "max_batch_tokens": 256},
    } | fields


def dashboard_url(server: ServeRun) -> str:
    """Where `serve` and `ray job` commands reach a server's Ray."""
    found = re.search(r"http://127\.0\.0\.1:\d+(?=\s|\x1b)", server.log.read_text())
    assert found is not None
    return found.group()


class ServeRun:
    """`serve run` of the shipped configuration with other models; a context manager that waits until all can serve.

    Attributes:
        process: of the command.
        url: of the server, without a path.
        timeout: seconds after which a request hangs.
        folder: Ray's temporary folder of this server alone; every process of it has it in its command line.
        log: what the terminal would show.
        env: for other processes that are to talk to it.
    """

    def __init__(self, folder: Path, models: list[dict[str, Any]]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.timeout = wait_limit(120)
        self.log = folder / "serve.log"
        self.folder = Path(tempfile.mkdtemp(prefix="cv-"))  # short: Ray puts sockets below it
        self._replicas = {model["name"]: model.get("num_replicas", 1) for model in models}
        config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
        config["http_options"]["port"] = self.port
        config["applications"][0]["args"]["models"] = models
        self._config = folder / "serve_config.yaml"
        self._config.write_text(yaml.safe_dump(config))
        self.env = os.environ | {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(self.folder),
            "PYTHONPATH": str(ROOT),
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }
        for name in ("RAY_ADDRESS", "OMP_NUM_THREADS"):
            self.env.pop(name, None)

    def __enter__(self) -> ServeRun:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [BIN / "serve", "run", "--address", "local", str(self._config)],
                env=self.env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            wait_until(self._can_serve, 240, every=0.5)
            (raylet,) = (one for one in self.processes() if one.name() == "raylet")
            prefix = "--gcs-address="
            self.env["RAY_ADDRESS"] = next(
                part.removeprefix(prefix) for part in raylet.cmdline() if part.startswith(prefix)
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Ctrl-C; what is left after that is killed, so that nothing of the server outlives it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(wait_limit(30))
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for process in self.processes():
            process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def processes(self) -> list[psutil.Process]:
        """Those of its Ray that are alive."""
        return [
            process
            for process in psutil.process_iter(["cmdline", "status"])
            if process.info["status"] != psutil.STATUS_ZOMBIE
            and str(self.folder) in " ".join(process.info["cmdline"] or [])
        ]

    def _can_serve(self) -> bool:
        assert self.process.poll() is None, self.log.read_text(errors="replace")[-6000:]
        try:
            health = httpx.get(f"{self.url}/health", timeout=5)
            models = health.json()["models"]
        except (httpx.HTTPError, ValueError):
            return False
        return health.status_code == 200 and self._replicas == {name: one["replicas"] for name, one in models.items()}
