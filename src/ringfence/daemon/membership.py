"""A daemon as a node of a cluster: its name in ids, the secret of gateways, the lease on its life."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from dataclasses import dataclass

from ..errors import IoError
from ..model.base import checks
from ..model.base.model import Model

LEASE, SECRET = "lease", "gateway.secret"
_LOOK_S = 0.5
_DAY_S = 86_400.0

logger = logging.getLogger("ringfence.daemon")


@dataclass(frozen=True, eq=False, repr=False)
class Membership(Model):
    """A daemon's place in a cluster. Its state directory has the secret, and the file of the lease.

    Attributes:
        node: Eight hexadecimal digits, which every id made here contains.
        lease_s: The daemon ends with its sandboxes when the lease was not renewed for so long: the
            cluster has given the node up by then, and calls its sandboxes lost.
    """

    node: str
    lease_s: float = 15.0

    def __post_init__(self) -> None:
        checks.text(self.node, "node", empty=False)
        checks.number(self.lease_s, "lease_s", 1.0, _DAY_S)


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


async def hold_lease(membership: Membership, state_dir: str) -> None:
    """Return after ending this process as SIGTERM does, once the lease is over.

    The content of the file counts, not its time: the clock may be set.
    """
    path = os.path.join(state_dir, LEASE)
    content, renewed = _read(path), time.monotonic()
    while time.monotonic() - renewed < membership.lease_s:
        await asyncio.sleep(_LOOK_S)
        if (now := _read(path)) != content:
            content, renewed = now, time.monotonic()
    logger.warning("the cluster has not renewed this node's lease: its sandboxes end")
    os.kill(os.getpid(), signal.SIGTERM)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(64)
    except OSError:
        return b""
