"""Field names and types of Kubernetes objects, for tests that have no cluster: what an API server would refuse.

Kubernetes' own types come from lightkube's models, which are made from its API description; those of KubeRay's
RayService (ray.io/v1) are written down here after its API reference, as far as this project could use them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml
from lightkube.models import core_v1, meta_v1


class Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An object of KubeRay."""


class AutoscalerOptions(Strict):
    version: Literal["v1", "v2"] | None = None
    upscalingMode: Literal["Default", "Aggressive", "Conservative"] | None = None
    idleTimeoutSeconds: int | None = None
    image: str | None = None
    imagePullPolicy: str | None = None
    resources: core_v1.ResourceRequirements | None = None
    env: list[core_v1.EnvVar] | None = None
    envFrom: list[core_v1.EnvFromSource] | None = None
    volumeMounts: list[core_v1.VolumeMount] | None = None
    securityContext: core_v1.SecurityContext | None = None


class HeadGroup(Strict):
    rayStartParams: dict[str, str]
    template: core_v1.PodTemplateSpec
    serviceType: str | None = None
    headService: core_v1.Service | None = None
    enableIngress: bool | None = None


class WorkerGroup(Strict):
    groupName: str
    rayStartParams: dict[str, str]
    template: core_v1.PodTemplateSpec
    minReplicas: int
    maxReplicas: int
    replicas: int | None = None
    numOfHosts: int | None = None
    idleTimeoutSeconds: int | None = None
    suspend: bool | None = None


class RayClusterSpec(Strict):
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup]
    rayVersion: str | None = None
    enableInTreeAutoscaling: bool | None = None
    autoscalerOptions: AutoscalerOptions | None = None
    headServiceAnnotations: dict[str, str] | None = None
    suspend: bool | None = None


class UpgradeStrategy(Strict):
    type: Literal["NewCluster", "None", "NewClusterWithIncrementalUpgrade"]


class RayServiceSpec(Strict):
    serveConfigV2: str
    rayClusterConfig: RayClusterSpec
    serveService: core_v1.Service | None = None
    upgradeStrategy: UpgradeStrategy | None = None
    excludeHeadPodFromServeSvc: bool | None = None


class RayService(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: meta_v1.ObjectMeta
    spec: RayServiceSpec


KINDS: dict[str, Any] = {
    "PersistentVolumeClaim": core_v1.PersistentVolumeClaim,
    "RayService": RayService,
    "Secret": core_v1.Secret,
}


def objects(file: Path) -> list[Any]:
    """The objects of a manifest.

    Raises:
        ValueError: a field is unknown, missing, or of the wrong type; says which.
    """
    return [read(data) for data in yaml.safe_load_all(file.read_text())]


def read(data: dict[str, Any]) -> Any:
    """One object of a kind in KINDS. Errors as in `objects`."""
    made = msgspec.convert(data, KINDS[data["kind"]])  # a ValidationError is a ValueError
    if lost := _lost(data, msgspec.to_builtins(made), data["kind"]):
        raise ValueError(f"unknown fields: {', '.join(lost)}")
    return made


def _lost(given: Any, kept: Any, path: str) -> list[str]:
    """Paths of what was given and is not there any more: conversion drops what it does not know."""
    if isinstance(given, dict):
        gone = [f"{path}.{key}" for key in given if key not in kept]
        return gone + [one for key in given if key in kept for one in _lost(given[key], kept[key], f"{path}.{key}")]
    if isinstance(given, list):
        pairs = zip(given, kept, strict=True)
        return [one for number, pair in enumerate(pairs) for one in _lost(*pair, f"{path}[{number}]")]
    return []
