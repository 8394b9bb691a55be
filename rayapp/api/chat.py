"""POST /v1/chat/completions.

Called by the route; the objects it answers with are OpenAI's chat.completion and chat.completion.chunk.
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
from rayapp.api.logprobs import chat_logprobs
from rayapp.api.reading import Reader
from rayapp.api.resolve import Plan, plan_chat
from rayapp.api.service import Chunk, Service
from rayapp.api.streaming import DONE, error_event, event
from rayapp.text.pieces import Content, Piece, Reasoning, ToolArguments, ToolStart, collected
from rayapp.text.tokenizer import Tokenizer


class ChatShape:
    """The objects of one chat answer."""

    failure = staticmethod(error_event)

    def __init__(self, plan: Plan, tokenizer: Tokenizer) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": plan.model}
        self._readers: dict[int, Reader] = {}

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        said = []
        for index, choice in enumerate(choices):
            reply = collected(self._reader(index).read(choice.text, ended=True))
            message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
            if reply.reasoning:
                message["reasoning_content"] = reply.reasoning
            if reply.calls:
                message["tool_calls"] = [
                    {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                    for call in reply.calls
                ]
                message["content"] = reply.content or None
            said.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._scores(choice.tokens),
                    "finish_reason": self._reader(index).reason(choice.finish_reason),
                }
            )
        return {**self._head, "object": "chat.completion", "choices": said, "usage": usage}

    def opening(self, usage: dict[str, Any] | None) -> Iterator[bytes]:
        for index in range(self._plan.num_choices):
            yield self._chunk(index, {"role": "assistant", "content": ""}, [], None, usage)

    def piece(self, index: int, chunk: Chunk, usage: dict[str, Any] | None) -> Iterator[bytes]:
        reader, ended = self._reader(index), chunk.finish_reason is not None
        deltas = [_delta(piece) for piece in reader.read(chunk.text, ended=ended)]
        tokens = chunk.token_ids if self._plan.logprobs else []
        for delta in deltas or ([{"content": ""}] if tokens else []):
            yield self._chunk(index, delta, tokens, None, usage)
            tokens = []
        if ended:
            yield self._chunk(index, {}, [], reader.reason(chunk.finish_reason), usage)

    def closing(self, usage: dict[str, Any]) -> Iterator[bytes]:
        if self._plan.include_usage:
            yield event({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage})
        yield DONE

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        tokens: Sequence[int],
        finish_reason: str | None,
        usage: dict[str, Any] | None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": self._scores(tokens), "finish_reason": finish_reason}
        tail = {"usage": usage} if self._plan.include_usage else {}
        return event({**self._head, "object": "chat.completion.chunk", "choices": [choice], **tail})

    def _reader(self, index: int) -> Reader:
        if index not in self._readers:
            self._readers[index] = Reader(self._plan.reply)
        return self._readers[index]

    def _scores(self, tokens: Sequence[int]) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, tokens) if self._plan.logprobs and tokens else None


def _delta(piece: Piece) -> dict[str, Any]:
    match piece:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case ToolStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ToolArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


async def create_chat_completion(service: Service, request: Request, body: bytes) -> Response:
    """Answers a chat request.

    Raises:
        ApiError, ClientGone: see `answer`.
    """
    plan = await run_in_threadpool(plan_chat, service.models, body, service.settings)
    return await answer(service, plan, ChatShape(plan, service.models[plan.model].tokenizer), request)
