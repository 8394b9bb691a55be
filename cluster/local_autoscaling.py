"""Shows on one machine that load adds nodes to a cluster and that idleness removes them.

    python cluster/local_autoscaling.py            # about a minute; everything it starts is gone afterwards

A Ray head without GPUs runs the Router. Each engine asks for a GPU, which no node has: Ray's autoscaler answers by
starting nodes, here further Ray processes on this machine that claim a GPU each (the engines compute on CPU). The
cluster has ports, a folder and a token of its own, so that it disturbs no other Ray here.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MEBIBYTE = 2**20
HEAD = "ray.head.default"
HEAD_ID = "f" * 51 + "00000"  # the id that Ray's provider of fake nodes expects of a head
IDLE_S = 3.0
APP = "local-autoscaling"

# Faster than a real cluster would be set to, so that there is something to see within a minute.
QUICK = {
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
}


class FakeCluster:
    """A Ray head that adds nodes of its own machine; a context manager.

    Args:
        max_nodes: beside the head.
    """

    def __init__(self, max_nodes: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cv-"))  # short: Ray puts sockets below it
        self.address = f"127.0.0.1:{free_port()}"
        self.env = {
            **QUICK,
            "RAY_FAKE_CLUSTER": "1",
            "RAY_raylet_start_wait_time_s": "120",  # a busy machine
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
        }
        self._config = self.folder / "cluster.json"
        self._config.write_text(json.dumps(cluster_config(self.address, max_nodes)))

    def __enter__(self) -> FakeCluster:
        port = self.address.rpartition(":")[2]
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}"),
            *("--num-cpus=4", "--num-gpus=0", f"--object-store-memory={100 * MEBIBYTE}", "--include-dashboard=false"),
            *(f"--ray-client-server-port={free_port()}", f"--dashboard-agent-listen-port={free_port()}"),
            f"--dashboard-port={free_port()}",
            *(f"--temp-dir={self.folder}", f"--autoscaling-config={self._config}"),
        ]
        start = subprocess.run(command, env=os.environ | self.env, capture_output=True, text=True)
        if start.returncode:
            self.__exit__()
            raise RuntimeError(f"ray start failed:\n{start.stdout}\n{start.stderr}")
        return self

    def __exit__(self, *exc_info: object) -> None:
        """By process id, of this cluster alone: `ray stop` would end every Ray of the machine."""
        import psutil

        processes = self.processes()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                if process.is_running():
                    process.send_signal(number)
            _, processes = psutil.wait_procs(processes, timeout=2)
        shutil.rmtree(self.folder, ignore_errors=True)

    def processes(self) -> list[Any]:
        """Those that carry its folder in their command line, and their children."""
        import psutil

        found = {}
        for process in psutil.process_iter(["cmdline"]):
            if str(self.folder) in " ".join(process.info["cmdline"] or ()):
                for one in (process, *process.children(recursive=True)):
                    found[one.pid] = one
        return list(found.values())


def cluster_config(address: str, max_nodes: int) -> dict[str, Any]:
    """What the autoscaler is told, complete: nothing is filled in for this kind of node provider."""
    empty_lists = (
        "initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
        "head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter",
    )  # fmt: skip
    gpu_node = {"CPU": 1, "GPU": 1, "object_store_memory": 80 * MEBIBYTE}
    return {
        "cluster_name": "local",
        "max_workers": max_nodes,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "available_node_types": {
            HEAD: {"resources": {"CPU": 4}, "node_config": {}, "max_workers": 0},
            "gpu": {"resources": gpu_node, "node_config": {}, "min_workers": 0, "max_workers": max_nodes},
        },
        "head_node_type": HEAD,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": IDLE_S / 60,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **{name: [] for name in empty_lists},
    }


def app_args(model: str, max_replicas: int) -> dict[str, Any]:
    """`args` of an application whose engines compute on CPU and reserve a GPU each."""
    return {
        "models": [
            {
                "name": "model",
                "source": model,
                "device": "cpu",
                "num_cpus": 0.4,
                "num_gpus": 1,
                "num_threads": 1,
                "graceful_shutdown_timeout_s": 5,
                "autoscaling": {
                    "min_replicas": 0,
                    "max_replicas": max_replicas,
                    "target_ongoing_requests": 2,
                    "look_back_period_s": 2,
                    "upscale_delay_s": 1,
                    "downscale_delay_s": 2,
                },
                "engine": {"max_requests_per_batch": 4, "num_blocks": 64, "max_batch_tokens": 256},
            }
        ]
    }


class Load:
    """Requests that keep coming, from a number of threads, until it is stopped."""

    def __init__(self, callers: int) -> None:
        self.answered = 0
        self.errors: list[Exception] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(number,), daemon=True) for number in range(callers)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _call(self, number: int) -> None:
        from rayapp.client import Client

        client = Client(APP)
        while not self._stop.is_set():
            try:
                client.generate_ids("model", [5, 6, 7, number], max_new_tokens=64, ignore_eos=True)
                self.answered += 1
            except Exception as error:
                self.errors.append(error)
                return


class Story:
    """What is there as time goes by, told whenever it changes."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._told: tuple[int, int] | None = None
        self.most = (0, 0)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._started:6.1f} s  {text}", flush=True)

    def wait(self, what: str, condition: Callable[[int, int], bool], timeout_s: float) -> None:
        """Tell of every change until `condition` holds of (GPU nodes, running replicas)."""
        deadline = time.monotonic() + timeout_s
        while True:
            seen = gpu_nodes(), running_replicas()
            if seen != self._told:
                self._told = seen
                self.most = max(self.most[0], seen[0]), max(self.most[1], seen[1])
                self.say(f"{seen[0]} GPU nodes, {seen[1]} replicas")
            if condition(*seen):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {timeout_s:g} s")
            time.sleep(0.2)


