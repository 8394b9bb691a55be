"""`AppConfig`: the `args:` of the application in serve_config.yaml, checked before anything is started.

Read by `app.py`, the replica and the Router. Defaults that depend on the device are filled in here, so that every
process sees the same values. Loads no torch and looks at no weights.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from engine.config import ContinuousBatchingConfig
from rayapp.api.settings import ApiConfig, RequestSettings
from rayapp.autoscaling import ScalingPolicy
from rayapp.strict import StrictModel

# The share of a replica's CPUs that its Serve actor takes; the rest is the engine's.
REPLICA_CPUS = 0.1
# Requests beyond the engine's running ones that a replica takes in, so that the next one is there when one ends.
ADMISSION_FACTOR = 1.25
METRICS_INTERVAL_S = 10.0  # how often Serve's replicas report their load; must be less than it is averaged over
# Of the requests that an engine runs at once, how many each replica of an autoscaling model should have.
TARGET_SHARE = 0.75
STEPS_WAITING = 16  # full steps of prompts that may wait there: some seconds
# How much longer a Router that stops is given than the engines: it still tells the clients of those that were cut off.
ROUTER_GRACE_S = 3.0
SCALING_GRACE_S = 600.0
DEFAULT_STEP_TOKENS = {"cpu": 512, "cuda": 8192}
DEFAULT_REQUESTS = {"cpu": 32, "cuda": 256}
# Of the host's free memory, shared by the replicas that run on it: unlike a GPU, a host has other tenants.
CPU_MEMORY_PERCENT = 0.3


class AutoscalingSettings(StrictModel):
    """How many replicas a model has, by its load.

    Attributes:
        min_replicas: 0 lets the last one go too; the next request then waits until one has loaded.
        max_replicas: at most; Ray adds nodes for them where the cluster may.
        initial_replicas: when the application is deployed; None means min_replicas.
        target_ongoing_requests: per replica, running and waiting; None means TARGET_SHARE of what its engine runs at
            once.
        target_kv_usage: share of each replica's KV cache that running requests should hold.
        target_waiting_prefill_tokens: prompt tokens that should wait per replica; None means STEPS_WAITING full steps.
        target_tokens_in_flight: tokens, prompt and generated so far, that each replica should have; None: any number.
            More of any of these calls for more replicas, less of all for fewer.
        upscale_delay_s, downscale_delay_s: how long the load must call for more or fewer replicas before it counts.
        downscale_to_zero_delay_s: the same for the last replica; None means downscale_delay_s.
        look_back_period_s: over which the load is averaged.
        upscaling_factor, downscaling_factor: of each step up or down; 1 is the whole way at once.
    """

    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(ge=1)
    initial_replicas: int | None = Field(default=None, ge=0)
    target_ongoing_requests: float | None = Field(default=None, gt=0)
    target_kv_usage: float = Field(default=0.75, gt=0, le=1)
    target_waiting_prefill_tokens: float | None = Field(default=None, gt=0)
    target_tokens_in_flight: float | None = Field(default=None, gt=0)
    upscale_delay_s: float = Field(default=10.0, ge=0)
    downscale_delay_s: float = Field(default=600.0, ge=0)
    downscale_to_zero_delay_s: float | None = Field(default=None, ge=0)
    look_back_period_s: float = Field(default=30.0, gt=0)
    upscaling_factor: float | None = Field(default=None, gt=0)
    downscaling_factor: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> AutoscalingSettings:
        first = self.min_replicas if self.initial_replicas is None else self.initial_replicas
        if not self.min_replicas <= first <= self.max_replicas:
            raise ValueError(
                f"min_replicas ({self.min_replicas}), initial_replicas ({first}) and max_replicas "
                f"({self.max_replicas}) must be in ascending order"
            )
        return self

    def for_serve(self, model: ModelConfig) -> dict[str, Any]:
        """The `autoscaling_config` of the model's deployment."""
        policy = {"policy_function": ScalingPolicy, "policy_kwargs": self._policy_targets(model)}
        return {"policy": policy} | _autoscaling_config(self.model_dump(exclude=set(_TARGETS)))

    def _policy_targets(self, model: ModelConfig) -> dict[str, Any]:
        ongoing = self.target_ongoing_requests
        waiting = self.target_waiting_prefill_tokens
        return {
            "ongoing_requests": TARGET_SHARE * model.requests_at_once() if ongoing is None else ongoing,
            "most_requests": model.ongoing_limit(),
            "tokens_in_flight": self.target_tokens_in_flight,
            "waiting_prefill_tokens": STEPS_WAITING * model.step_tokens() if waiting is None else waiting,
            "kv_usage": self.target_kv_usage,
        }


