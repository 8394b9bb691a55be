"""The HTTP side of the chat: which models a server has, and one streamed answer.

Called by `rayapp.chat.session` and `rayapp.cli`. Knows nothing of terminals; everything that can go wrong leaves it
as a `ServerError` with words for the user.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2

CONNECT_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 600.0
"""How long a server may say nothing: a request waits in a queue, or a long prompt is read."""

MAX_ERROR_BYTES = 64 * 1024

Show = Callable[[str, bool], None]
"""Told each piece of text as it comes, and whether it is reasoning before the answer."""


class ServerError(Exception):
    """The server cannot be reached, refused, or failed; the message says it to the user."""


@dataclass
class Answer:
    """What has come of an answer so far.

    Attributes:
        text: the answer.
        finish_reason: None until the server has said that the answer is whole.
        pieces: events with text, reasoning included.
        completion_tokens: as the server counted; None where it did not say.
        started, first, last: `time.monotonic()` of the request, of the first and of the latest piece.
    """

    text: str = ""
    finish_reason: str | None = None
    pieces: int = 0
    completion_tokens: int | None = None
    started: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float | None = None

    def saw_piece(self) -> None:
        self.last = time.monotonic()
        self.first = self.last if self.first is None else self.first
        self.pieces += 1


class Server:
    """One OpenAI-compatible server.

    Args:
        url: with or without the final /v1.
        api_key: sent as a bearer token, and kept out of every message.

    Attributes:
        name: the URL to show, without credentials.

    Raises:
        ServerError: the URL or the key cannot be used.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._key = (api_key or "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise ServerError("the API key has characters that cannot be sent")
        try:
            parsed = httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise ServerError(f"the URL cannot be used: {error}") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ServerError("the URL must begin with http:// or https:// and name a host")
        if parsed.port is not None and parsed.port >= 2**16:
            raise ServerError(f"the URL names port {parsed.port}; {2**16 - 1} is the last")
        path = parsed.path.rstrip("/").removesuffix("/v1")
        self._base = parsed.copy_with(path=f"{path}/v1", query=None, fragment=None)
        self._tls = httpx2.create_ssl_context()  # takes long: not once more for every answer
        self.name = f"{parsed.scheme}://{parsed.netloc.decode()}{path}"

    async def models(self) -> list[str] | None:
        """Names of the models, in the server's order; None where the server has no such list.

        Raises:
            ServerError
        """
        try:
            async with self._client() as client, client.stream("GET", f"{self._base}/models") as response:
                if response.status_code in (404, 405, 501):
                    return None
                await self._raise_for_status(response)
                body = await response.aread()
        except httpx2.HTTPError as error:
            raise self._failure(error) from error
        try:
            return [str(model["id"]) for model in json.loads(body)["data"]]
        except (ValueError, TypeError, KeyError):
            raise ServerError(f"{self.name}/v1/models is not a list of models: no OpenAI-compatible server?") from None

    async def answer(self, request: Mapping[str, Any], answer: Answer, show: Show) -> None:
        """Streams the answer to a chat request into `answer`. Cancelled, it closes the connection.

        Args:
            request: the body of POST /v1/chat/completions; streaming and usage are asked for here.
            answer: holds what came also when this raises.

        Raises:
            ServerError: no whole answer came.
        """
        body = {**request, "stream": True, "stream_options": {"include_usage": True}}
        content = json.dumps(body).encode()  # ASCII: also carries what is no valid Unicode
        answer.started = time.monotonic()
        try:
            async with (
                self._client() as client,
                client.stream("POST", f"{self._base}/chat/completions", content=content) as response,
            ):
                await self._raise_for_status(response)
                async for event in httpx2.EventSource(response):
                    if event.data == "[DONE]":
                        break
                    self._take(event, answer, show)
        except httpx2.HTTPError as error:
            raise self._failure(error, answer) from error
        if answer.finish_reason is None:
            raise self._error("the stream ended before the answer was whole", answer)

    def _client(self) -> httpx2.AsyncClient:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        timeout = httpx2.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        return httpx2.AsyncClient(headers=headers, timeout=timeout, verify=self._tls)

    def _take(self, event: httpx2.ServerSentEvent, answer: Answer, show: Show) -> None:
        """One event of the stream."""
        try:
            chunk = json.loads(event.data)
            if chunk.get("error") or event.event == "error":
                raise self._error(_message_of(chunk) or event.data, answer)
            choice = (chunk.get("choices") or [{}])[0]
            delta, reason = choice.get("delta") or {}, choice.get("finish_reason")
            # Of the two names of reasoning some servers send both. What is no text does not add up.
            reasoning = "" + (delta.get("reasoning_content") or delta.get("reasoning") or "")
            text = "" + (delta.get("content") or "") + (delta.get("refusal") or "")
            count = (chunk.get("usage") or {}).get("completion_tokens")
            answer.completion_tokens = answer.completion_tokens if count is None else int(count)
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
            raise self._error(f"the server sent what is no chat completion chunk: {event.data[:200]}", answer) from None
        for piece, reasons in ((reasoning, True), (text, False)):
            if piece:
                answer.saw_piece()
                show(piece, reasons)
        answer.text += text
        answer.finish_reason = str(reason) if reason else answer.finish_reason

    async def _raise_for_status(self, response: httpx2.Response) -> None:
        if response.is_success:
            return
        body = b""
        async for part in response.aiter_bytes():
            body += part
            if len(body) > MAX_ERROR_BYTES:
                break
        text = body.decode(errors="replace")
        try:
            said = _message_of(json.loads(text))
        except (ValueError, RecursionError):
            said = None
        if response.has_redirect_location:
            said = f"the address has moved to {response.headers['location']}"
        said = said or " ".join(text.split())[:300] or response.reason_phrase
        raise self._error(f"{self.name} answered {response.status_code}: {said}")

    def _failure(self, error: httpx2.HTTPError, answer: Answer | None = None) -> ServerError:
        reason = str(error) or type(error).__name__
        if isinstance(error, httpx2.ReadTimeout):
            reason = f"the server said nothing for {SILENCE_TIMEOUT_S:.0f} s"
        if isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout)):
            return self._error(f"cannot reach {self.name}: {reason}")
        return self._error(reason, answer)

    def _error(self, message: str, answer: Answer | None = None) -> ServerError:
        if answer is not None and answer.pieces:
            message = f"the answer broke off: {message}"
        return ServerError(message.replace(self._key, "***") if self._key else message)


def _message_of(body: Any) -> str | None:
    """What an error body says, in OpenAI's envelope or one of its usual variants."""
    if not isinstance(body, dict):
        return None
    error = body.get("error") or body.get("message") or body.get("detail")
    said = error.get("message") if isinstance(error, dict) else error
    return None if said is None else str(said)