def gpu_nodes() -> int:
    """Nodes that Ray has beside the head."""
    import ray

    return sum(node["Alive"] and bool(node["Resources"].get("GPU")) for node in ray.nodes())


def running_replicas() -> int:
    """Engines that can serve."""
    from ray import serve

    from rayapp.config import deployment_name

    deployments = serve.status().applications[APP].deployments
    states = deployments[deployment_name("model")].replica_states
    return sum(count for state, count in states.items() if str(getattr(state, "value", state)) == "RUNNING")


def show(cluster: FakeCluster, model: str, nodes: int, timeout_s: float) -> None:
    """Deploy, load, wait for the nodes, stop, wait until they are gone."""
    os.environ.update(cluster.env)
    sys.path.insert(0, str(ROOT))
    import ray
    from ray import serve

    from rayapp.app import build
    from rayapp.cluster import autoscales

    warnings.simplefilter("ignore", DeprecationWarning)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    story = Story()
    ray.init(address=cluster.address, namespace="demo", log_to_driver=False, logging_level="ERROR")
    try:
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
        serve.run(build(app_args(model, nodes)), name=APP, route_prefix=None)
        story.say(f"deployed; the cluster adds nodes by itself: {autoscales()}")
        story.wait("no engine before there is a request", lambda nodes_now, _: nodes_now == 0, timeout_s)
        load = Load(callers=4 * nodes)
        story.say(f"load: {4 * nodes} requests at a time")
        story.wait("a node and an engine for each part of the load", lambda *now: now == (nodes, nodes), timeout_s)
        load.stop()
        story.say(f"the load ends: {load.answered} requests answered, {len(load.errors)} errors")
        if load.errors:
            raise load.errors[0]
        story.wait("nodes removed as nobody asks", lambda *now: now == (0, 0), timeout_s)
        story.say(f"most at a time: {story.most[0]} GPU nodes, {story.most[1]} replicas")
    finally:
        ray.shutdown()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name, folder or hub id (%(default)s)")
    parser.add_argument("--nodes", type=int, default=2, help="GPU nodes at most (%(default)s)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each step (%(default)g)")
    arguments = parser.parse_args()
    # A stop by an operator or a test runner takes the cluster with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    cluster = FakeCluster(arguments.nodes)
    print(f"a Ray in {cluster.folder}", flush=True)
    with cluster:
        show(cluster, arguments.model, arguments.nodes, arguments.timeout)


if __name__ == "__main__":
    main()
