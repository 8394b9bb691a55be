"""`Router`: the ingress deployment. HTTP and Python callers come in here; text becomes token ids and back.

Implements the API layer's `Service`: holds each model's tokenizer and template, and one `Link` per model. It is
stateless, uses no GPU and loads no torch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import ValidationError
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.concurrency import run_in_threadpool

from rayapp.announce import application_url, log_to_terminal
from rayapp.api.choices import Choice
from rayapp.api.errors import ApiError, invalid_request, out_of_time, overloaded, unavailable
from rayapp.api.resolve import Plan, plan_chat, plan_completions
from rayapp.api.routes import build_api
from rayapp.api.service import Chunk, SamplingFields, ServedModel
from rayapp.api.settings import ApiConfig, RequestSettings
from rayapp.cluster import node_metrics
from rayapp.config import ModelConfig, RouterConfig
from rayapp.failures import DeadlineExceeded, EngineUnavailable, GenerationError, InvalidRequest, Overloaded
from rayapp.generation import generate
from rayapp.instruments import RouterInstruments
from rayapp.link import Link
from rayapp.migration import Migrating
from rayapp.models import resolve
from rayapp.text.reasoning import reasons
from rayapp.text.template import ChatTemplate
from rayapp.text.tokenizer import Tokenizer
from rayapp.text.tools import parser_name_for

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 0.8
ANNOUNCE_POLL_S = 0.5
READY, ASLEEP, STARTING, UNAVAILABLE = "ready", "asleep", "starting", "unavailable"  # what a model can be
# Names that model families use for the number of positions they know, in the order they are looked for.
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length")
UNKNOWN_CONTEXT = 2**20  # tokens; the engine then refuses what its cache cannot hold
SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p")


class Router:
    """Serve deployment and FastAPI ingress; `app.py` binds it to the engine deployments.

    Args:
        models: those that are served, in order.
        engines: a handle of the engine deployment of each, by its name.
        api: who may call.
        settings: of the Router itself.

    Raises:
        ValueError: keys are asked for, and there are none.
    """

    def __init__(
        self,
        models: list[ModelConfig],
        engines: dict[str, DeploymentHandle],
        api: ApiConfig,
        settings: RouterConfig,
    ) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # see EngineReplica
        log_to_terminal("rayapp")
        self.models: dict[str, ServedModel] = {model.name: load_served(model) for model in models}
        self.settings = RequestSettings()
        self._settings_error: str | None = None
        self._configured = False
        self._api = api
        self._on_demand = {model.name for model in models if model.on_demand}
        self._links = {name: Link(handle) for name, handle in engines.items()}
        self._sources = {
            name: Migrating(link, settings.max_migrations, settings.migration_timeout_s, link.is_gone)
            for name, link in self._links.items()
        }
        self._instruments = {name: RouterInstruments(name) for name in engines}
        self._announcing = asyncio.get_running_loop().create_task(self._announce())

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve once this replica is made."""
        return build_api(self, self._api)

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Called by Serve at the start and whenever `user_config` has changed; requests on their way keep what they
        have. Wrong fields, once it serves, leave what was there: raising would end every Router. The log and /health
        say so.

        Raises:
            ValueError: unknown or wrong fields at the start (pydantic.ValidationError).
        """
        try:
            self.settings = RequestSettings.model_validate(user_config)
            self._settings_error = None
        except ValidationError as error:
            if not self._configured:
                raise
            self._settings_error = f"user_config of Router is not applied: {error}"
            logger.error(self._settings_error)
        self._configured = True

    async def generate(
        self, model: str, prompt_ids: list[int], sampling: SamplingFields, stop: list[str], index: int
    ) -> AsyncGenerator[Chunk, None]:
        """See `rayapp.api.service.Service.generate`."""
        source, tokenizer = self._sources[model], self.models[model].tokenizer
        try:
            with self._instruments[model].generation(len(prompt_ids)) as watch:
                chunks = generate(source, tokenizer, prompt_ids, sampling, stop, index, watch=watch)
                async with aclosing(chunks):
                    async for chunk in chunks:
                        yield chunk
        except GenerationError as error:
            raise as_api_error(error, sampling.timeout) from error

    async def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether every model can be asked; per model its state, its replicas and their requests."""
        reports = await asyncio.gather(*(link.health(HEALTH_TIMEOUT_S) for link in self._links.values()))
        detail = {}
        for (name, link), report in zip(self._links.items(), reports, strict=True):
            on_demand = name in self._on_demand and not link.is_gone()
            detail[name] = summary(report, held=link.num_held, on_demand=on_demand)
        wrong = {"settings_error": self._settings_error} if self._settings_error else {}
        ok = all(one["state"] != UNAVAILABLE for one in detail.values())
        return ok, {"models": detail, **wrong}

    async def metrics(self) -> bytes | None:
        """See `rayapp.api.service.Service.metrics`."""
        return await run_in_threadpool(node_metrics)

    async def generate_text(self, **fields: Any) -> dict[str, Any]:
        """One answer, for Python callers.

        Args:
            **fields: as in the body of the HTTP endpoints: `messages` as for chat, or `prompt` as for
                completions, with `model` (may be left out where one model is served), max_tokens, temperature,
                stop, seed, ...

        Returns:
            {"text", "finish_reason", "usage": {"prompt_tokens", "completion_tokens", "cached_tokens"}}

        Raises:
            ApiError: what the HTTP endpoints would answer.
        """
        choice = Choice()
        plan = await self._plan(fields)
        async with aclosing(self._run(plan)) as chunks:
            async for chunk in chunks:
                choice.add(chunk)
        usage = {
            "prompt_tokens": len(plan.prompts[0]),
            "completion_tokens": choice.completion_tokens,
            "cached_tokens": choice.cached_tokens,
        }
        return {"text": choice.text, "finish_reason": choice.finish_reason, "usage": usage}

    async def stream_text(self, **fields: Any) -> AsyncGenerator[str, None]:
        """The same answer as pieces of text, as they come."""
        async with aclosing(self._run(await self._plan(fields))) as chunks:
            async for chunk in chunks:
                if chunk.text:
                    yield chunk.text

    async def facts(self) -> dict[str, Any]:
        """The process this replica runs in and what it holds, for operators and tests."""
        return {
            "pid": os.getpid(),
            "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "torch_loaded": "torch" in sys.modules,
            "open": {name: link.open() for name, link in self._links.items()},
        }

    async def _announce(self) -> None:
        """Says where to connect, once every model can be asked."""
        try:
            while not (await self.health())[0]:
                await asyncio.sleep(ANNOUNCE_POLL_S)
            url = await asyncio.to_thread(application_url, serve.get_replica_context().app_name)
            logger.info(f"Convoy is ready: {url}/v1 serves {', '.join(self.models)}")
        except Exception:
            logger.exception("could not find out where this application can be reached")

    async def _plan(self, fields: Mapping[str, Any]) -> Plan:
        if len(self.models) == 1:
            fields = {"model": next(iter(self.models)), **fields}
        try:
            body = json.dumps(fields).encode()
        except TypeError as error:
            raise invalid_request(str(error)) from None
        plan = await run_in_threadpool(
            plan_chat if "messages" in fields else plan_completions, self.models, body, self.settings
        )
        if plan.num_choices != 1 or plan.stream:
            raise invalid_request("one prompt and one answer a call: make several calls at once, and call stream_text")
        if plan.logprobs or plan.echo or fields.get("tools"):
            raise invalid_request("logprobs, echo and tools are for the HTTP endpoints: this call gives text alone")
        return plan

    def _run(self, plan: Plan) -> AsyncGenerator[Chunk, None]:
        return self.generate(plan.model, plan.prompts[0], plan.sampling[0], plan.stop, 0)


