"""Peers of a unix socket: such a process acts for the operator, and needs no key."""

from __future__ import annotations

from dataclasses import dataclass

from .caller import ADMIN, Caller

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PEER = "peer"
"""The key in a request's state under which the unix socket's peer is, the same in all of a connection's."""
LOCAL = "local"
"""The client of whoever comes through the unix socket."""


@dataclass
class Peer:
    """A process at the other end of a connection.

    Attributes:
        uid: Its user.
        is_gateway: It has sent a request under a cluster's seal. It sends what strangers write, so
            that from then on nothing counts on this connection that has no seal or key.
    """

    uid: int
    is_gateway: bool = False

    def __str__(self) -> str:
        return f"uid {self.uid}"


def note_gateway(state: dict[str, Any]) -> None:
    """Take a request's peer for a gateway, whether its seal is valid or not."""
    if PEER in state:
        state[PEER].is_gateway = True


def local_caller(state: dict[str, Any]) -> Caller | None:
    """Return the caller without a key: the operator, at a unix socket."""
    peer: Peer | None = state.get(PEER)
    return None if peer is None or peer.is_gateway else Caller(LOCAL, ADMIN)
