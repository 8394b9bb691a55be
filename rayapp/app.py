"""`build`: from the `args:` of serve_config.yaml to a Serve application. The place to see how the parts hang together.

Runs where the application is deployed from, which need not have weights, a GPU or torch: it only describes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from rayapp.cluster import alive_nodes, autoscales
from rayapp.config import REPLICA_CPUS, AppConfig, ModelConfig, RouterConfig
from rayapp.prefix_router import PrefixAffinityRouter
from rayapp.replica import EngineReplica
from rayapp.router import Router


def build(args: AppConfig | dict[str, Any]) -> serve.Application:
    """The application: one Router in front of one EngineReplica deployment per model.

    Args:
        args: fields of AppConfig.

    Raises:
        ValueError: a key or value is wrong (pydantic.ValidationError), or `device: auto` cannot be decided here.
    """
    # Serve validates by a builder's annotation only where that is not a string, as all are in this file.
    config = AppConfig.model_validate(args)
    models = [model.model_copy(update={"device": resolve_device(model)}) for model in config.models]
    engines = {model.name: engine_application(model, config.router) for model in models}
    routers: dict[str, Any] = {"num_replicas": config.router.num_replicas}
    if config.router.autoscaling is not None:
        routers = {"autoscaling_config": config.router.autoscaling.for_serve()}
    router = serve.deployment(
        name="Router",
        **routers,
        max_ongoing_requests=config.router.max_ongoing_requests,
        ray_actor_options={"num_cpus": config.router.num_cpus},
        user_config=config.requests.model_dump(mode="json"),
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=config.router.grace_s(models),
    )(serve.ingress()(Router))
    return router.bind(models, engines, config.api, config.router)


def engine_application(model: ModelConfig, router: RouterConfig) -> serve.Application:
    """The engine deployment of one model whose device is known: each replica in a placement group of its own."""
    bundle = {"CPU": model.num_cpus}
    if model.gpus():
        bundle["GPU"] = model.gpus()
    request_router: Any = PrefixAffinityRouter
    replicas: dict[str, Any] = {"num_replicas": model.num_replicas}
    if model.autoscaling is not None:
        replicas = {"autoscaling_config": model.autoscaling.for_serve(model)}
    deployment = serve.deployment(
        name=model.deployment,
        **replicas,
        max_ongoing_requests=model.ongoing_limit(),
        max_queued_requests=model.max_queued_requests,
        ray_actor_options={"num_cpus": REPLICA_CPUS},
        placement_group_bundles=[bundle],
        placement_group_strategy="STRICT_PACK",
        request_router_config=RequestRouterConfig(
            request_router_class=request_router,
            request_router_kwargs={
                "min_cap": router.min_cap,
                "load_factor": router.load_factor,
                "memory_entries": router.memory_entries,
            },
            request_routing_stats_period_s=router.digest_period_s,  # type: ignore[arg-type]
        ),
        health_check_period_s=model.health_check_period_s,
        health_check_timeout_s=model.health_check_timeout_s,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=model.graceful_shutdown_timeout_s,
    )(EngineReplica)
    return deployment.bind(model)


def resolve_device(model: ModelConfig) -> str:
    """`device: auto` as cpu or cuda, by the GPUs of this host.

    Raises:
        ValueError: the cluster has several nodes, or may get some, which may differ from this host.
    """
    if model.device != "auto":
        return model.device
    if ray.is_initialized():
        nodes = alive_nodes()
        if nodes > 1 or autoscales():
            has = f"has {nodes} nodes" if nodes > 1 else "adds nodes by itself"
            raise ValueError(
                f"model {model.name!r} has device: auto, which looks at one host, but the cluster {has}; "
                "set device: cpu or device: cuda"
            )
        if not ray.cluster_resources().get("GPU"):
            return "cpu"
    return "cuda" if has_gpu() else "cpu"


def has_gpu() -> bool:
    """Whether this host shows an NVIDIA GPU. Found by its device file, as asking torch would load it."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
