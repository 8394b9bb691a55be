"""One Ray with Serve for all tests that need it, and the application most of them talk to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rayapp.api.service import ServedModel
from tests.conftest import wait_limit
from tests.rayapp.scripted import ScriptedService, scripted_models
from tests.serving import free_port, model_args

# For this process and for the clients that tests start: Ray would else write a token into the home directory, and
# whether commands need it would depend on what ran before.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")  # Ray's own 30 s are too few on a machine that is busy
os.environ.setdefault("RAY_metrics_report_interval_ms", "1000")  # a test waits for figures; Ray's own is 10 s


@dataclass(frozen=True)
class ServeSession:
    """A running Ray and Serve.

    Attributes:
        url: of the HTTP proxy, without a path.
        address: of the Ray cluster, for other processes.
    """

    url: str
    address: str


@pytest.fixture(scope="session")
def serve_session() -> Iterator[ServeSession]:
    """Ray with 8 logical CPUs and 2 GPUs that are not there, and Serve on a port of its own."""
    import ray
    from ray import serve

    context = ray.init(
        num_cpus=8,
        num_gpus=2,
        include_dashboard=False,
        object_store_memory=150 * 2**20,
        log_to_driver=False,
        namespace="tests",
    )
    port = free_port()
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": "127.0.0.1", "port": port},
        logging_config={"enable_access_log": False},
    )
    yield ServeSession(f"http://127.0.0.1:{port}", context.address_info["address"])
    serve.shutdown()
    ray.shutdown()


@dataclass(frozen=True)
class App:
    """A deployed application.

    Attributes:
        url: what its paths hang under, such as /v1/models.
    """

    name: str
    url: str
    address: str

    def engines(self, model: str = "tiny") -> Any:
        """Handle of the engine deployment of a model."""
        from ray import serve

        from rayapp.config import deployment_name

        return serve.get_deployment_handle(deployment_name(model), self.name)

    def facts(self) -> list[dict[str, Any]]:
        """`EngineReplica.facts` of every replica."""
        answers: list[dict[str, Any]] = self.engines().broadcast("facts").results(timeout_s=wait_limit(30))
        return answers

    def health(self) -> dict[str, dict[str, Any]]:
        """`EngineReplica.health` by replica; one whose engine has died is left out."""
        call = self.engines().broadcast("health", 5.0)
        answers = call.results(timeout_s=wait_limit(30), return_exceptions=True)
        return {one["replica"]: one for one in answers if isinstance(one, dict)}

    def served(self) -> dict[str, int]:
        """Requests that each replica has ended so far."""
        return {replica: report["served"] for replica, report in self.health().items()}


@pytest.fixture(scope="session")
def deploy(serve_session: ServeSession) -> Callable[..., App]:
    """Deploys an application under a name of its own and waits until it runs."""
    from ray import serve

    from rayapp.app import build

    def run(name: str, **args: Any) -> App:
        # A name is never used twice: a process keeps the request router it made for a deployment's name.
        serve.run(build(args), name=name, route_prefix=f"/{name}")
        return App(name, f"{serve_session.url}/{name}", serve_session.address)

    return run


def tiny_model(source: Path, **fields: Any) -> dict[str, Any]:
    """A small fast model whose replicas reserve one of the GPUs each while the engine runs on CPU."""
    small = {"num_gpus": 1, "num_cpus": 0.5, "num_threads": 1, "health_check_period_s": 1}
    return model_args("tiny", source, **(small | {"graceful_shutdown_timeout_s": 2} | fields))


@pytest.fixture(scope="session")
def tiny_app(deploy: Callable[..., App], tiny_http_path: Path) -> App:
    """TINY on two replicas. Shared: leave it running and idle."""
    return deploy("tiny-app", models=[tiny_model(tiny_http_path, num_replicas=2)])


@pytest.fixture(scope="session")
def models(smol_path: Path) -> dict[str, ServedModel]:
    """What a scripted service serves."""
    return scripted_models(smol_path)


@pytest.fixture
def service(models: dict[str, ServedModel]) -> ScriptedService:
    return ScriptedService(models)