def load_served(config: ModelConfig) -> ServedModel:
    """Tokenizer, template and figures of a model, read from its folder; the weights stay where they are.

    Raises:
        FileNotFoundError: there is no such model.
    """
    folder = resolve(config.source)
    settings = _read_json(folder / "config.json")
    settings = settings.get("text_config") or settings
    tokenizer = Tokenizer.load(folder, settings.get("vocab_size"))
    generation = _read_json(folder / "generation_config.json")
    context = next((settings[key] for key in CONTEXT_KEYS if settings.get(key)), UNKNOWN_CONTEXT)
    template = ChatTemplate.of(tokenizer)
    source = None if template is None else template.source
    told = parser_name_for(None if template is None else template.tool_source, tokenizer.added_tokens)
    if config.tool_parser not in ("auto", "none") and (template is None or "tools" not in template.tool_source):
        logger.warning(
            "model %s: tool_parser is %s, but its chat template does not mention tools, so it never sees those of a "
            "request; give it a template that does, or leave tool_parser out, which refuses tools",
            config.name, config.tool_parser,
        )  # fmt: skip
    return ServedModel(
        name=config.name,
        created=int(time.time()),
        tokenizer=tokenizer,
        template=template,
        tool_format={"auto": told, "none": None}.get(config.tool_parser, config.tool_parser),
        reasons={"auto": reasons(source, tokenizer.added_tokens), "none": False}.get(config.reasoning_parser, True),
        context_length=int(context),
        default_sampling={key: generation[key] for key in SAMPLING_DEFAULTS if generation.get(key) is not None},
    )


def as_api_error(error: GenerationError, timeout: float | None = None) -> ApiError:
    """What a client is told of a generation that could not be done.

    Args:
        timeout: that the request asked for; the error has what was left of it when it was sent.
    """
    if isinstance(error, InvalidRequest):
        return invalid_request(error.message, error.param)
    if isinstance(error, Overloaded):
        return overloaded(error.message)
    if isinstance(error, DeadlineExceeded):
        asked = "" if timeout is None else f" ({timeout:g} s)"
        return out_of_time(
            f"the request did not end within its timeout{asked}: give it a larger one, or ask for fewer tokens"
        )
    if isinstance(error, EngineUnavailable):
        return unavailable(error.message, retry_after_s=1)
    return ApiError(500, error.message, code="generation_failed")


def summary(report: list[dict[str, Any]], *, held: int, on_demand: bool) -> dict[str, Any]:
    """What /health says of one model.

    Args:
        report: `EngineReplica.health` of the replicas that answered.
        held: requests of this Router that no replica has taken in.
        on_demand: whether a replica is started for the next request, should there be none.

    Returns:
        state: "ready"; "asleep" or "starting" where there is no replica because nobody asked, or until the one that is
        started for those who do has loaded; else "unavailable". `replicas`, `running` and `waiting` count those whose
        engine works, `errors` says why others cannot serve.
    """
    good = [one for one in report if one["error"] is None]
    errors = [one["error"] for one in report if one["error"] is not None]
    state = UNAVAILABLE
    if good:
        state = READY
    elif on_demand and not errors:
        state = STARTING if held else ASLEEP
    return {
        "state": state,
        "replicas": len(good),
        "running": sum(one["running"] for one in good),
        "waiting": sum(one["waiting"] for one in good),
        "held": held,
        "errors": errors,
    }


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value: dict[str, Any] = json.loads(path.read_text())
    return value
