"""Protocols allowed on a connection for a name, by its port and the request rules."""

from __future__ import annotations

from .first import HTTP, TLS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .connection import Connection

_ALWAYS_TLS, _ALWAYS_HTTP = frozenset((443, 8443)), frozenset((80,))


def expected(connection: Connection) -> tuple[str, ...]:
    """Return the protocols of which one must be spoken; empty: any may."""
    if connection.sandbox.terminates(connection.host, connection.port):
        return (TLS, HTTP)
    if connection.port in _ALWAYS_TLS:
        return (TLS,)
    if connection.port in _ALWAYS_HTTP:
        return (HTTP,)
    return ()


def not_enough(connection: Connection) -> str:
    """Why a client is refused that has not said enough in time."""
    return f"not enough within {connection.sandbox.limits.header_s:g} s to detect the protocol"


def other_than(connection: Connection, kind: str) -> str:
    """Why one is that speaks `kind`."""
    wanted = " or ".join(each.upper() for each in expected(connection))
    spoken = kind.upper() if kind in (TLS, HTTP) else "something else"
    return f"{spoken} where only {wanted} may be spoken"
