"""Several generations as one stream, and work that ends when the client hangs up.

Used by `rayapp.api.answer`. Knows nothing of JSON or models.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
from starlette.types import Receive

from rayapp.api.service import Chunk
from rayapp.text.reasoning import ReasoningCount

T = TypeVar("T")

CLOSE_LIMIT_S = 5.0
"""How long cancelled work may take to end before it is left to end on its own."""

Indexed = AsyncGenerator[tuple[int, Chunk], None]


class ClientGone(Exception):
    """The client hung up; there is nobody to answer."""


@dataclass(slots=True)
class Choice:
    """What one generation has said so far.

    Attributes:
        tokens: of the text.
        prompt, cut: as in `Chunk`.
        reasoning: counts the tokens of its reasoning; None where there is none.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    cut: bool = False
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning: ReasoningCount | None = None

    def add(self, chunk: Chunk) -> None:
        """Take everything that a chunk says."""
        self.text += chunk.text
        self.tokens += chunk.token_ids
        self.prompt += chunk.prompt or ()
        self.count(chunk)

    def count(self, chunk: Chunk) -> None:
        """Take its figures alone."""
        self.finish_reason, self.cut = chunk.finish_reason, chunk.cut
        self.completion_tokens = chunk.completion_tokens
        self.cached_tokens = chunk.cached_tokens
        if self.reasoning is not None:
            self.reasoning.push(chunk.token_ids)


async def merge(streams: Sequence[AsyncGenerator[Chunk, None]]) -> Indexed:
    """The chunks of all generations as they come, each with the generation's index.

    A slow reader slows the generations' readers down. When it ends, is closed or fails, every generation has been
    closed.

    Raises:
        What the first failing generation raised; RuntimeError for one that ends without a finish reason or with
        one that is not OpenAI's.
    """
    queue: asyncio.Queue[tuple[int, Chunk | Exception]] = asyncio.Queue(maxsize=len(streams))

    async def pump(index: int, stream: AsyncGenerator[Chunk, None]) -> None:
        try:
            async for chunk in stream:
                if chunk.finish_reason not in (None, "stop", "length"):
                    raise RuntimeError(f"a generation ended with {chunk.finish_reason!r}")
                await queue.put((index, chunk))
                if chunk.finish_reason is not None:
                    return
            raise RuntimeError("a generation ended without a finish reason")
        except Exception as error:
            await queue.put((index, error))
        finally:
            await stream.aclose()

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(streams)
        while running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            running -= item.finish_reason is not None
            yield index, item
    finally:
        await cancel(tasks)


async def first_of_each(merged: Indexed, count: int) -> list[tuple[int, Chunk]]:
    """Reads until each of `count` generations has said something: none of them has been refused."""
    seen: set[int] = set()
    read = []
    while len(seen) < count:
        index, chunk = await anext(merged)
        seen.add(index)
        read.append((index, chunk))
    return read


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client hangs up or this call is cancelled.

    Raises:
        ClientGone: the client hung up first.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await cancel([task, watcher])


async def _disconnected(receive: Receive) -> None:
    """Returns when the client is gone. A server that can no longer say (Serve, once it cancels the request) counts."""
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    except Exception:
        return


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels what still runs and waits until it has ended, so that nothing outlives the request."""
    left = [task for task in tasks if not task.done()]
    for task in left:
        task.cancel()
    if left:
        await _uncancelled(asyncio.wait(left, timeout=CLOSE_LIMIT_S))


async def _uncancelled(waiting: Awaitable[Any]) -> None:
    """Awaits also inside a cancelled scope, which would interrupt any plain `await` again at once."""
    with anyio.CancelScope(shield=True):
        await waiting
