"""How requests reach the replicas of one model, and tokens come back: the wire format and the data plane.

`Link` is the Router's: a request is one call to a replica, held until its end, and tokens of all requests at a replica
come by one subscription (`subscriber.py`). Bare handle callers (`rayapp.client`, jobs) read one stream a request
(`EngineReplica.generate`) and share the rest. Everything of Ray that shows in a call, its errors above all, ends here.
Knows nothing of text or HTTP.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from rayapp.failures import DeadlineExceeded, EngineUnavailable, GenerationError, GenerationFailed, Overloaded
from rayapp.prefix_router import prefix_hint
from rayapp.subscriber import Inbox, Item, Subscriber

DEADLINE_GRACE_S = 0.2  # the engine, which knows how far the request has come, speaks first


def wire_request(
    prompt_ids: Sequence[int],
    sampling: Mapping[str, Any],
    *,
    output_ids: Sequence[int] = (),
) -> dict[str, Any]:
    """One request as `EngineReplica.generate` takes it: plain data under a fresh id.

    Args:
        sampling: those of `ContinuousBatchingManager.add_request`: max_new_tokens, do_sample, temperature, top_p, seed,
            stop_token_ids, logit_bias, logprobs, ...; those left out or None take the engine's defaults. A request
            that may sample and has no seed gets one here, so that it can go on elsewhere as the same random stream.
            Beside these, priority (lower runs first); when the request must have ended: timeout_s, seconds from now, or
            deadline, `time.monotonic()` of this process; cache_salt: only requests with the same one share cached
            prefixes; structure: what the text must be (see `rayapp.structured`).
        output_ids: tokens generated before, elsewhere.
    """
    fields = {key: value for key, value in sampling.items() if value is not None}
    if fields.get("do_sample", True) and "seed" not in fields:
        fields["seed"] = secrets.randbits(63)
    timeout_s = fields.pop("timeout_s", None)
    if (deadline := fields.pop("deadline", None)) is not None:
        timeout_s = max(0.0, deadline - time.monotonic())
    return {
        "request_id": uuid.uuid4().hex,
        "prompt_ids": list(prompt_ids),
        "output_ids": list(output_ids),
        "priority": fields.pop("priority", 0),
        "timeout_s": timeout_s,
        "cache_salt": fields.pop("cache_salt", None),
        "structure": fields.pop("structure", None),
        "sampling": fields,
    }


class Link:
    """Calls of one engine deployment."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._attend = handle.options(method_name="attend", stream=True)
        self._subscriber = Subscriber()
        self._held: set[asyncio.Task[None]] = set()

    async def generate(self, request: dict[str, Any]) -> AsyncGenerator[Item, None]:
        """Send a request and yield its items (see `EngineReplica.generate`) as they come, the end included.

        Closing the generator before its end aborts the request in the engine.

        Raises:
            GenerationError: one of its subclasses.
        """
        inbox = self._subscriber.open(request["request_id"])
        timer = self._end_in_time(inbox, request.get("timeout_s"))
        held = asyncio.create_task(self._hold(request, inbox))
        self._held.add(held)  # it may outlive this generator: the replica's answer comes behind the last token
        held.add_done_callback(self._held.discard)
        try:
            while True:
                item = await inbox.next()
                if item[1] is not None:
                    raise_if_failed(item)
                yield item
                if item[1] is not None:
                    return
        finally:
            self._subscriber.close(request["request_id"])
            if timer is not None:
                timer.cancel()
            if not inbox.complete:
                held.cancel()

    def _end_in_time(self, inbox: Inbox, timeout_s: float | None) -> asyncio.TimerHandle | None:
        """For a request that no engine has: it may still wait for a replica with room."""
        if timeout_s is None:
            return None
        error = DeadlineExceeded(f"the request did not end within its {timeout_s:g} s")
        return asyncio.get_running_loop().call_later(timeout_s + DEADLINE_GRACE_S, inbox.fail, error)

    async def _hold(self, request: dict[str, Any], inbox: Inbox) -> None:
        """The held call of a request: its end, whatever it is, ends the inbox too."""
        hint = prefix_hint(request["prompt_ids"], request["cache_salt"])
        call: Any = None
        try:
            call = self._attend.remote({**request, "subscriber": self._subscriber.id}, route_hint=hint)
            accepted = await anext(call)
            self._subscriber.follow(request["request_id"], accepted["replica"], accepted["engine"])
            async for tokens, reason, info in call:
                inbox.put(0, tokens, reason, info)
            inbox.fail(EngineUnavailable("the replica ended the call before the generation was done"))
        except StopAsyncIteration:
            inbox.fail(EngineUnavailable("the replica ended the call before the generation was begun"))
        except Exception as error:
            inbox.fail(failure_of(error))
        except BaseException:  # the reader left; a call that failed by itself must not be cancelled
            with suppress(Exception):  # there is nothing left to cancel
                call.cancel()
            raise

    @property
    def num_held(self) -> int:
        """Requests of this process that no replica has taken in: there is none, or none has room."""
        return self._subscriber.num_unplaced

    def is_gone(self) -> bool:
        """Whether the deployment was deleted or failed for good: calls that wait for a replica would do so for ever."""
        router = self._router()
        return router is not None and not router._deployment_available

    def open(self) -> dict[str, int]:
        """What this process holds for requests on their way; all of it is 0 a little while after the last one."""
        router = self._router()
        request_router = router and router._request_router
        return {
            "requests": self._subscriber.num_requests,
            "calls": len(self._held),
            "subscriptions": self._subscriber.num_feeds,
            "routed": request_router.num_outstanding if request_router else 0,
        }

    def _router(self) -> Any:
        """Serve's router of this handle; None before the first call."""
        router: Any = getattr(self._handle, "_router", None)
        return router and router._asyncio_router

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
    if reason == "timeout":
        raise DeadlineExceeded(str(error).removeprefix("TimeoutError: "))
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
