"""POST /v1/completions.

Called by the route; the objects it answers with are OpenAI's text_completion, streamed or not.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from rayapp.api.answer import answer
from rayapp.api.choices import Choice
from rayapp.api.logprobs import TextLogprobs
from rayapp.api.resolve import Plan, plan_completions
from rayapp.api.service import Chunk, Service
from rayapp.api.streaming import DONE, error_event, event
from rayapp.text.tokenizer import Tokenizer


class CompletionShape:
    """The objects of one answer. With `echo` a choice's text begins with its prompt, and so do its logprobs."""

    failure = staticmethod(error_event)

    def __init__(self, plan: Plan, tokenizer: Tokenizer) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": plan.model,
        }
        self._logprobs: dict[int, TextLogprobs] = {}

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        said = [
            self._choice(index, self._echo(index) + choice.text, [*choice.prompt, *choice.tokens], choice.finish_reason)
            for index, choice in enumerate(choices)
        ]
        return {**self._head, "choices": said, "usage": usage}

    def opening(self, usage: dict[str, Any] | None) -> Iterator[bytes]:
        return iter(())

    def piece(self, index: int, chunk: Chunk, usage: dict[str, Any] | None) -> Iterator[bytes]:
        first = index not in self._logprobs
        text, tokens = chunk.text, chunk.token_ids
        if first:
            text, tokens = self._echo(index) + text, [*(chunk.prompt or ()), *tokens]
        if text or (tokens and self._plan.logprobs):
            yield self._event(self._choice(index, text, tokens, None), usage)
        if chunk.finish_reason is not None:
            yield self._event(self._choice(index, "", [], chunk.finish_reason), usage)

    def closing(self, usage: dict[str, Any]) -> Iterator[bytes]:
        if self._plan.include_usage:
            yield event({**self._head, "choices": [], "usage": usage})
        yield DONE

    def _event(self, choice: dict[str, Any], usage: dict[str, Any] | None) -> bytes:
        tail = {"usage": usage} if self._plan.include_usage else {}
        return event({**self._head, "choices": [choice], **tail})

    def _echo(self, index: int) -> str:
        return self._plan.echo[index // self._plan.n] if self._plan.echo else ""

    def _choice(self, index: int, text: str, tokens: Sequence[int], finish_reason: str | None) -> dict[str, Any]:
        logprobs = self._logprobs.setdefault(index, TextLogprobs(self._tokenizer))
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs.of(tokens) if self._plan.logprobs and tokens else None,
            "finish_reason": finish_reason,
        }


async def create_completion(service: Service, request: Request, body: bytes) -> Response:
    """Answers a completion request.

    Raises:
        ApiError, ClientGone: see `answer`.
    """
    plan = await run_in_threadpool(plan_completions, service.models, body, service.settings)
    return await answer(service, plan, CompletionShape(plan, service.models[plan.model].tokenizer), request)
