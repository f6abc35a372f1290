"""A Ray cluster with Ray's own autoscaler and its fake provider, until standard input ends.

A program of its own, as a process joins one Ray cluster only. `ray.cluster_utils.AutoscalingCluster` ends
every Ray process of the machine, and needs a file that Ray's wheel lacks: hence the head is started here.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import sys
import tempfile
from typing import Any

from tests.suites.ray.conftest import OBJECT_STORE_BYTES, SETTINGS, _get_node, free_ports

PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
HEAD = f"{'f' * 51}00000"


def config(port: int, most: int) -> dict[str, Any]:
    """What `ray up` would make of a cluster's file; a node is ended after 6 s without any work."""
    worker = {"CPU": 1, "object_store_memory": OBJECT_STORE_BYTES}
    kind: dict[str, Any] = {"node_config": {}, "min_workers": 0, "max_workers": most - 1}
    return {
        "cluster_name": "fake",
        "max_workers": most - 1,
        "provider": {
            "type": "external",
            "module": PROVIDER,
            "gcs_address": f"127.0.0.1:{port}",
            "head_node_id": HEAD,
            "launch_multiple": True,
            "disable_node_updaters": True,  # by ssh, which these have not
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "worker": {**kind, "resources": worker},
        },
        "head_node_type": "ray.head.default",
        "idle_timeout_minutes": 0.1,
        "upscaling_speed": 10.0,
        "auth": {},
        "file_mounts": {},
        **{
            name: []
            for name in (
                *("cluster_synced_files", "initialization_commands", "setup_commands"),
                *("head_setup_commands", "worker_setup_commands"),
                *("head_start_ray_commands", "worker_start_ray_commands"),
            )
        },
    }


def main(most: int) -> None:
    directory = os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="rf-ray-", dir="/tmp")
    os.mkdir(f"{directory}/ray")
    own = {"RAY_CLOUD_INSTANCE_ID": HEAD, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD}
    version = {"RAY_enable_autoscaler_v2": "1", "RAY_FAKE_CLUSTER": "1"}
    os.environ |= {**SETTINGS, **own, **version, "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    (port,) = free_ports(1)
    path = f"{directory}/autoscaling.json"
    with open(path, "w") as file:
        json.dump(config(port, most), file)
    from ray._private import services
    from ray.cluster_utils import Cluster

    services.get_node = functools.partial(_get_node, services.get_node)
    cluster = Cluster()
    options = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    try:
        cluster.add_node(
            num_cpus=1,
            autoscaling_config=path,
            gcs_server_port=port,
            dashboard_port=None,
            **options,
        )
        print(cluster.address, flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()
        for pid in _left(directory):  # nodes that the autoscaler has started
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)


def _left(directory: str) -> list[int]:
    """Processes that name the directory of this cluster, which no other has."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                if directory.encode() in file.read() and int(name) != os.getpid():
                    found.append(int(name))
        except OSError:
            continue
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]))
