"""How requests reach the replicas of one model, and tokens come back: the wire format and one stream per request.

Used by the Router and by bare handle callers (`rayapp.client`, jobs). Everything of Ray that shows in a call, its
errors above all, ends here. Knows nothing of text or HTTP.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from rayapp.failures import EngineUnavailable, GenerationError, GenerationFailed, Overloaded
from rayapp.prefix_router import prefix_hint

Item = tuple[list[int], str | None, dict[str, Any] | None]


def wire_request(
    prompt_ids: Sequence[int],
    sampling: Mapping[str, Any],
    *,
    output_ids: Sequence[int] = (),
    cache_salt: str | None = None,
) -> dict[str, Any]:
    """One request as `EngineReplica.generate` takes it: plain data under a fresh id.

    Args:
        sampling: max_new_tokens, min_new_tokens, do_sample, temperature, top_k, top_p, min_p, seed, ignore_eos,
            stop_token_ids; those left out or None take the engine's defaults. A request that may sample and has
            no seed gets one here, so that it can go on elsewhere as the same random stream.
        output_ids: tokens generated before, elsewhere.
        cache_salt: only requests with the same salt share cached prefixes.
    """
    fields = {key: value for key, value in sampling.items() if value is not None}
    if fields.get("do_sample", True) and "seed" not in fields:
        fields["seed"] = secrets.randbits(63)
    return {
        "request_id": uuid.uuid4().hex,
        "prompt_ids": list(prompt_ids),
        "output_ids": list(output_ids),
        "sampling": fields,
        "cache_salt": cache_salt,
    }


class Link:
    """Calls of one engine deployment."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._generate = handle.options(method_name="generate", stream=True)

    async def generate(self, request: dict[str, Any]) -> AsyncGenerator[Item, None]:
        """Send a request and yield what its replica yields (see `EngineReplica.generate`), the end included.

        Closing the generator before its end aborts the request in the engine.

        Raises:
            GenerationError: one of its subclasses.
        """
        hint = prefix_hint(request["prompt_ids"], request["cache_salt"])
        ended = False
        try:
            stream: Any = self._generate.remote(request, route_hint=hint)
            async for item in stream:
                ended = item[1] is not None
                if ended:
                    raise_if_failed(item)
                yield item
            if not ended:
                raise EngineUnavailable("the replica ended the stream before the generation was done")
        except GenerationError:
            raise
        except Exception as error:
            raise failure_of(error) from error
        except BaseException:  # the reader left or was cancelled; a call that failed by itself must not be cancelled
            if not ended:
                with suppress(Exception):  # there is nothing left to cancel
                    stream.cancel()
            raise

    def is_gone(self) -> bool:
        """Whether the deployment was deleted or failed for good: calls that wait for a replica would do so for ever."""
        router: Any = getattr(self._handle, "_router", None)  # None before the first call
        return router is not None and not router._asyncio_router._deployment_available

    async def health(self, timeout_s: float) -> list[dict[str, Any]]:
        """`EngineReplica.health` of every running replica that answers in time; empty when none does."""
        try:
            call = self._handle.broadcast("health", timeout_s / 2).results_async(return_exceptions=True)
            answers = await asyncio.wait_for(call, timeout_s)
        except (TimeoutError, RayError, RayServeException):
            return []
        return [answer for answer in answers if isinstance(answer, dict)]


def raise_if_failed(item: Item) -> None:
    """Turn the end of a generation that did not end by itself into its exception."""
    _, reason, info = item
    if reason in ("stop", "length"):
        return
    error = (info or {}).get("error") or f"the generation ended with {reason!r}"
    if reason == "cancelled" or (info or {}).get("engine_failed"):
        raise EngineUnavailable(str(error))
    raise GenerationFailed(str(error))


def failure_of(error: Exception) -> GenerationError:
    """What an exception of a handle call says about the request."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, GenerationError):
        return cause
    if isinstance(cause, BackPressureError):
        return Overloaded(f"{cause.message} Try again later, or raise max_queued_requests or num_replicas.")
    if isinstance(error, RayActorError) or isinstance(cause, RayActorError):
        return EngineUnavailable("the replica that served this request died")
    if isinstance(cause, DeploymentUnavailableError | RequestCancelledError):
        return EngineUnavailable(str(cause))
    return GenerationFailed(f"{type(cause).__name__}: {cause}")
