"""A real `serve run` as a child process: on a free loopback port, started and ended by its own process id."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.conftest import wait_limit

ROOT = Path(__file__).resolve().parents[1]
SERVE = Path(sys.executable).with_name("serve")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def model_args(name: str, source: Path, **fields: Any) -> dict[str, Any]:
    """One entry of `models:` that shares two cores with others and computes in float32."""
    engine = {"page_size": 16, "num_blocks": 1024, "max_batch_tokens": 256}
    args = {"name": name, "source": str(source), "device": "cpu", "dtype": "float32", "num_cpus": 0.2}
    return args | {"engine": engine} | fields


class ServeRun:
    """`serve run` of one application; a context manager that waits until it is healthy.

    Args:
        folder: where the configuration and the log go.
        args: what `rayapp.app:build` takes.
    """

    def __init__(self, folder: Path, args: dict[str, Any], name: str = "convoy") -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.timeout = wait_limit(120)
        self.log = folder / "serve.log"
        self.app_name = name
        self._config = folder / "serve_config.yaml"
        application = {"name": name, "route_prefix": "/", "import_path": "rayapp.app:build", "args": args}
        self._config.write_text(
            yaml.safe_dump(
                {
                    "proxy_location": "HeadOnly",
                    "http_options": {"host": "127.0.0.1", "port": self.port},
                    "applications": [application],
                }
            )
        )

    def __enter__(self) -> ServeRun:
        environment = os.environ | {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "PYTHONPATH": str(ROOT),
        }
        environment.pop("RAY_ADDRESS", None)
        environment.pop("OMP_NUM_THREADS", None)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [SERVE, "run", "--address", "local", str(self._config)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Ctrl-C, and whatever is left of the process group is killed."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(wait_limit(60))
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + wait_limit(180)
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"serve run ended with {self.process.returncode}:\n{self.tail()}")
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            if time.monotonic() > deadline:
                raise TimeoutError(f"serve run is not healthy:\n{self.tail()}")
            time.sleep(0.3)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]
