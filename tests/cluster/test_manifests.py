"""The files that describe clusters: valid by the schemas of those who read them, and consistent with each other."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from rayapp.app import build
from rayapp.check import problems
from rayapp.config import AppConfig
from tests.cluster import kubernetes

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "cluster"
SERVE_CONFIGS = [ROOT / "serve_config.yaml", CLUSTER / "serve_config.yaml"]
IMAGE = re.compile(r"registry\.example\.com/convoy:[\w.]+")


@pytest.fixture(scope="module")
def service() -> Any:
    (made,) = kubernetes.objects(CLUSTER / "kuberay" / "rayservice.yaml")
    return made


def service_data() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load((CLUSTER / "kuberay" / "rayservice.yaml").read_text())
    return data


@pytest.mark.parametrize("file", SERVE_CONFIGS, ids=lambda file: str(file.relative_to(ROOT)))
def test_serve_configurations_pass_the_schema_of_serve_and_the_builder(file: Path) -> None:
    config = yaml.safe_load(file.read_text())
    schema = ServeDeploySchema.model_validate(config)
    assert not _unknown(config, schema), "Serve ignores keys that it does not know"
    assert not problems(file)
    (application,) = config["applications"]
    assert build(application["args"]) is not None


def _unknown(given: dict[str, Any], schema: BaseModel) -> list[str]:
    fields = type(schema).model_fields
    found = [key for key in given if key not in fields]
    for key, value in given.items():
        inner = getattr(schema, key, None)
        if isinstance(inner, BaseModel):
            found += [f"{key}.{one}" for one in _unknown(value, inner)]
        elif isinstance(inner, list) and inner and isinstance(inner[0], BaseModel):
            found += [f"{key}.{one}" for pair in zip(value, inner, strict=True) for one in _unknown(*pair)]
    return found


def test_unknown_keys_of_serve_are_found() -> None:
    config = {"http_option": {}, "applications": [{"import_path": "a:b", "nam": "x"}]}
    schema = ServeDeploySchema.model_validate(config)
    assert _unknown(config, schema) == ["http_option", "applications.nam"]


def test_kuberay_serves_the_same_as_ray_up(service: Any) -> None:
    served = yaml.safe_load(service.spec.serveConfigV2)
    keys = Path(served["applications"][0]["args"].pop("api")["keys_file"])
    assert served == yaml.safe_load((CLUSTER / "serve_config.yaml").read_text())
    assert AppConfig.model_validate({"models": [{"name": "m"}], "api": {"keys_file": str(keys)}}).api.keys_file == keys
    worker = service.spec.rayClusterConfig.workerGroupSpecs[0].template.spec.containers[0]
    assert str(keys.parent) in {mount.mountPath for mount in worker.volumeMounts}


def test_the_cluster_file_passes_ray_s_schema() -> None:
    config = yaml.safe_load((CLUSTER / "ray-cluster.yaml").read_text())
    filled = prepare_config(copy.deepcopy(config))
    validate_config(filled)
    types = filled["available_node_types"]
    assert types["head"]["resources"]["CPU"] == 0
    assert types["gpu"]["resources"]["GPU"] == 1 and types["gpu"]["min_workers"] == 0
    assert sum(one["max_workers"] for one in types.values()) <= filled["max_workers"]
    with pytest.raises(Exception, match="min_worker"):
        validate_config({**filled, "available_node_types": {**types, "gpu": {**types["gpu"], "min_worker": 1}}})


def test_a_gpu_node_has_what_one_engine_asks_for(service: Any) -> None:
    config = AppConfig.model_validate(yaml.safe_load(service.spec.serveConfigV2)["applications"][0]["args"])
    (model,) = config.models
    assert model.device == "cuda" and model.autoscaling is not None
    nodes = yaml.safe_load((CLUSTER / "ray-cluster.yaml").read_text())["available_node_types"]
    pods = {group.groupName: group for group in service.spec.rayClusterConfig.workerGroupSpecs}
    gpu, router = (pods[name].template.spec.containers[0].resources.limits for name in ("gpu", "router"))
    for cpus, gpus in (
        (nodes["gpu"]["resources"]["CPU"], nodes["gpu"]["resources"]["GPU"]),
        (float(gpu["cpu"]), float(gpu["nvidia.com/gpu"])),
    ):
        assert model.gpus() <= gpus and model.num_cpus <= cpus
    for most in (nodes["gpu"]["max_workers"], pods["gpu"].maxReplicas):
        assert most >= model.autoscaling.max_replicas
    for cpus in (nodes["router"]["resources"]["CPU"], float(router["cpu"])):
        assert config.router.num_cpus * config.router.num_replicas <= cpus


def test_pods_outlive_the_streams_of_their_replicas(service: Any) -> None:
    config = AppConfig.model_validate(yaml.safe_load(service.spec.serveConfigV2)["applications"][0]["args"])
    grace = max(model.graceful_shutdown_timeout_s for model in config.models)
    for group in service.spec.rayClusterConfig.workerGroupSpecs:
        pod = group.template.spec
        (container,) = pod.containers
        hook = " ".join(container.lifecycle.preStop.exec.command)
        drain = int(re.search(r"--deadline-remaining-seconds (\d+)", hook)[1])  # type: ignore[index]
        assert grace < drain < pod.terminationGracePeriodSeconds


def test_every_container_has_probes_on_ports_that_are_served(service: Any) -> None:
    cluster = service.spec.rayClusterConfig
    serve_port = yaml.safe_load(service.spec.serveConfigV2)["http_options"]["port"]
    agent_port = 52365  # Ray's default for the agent of a node
    for group in (cluster.headGroupSpec, *cluster.workerGroupSpecs):
        (container,) = group.template.spec.containers
        assert container.livenessProbe.httpGet.port == agent_port
        assert container.readinessProbe.httpGet.port in (agent_port, serve_port)
        ports = {port.name: port.containerPort for port in container.ports}
        assert (ports["serve"], str(ports["metrics"])) == (serve_port, group.rayStartParams["metrics-export-port"])


def test_volumes_are_mounted_and_exist(service: Any) -> None:
    stored = {(made.kind, made.metadata.name) for made in kubernetes.objects(CLUSTER / "kuberay" / "storage.yaml")}
    for group in service.spec.rayClusterConfig.workerGroupSpecs:
        pod = group.template.spec
        assert {volume.name for volume in pod.volumes} == {mount.name for mount in pod.containers[0].volumeMounts}
        for volume in pod.volumes:
            if volume.persistentVolumeClaim:
                assert ("PersistentVolumeClaim", volume.persistentVolumeClaim.claimName) in stored
            if volume.secret:
                assert ("Secret", volume.secret.secretName) in stored


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("spec.rayClusterConfig.workerGroupSpecs.0.template.spec.containers.0.readynessProbe", {}, "readynessProbe"),
        ("spec.rayClusterConfig.workerGroupSpecs.0.template.spec.terminationGracePeriodSeconds", "360", "int"),
        ("spec.rayClusterConfig.headGroupSpec.rayStartParams.num-cpus", 0, "str"),
        ("spec.rayClusterConfig.workerGroupSpec", [], "workerGroupSpec"),
        ("spec.upgradeStrategy.type", "Rolling", "Rolling"),
    ],
)
def test_what_kubernetes_would_refuse_is_found(path: str, value: Any, words: str) -> None:
    data = service_data()
    place: Any = data
    *parents, last = path.split(".")
    for key in parents:
        place = place[int(key)] if key.isdigit() else place[key]
    place[last] = value
    with pytest.raises(ValueError, match=words):
        kubernetes.read(data)


def test_one_image_and_the_installed_ray_everywhere(service: Any) -> None:
    files = (CLUSTER / "ray-cluster.yaml", CLUSTER / "kuberay" / "rayservice.yaml", CLUSTER / "Dockerfile")
    assert len({image for file in files for image in IMAGE.findall(file.read_text())}) == 1
    pinned = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and service.spec.rayClusterConfig.rayVersion == pinned[1]


def test_the_image_has_what_the_application_imports() -> None:
    """Paths that the Dockerfile copies exist, and with them the package can be built and the cluster's files run."""
    copied = {
        path.rstrip("/")
        for line in re.findall(r"^COPY (.*)$", (CLUSTER / "Dockerfile").read_text(), re.MULTILINE)
        for path in line.split()[:-1]
    }
    assert all((ROOT / path).exists() for path in copied)
    assert {"engine", "rayapp", "cluster", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"} <= copied
