"""POST /v1/chat/completions.

Called by the route; the objects it answers with are OpenAI's chat.completion and chat.completion.chunk.
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
from rayapp.api.resolve import plan_chat
from rayapp.api.service import Service


class ChatShape:
    """The objects of one chat answer."""

    def __init__(self, model: str) -> None:
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        said = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._head, "object": "chat.completion", "choices": said, "usage": usage}

    def opening(self, index: int) -> dict[str, Any]:
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def piece(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return self._chunk(index, {"content": text} if text else {}, finish_reason)

    def closing(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}

    def _chunk(self, index: int, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}


async def create_chat_completion(service: Service, request: Request, body: bytes) -> Response:
    """Answers a chat request.

    Raises:
        ApiError, ClientGone: see `answer`.
    """
    plan = await run_in_threadpool(plan_chat, service.models, body, service.settings)
    return await answer(service, plan, ChatShape(plan.model), request)
