"""`EngineReplica`: a Serve replica that owns one engine actor and lets requests through to it.

One deployment of it per model. It decides nothing about tokens; it ties the life of a request to that of its
caller, and its own life to that of the engine: when that fails, dies or is stuck, this process ends at once, so that
no caller's request router offers it any more and Serve replaces it. Imports no torch and keeps CUDA out of its process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncGenerator
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayTaskError

from rayapp.autoscaling import KV_USAGE, TOKENS_IN_FLIGHT, WAITING_PREFILL_TOKENS
from rayapp.config import REPLICA_CPUS, ModelConfig
from rayapp.engine_actor import EngineActor, Item
from rayapp.failures import EngineUnavailable, GenerationError, InvalidRequest
from rayapp.prefix_router import digest_of

logger = logging.getLogger("ray.serve")

# Calls of the actor beside the generations: aborts, health checks, figures.
SPARE_CALLS = 200


class EngineReplica:
    """Serve deployment; `app.py` binds it to a model and its placement group."""

    async def __init__(self, config: ModelConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        # Ray leaves every GPU of the node visible to an actor that asked for none. Not through the runtime
        # environment, which the engine actor would inherit; its own process gets what Ray assigns to it.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._config = config
        self._id = serve.get_replica_context().replica_id.unique_id
        # Without a scheduling strategy it lands in this replica's placement group; without a name or lifetime it
        # ends with this process.
        actor_class: Any = ray.remote(EngineActor)
        self._actor = actor_class.options(
            num_cpus=round(config.num_cpus - REPLICA_CPUS, 4),
            num_gpus=config.gpus(),
            max_restarts=0,
            max_concurrency=config.ongoing_limit() + SPARE_CALLS,
        ).remote(config)
        try:
            self._facts = await self._actor.start.remote()
            self._engine_process = await self._actor.environment.remote()
        except BaseException:
            ray.kill(self._actor)  # it would hold the device until this process ends
            raise
        logger.info(f"engine ready: {self._facts}")
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def attend(
        self, payload: dict[str, Any], route_hint: list[int] | None = None
    ) -> AsyncGenerator[dict[str, Any] | Item, None]:
        """Hold one request, made by `rayapp.link`, until its end. Its tokens are read at the engine actor meanwhile.

        Args:
            payload: a wire request with the `subscriber` that polls for its tokens.
            route_hint: as for `generate`.

        Yields:
            At once {"replica": this one's id, "engine": handle of the engine actor}; at the end an item with all
            tokens that were generated here.

        Raises:
            As `generate`.
        """
        request_id = request_id_of(payload)
        call = self._actor.attend.remote(payload)
        ended = False
        try:
            yield {"replica": self._id, "engine": self._actor}
            tokens, reason, info = await call
            ended = True
            yield tokens, reason, {**info, "replica": self._id}
        except (RayTaskError, RayActorError) as error:
            raise await self._failure(error) from None
        finally:
            if not ended:
                self._actor.abort.remote(request_id)

    async def generate(
        self, payload: dict[str, Any], route_hint: list[int] | None = None
    ) -> AsyncGenerator[Item, None]:
        """Generate for one request, given as `rayapp.link.wire_request` makes it, for a caller that reads it alone.

        Args:
            route_hint: for the request router alone, which reads it on the caller's side.

        Yields:
            (token ids, finish reason, info). The last item alone has a finish reason: "stop", "length",
            "cancelled" or "error". The first and the last have info: prompt_tokens, cached_tokens, error,
            engine_failed, replica.

        Raises:
            InvalidRequest: refused before the first token.
            EngineUnavailable: the engine failed or died.
        """
        request_id = request_id_of(payload)
        stream = self._actor.generate.options(num_returns="streaming").remote(payload)
        ended = False
        try:
            async for ref in stream:
                tokens, reason, info = await ref
                ended = reason is not None
                yield tokens, reason, {**info, "replica": self._id} if info is not None else None
        except (RayTaskError, RayActorError) as error:
            raise await self._failure(error) from None
        finally:
            # Dropping the stream would not stop the engine, and not every cancellation reaches the actor.
            if not ended:
                self._actor.abort.remote(request_id)

    async def health(self, timeout_s: float) -> dict[str, Any]:
        """The engine's counts, this replica's id, and `error`: None, or why the engine cannot serve.

        Raises:
            RayActorError: the engine actor died.
        """
        try:
            report = await asyncio.wait_for(self._actor.health.remote(), timeout_s)
        except TimeoutError:
            report = {"error": f"the engine actor did not answer within {timeout_s:g} s"}
        return {"replica": self._id, **report}

    async def check_health(self) -> None:
        """Serve replaces this replica when this raises: at once if the actor has died, else after three times."""
        error = (await self.health(self._config.health_check_timeout_s / 2))["error"]
        if error is not None:
            raise RuntimeError(error)

    async def record_routing_stats(self) -> dict[str, Any]:
        """What request routers are told of this replica; see `rayapp.prefix_router.digest_of`. Never raises."""
        try:
            report = await self.health(self._config.health_check_timeout_s / 2)
        except RayActorError:
            report = {"error": "the engine actor died"}
        return digest_of(report)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `rayapp.autoscaling.ScalingPolicy` is told of this replica. Never raises, which would turn it off."""
        try:
            report = await self.health(self._config.health_check_timeout_s / 2)
        except RayActorError:
            report = {}
        usage = report.get("kv_used_blocks", 0) / max(1, report.get("kv_total_blocks", 1))
        return {
            TOKENS_IN_FLIGHT: float(report.get("tokens_in_flight", 0)),
            WAITING_PREFILL_TOKENS: float(report.get("waiting_prefill_tokens", 0)),
            KV_USAGE: usage,
        }

    async def facts(self) -> dict[str, Any]:
        """What the engine reported when it became ready, and the processes it runs in."""
        return {
            "replica": self._id,
            **self._facts,
            "pid": os.getpid(),
            "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "engine": self._engine_process,
        }

    async def _failure(self, error: RayTaskError | RayActorError) -> Exception:
        """What a failed call of the engine actor says about the request."""
        if isinstance(error, RayActorError):
            await asyncio.shield(self._watching)  # only the end of this process tells the caller's request router
            return EngineUnavailable("the engine of this replica died")
        return error.cause if isinstance(error.cause, GenerationError) else error

    async def _watch(self) -> None:
        """Ends this process when the engine ends, fails or is stuck.

        Callers of a process that is gone look for another at once; one that only answered with errors would be
        offered requests until Serve's next health check.
        """
        try:
            reason = await self._actor.failure.remote()
            os.kill(self._engine_process["pid"], signal.SIGKILL)  # a stuck one would go on holding the device
        except RayActorError as error:
            reason = f"the engine actor died: {error}"
        except Exception as error:
            reason = f"the engine actor cannot be watched: {error!r}"
        logger.error(f"replica {self._id} ends: {reason}")
        os._exit(1)


def request_id_of(payload: Any) -> str:
    """The id of a wire request. Raises InvalidRequest for anything else."""
    request_id = payload.get("request_id") if isinstance(payload, dict) else None
    if not isinstance(request_id, str):
        raise InvalidRequest("a request is a dict with a unique string request_id; see rayapp.link.wire_request")
    return request_id
