"""The configuration and `build`: what is refused and how it says so, defaults by device, what gets deployed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

import rayapp.app
import rayapp.cluster
from rayapp.app import build, engine_application, resolve_device
from rayapp.autoscaling import ScalingPolicy
from rayapp.config import ROUTER_GRACE_S, SCALING_GRACE_S, AppConfig, ModelConfig, RouterConfig, deployment_name

ROOT = Path(__file__).resolve().parents[2]


def model(**fields: Any) -> ModelConfig:
    return AppConfig.model_validate({"models": [{"name": "m", **fields}]}).models[0]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"modles": []}, "unknown key 'modles': did you mean 'models'"),
        ({"models": []}, "at least 1"),
        ({"models": [{"nam": "m"}]}, "did you mean 'name'"),
        ({"models": [{"name": "m", "num_replica": 2}]}, "did you mean 'num_replicas'"),
        ({"models": [{"name": "m", "device": "gpu"}]}, "'auto', 'cpu' or 'cuda'"),
        ({"models": [{"name": "m", "num_replicas": 0}]}, "greater than or equal to 1"),
        ({"models": [{"name": "m", "tensor_parallel_size": 0}]}, "tensor_parallel_size"),
        (
            {"models": [{"name": "m", "device": "cuda", "tensor_parallel_size": 4, "num_gpus": 1}]},
            "tensor_parallel_size: 4 needs as many GPUs, but num_gpus is 1",
        ),
        ({"models": [{"name": "m", "autoscaling": {}}]}, "max_replicas"),
        ({"models": [{"name": "m", "autoscaling": {"max_replica": 2}}]}, "did you mean 'max_replicas'"),
        ({"models": [{"name": "m", "autoscaling": {"min_replicas": 3, "max_replicas": 2}}]}, "ascending order"),
        ({"models": [{"name": "m", "num_replicas": 2, "autoscaling": {"max_replicas": 2}}]}, "exclude each other"),
        ({"models": [{"name": "m", "engine": {"page_sise": 16}}]}, "did you mean 'page_size'"),
        ({"models": [{"name": "m", "engine": {"page_size": 3}}]}, "page_size is 3"),
        ({"models": [{"name": "m", "engine": {"decode_compile_config": {"fullgraph": True}}}]}, "fullgraph"),
        ({"models": [{"name": "m", "engine": {"per_request_processors": False}}]}, "per_request_processors"),
        ({"models": [{"name": "a/b"}, {"name": "a-b"}]}, "both need the deployment 'EngineReplica-a-b'"),
        ({"models": [{"name": "m"}], "router": {"load_facto": 2}}, "did you mean 'load_factor'"),
        ({"models": [{"name": "m"}], "router": {"load_factor": 0.5}}, "load_factor"),
        ({"models": [{"name": "m"}], "router": {"autoscaling": {"min_replicas": 0, "max_replicas": 2}}}, "equal to 1"),
        ({"models": [{"name": "m"}], "router": {"autoscaling": {"min_replicas": 3, "max_replicas": 2}}}, "above max"),
        ({"models": [{"name": "m"}], "router": {"num_replicas": 2, "autoscaling": {"max_replicas": 2}}}, "exclude"),
    ],
)
def test_wrong_settings_are_refused_by_name(args: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as error:
        build(args)
    assert words in str(error.value)


def test_defaults_follow_the_device() -> None:
    cpu, cuda = model(device="cpu"), model(device="cuda")
    assert (cpu.gpus(), cuda.gpus(), model(device="cpu", num_gpus=1).gpus()) == (0, 1, 1)
    assert cpu.engine_fields()["max_memory_percent"] < 0.6
    assert "max_memory_percent" not in cuda.engine_fields()
    assert "max_memory_percent" not in model(device="cpu", engine={"num_blocks": 8}).engine_fields()
    assert all(one.engine_fields()["per_request_processors"] for one in (cpu, cuda))


def test_ranks_are_in_one_bundle_with_a_gpu_each() -> None:
    ranks = model(device="cuda", tensor_parallel_size=4, num_cpus=6.0)
    options = engine_application(ranks, RouterConfig())._bound_deployment._replica_config  # type: ignore[attr-defined]
    assert options.placement_group_bundles == [{"CPU": 6.0, "GPU": 4.0}]
    assert options.placement_group_strategy == "STRICT_PACK"
    assert ranks.threads() == 1 and ranks.gpus() == 4
    assert model(device="cuda", tensor_parallel_size=2, num_gpus=2).gpus() == 2


def test_ranks_on_cpu_share_its_threads_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(9)))
    assert [model(device="cpu", tensor_parallel_size=size).threads() for size in (1, 2, 16)] == [9, 4, 1]
    assert model(device="cpu", tensor_parallel_size=2, num_threads=6).threads() == 3
    one, two = (model(device="cpu", tensor_parallel_size=size) for size in (1, 2))
    assert one.engine_fields()["max_memory_percent"] == 2 * two.engine_fields()["max_memory_percent"]
    assert two.gpus() == 0


def test_ongoing_requests_are_what_the_engine_can_run_and_a_few_more() -> None:
    assert model(device="cpu", engine={"max_requests_per_batch": 8}).ongoing_limit() == 10
    assert model(max_ongoing_requests=3).ongoing_limit() == 3


def router_deployment(**router: Any) -> Any:
    models = [{"name": "m", "device": "cpu", "graceful_shutdown_timeout_s": 5}]
    return build({"models": models, "router": router})._bound_deployment._deployment_config


def test_the_number_of_routers_is_fixed_or_follows_the_load() -> None:
    fixed = router_deployment(num_replicas=2)
    assert (fixed.num_replicas, fixed.autoscaling_config) == (2, None)
    scaled = router_deployment(autoscaling={"max_replicas": 4, "target_ongoing_requests": 50, "look_back_period_s": 4})
    config = scaled.autoscaling_config
    assert (config.min_replicas, config.max_replicas, config.target_ongoing_requests) == (1, 4, 50)
    assert config.metrics_interval_s < config.look_back_period_s == 4


def test_a_router_outlives_its_engines_and_one_that_comes_and_goes_its_streams() -> None:
    assert router_deployment().graceful_shutdown_timeout_s == 5 + ROUTER_GRACE_S
    assert router_deployment(autoscaling={"max_replicas": 2}).graceful_shutdown_timeout_s == SCALING_GRACE_S
    own = router_deployment(autoscaling={"max_replicas": 2}, graceful_shutdown_timeout_s=7)
    assert own.graceful_shutdown_timeout_s == 7


def test_autoscaling_aims_at_a_share_of_what_an_engine_runs() -> None:
    scaled = model(
        device="cpu", engine={"max_requests_per_batch": 8}, autoscaling={"min_replicas": 0, "max_replicas": 3}
    )
    deployment = engine_application(scaled, RouterConfig())._bound_deployment  # type: ignore[attr-defined]
    config = deployment._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas) == (0, 3)
    targets = config.policy.policy_kwargs
    assert (targets["ongoing_requests"], targets["most_requests"]) == (6, 10)
    assert targets["waiting_prefill_tokens"] > 512
    assert isinstance(config.policy.get_policy()(**targets), ScalingPolicy)
    own = model(autoscaling={"max_replicas": 2, "target_ongoing_requests": 5, "upscale_delay_s": 1})
    fields = own.autoscaling.for_serve(own) if own.autoscaling else {}
    assert (fields["policy"]["policy_kwargs"]["ongoing_requests"], fields["upscale_delay_s"]) == (5, 1)


def test_replicas_that_may_come_share_the_memory_of_the_host() -> None:
    fixed, scaled = model(device="cpu", num_replicas=4), model(device="cpu", autoscaling={"max_replicas": 4})
    assert fixed.engine_fields() == scaled.engine_fields()


def test_changed_fields_are_those_that_differ() -> None:
    assert model().changed_fields() == {}
    assert model(num_replicas=1, source="m").changed_fields() == {}
    assert model(source="x", engine={"page_size": 16}).changed_fields() == {"source": "x", "engine.page_size": 16}


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        model().num_replicas = 2  # type: ignore[misc]


def test_auto_looks_at_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rayapp.app.ray, "is_initialized", lambda: False)
    for found, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(rayapp.app, "has_gpu", lambda found=found: found)
        assert resolve_device(model()) == device
        assert resolve_device(model(device="cpu")) == "cpu"


def test_auto_is_refused_on_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rayapp.app.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(rayapp.cluster.ray, "nodes", lambda: [{"Alive": True}, {"Alive": True}, {"Alive": False}])
    with pytest.raises(ValueError, match="2 nodes; set device: cpu or device: cuda"):
        resolve_device(model())
    assert resolve_device(model(device="cuda")) == "cuda"


def test_auto_is_refused_where_nodes_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rayapp.app.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(rayapp.app, "alive_nodes", lambda: 1)
    for types, refused in (({"head", ""}, True), ({"node_8f3a", ""}, False)):
        monkeypatch.setattr(rayapp.cluster, "_node_types", lambda types=types: types)
        if refused:
            with pytest.raises(ValueError, match="adds nodes by itself; set device"):
                resolve_device(model())
        else:
            monkeypatch.setattr(rayapp.app.ray, "cluster_resources", lambda: {"CPU": 2})
            assert resolve_device(model()) == "cpu"


def test_auto_does_not_ask_for_gpus_that_ray_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rayapp.app.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(rayapp.app, "alive_nodes", lambda: 1)
    monkeypatch.setattr(rayapp.app, "autoscales", lambda: False)
    monkeypatch.setattr(rayapp.app.ray, "cluster_resources", lambda: {"CPU": 2})
    monkeypatch.setattr(rayapp.app, "has_gpu", lambda: True)
    assert resolve_device(model()) == "cpu"


def test_build_needs_no_weights_no_torch_and_no_ray(tmp_path: Path) -> None:
    """Unresolvable sources are no matter here: only the processes that need them look."""
    code = (
        "import sys; from rayapp.app import build\n"
        "app = build({'models': [{'name': 'm', 'source': '/nowhere', 'device': 'cuda', 'num_replicas': 2}]})\n"
        "import ray; print(app is not None, 'torch' in sys.modules, ray.is_initialized())"
    )
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["True", "False", "False"]


def test_the_shipped_file_is_valid() -> None:
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    assert config["http_options"] == {"host": "127.0.0.1", "port": 8000}
    (application,) = config["applications"]
    assert (application["name"], application["import_path"]) == ("convoy", "rayapp.app:build")
    (served,) = AppConfig.model_validate(application["args"]).models
    assert (served.name, served.num_replicas) == ("smollm2-135m-instruct", 1)


def test_deployment_names_take_any_model_name() -> None:
    assert deployment_name("Qwen/Qwen3-8B") == "EngineReplica-Qwen-Qwen3-8B"
