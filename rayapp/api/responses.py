"""POST /v1/responses.

Called by the route; a chat generation under the names of OpenAI's response object and its stream of typed events.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from rayapp.api.answer import answer
from rayapp.api.choices import Choice
from rayapp.api.errors import ApiError
from rayapp.api.logprobs import chat_logprobs
from rayapp.api.reading import Reader
from rayapp.api.resolve import Plan, plan_chat_fields
from rayapp.api.response_fields import NamedFunction, ResponsesRequest
from rayapp.api.schemas import parse_body
from rayapp.api.service import Chunk, ServedModel, Service
from rayapp.api.settings import RequestSettings
from rayapp.api.streaming import event
from rayapp.text.pieces import Content, Piece, Reasoning, ToolArguments, ToolStart
from rayapp.text.tokenizer import Tokenizer


class _Item:
    """One item of the output, as it grows."""

    def __init__(self, index: int, kind: str, **fields: Any) -> None:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        self.index = index
        self.kind = kind
        self.id = f"{prefix}_{uuid.uuid4().hex}"
        self.text = ""
        self.tokens: list[int] = []
        self._fields = fields

    def shown(self, status: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "message":
            return {**head, "role": "assistant", "content": [self.part(logprobs)]}
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": [self.part(logprobs)]}
        return {**head, **self._fields, "arguments": self.text}

    def begun(self) -> dict[str, Any]:
        whole = self.shown("in_progress", [])
        return whole | {"content": []} if "content" in whole else whole | {"arguments": ""}

    def part(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": logprobs}


class ResponseShape:
    """The response object and the events of its stream. One generation: item follows item."""

    def __init__(self, request: ResponsesRequest, plan: Plan, tokenizer: Tokenizer) -> None:
        self._request = request
        self._plan = plan
        self._tokenizer = tokenizer
        self._reader = Reader(plan.reply)
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._items: list[_Item] = []
        self._number = 0
        self._reason: str | None = None

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        (choice,) = choices
        self._reason = choice.finish_reason
        for _ in self._grow(self._reader.read(choice.text, ended=True), choice.tokens):
            pass
        for _ in self._close_last():
            pass
        return self._response(self._status(), usage)

    def opening(self, usage: dict[str, Any] | None) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress", None))

    def piece(self, index: int, chunk: Chunk, usage: dict[str, Any] | None) -> Iterator[bytes]:
        ended = chunk.finish_reason is not None
        if ended:
            self._reason = chunk.finish_reason
        yield from self._grow(self._reader.read(chunk.text, ended=ended), chunk.token_ids)
        if ended:
            yield from self._close_last()

    def closing(self, usage: dict[str, Any]) -> Iterator[bytes]:
        status = self._status()
        yield self._event(f"response.{status}", response=self._response(status, usage))

    def failure(self, error: ApiError) -> bytes:
        told = {"code": error.code or error.type, "message": error.message}
        response = self._response("failed", None) | {"error": {"code": "server_error", "message": error.message}}
        return self._event("error", **told, param=error.param) + self._event("response.failed", response=response)

    def _grow(self, pieces: Sequence[Piece], tokens: Sequence[int]) -> Iterator[bytes]:
        for piece in pieces:
            match piece:
                case Content(text):
                    yield from self._more("message", text, "response.output_text.delta", tokens)
                    tokens = ()
                case Reasoning(text):
                    yield from self._more("reasoning", text, "response.reasoning_text.delta", ())
                case ToolStart(_, call_id, name):
                    yield from self._open(_Item(len(self._items), "function_call", call_id=call_id, name=name))
                case ToolArguments(_, text):
                    item = self._items[-1]
                    item.text += text
                    yield self._event("response.function_call_arguments.delta", **self._at(item), delta=text)

    def _more(self, kind: str, text: str, event_kind: str, tokens: Sequence[int]) -> Iterator[bytes]:
        if not self._items or self._items[-1].kind != kind:
            yield from self._open(_Item(len(self._items), kind))
        item = self._items[-1]
        item.text += text
        item.tokens += tokens
        logprobs = {"logprobs": self._scores(tokens)} if kind == "message" else {}
        yield self._event(event_kind, **self._at(item), content_index=0, delta=text, **logprobs)

    def _open(self, item: _Item) -> Iterator[bytes]:
        yield from self._close_last()
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=item.index, item=item.begun())
        if item.kind != "function_call":
            part = item.part([])
            yield self._event("response.content_part.added", **self._at(item), content_index=0, part=part)

    def _close_last(self) -> Iterator[bytes]:
        if not self._items:
            return
        item = self._items[-1]
        at, scores = self._at(item), self._scores(item.tokens)
        if item.kind == "function_call":
            name = item.shown("completed", [])["name"]
            yield self._event("response.function_call_arguments.done", **at, name=name, arguments=item.text)
        else:
            kind = "response.output_text.done" if item.kind == "message" else "response.reasoning_text.done"
            logprobs = {"logprobs": scores} if item.kind == "message" else {}
            yield self._event(kind, **at, content_index=0, text=item.text, **logprobs)
            yield self._event("response.content_part.done", **at, content_index=0, part=item.part(scores))
        shown = item.shown(self._item_status(item, self._status()), scores)
        yield self._event("response.output_item.done", output_index=item.index, item=shown)

    @staticmethod
    def _at(item: _Item) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": item.index}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **fields}, kind)

    def _scores(self, tokens: Sequence[int]) -> list[dict[str, Any]]:
        if not self._plan.logprobs:
            return []
        entries = chat_logprobs(self._tokenizer, tokens)["content"]
        return [{key: entry[key] for key in ("token", "bytes", "logprob", "top_logprobs")} for entry in entries]

    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _item_status(self, item: _Item, status: str) -> str:
        """Of the response it follows for the last item alone, which breaks off where the response does."""
        return "completed" if status == "completed" or item is not self._items[-1] else "incomplete"

    def _response(self, status: str, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        asked = self._request
        items = [] if status == "in_progress" else self._items
        output = [item.shown(self._item_status(item, status), self._scores(item.tokens)) for item in items]
        choice = asked.tool_choice
        text = asked.text.model_dump(exclude_none=True, by_alias=True) if asked.text else {}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata,
            "model": self._plan.model,
            "output": output,
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": {"type": "text"}} | text,
            "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice or "auto",
            "tools": [tool.model_dump() for tool in asked.tools],
            "top_logprobs": asked.top_logprobs,
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": asked.user,
        }


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": dict(usage["completion_tokens_details"]),
        "total_tokens": usage["total_tokens"],
    }


def plan_response(
    models: Mapping[str, ServedModel], body: bytes, settings: RequestSettings
) -> tuple[ResponsesRequest, Plan]:
    """The fields of a body and the plan of the chat that it stands for.

    Raises:
        ApiError: 400, 404 or 413.
    """
    fields = parse_body(ResponsesRequest, body)
    return fields, plan_chat_fields(models, fields.for_chat(), settings)


async def create_response(service: Service, request: Request, body: bytes) -> Response:
    """Answers a request for a response.

    Raises:
        ApiError, ClientGone: see `answer`.
    """
    fields, plan = await run_in_threadpool(plan_response, service.models, body, service.settings)
    return await answer(service, plan, ResponseShape(fields, plan, service.models[plan.model].tokenizer), request)
