"""A Ray cluster of processes on this machine, for the benchmark and for trying things out."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile

from .directory import check_version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_OBJECT_STORE_BYTES = 80 << 20  # the least that Ray takes; nothing here uses it


def check() -> None:
    """Refuse to go on without Ray.

    Raises:
        BackendUnavailable: It is not installed, or in a version that was not tried.
    """
    from ..errors import BackendUnavailable

    try:
        import ray
    except ImportError as exc:
        hint = 'pip install "ringfence[ray]"'
        raise BackendUnavailable(f"Ray is not installed: {exc}", hint=hint) from exc
    check_version(ray.__version__)


@contextlib.contextmanager
def nodes(count: int, name: str) -> Iterator[str]:
    """So many Ray nodes, until the end of the block; the address of their head."""
    # A socket's path has at most 107 bytes, and Ray's own part takes 70 of them.
    place = tempfile.mkdtemp(prefix=f"rf-{name[:8]}-", dir="/tmp")
    os.mkdir(f"{place}/ray")  # where `Cluster` writes its address before any node is there
    before = os.environ.get("RAY_TMPDIR")
    os.environ |= {"RAY_TMPDIR": place, "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        from ray.cluster_utils import Cluster

        cluster = Cluster()
        try:
            for number in range(count):
                head = {} if number else {"include_dashboard": False}
                cluster.add_node(num_cpus=1, object_store_memory=_OBJECT_STORE_BYTES, **head)
            yield cluster.address
        finally:
            cluster.shutdown()
    finally:
        if before is None:
            del os.environ["RAY_TMPDIR"]
        else:
            os.environ["RAY_TMPDIR"] = before
        shutil.rmtree(place, ignore_errors=True)


def end(address: str, name: str) -> None:
    _run("cluster", "down", address, name)


def socket_of(address: str, name: str, any_id: str) -> str:
    import json

    from ..model.base.ids import node_of

    found = json.loads(_run("nodes", "--json", address, name))
    return next(f"unix:{each['socket']}" for each in found if each["node"] == node_of(any_id))


def _run(command: str, word: str, address: str, name: str) -> str:
    """Run a command in a process of its own: a driver of Ray is never rid of it again."""
    argv = [sys.executable, "-m", "ringfence", command, word]
    options = ["--address", address, "--cluster-name", name]
    done = subprocess.run([*argv, *options], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout
