"""`AppConfig`: the `args:` of the application in serve_config.yaml, checked before anything is started.

Read by `app.py`, the replica and the Router. Defaults that depend on the device are filled in here, so that every
process sees the same values. Loads no torch and looks at no weights.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from engine.config import ContinuousBatchingConfig

# The share of a replica's CPUs that its Serve actor takes; the rest is the engine's.
REPLICA_CPUS = 0.1
# Requests beyond the engine's running ones that a replica takes in, so that the next one is there when one ends.
ADMISSION_FACTOR = 1.25
DEFAULT_REQUESTS = {"cpu": 32, "cuda": 256}
# Of the host's free memory, shared by the replicas that run on it: unlike a GPU, a host has other tenants.
CPU_MEMORY_PERCENT = 0.3


def _refuse_unknown(data: dict[str, Any], valid: list[str]) -> None:
    for key in data:
        if key not in valid:
            near = difflib.get_close_matches(str(key), valid, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else "valid keys: " + ", ".join(sorted(valid))
            raise ValueError(f"unknown key {key!r}: {hint}")


class StrictModel(BaseModel):
    """A section of the configuration: unknown keys are errors that name the nearest valid one; it never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            _refuse_unknown(data, list(cls.model_fields))
        return data


class ModelConfig(StrictModel):
    """One served model and the replicas that serve it.

    Attributes:
        name: what requests say in `model`.
        source: bundled name, folder or hub id; the name itself when left out.
        device: "auto" takes a GPU of this host if there is one; a cluster of several nodes must say cpu or cuda.
        dtype: of weights and KV cache; "auto" is that of the checkpoint.
        num_replicas: engines, each with its own weights and KV cache.
        num_cpus: share of Ray's CPUs a replica reserves, for scheduling only.
        num_gpus: GPUs a replica reserves; None means tensor_parallel_size on cuda and none on cpu.
        num_threads: threads the engine computes with; None means every core the process may use, on cuda num_cpus.
        tensor_parallel_size: GPUs one copy of the model is spread over; only 1 for now.
        engine: fields of ContinuousBatchingConfig.
        max_ongoing_requests: requests one replica holds; None means 1.25 times what its engine runs at once.
        max_queued_requests: requests that may wait in one process for a replica with room; more are refused.
        stall_timeout_s: seconds a busy engine may go without ending a step before it counts as stuck.
        health_check_period_s, health_check_timeout_s: how often Serve asks a replica, and how long it waits.
        graceful_shutdown_timeout_s: seconds that a stopping replica's running requests are given to end.
    """

    name: str = Field(min_length=1)
    source: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    num_replicas: int = Field(default=1, ge=1)
    num_cpus: float = Field(default=0.5, gt=REPLICA_CPUS)
    num_gpus: float | None = Field(default=None, ge=0)
    num_threads: int | None = Field(default=None, ge=1)
    tensor_parallel_size: int = Field(default=1, ge=1)
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

    @field_validator("tensor_parallel_size")
    @classmethod
    def _one_gpu(cls, value: int) -> int:
        if value > 1:
            raise ValueError(f"tensor_parallel_size: {value} is not supported yet; use 1")
        return value

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
        """Compute threads of the engine, on the host where this is called."""
        if self.num_threads is not None:
            return self.num_threads
        return max(1, int(self.num_cpus)) if self.device == "cuda" else len(os.sched_getaffinity(0))

    def engine_fields(self) -> dict[str, Any]:
        """Arguments for ContinuousBatchingConfig: what was asked, over what serving on this device calls for."""
        defaults: dict[str, Any] = {
            "per_request_processors": True,
            "release_weights": True,  # nobody else has the model
            "max_requests_per_batch": DEFAULT_REQUESTS["cuda" if self.device == "cuda" else "cpu"],
        }
        if self.device == "cpu" and self.engine.get("num_blocks") is None:
            defaults["max_memory_percent"] = CPU_MEMORY_PERCENT / self.num_replicas
        return defaults | {key: value for key, value in self.engine.items() if value is not None}

    def ongoing_limit(self) -> int:
        """Requests one replica holds at once."""
        if self.max_ongoing_requests is not None:
            return self.max_ongoing_requests
        return math.ceil(ADMISSION_FACTOR * int(self.engine_fields()["max_requests_per_batch"]))

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


class RouterConfig(StrictModel):
    """The Router deployment and how requests are spread over replicas.

    Attributes:
        num_replicas, num_cpus: of the Router; it is stateless and computes nothing.
        max_ongoing_requests: requests one Router process holds.
        min_cap, load_factor: a replica is passed over for affinity while it would have more to compute than min_cap
            usual requests and load_factor times the mean, by more than what it has cached saves.
        memory_entries: prefixes each process remembers the replicas of, at about 250 bytes.
        digest_period_s: seconds between two reports of a replica to the request routers; longer for hundreds of them.
    """

    num_replicas: int = Field(default=1, ge=1)
    num_cpus: float = Field(default=0.2, ge=0)
    max_ongoing_requests: int = Field(default=1000, ge=1)
    min_cap: int = Field(default=3, ge=1)
    load_factor: float = Field(default=1.75, ge=1.0)
    memory_entries: int = Field(default=65536, ge=1)
    digest_period_s: float = Field(default=2.0, gt=0)


class AppConfig(StrictModel):
    """Everything `rayapp.app:build` takes."""

    models: list[ModelConfig] = Field(min_length=1)
    router: RouterConfig = RouterConfig()

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
