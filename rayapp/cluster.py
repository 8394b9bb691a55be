"""What can be told of the Ray cluster that this process is connected to. For `app.py`."""

from __future__ import annotations

import json

import ray
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # a compiled module
from ray.autoscaler.v2.sdk import get_cluster_resource_state

# Where Ray's autoscaler may add no nodes, it makes up a type for each node that is there.
MADE_UP_TYPE = "node_"


def alive_nodes() -> int:
    """Nodes that the cluster has now."""
    return sum(bool(node["Alive"]) for node in ray.nodes())


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
