"""Server-sent events: how a JSON object becomes an event, and the response that sends them.

Used by `rayapp.api.answer`. Knows nothing of what the events say.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rayapp.api.choices import ClientGone, while_connected
from rayapp.api.errors import ApiError, as_api_error

DONE = b"data: [DONE]\n\n"

# Legal inside JSON, but line ends to many clients' line splitters.
_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # json.dumps makes one for every event


def to_json(value: Any) -> str:
    """One line of JSON, text readable as it is."""
    text = _encode(value)
    return text if text.isascii() else text.translate(_LINE_ENDS)


def json_response(value: Any, status: int = 200) -> Response:
    """`value` as a whole answer."""
    return Response(to_json(value), status, media_type="application/json")


def event(value: Any, name: str | None = None) -> bytes:
    """`value` as one event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {to_json(value)}\n\n".encode()


def error_event(error: ApiError) -> bytes:
    """What breaks off a stream of chat or text completions."""
    return event(error.envelope())


class EventStream(Response):
    """Sends events until they end, fail, or the client hangs up; then `events` has been closed.

    After a failure the client gets the event that `failure` makes of it, and the response is left unended: the server
    closes the connection, so that no client can take the text for a whole answer.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], failure: Callable[[ApiError], bytes] = error_event) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        except (ClientGone, OSError):
            return  # nobody is left to tell

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for body in events:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            except OSError:
                raise
            except Exception as error:
                body = self._failure(as_api_error(error))
                await send({"type": "http.response.body", "body": body, "more_body": True})
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})
