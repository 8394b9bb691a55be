"""Python access to a running application, from any process of the cluster: notebooks, Ray jobs, other applications.

Text goes through the Router, token ids straight to the engine replicas; both reach the same replica for the same
prompt. Loads no torch. For use outside an event loop; inside one, take the handles of Ray Serve directly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ray import serve
from ray.exceptions import RayTaskError

from rayapp.api.errors import ApiError
from rayapp.config import deployment_name
from rayapp.failures import DeadlineExceeded, EngineUnavailable, GenerationError
from rayapp.link import DEADLINE_GRACE_S, Item, failure_of, raise_if_failed, wire_request
from rayapp.migration import MAX_MIGRATIONS, Resumption
from rayapp.prefix_router import prefix_hint

DEFAULT_APP = "convoy"
FIGURES = ("prompt_tokens", "cached_tokens", "replica", "migrations")


class Client:
    """Calls of one application.

    Args:
        app_name: `name` of the application in serve_config.yaml.
        max_migrations: how often `generate_ids` goes on at another replica when the one that generates is lost.

    Raises:
        RayServeException: the application does not run in the Ray cluster this process is connected to.
    """

    def __init__(self, app_name: str = DEFAULT_APP, max_migrations: int = MAX_MIGRATIONS) -> None:
        self._app_name = app_name
        self._max_migrations = max_migrations
        router = serve.get_app_handle(app_name)
        self._generate = router.options(method_name="generate_text")
        self._stream = router.options(method_name="stream_text", stream=True)
        self._engines: dict[str, Any] = {}

    def generate(self, text: str | Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        """One answer. See `Router.generate_text` for the result.

        Args:
            text: a prompt to be continued, or chat messages to be answered.
            **fields: those of the HTTP endpoints: model, max_tokens, temperature, top_p, stop, seed, ...

        Raises:
            ApiError: what the HTTP endpoints would answer.
        """
        with _unwrapped():
            result: dict[str, Any] = self._generate.remote(**_body(text, fields)).result()
        return result

    def stream(self, text: str | Sequence[Mapping[str, Any]], **fields: Any) -> Iterator[str]:
        """The pieces of one answer as they come. Leaving the loop early ends the generation."""
        pieces: Any = self._stream.remote(**_body(text, fields))
        try:
            with _unwrapped():
                yield from pieces
        except GeneratorExit:
            pieces.cancel()
            raise

    def generate_ids(self, model: str, prompt_ids: Sequence[int], **sampling: Any) -> dict[str, Any]:
        """Generate from token ids to token ids, past the Router.

        Args:
            **sampling: as `rayapp.link.wire_request` takes them: max_new_tokens, do_sample, temperature, seed, ...

        Returns:
            {"token_ids", "finish_reason", "prompt_tokens", "cached_tokens", "replica", "migrations"}; the ids end with
            the token that ended the generation, `replica` is the last one.

        Raises:
            GenerationError: one of its subclasses.
        """
        request = wire_request(prompt_ids, sampling)
        hint = prefix_hint(request["prompt_ids"])
        state = Resumption(request, self._max_migrations)
        token_ids: list[int] = []
        while True:
            try:
                for tokens, reason, info in self._attempt(model, state.next_request(), hint):
                    tokens, reason, info = state.take((tokens, reason, info))
                    token_ids += tokens
                    if reason is not None and info is not None:
                        return {"token_ids": token_ids, "finish_reason": reason} | {key: info[key] for key in FIGURES}
                raise EngineUnavailable("the replica ended the stream before the generation was done")
            except GenerationError as error:
                time.sleep(state.failed(error))

    def _attempt(self, model: str, request: dict[str, Any], hint: list[int]) -> Iterator[Item]:
        """What one replica yields for a request. Raises GenerationError."""
        call: Any = self._engine(model).remote(request, route_hint=hint)
        try:
            with _ended_in_time(call, request["timeout_s"]):
                for item in call:
                    if item[1] is not None:
                        raise_if_failed(item)
                    yield item
        except GenerationError:
            raise
        except Exception as error:
            raise failure_of(error) from error

    def _engine(self, model: str) -> Any:
        if model not in self._engines:
            handle = serve.get_deployment_handle(deployment_name(model), self._app_name)
            self._engines[model] = handle.options(method_name="generate", stream=True)
        return self._engines[model]


def _body(text: str | Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"prompt": text, **fields} if isinstance(text, str) else {"messages": [dict(one) for one in text], **fields}


@contextmanager
def _ended_in_time(call: Any, timeout_s: float | None) -> Iterator[None]:
    """Cancels a call that no engine ends in time: it may wait for a replica.

    Raises:
        DeadlineExceeded: that was done.
    """
    if timeout_s is None:
        yield
        return
    timer = threading.Timer(timeout_s + DEADLINE_GRACE_S, call.cancel)
    timer.daemon = True
    timer.start()
    try:
        yield
    except GenerationError:
        raise
    except Exception as error:
        if call.cancelled():
            raise DeadlineExceeded(f"the request did not end within its {timeout_s:g} s") from error
        raise
    finally:
        timer.cancel()


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Raise the Router's own error instead of Ray's wrapping of it."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, ApiError):
            raise error.cause from None
        raise
