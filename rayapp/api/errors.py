"""Errors as HTTP answers: `ApiError`, the OpenAI envelope, and the net under everything else.

Raised by the endpoints and by the Service; `install_error_handling` is called once, by `build_api`. Knows of no
endpoint.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


class ApiError(Exception):
    """A refusal or failure that the client is told of.

    Args:
        status: HTTP status, 4xx or 5xx.
        message: what was asked, what the limit is, what to change; shown to the client.
        type: error class of the envelope; by default told from the status.
        param: the field at fault, dotted ("messages.0.content").
        code: for programs, such as "context_length_exceeded".
        headers: for the answer, such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or (INVALID_REQUEST if status < 500 else SERVER_ERROR)
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.status, self.message, self.type, self.param, self.code, self.headers)

    def envelope(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        body = json.dumps(self.envelope(), ensure_ascii=False).encode(errors="backslashreplace")
        return Response(body, self.status, self.headers, media_type="application/json")


def _rebuild(
    status: int, message: str, type: str, param: str | None, code: str | None, headers: dict[str, str]
) -> ApiError:
    return ApiError(status, message, type=type, param=param, code=code, headers=headers)


def invalid_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is at fault."""
    return ApiError(400, message, param=param, code=code)


def not_found(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """404."""
    return ApiError(404, message, param=param, code=code)


def unavailable(message: str, retry_after_s: int | None = None) -> ApiError:
    """503: no replica can serve this now."""
    return ApiError(503, message, code="unavailable", headers=_retry_after(retry_after_s))


def overloaded(message: str, retry_after_s: int = 1) -> ApiError:
    """503: the queues are full."""
    return ApiError(503, message, code="overloaded", headers=_retry_after(retry_after_s))


def out_of_time(message: str) -> ApiError:
    """504: the request's own `timeout` passed. Clients that try again by themselves are told not to."""
    return ApiError(504, message, param="timeout", code="timeout", headers={"x-should-retry": "false"})


def internal_error(error: BaseException) -> ApiError:
    """500 that tells the client nothing but a number, under which the log has the error."""
    number = uuid.uuid4().hex
    logger.error("internal error %s", number, exc_info=error)
    return ApiError(500, f"internal error; the server's log has it under {number}", code="internal_error")


def as_api_error(error: Exception) -> ApiError:
    """The error itself where it is made for clients, else an internal error (logged)."""
    return error if isinstance(error, ApiError) else internal_error(error)


def _retry_after(seconds: int | None) -> dict[str, str]:
    return {} if seconds is None else {"Retry-After": str(seconds)}


def install_error_handling(app: FastAPI) -> None:
    """Every error of the app leaves it in the envelope."""
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_middleware(ErrorBoundary)


async def _answer_api_error(request: Request, error: Exception) -> Response:
    return as_api_error(error).response()


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """What the routing itself refuses."""
    if not isinstance(error, HTTPException):
        return internal_error(error).response()
    message = error.detail
    if error.status_code == 404:
        message = f"there is no {request.method} {request.url.path}"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.url.path} does not take {request.method}; it takes {allowed}"
    return ApiError(error.status_code, message, headers=error.headers).response()


class ErrorBoundary:
    """Answers 500 for an exception nobody handled.

    Where the answer has already begun the app just returns without ending it: the server then closes the
    connection, so that the client cannot take half an answer for a whole one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        except Exception as error:
            refusal = internal_error(error)
            if not started:
                await refusal.response()(scope, receive, send)
