"""The HTTP app: which path does what.

`build_api` is called once, where the Router starts. Everything below talks to the Router through `Service` alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from rayapp.api import ops
from rayapp.api.auth import KeyGate, Keys
from rayapp.api.chat import create_chat_completion
from rayapp.api.choices import ClientGone
from rayapp.api.completions import create_completion
from rayapp.api.errors import ApiError, install_error_handling
from rayapp.api.openapi import document
from rayapp.api.prompts import find_model
from rayapp.api.responses import create_response
from rayapp.api.service import ServedModel, Service
from rayapp.api.settings import ApiConfig
from rayapp.api.streaming import json_response

Endpoint = Callable[[Service, Request, bytes], Awaitable[Response]]


def build_api(service: Service, config: ApiConfig | None = None) -> FastAPI:
    """The app over a service.

    Raises:
        ValueError: keys are asked for, and there are none.
    """
    config = config or ApiConfig()
    app = FastAPI(title="Convoy", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    install_error_handling(app)
    keys = Keys(config)
    if keys.needed:
        app.add_middleware(KeyGate, keys=keys, settings=lambda: service.settings)
    if config.cors_origins:  # outermost: browsers ask first without a key, and must be able to read a refusal
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )

    def post(path: str, endpoint: Endpoint) -> None:
        async def handle(request: Request) -> Response:
            try:
                body = await _read_body(request, service.settings.max_body_bytes)
                _check_kind(request, body)
                return await endpoint(service, request, body)
            except (ClientGone, ClientDisconnect):
                return Response(status_code=499)  # for the log; nobody reads it

        app.add_api_route(path, handle, methods=["POST"], response_model=None)

    post("/v1/chat/completions", create_chat_completion)
    post("/v1/completions", create_completion)
    post("/v1/responses", create_response)
    post("/tokenize", ops.tokenize)
    post("/detokenize", ops.detokenize)

    def get(path: str, endpoint: Callable[[Service, Request], Awaitable[Response]], *more: str) -> None:
        async def handle(request: Request) -> Response:
            return await endpoint(service, request)

        app.add_api_route(path, handle, methods=["GET", *more], response_model=None)

    @app.get("/openapi.json", response_model=None)
    async def openapi() -> Response:
        return json_response(document(service.models))

    get("/tokenizer_info", ops.tokenizer_info)
    get("/ping", ops.ping, "POST")
    get("/version", ops.version)
    get("/load", ops.load)
    get("/metrics", ops.metrics)

    @app.get("/v1/models", response_model=None)
    async def list_models() -> Response:
        return json_response({"object": "list", "data": [_describe(model) for model in service.models.values()]})

    @app.get("/v1/models/{name:path}", response_model=None)
    async def get_model(name: str) -> Response:
        return json_response(_describe(find_model(service.models, name)))

    @app.api_route("/health", methods=["GET", "HEAD"], response_model=None)
    async def health() -> Response:
        ok, detail = await service.health()
        return json_response({"status": "ok" if ok else "unavailable", **detail}, 200 if ok else 503)

    return app


async def _read_body(request: Request, limit: int) -> bytes:
    refusal = ApiError(413, f"the request body is longer than {limit} bytes (max_body_bytes)", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise refusal
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise refusal
    return bytes(body)


def _check_kind(request: Request, body: bytes) -> None:
    """Raises ApiError for what is said not to be JSON, and is not. (JSON is often sent as something else.)"""
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise ApiError(
            415,
            f"the body's Content-Encoding is {encoding[:60]!r}; this server takes none: send the JSON as it is",
            code="unsupported_media_type",
        )
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and not kind.endswith("json") and body.strip() and not body.lstrip().startswith(b"{"):
        raise ApiError(
            415,
            f"the body is no JSON object, and its Content-Type is {kind[:60]!r}: send JSON, as application/json",
            code="unsupported_media_type",
        )


def _describe(model: ServedModel) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": model.created, "owned_by": model.owned_by}
