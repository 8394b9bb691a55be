"""A small OpenAI-compatible server in a thread of the tests: streams known tokens, or fails in a known way.

The `model` of a request says what becomes of it: "steady" answers, the others are `FAULTS`.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

FAULTS = ("busy", "error-event", "cut", "empty", "no-usage")
PIECE = "ab "


class StreamingServer:
    """Use as a context manager.

    Attributes:
        url: without a path.
        bodies: of all requests, in the order of their arrival.
        headers: of all requests.
        most: requests that were under way at one moment.
        gather: answers begin once so many requests are there, but for that of the first one.
        tokens_per_piece: tokens that the usage counts for each piece of text.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most = self._running = 0
        self.gather = 0
        self.tokens_per_piece = 1
        routes = [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models),
        ]
        config = uvicorn.Config(Starlette(routes=routes), host="127.0.0.1", port=0, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)

    def __enter__(self) -> StreamingServer:
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            threading.Event().wait(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "steady"}]})

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, chat=False)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, chat=True)

    async def _answer(self, request: Request, chat: bool) -> Response:
        body = json.loads(await request.body())
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        prompt = str(body["messages"] if chat else body["prompt"])
        fault = next((fault for fault in FAULTS if fault in (body["model"], *prompt.split("'"))), "")
        if fault == "busy":
            return JSONResponse({"error": {"message": "no room\nleft", "type": "overloaded"}}, 503)
        held = len(self.bodies) > 1
        return StreamingResponse(self._events(body, chat, fault, held), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any], chat: bool, fault: str, held: bool) -> AsyncIterator[str]:
        self._running += 1
        self.most = max(self.most, self._running)
        try:
            while held and len(self.bodies) < self.gather:
                await asyncio.sleep(0.005)
            for event in self._content(body, chat, fault):
                yield event
                await asyncio.sleep(0)
        finally:
            self._running -= 1

    def _content(self, body: dict[str, Any], chat: bool, fault: str) -> list[str]:
        pieces = body["max_tokens"] // self.tokens_per_piece
        events = [": a comment\n\n"]
        if chat:
            events.append(_event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}))
        if fault != "empty":
            events += [_piece(PIECE, None, chat)] * pieces
        if fault == "cut":
            return events
        if fault == "error-event":
            return [*events, _event({"error": {"message": "it broke"}})]
        if fault != "empty":
            events.append(_piece("", "length", chat))
        if fault != "no-usage":
            prompt = body.get("messages") or body["prompt"]
            details = {"prompt_tokens_details": {"cached_tokens": 2}}
            usage = {"prompt_tokens": count_prompt(prompt), "completion_tokens": body["max_tokens"]} | details
            events.append(_event({"choices": [], "usage": usage}))
        return [*events, "data: [DONE]\n\n"]


def count_prompt(prompt: Any) -> int:
    """Tokens as this server counts them: ids, or words of all texts."""
    if isinstance(prompt, str):
        return len(prompt.split())
    return sum(1 if isinstance(part, int) else len(part["content"].split()) for part in prompt)


def _piece(text: str, reason: str | None, chat: bool) -> str:
    content: dict[str, Any] = {"delta": {"content": text} if text else {}} if chat else {"text": text}
    return _event({"choices": [{"index": 0, **content, "finish_reason": reason}]})


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\r\n\r\n"
