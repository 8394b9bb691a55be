"""What operators and tools ask beside generations: /tokenize, /detokenize, /tokenizer_info, /ping, /version, /load and
/metrics.

Called by the routes. Tokenizing runs in worker threads, as it does for generations.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from engine import __version__
from rayapp.api.errors import invalid_request, not_found
from rayapp.api.logprobs import shown
from rayapp.api.messages import read_messages
from rayapp.api.prompts import PromptReader, find_model
from rayapp.api.refusals import Neutral, refuse
from rayapp.api.schemas import Body, TemplateFields, or_default, parse_body
from rayapp.api.service import ServedModel, Service
from rayapp.api.streaming import json_response
from rayapp.api.tool_fields import AnyTool, check_can_call, check_tools
from rayapp.text.template import Message

ONE_OF_THEM = "give prompt or messages, one of them"


class TokenizeRequest(TemplateFields):
    """POST /tokenize: of a text, or of chat messages as the model's template renders them."""

    refused: ClassVar[Neutral] = {"chat_template": ()}

    model: str | None = None  # type: ignore[assignment]
    prompt: str | None = None
    messages: Annotated[list[Message], BeforeValidator(read_messages)] | None = None
    tools: Annotated[list[AnyTool], BeforeValidator(or_default([])), Field(default_factory=list)]
    add_special_tokens: bool | None = None  # None: to a text, but not to messages, whose template writes them
    return_token_strs: Annotated[bool, BeforeValidator(or_default(False))] = False

    @model_validator(mode="before")
    @classmethod
    def _check_one(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Before what they hold: an empty one is one too."""
        if value.get("prompt") is not None and value.get("messages") is not None:
            raise refuse(ONE_OF_THEM, "prompt")
        if value.get("prompt") is not None and value.get("tools"):
            raise refuse("tools go with messages, not with a prompt", "tools")
        return value

    @model_validator(mode="after")
    def _check_tools(self) -> TokenizeRequest:
        check_tools([tool.function.name for tool in self.tools], None, "function", "name")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None  # type: ignore[assignment]
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=2**20)]


async def tokenize(service: Service, request: Request, body: bytes) -> Response:
    """Token ids of a text or of messages.

    Raises:
        ApiError: 400, 404 or 413.
    """
    return json_response(await run_in_threadpool(_tokenize, service, body))


def _tokenize(service: Service, body: bytes) -> dict[str, Any]:
    fields = parse_body(TokenizeRequest, body)
    model = _model(service, fields.model)
    if fields.prompt is None and fields.messages is None:
        raise invalid_request(ONE_OF_THEM, "prompt")
    reader = PromptReader(model, service.settings, fits=False)
    if fields.messages is not None:
        if fields.tools:
            check_can_call(model)
        tools = [tool.model_dump(exclude_none=True) for tool in fields.tools]
        text = reader.render(fields.messages, fields, "messages", tools)
        ids = reader.encode(text, "messages", add_special_tokens=bool(fields.add_special_tokens))
    else:
        ids = reader.encode(fields.prompt or "", "prompt", fields.add_special_tokens is not False)
    strings = [shown(model.tokenizer, token_id) for token_id in ids] if fields.return_token_strs else None
    return {"count": len(ids), "max_model_len": model.context_length, "tokens": ids, "token_strs": strings}


async def detokenize(service: Service, request: Request, body: bytes) -> Response:
    """The text of token ids, special tokens by their names: what was tokenized comes back.

    Raises:
        ApiError: 400 or 404.
    """

    def text() -> str:
        fields = parse_body(DetokenizeRequest, body)
        model = _model(service, fields.model)
        try:
            model.tokenizer.check_ids(fields.tokens)
        except ValueError as error:
            raise invalid_request(f"tokens: {error}", "tokens") from None
        return model.tokenizer.decode(fields.tokens, skip_special_tokens=False)

    return json_response({"prompt": await run_in_threadpool(text)})


async def tokenizer_info(service: Service, request: Request) -> Response:
    """What the tokenizer of `?model=` is.

    Raises:
        ApiError: 400 or 404.
    """
    return json_response(_tokenizer_facts(_model(service, request.query_params.get("model"))))


def _model(service: Service, name: str | None) -> ServedModel:
    """The model of a name; the only one needs no naming, and some clients never name it.

    Raises:
        ApiError: 400 or 404.
    """
    if name is None and len(service.models) > 1:
        raise invalid_request(f"say which model: {', '.join(service.models)}", "model")
    return find_model(service.models, next(iter(service.models)) if name is None else name)


def _tokenizer_facts(model: ServedModel) -> dict[str, Any]:
    fast = model.tokenizer.fast
    return {name: getattr(fast, name) for name in ("bos_token", "eos_token", "pad_token")} | {
        "model": model.name,
        "tokenizer_class": type(fast).__name__,
        "vocab_size": model.tokenizer.vocab_size,
        "max_model_len": model.context_length,
        "special_tokens": {name: str(token) for name, token in fast.special_tokens_map.items()},
        "chat_template": None if model.template is None else model.template.source,
    }


async def ping(service: Service, request: Request) -> Response:
    """Whether requests can be served, by the status alone."""
    ok, _ = await service.health()
    return Response(status_code=200 if ok else 503)


async def version(service: Service, request: Request) -> Response:
    """Of Convoy."""
    return json_response({"version": __version__})


async def load(service: Service, request: Request) -> Response:
    """Requests that run or wait at the replicas of all models."""
    _, detail = await service.health()
    return json_response({"server_load": sum(one["running"] + one["waiting"] for one in detail["models"].values())})


async def metrics(service: Service, request: Request) -> Response:
    """What the exporter of this node says, as it is.

    Raises:
        ApiError: 404 where it has none.
    """
    found = await service.metrics()
    if found is None:
        raise not_found("this node exports no metrics: Ray was started without its metrics agent")
    return Response(found, media_type="text/plain; version=0.0.4")
