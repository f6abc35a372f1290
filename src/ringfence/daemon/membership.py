"""A daemon as a node of a cluster: its name in ids, the secret of gateways, the lease on its life."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from dataclasses import dataclass, field

from ..backends.local.host.owner import start_time
from ..errors import IoError
from ..model.base import checks
from ..model.base.model import Model

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LEASE, SECRET, ADDRESSES = "lease", "gateway.secret", "addresses.json"
DRAIN = b" drain"
"""At the end of a lease's content: the daemon makes no new sandboxes."""
DRAINED = "drained"
"""A file of a daemon that drains and has no sandbox any more."""
_LOOK_S = 0.5
_RESTART_S = 60.0  # in which the actor that renews the lease may be started again
_DAY_S = 86_400.0
_MOST_NODES, _MOST_SPARE = 10_000, 100_000

logger = logging.getLogger("ringfence.daemon")


@dataclass(frozen=True, eq=False, repr=False)
class Membership(Model):
    """A daemon's place in a cluster. Its state directory has the secret, and the file of the lease.

    Attributes:
        node: Eight hexadecimal digits, which every id made here contains.
        lease_s: The daemon ends with its sandboxes when the lease was not renewed for so long: the
            cluster has given the node up by then, and calls its sandboxes lost. Where the lease names
            the process that starts the renewing actor again, a minute longer while that lives.
    """

    node: str
    lease_s: float = 15.0

    def __post_init__(self) -> None:
        checks.text(self.node, "node", empty=False)
        checks.number(self.lease_s, "lease_s", 1.0, _DAY_S)


@dataclass(frozen=True, eq=False, repr=False)
class Scaling(Model):
    """How a cluster asks Ray for nodes, and lets go of those without sandboxes.

    Attributes:
        max_nodes: Nodes of Ray at most, its head counted.
        min_nodes: Nodes that are kept, however little there is to do.
        resources: Resources of Ray that one node has, and that no node has twice.
        spare: Sandboxes for which there is room beside those that there are.
        memory_mb: Memory that each is reckoned with.
        load: A node whose load for each of its processors is higher has no room; 0: loads do not count.
        idle_s: A node that is not needed takes nothing new, and is released after so long without a
            sandbox; until then it is taken back within seconds.
        wait_s: How long a create waits for a node that was asked for; 0: it is refused. A client's own
            time limit must be longer.
    """

    max_nodes: int
    min_nodes: int = 1
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    spare: int = 1
    memory_mb: int = 256
    load: float = 1.0
    idle_s: float = 300.0
    wait_s: float = 45.0

    def __post_init__(self) -> None:
        checks.integer(self.max_nodes, "max_nodes", 1, _MOST_NODES)
        checks.integer(self.min_nodes, "min_nodes", 1, self.max_nodes)
        if not isinstance(self.resources, dict) or not self.resources:
            checks.refuse("resources", "must be an object", 'what a node has, such as {"CPU": 8}')
        for name, amount in self.resources.items():
            checks.text(name, "resources", empty=False)
            checks.number(amount, f"resources[{name!r}]", 0.0001, 1e9)
        checks.integer(self.spare, "spare", 0, _MOST_SPARE)
        checks.integer(self.memory_mb, "memory_mb", 1, 1 << 24)
        checks.number(self.load, "load", 0.0, 1e6)
        checks.number(self.idle_s, "idle_s", 1.0, _DAY_S)
        checks.number(self.wait_s, "wait_s", 0.0, 3600.0)


def write_addresses(state_dir: str, addresses: list[str]) -> None:
    """Tell the actor of this node where its daemon listens, before it does: each start has another port."""
    path = os.path.join(state_dir, ADDRESSES)
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(addresses, file)
    os.rename(f"{path}.new", path)


def read_secret(state_dir: str) -> bytes:
    """Read the cluster's secret.

    Raises:
        IoError: It is not there: without one, a node would trust nobody, or anybody.
    """
    path = os.path.join(state_dir, SECRET)
    try:
        with open(path, "rb") as file:
            secret = file.read()
    except OSError as exc:
        raise IoError(f"{path}: {exc.strerror}", field="membership") from exc
    if not secret:
        raise IoError(f"{path} is empty", field="membership")
    return secret


def lease(restarter: tuple[int, int], turn: str, *, drains: bool) -> bytes:
    """The content of the file.

    Args:
        restarter: Process id and start time of what starts the renewing actor again.
        turn: Another one each time.
    """
    return f"{restarter[0]}.{restarter[1]} {turn}".encode() + DRAIN * drains


async def hold_lease(membership: Membership, state_dir: str, drain: Callable[[bool], bool]) -> None:
    """Return after ending this process as SIGTERM does, once the lease is over.

    The content of the file counts, not its time: the clock may be set.

    Args:
        drain: Begins or ends a drain; returns whether the daemon drains and has no sandbox left.
    """
    path = os.path.join(state_dir, LEASE)
    content, renewed, drains = _read(path), time.monotonic(), False
    while True:
        over_s = time.monotonic() - renewed - membership.lease_s
        if over_s >= 0 and (over_s >= _RESTART_S or not _is_restarted(content)):
            break
        if content.endswith(DRAIN) or drains:
            drains = content.endswith(DRAIN)
            is_empty = await asyncio.get_running_loop().run_in_executor(None, drain, drains)
            _mark(os.path.join(state_dir, DRAINED), is_empty)
        await asyncio.sleep(_LOOK_S)
        if (now := _read(path)) != content:
            content, renewed = now, time.monotonic()
    logger.warning("the cluster has not renewed this node's lease: its sandboxes end")
    os.kill(os.getpid(), signal.SIGTERM)


def _is_restarted(content: bytes) -> bool:
    """Return whether the process lives that starts the renewing actor again."""
    pid, dot, started = content.partition(b" ")[0].partition(b".")
    try:
        return bool(dot) and start_time(int(pid)) == int(started) > 0
    except (OSError, ValueError):
        return False


def _mark(path: str, there: bool) -> None:
    with contextlib.suppress(OSError):  # without the mark this node is not released
        open(path, "w").close() if there else os.remove(path)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(128)
    except OSError:
        return b""
