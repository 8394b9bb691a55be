"""Every error leaves the app in OpenAI's envelope, and none tells how the inside looks."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse

from rayapp.api.errors import (
    ApiError,
    install_error_handling,
    internal_error,
    invalid_request,
    out_of_time,
    overloaded,
    unavailable,
)


def app_that_raises(error: Exception) -> FastAPI:
    app = FastAPI(redirect_slashes=False)
    install_error_handling(app)

    @app.get("/fail", response_model=None)
    async def fail() -> None:
        raise error

    return app


def get(app: FastAPI, path: str, method: str = "GET") -> httpx.Response:
    async def call() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.request(method, path)

    return asyncio.run(call())


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = body["error"]
    return error


def test_api_error_becomes_the_envelope() -> None:
    response = get(app_that_raises(invalid_request("n is 0; 1 is the least", "n", "too_small")), "/fail")
    assert response.status_code == 400
    assert error_of(response) == {
        "message": "n is 0; 1 is the least",
        "type": "invalid_request_error",
        "param": "n",
        "code": "too_small",
    }


def test_a_deadline_of_the_clients_own_is_504_and_not_to_be_tried_again() -> None:
    response = get(app_that_raises(out_of_time("too long")), "/fail")
    assert response.status_code == 504
    assert response.headers["x-should-retry"] == "false"
    assert (error_of(response)["code"], error_of(response)["param"]) == ("timeout", "timeout")


@pytest.mark.parametrize(
    ("error", "code", "retry_after"),
    [(overloaded("full", 3), "overloaded", "3"), (unavailable("gone"), "unavailable", None)],
)
def test_what_passes_is_503(error: ApiError, code: str, retry_after: str | None) -> None:
    response = get(app_that_raises(error), "/fail")
    assert response.status_code == 503
    assert response.headers.get("retry-after") == retry_after
    assert (error_of(response)["type"], error_of(response)["code"]) == ("server_error", code)


def test_unexpected_error_tells_nothing_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    response = get(app_that_raises(RuntimeError("secret path /etc/x")), "/fail")
    assert response.status_code == 500
    error = error_of(response)
    assert "secret" not in response.text
    number = error["message"].rsplit(" ", 1)[1]
    record = next(record for record in caplog.records if number in record.getMessage())
    assert record.exc_info is not None
    assert "secret" in str(record.exc_info[1])


def test_unknown_path_and_method() -> None:
    app = app_that_raises(RuntimeError())
    response = get(app, "/nope")
    assert response.status_code == 404
    assert "/nope" in error_of(response)["message"]
    response = get(app, "/fail", "POST")
    assert response.status_code == 405
    assert "GET" in error_of(response)["message"]
    assert response.headers["allow"] == "GET"
    assert get(app, "/fail/").status_code == 404


def test_failure_after_the_answer_began_leaves_it_unended() -> None:
    app = FastAPI()
    install_error_handling(app)

    @app.get("/half", response_model=None)
    async def half() -> StreamingResponse:
        async def body() -> Any:
            yield b"half"
            raise RuntimeError

        return StreamingResponse(body())

    sent: list[dict[str, Any]] = []

    async def call() -> None:
        async def receive() -> dict[str, Any]:
            await asyncio.sleep(3600)
            raise AssertionError

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "GET",
            "path": "/half", "raw_path": b"/half", "query_string": b"", "root_path": "", "headers": [],
        }  # fmt: skip
        await app(scope, receive, send)

    asyncio.run(call())
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[-1]["more_body"]


def test_pickles() -> None:
    again = pickle.loads(pickle.dumps(overloaded("full", 3)))
    assert again.envelope() == overloaded("full", 3).envelope()
    assert (again.status, again.headers) == (503, {"Retry-After": "3"})


def test_internal_errors_have_numbers_of_their_own() -> None:
    assert internal_error(ValueError("a")).message != internal_error(ValueError("a")).message
