"""The network of a sandbox that may reach something: routes, redirections, and two sockets.

All of it was decided by the host process, as finished netlink messages. A socket belongs to the
network namespace that it was made in: the two are made here, inside, and go to who serves them.
"""

from __future__ import annotations

import _socket as socket
import errno
import posix as os

from ..linux import netlink
from .newroot import BuildError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .plan import NetworkPlan

_BACKLOG = 1024
_RESOLVER = ("127.0.0.53", 53)
# errnos of IPv6 calls where the kernel or its settings have none.
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EOPNOTSUPP, errno.EACCES, errno.EADDRNOTAVAIL)


def set_up(plan: NetworkPlan | None) -> list[int]:
    """Apply the plan in this network namespace; returns the listener and the resolver's socket.

    Without a plan, or where it asks for no sockets, it returns none.

    Raises:
        BuildError: The kernel refused a step.

    Precondition: CAP_NET_ADMIN and CAP_NET_BIND_SERVICE in the user namespace that owns it.
    """
    if plan is None:
        return []
    # All are tried: who takes a policy back must not stop at what was never there.
    problems = [problem for batch in plan["batches"] if (problem := _apply(*batch))]
    if problems:
        raise problems[0]
    return _open_sockets(plan["port"]) if plan["port"] else []


def _apply(name: str, protocol: int, data: bytes, last: int, first_ipv6: int) -> BuildError | None:
    try:
        refused = netlink.send_batch(protocol, data, last)
    except OSError as exc:
        return BuildError(f"network {name}", exc)
    for number, code in refused:
        # An address family that is not there is as unreachable as it should be.
        if number < first_ipv6 or code not in _NO_IPV6:
            return BuildError(f"network {name} {number}", OSError(code, os.strerror(code)))
    return None


def _open_sockets(port: int) -> list[int]:
    """A listener for everything that is turned to it, and the socket that DNS queries come to."""
    try:
        listener = _listener(port)
        try:
            resolver = _bound(socket.AF_INET, socket.SOCK_DGRAM, _RESOLVER)
        except OSError:
            listener.close()
            raise
    except OSError as exc:
        raise BuildError("network sockets", exc) from exc
    return [listener.detach(), resolver.detach()]


def _listener(port: int) -> socket.socket:
    """On IPv6 and IPv4 together: each accepted connection tells which it is."""
    try:
        sock = _bound(socket.AF_INET6, socket.SOCK_STREAM, ("::", port))
    except OSError as exc:
        if exc.errno not in _NO_IPV6:
            raise
        sock = _bound(socket.AF_INET, socket.SOCK_STREAM, ("0.0.0.0", port))
    sock.listen(_BACKLOG)
    return sock


def _bound(family: int, kind: int, address: tuple[str, int]) -> socket.socket:
    sock = socket.socket(family, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        if kind == socket.SOCK_STREAM:
            # After a time without network: connections of the last one may still be on their way out.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock
