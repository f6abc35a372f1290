"""One Ray cluster for all tests of this suite: starting one takes seconds, and each node 150 MiB."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

OBJECT_STORE_BYTES = 80 << 20
# Nothing is reported to anybody, nodes listen on loopback alone, and workers start only when a task needs one.
SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_raylet_start_wait_time_s": "100",  # on a busy machine its agents take longer than 15 s
    "RAY_agent_register_timeout_ms": "100000",  # and longer than 15 s to write their ports
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",  # else 15, and beside other tests nodes get next to nothing
}
os.environ |= SETTINGS
TIMEOUT_S = 900  # six nodes start, each with three Python processes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A cluster with one node, its head; `cluster.add_node(**node_options())` adds one."""
    # A socket's path has at most 107 bytes, and Ray's own part takes 70 of them.
    directory = os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="rf-ray-", dir="/tmp")
    os.mkdir(f"{directory}/ray")  # where `Cluster` writes its address before any node is there
    import ray
    from ray._private import services
    from ray.cluster_utils import Cluster

    # Ray gives a node up after 30 s: on a busy machine it takes longer to start.
    services.get_node = functools.partial(_get_node, services.get_node)
    cluster = Cluster()
    try:
        cluster.add_node(**node_options(), include_dashboard=False)
        ray.init(address=cluster.address, namespace="ringfence-tests", log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def _get_node(get_node: Callable[..., Any], *parts: Any) -> Any:
    deadline = time.monotonic() + 100
    while True:
        try:
            return get_node(*parts)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


@pytest.fixture(scope="session")
def far(cluster: Any) -> dict[str, float]:
    """The resource that tasks ask for to run on a second node."""
    cluster.add_node(**node_options(), resources={"far": 100.0})
    return {"far": 0.01}


def node_options(**more: Any) -> dict[str, Any]:
    """Arguments of `Cluster.add_node` for a small node."""
    return {"num_cpus": 2, "object_store_memory": OBJECT_STORE_BYTES, **more}


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
