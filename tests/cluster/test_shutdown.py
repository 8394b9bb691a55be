"""The ways to end `serve run` beside Ctrl-C (test_serve_run.py), while answers are streamed."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.conftest import wait_limit
from tests.serving import BIN, ServeRun, dashboard_url, model_args, wait_until

pytestmark = pytest.mark.slow

TOKENS = 3900
STOP_LIMIT_S = 20


@dataclass
class Seen:
    """What a client saw that asks for one long stream after the other until nobody answers.

    Attributes:
        whole: streams with all their tokens, ended by [DONE].
        errors: codes of error events, and the statuses of answers other than 200.
        cut: streams that broke off without either.
    """

    begun: int = 0
    whole: int = 0
    cut: int = 0
    errors: list[str] = field(default_factory=list)

    def ask(self, server: ServeRun) -> None:
        """Raises httpx.ConnectError once there is no server."""
        body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": TOKENS, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        data, tokens = "", 0
        try:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=wait_limit(60)) as response:
                if response.status_code != 200:
                    self.errors.append(str(response.status_code))
                    time.sleep(0.1)
                    return
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.begun += data == ""
                        data = line[6:]
                        if data != "[DONE]":
                            tokens = (json.loads(data).get("usage") or {}).get("completion_tokens", tokens)
        except (httpx.RemoteProtocolError, httpx.ReadError):
            assert data != "[DONE]"
            if '"error"' in data:
                self.errors.append(json.loads(data)["error"]["code"])
            else:
                self.cut += 1
            return
        assert data == "[DONE]", "a stream ended like a whole one without its end"
        assert tokens == TOKENS, "a [DONE] behind a part of the answer"
        self.whole += 1

    def keep_asking(self, server: ServeRun) -> None:
        while True:
            try:
                self.ask(server)
            except httpx.ConnectError:
                return


def while_asked(server: ServeRun, end: list[str] | signal.Signals) -> tuple[Seen, float]:
    """Ends the server while two clients stream; what they saw, and the seconds until they found nobody."""
    seen = Seen()
    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(seen.keep_asking, server) for _ in range(2)]
        wait_until(lambda: seen.begun >= 2, 60)
        if isinstance(end, signal.Signals):
            server.process.send_signal(end)
        else:
            subprocess.run(end, env=server.env, check=True, timeout=wait_limit(60))
        started = time.monotonic()
        for one in asking:
            one.result(wait_limit(90))
    return seen, time.monotonic() - started


@pytest.fixture
def server(tiny_http_path: Path, tmp_path: Path) -> ServeRun:
    return ServeRun(tmp_path, [model_args("tiny", tiny_http_path, num_threads=1)])


def test_sigterm_ends_everything(server: ServeRun) -> None:
    with server:
        seen, seconds = while_asked(server, signal.SIGTERM)
        server.process.wait(wait_limit(STOP_LIMIT_S))
        print(f"SIGTERM: {seen}, status {server.process.returncode}, nobody answers after {seconds:.1f} s")
        wait_until(lambda: not server.processes(), STOP_LIMIT_S)


def test_serve_shutdown_ends_the_application_and_leaves_the_cluster(server: ServeRun) -> None:
    with server:
        command = [str(BIN / "serve"), "shutdown", "-y", "--address", dashboard_url(server)]
        seen, seconds = while_asked(server, command)
        print(f"serve shutdown: {seen}, nobody answers after {seconds:.1f} s")
        assert server.process.poll() is None
        started = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(wait_limit(STOP_LIMIT_S)) == 0
        wait_until(lambda: not server.processes(), STOP_LIMIT_S)
        print(f"Ctrl-C behind it: {time.monotonic() - started:.1f} s")
