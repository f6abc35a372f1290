"""Network events of a sandbox: connections, requests and lookups, allowed or denied."""

from __future__ import annotations

from ..base.model import Model
from ..base.record import dataclass

KINDS = ("dns", "tcp", "http", "connect", "socks", "udp")
_TEXTS = ("kind", "host", "address", "reason", "method", "path", "rule")
_TEXT_MAX = 2048


@dataclass(frozen=True, eq=False, repr=False)
class NetworkEvent(Model):
    """A policy decision and its result. Control characters in texts are escaped.

    Attributes:
        time: Seconds since the epoch, when it was decided.
        kind: `dns` a lookup; `tcp` a connection; `http` a request; `connect` and `socks` a
            proxy's tunnel; `udp` a datagram, which is always refused.
        host: The name requested; empty for an address.
        address: The address dialled or requested; empty where none was.
        rule: The rule that decided, in text form; empty when none did.
        bytes_in: From the server to the sandbox.
        duration_s: Until the connection ended.
    """

    time: float
    sandbox_id: str
    kind: str
    host: str = ""
    address: str = ""
    port: int = 0
    allowed: bool = False
    reason: str = ""
    method: str = ""
    path: str = ""
    bytes_in: int = 0
    bytes_out: int = 0
    duration_s: float = 0.0
    rule: str = ""

    def __post_init__(self) -> None:
        for name in _TEXTS:
            given = getattr(self, name)
            if not given.isascii() or not given.isprintable() or len(given) > _TEXT_MAX:
                object.__setattr__(self, name, escape(given)[:_TEXT_MAX])


def escape(text: str) -> str:
    r"""`text` in printable ASCII: what a program chose must not drive a terminal or split a line."""
    return "".join(
        char if char.isascii() and char.isprintable() else ascii(char)[1:-1] for char in text
    )
