"""One Ray cluster for all tests of this suite: starting one takes seconds, and each node 150 MiB."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

OBJECT_STORE_BYTES = 80 << 20
# Nothing is reported to anybody, nodes listen on loopback alone, and workers start only when a task needs one.
SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}
os.environ |= SETTINGS


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A cluster with one node, its head; `cluster.add_node(**node_options())` adds one."""
    # A socket's path has at most 107 bytes, and Ray's own part takes 70 of them.
    directory = os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="rf-ray-", dir="/tmp")
    os.mkdir(f"{directory}/ray")  # where `Cluster` writes its address before any node is there
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        cluster.add_node(**node_options(), include_dashboard=False)
        ray.init(address=cluster.address, namespace="ringfence-tests", log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def node_options(**more: Any) -> dict[str, Any]:
    """Arguments of `Cluster.add_node` for a small node."""
    return {"num_cpus": 2, "object_store_memory": OBJECT_STORE_BYTES, **more}
