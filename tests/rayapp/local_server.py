"""The HTTP API over a real engine in one process, without Ray: what a client sees, cheaply.

Only what lies between Router and engine is left out: requests go straight into an `EngineActor` on the server's loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import uvicorn

from rayapp.api.routes import build_api
from rayapp.api.service import Chunk, SamplingFields, ServedModel, Service
from rayapp.api.settings import RequestSettings
from rayapp.config import ModelConfig
from rayapp.engine_actor import EngineActor
from rayapp.failures import GenerationError
from rayapp.generation import generate
from rayapp.link import raise_if_failed
from rayapp.router import as_api_error, load_served
from tests.conftest import wait_limit
from tests.serving import wait_until


class LocalService:
    """The `Service` of some models, each with an engine here. See `Router`."""

    def __init__(self, configs: list[ModelConfig]) -> None:
        self.models: dict[str, ServedModel] = {config.name: load_served(config) for config in configs}
        self.settings = RequestSettings()
        self.actors = {config.name: EngineActor(config) for config in configs}

    async def generate(
        self, model: str, prompt_ids: list[int], sampling: SamplingFields, stop: list[str], index: int
    ) -> AsyncGenerator[Chunk, None]:
        tokenizer = self.models[model].tokenizer
        try:
            async with aclosing(
                generate(_Source(self.actors[model]), tokenizer, prompt_ids, sampling, stop, index)
            ) as it:
                async for chunk in it:
                    yield chunk
        except GenerationError as error:
            raise as_api_error(error, sampling.timeout) from error

    async def metrics(self) -> bytes | None:
        return None

    async def health(self) -> tuple[bool, dict[str, Any]]:
        return True, {"models": {name: await actor.health() for name, actor in self.actors.items()}}


class _Source:
    def __init__(self, actor: EngineActor) -> None:
        self._actor = actor

    async def generate(self, request: dict[str, Any]) -> AsyncGenerator[Any, None]:
        async with aclosing(self._actor.generate(request)) as items:  # type: ignore[type-var]
            async for item in items:
                if item[1] is not None:
                    raise_if_failed(item)
                yield item


@contextmanager
def local_server(*models: dict[str, Any]) -> Iterator[str]:
    """The base URL of the models' API, which runs in a thread until the block is left."""
    service = LocalService([ModelConfig(**model) for model in models])

    @asynccontextmanager
    async def engines() -> AsyncIterator[None]:
        for actor in service.actors.values():
            await actor.start()
        yield
        for actor in service.actors.values():
            await asyncio.to_thread(actor._engine.stop, hard_stop=True)

    with serving(service, engines()) as url:
        yield url


@contextmanager
def serving(service: Service, life: AbstractAsyncContextManager[None] | None = None) -> Iterator[str]:
    """The base URL of a service's API, which runs in a thread until the block is left.

    Args:
        life: entered on the server's loop before it listens, and left after.
    """
    server = uvicorn.Server(uvicorn.Config(build_api(service), port=0, log_level="critical", lifespan="off"))

    async def run() -> None:
        async with life or nullcontext():
            await server.serve()

    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive(), 120)
    assert server.started, "the server did not start"
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(wait_limit(30))


def small(name: str, source: Path, **fields: Any) -> dict[str, Any]:
    """A float32 model on one thread."""
    return {
        "name": name,
        "source": str(source),
        "device": "cpu",
        "dtype": "float32",
        "num_threads": 1,
        "engine": {"page_size": 16, "num_blocks": 1024, "max_batch_tokens": 256},
    } | fields