def _autoscaling_config(fields: dict[str, Any]) -> dict[str, Any]:
    """As Serve takes it, without what is left to Serve: its replicas must report within the time averaged over."""
    given = {key: value for key, value in fields.items() if value is not None}
    if given["look_back_period_s"] <= METRICS_INTERVAL_S:
        given["metrics_interval_s"] = given["look_back_period_s"] / 4
    return given


_TARGETS = ("target_ongoing_requests", "target_kv_usage", "target_waiting_prefill_tokens", "target_tokens_in_flight")


class ModelConfig(StrictModel):
    """One served model and the replicas that serve it.

    Attributes:
        name: what requests say in `model`.
        source: bundled name, folder or hub id; the name itself when left out.
        device: "auto" takes a GPU of this host if there is one; a cluster of several nodes must say cpu or cuda.
        dtype: of weights and KV cache; "auto" is that of the checkpoint.
        num_replicas: engines, each with its own weights and KV cache.
        autoscaling: a number of replicas that follows the load, instead of num_replicas.
        num_cpus: share of Ray's CPUs a replica reserves, for scheduling only.
        num_gpus: GPUs a replica reserves; None means tensor_parallel_size on cuda and none on cpu.
        num_threads: threads the engine computes with; None means every core the process may use, on cuda num_cpus.
            The ranks of tensor parallelism share them.
        tensor_parallel_size: processes of one host that share each copy of the model, on cuda with a GPU each; it
            must divide the model's KV heads.
        tool_parser: the form of the model's tool calls: hermes, llama3_json, pythonic, mistral, qwen3_coder,
            deepseek_v3 or deepseek_v31; "auto" tells it by the chat template; "none": it cannot call tools.
        reasoning_parser: "think": answers may begin with a <think> block; "auto" tells by the chat template; "none".
        engine: fields of ContinuousBatchingConfig.
        max_ongoing_requests: requests one replica holds; None means 1.25 times what its engine runs at once.
        max_queued_requests: requests that may wait in one process for a replica with room; more are refused.
        stall_timeout_s: seconds a busy engine may go without ending a step before it counts as stuck and is replaced.
        health_check_period_s, health_check_timeout_s: how often Serve asks a replica, and how long it waits.
        graceful_shutdown_timeout_s: seconds that a stopping replica's running requests are given to end.
    """

    name: str = Field(min_length=1)
    source: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    num_replicas: int = Field(default=1, ge=1)
    autoscaling: AutoscalingSettings | None = None
    num_cpus: float = Field(default=0.5, gt=REPLICA_CPUS)
    num_gpus: float | None = Field(default=None, ge=0)
    num_threads: int | None = Field(default=None, ge=1)
    tensor_parallel_size: int = Field(default=1, ge=1)
    tool_parser: Literal[
        "auto", "none", "hermes", "llama3_json", "pythonic", "mistral", "qwen3_coder", "deepseek_v3", "deepseek_v31"
    ] = "auto"
    reasoning_parser: Literal["auto", "none", "think"] = "auto"
    engine: dict[str, Any] = Field(default_factory=dict)
    max_ongoing_requests: int | None = Field(default=None, ge=1)
    max_queued_requests: int = Field(default=1024, ge=-1)
    stall_timeout_s: float = Field(default=120.0, gt=0)
    health_check_period_s: float = Field(default=2.0, gt=0)
    health_check_timeout_s: float = Field(default=10.0, gt=0)
    graceful_shutdown_timeout_s: float = Field(default=60.0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _source_is_name(cls, data: Any) -> Any:
        if isinstance(data, dict) and not data.get("source"):
            return {**data, "source": data.get("name", "")}
        return data

    @field_validator("engine")
    @classmethod
    def _engine_config(cls, fields: dict[str, Any]) -> dict[str, Any]:
        if fields.get("per_request_processors") is False:
            raise ValueError("per_request_processors: requests bring their own sampling here; leave it out")
        try:
            ContinuousBatchingConfig.from_dict(fields)
        except NotImplementedError as error:
            raise ValueError(str(error)) from error
        return fields

    @model_validator(mode="after")
    def _one_number_of_replicas(self) -> ModelConfig:
        _refuse_two_numbers(self)
        return self

    @model_validator(mode="after")
    def _a_gpu_for_each_rank(self) -> ModelConfig:
        ranks = self.tensor_parallel_size
        if ranks > 1 and self.device != "cpu" and self.num_gpus is not None and self.num_gpus < ranks:
            raise ValueError(
                f"tensor_parallel_size: {ranks} needs as many GPUs, but num_gpus is {self.num_gpus:g}; leave it out"
            )
        return self

    @property
    def on_demand(self) -> bool:
        """Whether it may have no replica at all while nobody asks for it."""
        return self.autoscaling is not None and self.autoscaling.min_replicas == 0

    @property
    def deployment(self) -> str:
        """Name of the model's engine deployment."""
        return deployment_name(self.name)

    def gpus(self) -> float:
        """GPUs a replica reserves. The device must have been resolved."""
        if self.num_gpus is not None:
            return self.num_gpus
        return float(self.tensor_parallel_size) if self.device == "cuda" else 0.0

    def threads(self) -> int:
        """Compute threads of each process of the engine, on the host where this is called."""
        threads = self.num_threads
        if threads is None:
            threads = int(self.num_cpus) if self.device == "cuda" else len(os.sched_getaffinity(0))
        return max(1, threads // self.tensor_parallel_size)

    def engine_fields(self) -> dict[str, Any]:
        """Arguments for ContinuousBatchingConfig: what was asked, over what serving on this device calls for."""
        defaults: dict[str, Any] = {
            "per_request_processors": True,
            "release_weights": True,  # nobody else has the model
            "max_requests_per_batch": DEFAULT_REQUESTS["cuda" if self.device == "cuda" else "cpu"],
        }
        if self.device == "cpu" and self.engine.get("num_blocks") is None:
            replicas = self.autoscaling.max_replicas if self.autoscaling else self.num_replicas
            defaults["max_memory_percent"] = CPU_MEMORY_PERCENT / (replicas * self.tensor_parallel_size)
        return defaults | {key: value for key, value in self.engine.items() if value is not None}

    def ongoing_limit(self) -> int:
        """Requests one replica holds at once."""
        if self.max_ongoing_requests is not None:
            return self.max_ongoing_requests
        return math.ceil(ADMISSION_FACTOR * self.requests_at_once())

    def requests_at_once(self) -> int:
        """Requests that one engine runs in a batch."""
        return int(self.engine_fields()["max_requests_per_batch"])

    def step_tokens(self) -> int:
        """Tokens that one step of an engine takes at most, unless its memory is too small for so many."""
        default = DEFAULT_STEP_TOKENS["cuda" if self.device == "cuda" else "cpu"]
        return int(self.engine.get("max_batch_tokens") or default)

    def changed_fields(self) -> dict[str, Any]:
        """What differs from the defaults, but for the name and the device."""
        changed = {
            key: value
            for key, value in self
            if key in self.model_fields_set and key not in ("name", "device", "engine")
        }
        defaults = {key: field.get_default() for key, field in type(self).model_fields.items()} | {"source": self.name}
        return {key: value for key, value in changed.items() if value != defaults[key]} | {
            f"engine.{key}": value for key, value in self.engine.items()
        }


class RouterAutoscaling(StrictModel):
    """How many Routers there are, by the requests that they hold.

    Attributes:
        min_replicas: at least one: it is what holds the requests of models that are scaled to zero.
        max_replicas: at most.
        target_ongoing_requests: per Router.
        upscale_delay_s, downscale_delay_s, look_back_period_s: as for a model.
    """

    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(ge=1)
    target_ongoing_requests: float = Field(default=200.0, gt=0)
    upscale_delay_s: float = Field(default=10.0, ge=0)
    downscale_delay_s: float = Field(default=600.0, ge=0)
    look_back_period_s: float = Field(default=30.0, gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> RouterAutoscaling:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas ({self.min_replicas}) is above max_replicas ({self.max_replicas})")
        return self

    def for_serve(self) -> dict[str, Any]:
        """The `autoscaling_config` of the deployment."""
        return _autoscaling_config(self.model_dump())


class RouterConfig(StrictModel):
    """The Router deployment and how requests are spread over replicas.

    Attributes:
        num_replicas, num_cpus: of the Router; it is stateless and computes nothing.
        autoscaling: a number of Routers that follows the load, instead of num_replicas.
        max_ongoing_requests: requests one Router process holds.
        graceful_shutdown_timeout_s: seconds that the requests of a Router which leaves are given to end; None means a
            little longer than the engines', which tell it of their end, and at least SCALING_GRACE_S where Routers come
            and go with the load, as a stream cannot leave its Router.
        min_cap, load_factor: a replica is passed over for affinity while it would have more to compute than min_cap
            usual requests and load_factor times the mean, by more than what it has cached saves.
        memory_entries: prefixes each process remembers the replicas of, at about 250 bytes.
        digest_period_s: seconds between two reports of a replica to the request routers; longer for hundreds of them.
        max_migrations: how often a generation whose replica is lost goes on at another one; 0 ends it with an error.
        migration_timeout_s: how long after such a loss its next token may take to come.
    """

    num_replicas: int = Field(default=1, ge=1)
    autoscaling: RouterAutoscaling | None = None
    num_cpus: float = Field(default=0.2, ge=0)
    max_ongoing_requests: int = Field(default=1000, ge=1)
    graceful_shutdown_timeout_s: float | None = Field(default=None, ge=0)
    min_cap: int = Field(default=3, ge=1)
    load_factor: float = Field(default=1.75, ge=1.0)
    memory_entries: int = Field(default=65536, ge=1)
    digest_period_s: float = Field(default=2.0, gt=0)
    max_migrations: int = Field(default=3, ge=0)
    migration_timeout_s: float = Field(default=120.0, gt=0)

    @model_validator(mode="after")
    def _one_number_of_replicas(self) -> RouterConfig:
        _refuse_two_numbers(self)
        return self

    def grace_s(self, models: Sequence[ModelConfig]) -> float:
        """`graceful_shutdown_timeout_s` of the deployment in front of these models."""
        if self.graceful_shutdown_timeout_s is not None:
            return self.graceful_shutdown_timeout_s
        behind_engines = ROUTER_GRACE_S + max(model.graceful_shutdown_timeout_s for model in models)
        return behind_engines if self.autoscaling is None else max(SCALING_GRACE_S, behind_engines)


def _refuse_two_numbers(config: ModelConfig | RouterConfig) -> None:
    if config.autoscaling is not None and "num_replicas" in config.model_fields_set:
        raise ValueError("num_replicas and autoscaling exclude each other; give one of them")


class AppConfig(StrictModel):
    """Everything `rayapp.app:build` takes.

    Attributes:
        requests: what the Router starts with; `user_config` of the deployment `Router` changes it without a restart.
    """

    models: list[ModelConfig] = Field(min_length=1)
    router: RouterConfig = RouterConfig()
    api: ApiConfig = ApiConfig()
    requests: RequestSettings = RequestSettings()

    @model_validator(mode="after")
    def _distinct_names(self) -> AppConfig:
        seen: dict[str, str] = {}
        for model in self.models:
            if model.deployment in seen:
                raise ValueError(
                    f"models {seen[model.deployment]!r} and {model.name!r} both need the deployment "
                    f"{model.deployment!r}; give one of them another name"
                )
            seen[model.deployment] = model.name
        return self


def deployment_name(model_name: str) -> str:
    """Name of the deployment that serves a model, as `serve.get_deployment_handle` takes it."""
    return "EngineReplica-" + re.sub(r"[^A-Za-z0-9_.-]", "-", model_name)
