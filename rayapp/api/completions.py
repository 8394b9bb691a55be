"""POST /v1/completions.

Called by the route; the objects it answers with are OpenAI's text_completion, streamed or not.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from rayapp.api.answer import answer
from rayapp.api.choices import Choice
from rayapp.api.resolve import plan_completions
from rayapp.api.service import Service


class CompletionShape:
    """The objects of one answer."""

    def __init__(self, model: str) -> None:
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        said = [_choice(index, choice.text, choice.finish_reason) for index, choice in enumerate(choices)]
        return {**self._head, "choices": said, "usage": usage}

    def opening(self, index: int) -> None:
        return None

    def piece(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {**self._head, "choices": [_choice(index, text, finish_reason)]}

    def closing(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": usage}


def _choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


async def create_completion(service: Service, request: Request, body: bytes) -> Response:
    """Answers a completion request.

    Raises:
        ApiError, ClientGone: see `answer`.
    """
    plan = await run_in_threadpool(plan_completions, service.models, body, service.settings)
    return await answer(service, plan, CompletionShape(plan.model), request)
