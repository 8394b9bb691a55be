"""What can be told of the Ray cluster that this process is connected to. For `app.py` and `router.py`."""

from __future__ import annotations

import json
from urllib.request import urlopen

import ray
from ray._common.network_utils import build_address
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # a compiled module
from ray.autoscaler.v2.sdk import get_cluster_resource_state

# Where Ray's autoscaler may add no nodes, it makes up a type for each node that is there.
MADE_UP_TYPE = "node_"


def alive_nodes() -> int:
    """Nodes that the cluster has now."""
    return sum(bool(node["Alive"]) for node in ray.nodes())


def node_metrics(timeout_s: float = 5.0) -> bytes | None:
    """What the metrics exporter of this process's node says; None where there is none. Blocks."""
    here = ray.get_runtime_context().get_node_id()
    node = next((one for one in ray.nodes() if one["NodeID"] == here), None)
    if node is None or not node.get("MetricsExportPort"):
        return None
    url = f"http://{build_address(node['NodeManagerAddress'], node['MetricsExportPort'])}/metrics"
    try:
        with urlopen(url, timeout=timeout_s) as answer:
            return bytes(answer.read())
    except OSError:
        return None


def autoscales() -> bool:
    """Whether the cluster adds nodes by itself, also when it has but one. Two calls to its head."""
    return any(name and not name.startswith(MADE_UP_TYPE) for name in _node_types())


def _node_types() -> set[str]:
    """Types of the nodes as the autoscaler knows them. Its two generations keep them in different places."""
    head = GcsClient(address=ray.get_runtime_context().gcs_address)
    types = {node.ray_node_type_name for node in get_cluster_resource_state(head).node_states}
    status = json.loads(head.internal_kv_get(DEBUG_AUTOSCALING_STATUS.encode()) or b"{}")
    report = status.get("autoscaler_report") or {}
    return types | set(report.get("active_nodes") or ())
