"""One request to an OpenAI-compatible server, streamed, with the time of everything that came.

Called by `load.py` for every request. Token counts are the server's own (`usage`). Whatever goes wrong is the
outcome's `error`, never an exception. Knows nothing of schedules or statistics.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from rayapp.bench.datasets import Prompt

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
LONGEST_S = 6 * 3600
ERROR_CHARACTERS = 300


@dataclass(frozen=True)
class Target:
    """Where requests go and what they all have in common.

    Attributes:
        url: with the endpoint.
        chat: the endpoint takes messages.
        fields: of the body of every request, beside the prompt and its limit.
        headers: of every request.
    """

    url: str
    model: str
    chat: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self, prompt: Prompt | list[dict[str, str]], max_tokens: int) -> dict[str, Any]:
        """Of one request."""
        return {
            "model": self.model,
            "messages" if self.chat else "prompt": prompt,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }


@dataclass
class Outcome:
    """One request and what came of it. Times are `time.perf_counter()`, seconds.

    Attributes:
        planned: when it was to arrive.
        arrived: when the client got to it; waiting for --max-concurrency begins.
        start: when it was sent.
        arrivals: when pieces of text came.
        end: when the last of the answer came.
        has_usage: the token counts are the server's. Without, every piece of text counts as a token.
        error: why it failed, None for a complete answer.
    """

    planned: float = 0.0
    arrived: float = 0.0
    start: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    end: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    has_usage: bool = False
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first piece of text; of an answer without text, to its end."""
        return (self.arrivals[0] if self.arrivals else self.end) - self.start

    @property
    def latency(self) -> float:
        """Seconds from sending to the end."""
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None without such tokens."""
        return (self.latency - self.ttft) / (self.completion_tokens - 1) if self.completion_tokens > 1 else None


def connect() -> aiohttp.ClientSession:
    """As many connections as there are requests, kept for the next ones."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
        timeout=aiohttp.ClientTimeout(total=LONGEST_S),
        trust_env=False,
    )


async def send(
    session: aiohttp.ClientSession, target: Target, prompt: Prompt | list[dict[str, str]], max_tokens: int
) -> Outcome:
    """Sends one request and reads its answer to the end."""
    body = json.dumps(target.body(prompt, max_tokens)).encode()
    headers = {"Content-Type": "application/json", **target.headers}
    outcome = Outcome(start=time.perf_counter())
    try:
        async with session.post(target.url, data=body, headers=headers) as response:
            if response.status != 200:
                outcome.error = f"HTTP {response.status}: {_reason(await response.text())}"
            else:
                await _read(response, outcome)
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS]
    outcome.end = outcome.end or time.perf_counter()
    return outcome


async def _read(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    done = False
    async for data in _events(response):
        now = time.perf_counter()
        if data == b"[DONE]":
            done = True
            break
        content = json.loads(data)
        if error := content.get("error"):
            outcome.error = f"error event: {_reason(json.dumps({'error': error}))}"
            return
        if content.get("choices"):
            _take(content["choices"][0], outcome, now)
        if usage := content.get("usage"):
            _count(usage, outcome)
    if not done:
        outcome.error = "the stream ended without [DONE]"
    elif not outcome.end:
        outcome.error = "the answer has no choices"
    elif not outcome.has_usage:
        outcome.completion_tokens = len(outcome.arrivals)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of server-sent events of one line each; comments and other fields are left out."""
    rest = b""
    async for piece in response.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _take(choice: Mapping[str, Any], outcome: Outcome, now: float) -> None:
    """An opening without text, and an end without text, are no token."""
    delta = choice.get("delta")
    if delta is None:
        text = choice.get("text") or ""
    else:
        text = (delta.get("content") or "") + (delta.get("reasoning_content") or delta.get("reasoning") or "")
    outcome.end = now
    if text or (delta is None and choice.get("finish_reason") is None) or (delta and delta.get("tool_calls")):
        outcome.arrivals.append(now)
        outcome.text += text


def _count(usage: Mapping[str, Any], outcome: Outcome) -> None:
    outcome.prompt_tokens = usage.get("prompt_tokens") or 0
    outcome.completion_tokens = usage.get("completion_tokens") or 0
    outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    outcome.has_usage = True


def _reason(body: str) -> str:
    """What an error body says."""
    try:
        error = json.loads(body)["error"]
        body = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, TypeError, KeyError):
        pass
    return " ".join(body.split())[:ERROR_CHARACTERS]
