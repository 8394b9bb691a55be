"""A local Ray Serve of its own for the benchmark, and the ways into it: replica, Router, HTTP; and peers' servers.

Each way is an `Ask` of `closed_loop.py`, so that all do the same work. Used by `split.py`.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import aiohttp
import ray
from ray import serve

from rayapp.app import build
from rayapp.bench.client import ENDPOINTS, Target, send
from rayapp.bench.closed_loop import Answer, Ask
from rayapp.config import AppConfig, ModelConfig
from rayapp.link import Link, wire_request

APP = "bench"
HOST = "127.0.0.1"


@contextmanager
def local_serve(config: AppConfig) -> Iterator[str]:
    """The application on a Ray of its own, on free ports; both are ended at the end. Gives the server's URL."""
    folder = tempfile.mkdtemp(prefix="cvb-")  # short: Ray puts sockets below it
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else a token is written into the home directory
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray runs its workers at 15: whatever else the machine does would slow them alone, and not the engine's process.
    os.environ.setdefault("RAY_worker_niceness", "0")
    port = _free_port()
    ray.init(
        address="local",
        num_cpus=max(8, os.cpu_count() or 1),  # for placement only
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
        _temp_dir=folder,
    )
    try:
        quiet: Any = {"enable_access_log": False, "log_level": "WARNING"}  # as serve_config.yaml has it
        serve.start(proxy_location="HeadOnly", http_options={"host": HOST, "port": port}, logging_config=quiet)
        serve.run(build(config), name=APP, route_prefix="/", logging_config=quiet)
        yield f"http://{HOST}:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


def ask_replica(model: ModelConfig, app: str = APP) -> Ask:
    """Token ids to the replica as a Router sends them, and back."""
    link = Link(serve.get_deployment_handle(model.deployment, app))

    async def ask(prompt: list[int], new_tokens: int) -> Answer:
        sampling = {"max_new_tokens": new_tokens, "do_sample": False, "ignore_eos": True}
        start, first, count = time.perf_counter(), None, 0
        async with aclosing(link.generate(wire_request(prompt, sampling))) as items:
            async for tokens, _, _ in items:
                count += len(tokens)
                if first is None and tokens:
                    first = time.perf_counter() - start
        return Answer(first, time.perf_counter() - start, count)

    return ask


def _fields(model: ModelConfig, prompt: list[int], new_tokens: int) -> dict[str, Any]:
    return {
        "model": model.name, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip


def ask_router(model: ModelConfig, app: str = APP) -> Ask:
    """The Router by its handle, answers whole."""
    handle = serve.get_app_handle(app).options(method_name="generate_text")

    async def ask(prompt: list[int], new_tokens: int) -> Answer:
        start = time.perf_counter()
        answer: Any = await handle.remote(**_fields(model, prompt, new_tokens))
        return Answer(None, time.perf_counter() - start, answer["usage"]["completion_tokens"])

    return ask


def ask_router_stream(model: ModelConfig, app: str = APP) -> Ask:
    """The Router by its handle, text as it comes. It does not say how many tokens that was, so all count as come."""
    handle = serve.get_app_handle(app).options(method_name="stream_text", stream=True)

    async def ask(prompt: list[int], new_tokens: int) -> Answer:
        start, first = time.perf_counter(), None
        pieces: Any = handle.remote(**_fields(model, prompt, new_tokens))
        async for _ in pieces:
            if first is None:
                first = time.perf_counter() - start
        return Answer(first, time.perf_counter() - start, new_tokens)

    return ask


def ask_http(session: aiohttp.ClientSession, base_url: str, model_name: str, headers: dict[str, str]) -> Ask:
    """Completions of an OpenAI-compatible server."""
    fields = {"temperature": 0, "ignore_eos": True}
    target = Target(base_url.rstrip("/") + ENDPOINTS["openai"], model_name, fields=fields, headers=headers)

    async def ask(prompt: list[int], new_tokens: int) -> Answer:
        outcome = await send(session, target, prompt, new_tokens)
        if outcome.error is not None:
            raise RuntimeError(f"{base_url}: {outcome.error}")
        return Answer(outcome.ttft, outcome.latency, outcome.completion_tokens)

    return ask
