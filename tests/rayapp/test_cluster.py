"""What is told of the cluster, asked of a real one. One that grows: tests/cluster/test_local_autoscaling.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rayapp.cluster import alive_nodes, autoscales
from tests.serving import wait_until

if TYPE_CHECKING:
    from tests.rayapp.conftest import ServeSession


def test_a_ray_that_was_started_by_hand_does_not_grow(serve_session: ServeSession) -> None:
    import ray
    from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
    from ray._raylet import GcsClient

    assert alive_nodes() == 1
    head: Any = GcsClient(address=ray.get_runtime_context().gcs_address)
    # Its autoscaler reports too, some seconds after the start, on what it may not change.
    wait_until(lambda: head.internal_kv_get(DEBUG_AUTOSCALING_STATUS.encode()), 30, every=0.5)
    assert not autoscales()
