"""Sockets of a sandbox in the host's network: the agent makes, binds and connects them for its programs.

Each sandbox has loopback addresses of its own, `127.a.b.c`. A TCP socket is bound to one of them when
it is made, so that by itself it reaches and serves nothing but this machine's loopback. A server inside
listens at a port that the kernel chooses; a client's connection to `127.0.0.1` goes to that port if a
listener of the sandbox's is there, before and after. Every other destination is connected to the
egress process, which is told whom it is for. Landlock refuses bind and connect to the programs
themselves; nothing is left to the caller's own call.
"""

from __future__ import annotations

import _socket as socket
import _struct as struct
import errno
import fcntl
import os

from ...launcher import wire
from ...launcher.pid1 import connects
from ...linux import on_behalf, seccomp
from .. import looking
from . import inet_diag

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, TypedDict

    class Way(TypedDict):
        """Where the egress process accepts, and for which destinations."""

        at: tuple[str, int]
        token: bytes  # by which it knows that the agent connected
        loopback: list[tuple[bytes, int, int, int]]  # network, its bits, first and last port
        others: list[tuple[bytes, int, int, int]]

    class Network(TypedDict):
        """Network of a sandbox without a network namespace."""

        calls: dict[int, str]  # calls that ask, by their numbers on this machine
        v4: bytes  # its own address, for sockets of IPv4
        v6: bytes  # for those of IPv6, an IPv4 address as well: ::1 is the whole host's
        unix: list[str]  # directories whose Unix sockets can be reached by path
        is_scoped: bool  # Landlock keeps the agent itself from abstract sockets of the host
        way: Way | None


_INET, _INET6, _UNIX = socket.AF_INET, socket.AF_INET6, socket.AF_UNIX
_MAPPED = bytes(10) + b"\xff\xff"
_IP_BIND_ADDRESS_NO_PORT, _IPV6_V6ONLY = 24, 26  # include/uapi/linux/in.h, in6.h
_SO_DOMAIN = 39
_V4, _V6 = (
    struct.Struct("!H4s8x"),
    struct.Struct("!H4x16s4x"),
)  # behind sa_family, of sockaddr_in(6)
_TYPES, _FLAGS = 0xF, socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
_DNS, _RESOLVER = 53, bytes([127, 0, 0, 53])  # `policy.redirects.RESOLVER`
_LISTENS = b"0A"  # in /proc/net/tcp: TCP_LISTEN, include/net/tcp_states.h
_DISCONNECT = struct.pack("=H", socket.AF_UNSPEC) + bytes(14)
_UNREADABLE = (errno.EPERM, errno.EACCES, errno.ENOSYS)


class Sockets(connects.Connects):
    """Answers the calls in `Network.calls`.

    Args:
        listener_fd, key: Of `asking.guard`.
        listeners: Who is asked for sockets that listen; None: /proc, which takes milliseconds.
    """

    def __init__(
        self, listener_fd: int, network: Network, key: int, listeners: inet_diag.Listeners | None
    ) -> None:
        super().__init__(listener_fd, key)
        self.network, self._listeners = network, listeners
        self._ports: dict[tuple[int, int], int] = {}  # by family and port inside: the real port
        self._beneath = tuple(f"{root}/" for root in network["unix"])

    def serve(self, asked: seccomp.Notification) -> None:
        name = self.network["calls"][asked.number]
        if name == "connect":
            self.answer(asked)
            return
        try:
            number = self._make(asked) if name == "socket" else self._bind(asked)
        except OSError as exc:
            number = exc.errno or errno.EIO
        if number >= 0:
            seccomp.answer(self._listener_fd, asked, number)

    # -- socket ---------------------------------------------------------------------------------

    def _make(self, asked: seccomp.Notification) -> int:
        """Make a TCP socket; -1: the caller has it already."""
        family, kind = asked.arguments[0] & 0xFFFFFFFF, asked.arguments[1] & 0xFFFFFFFF
        if kind & _TYPES != socket.SOCK_STREAM or asked.arguments[2] & 0xFFFFFFFF not in (0, 6):
            return errno.ESOCKTNOSUPPORT
        sock = self._new(family, kind & _FLAGS)
        try:
            flags = os.O_CLOEXEC if kind & socket.SOCK_CLOEXEC else 0
            seccomp.answer_with(self._listener_fd, asked, sock.fileno(), flags)
        finally:
            sock.close()
        return -1

    def _new(self, family: int, flags: int = 0) -> wire.Socket:
        """A TCP socket whose source can be an address of the sandbox's own only."""
        fd = on_behalf.socket(family, socket.SOCK_STREAM | flags | socket.SOCK_CLOEXEC, self._key)
        sock = wire.Socket(family, socket.SOCK_STREAM, 0, fd)
        try:
            if family == _INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_V6ONLY, 0)
            sock.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
            if number := on_behalf.bind(fd, self._own(family, 0), self._key):
                raise OSError(number, os.strerror(number))
        except BaseException:
            sock.close()
            raise
        return sock

    def _own(self, family: int, port: int) -> bytes:
        if family == _INET:
            return _address(_INET, self.network["v4"], port)
        return _address(_INET6, _MAPPED + self.network["v6"], port)

    # -- the caller's socket ----------------------------------------------------------------------

    def _take(self, asked: seccomp.Notification, family: int) -> tuple[wire.Socket, int]:
        """The socket that a call names, and the flags of a descriptor if it must be put in place; else -1.

        Where pidfd_getfd(2) is refused, as in a default container, it is a new one of the same kind.
        """
        number = connects.signed(asked.arguments[0])
        try:
            return connects.take(asked.pid, number, self._key), -1
        except OSError as exc:
            if exc.errno not in _UNREADABLE:
                raise
        target = os.readlink(b"/proc/%d/fd/%d" % (asked.pid, number))
        if not target.startswith(b"socket:["):
            raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
        kind = _unix_kind(target[8:-1])
        if (kind is None) != (family in (_INET, _INET6)):
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        flags = int(looking.field_of(f"/proc/{asked.pid}/fdinfo/{number}", b"flags:"), 8)
        nonblocking = socket.SOCK_NONBLOCK if flags & os.O_NONBLOCK else 0
        if kind is None:
            sock = self._new(family, nonblocking)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            kinds = kind | nonblocking | socket.SOCK_CLOEXEC
            sock = wire.Socket(_UNIX, kind, 0, on_behalf.socket(_UNIX, kinds, self._key))
        return sock, flags & os.O_CLOEXEC

    def _put(self, asked: seccomp.Notification, sock: wire.Socket, flags: int) -> None:
        if flags >= 0:
            number = connects.signed(asked.arguments[0])
            seccomp.put_in_place(self._listener_fd, asked, sock.fileno(), number, flags)

    # -- bind ---------------------------------------------------------------------------------------

    def _bind(self, asked: seccomp.Notification) -> int:
        address = connects.read_address(asked)
        family = _family(address)
        connects.start_guard()
        try:
            sock, flags = self._take(asked, family)
        except OSError as exc:
            connects.end_guard()
            return connects.number_of(exc)
        try:
            domain = sock.getsockopt(socket.SOL_SOCKET, _SO_DOMAIN)
            if domain == _UNIX and family == _UNIX:
                number = self._bind_path(asked, sock.fileno(), address)
            elif domain == family and family in (_INET, _INET6):
                number = self._bind_port(sock, family, address)
            else:
                number = errno.EINVAL if domain == _UNIX else errno.EAFNOSUPPORT
            if not number:
                self._put(asked, sock, flags)
            return number
        finally:
            sock.close()
            connects.end_guard()

    def _bind_port(self, sock: wire.Socket, family: int, address: bytes) -> int:
        place, port = _place(address)
        if any(place) and not _is_loopback(place):
            return errno.EADDRNOTAVAIL
        if (place, port) == (_RESOLVER, _DNS):
            return errno.EADDRINUSE
        if family == _INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_V6ONLY, 0)
        sock.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 0)
        real = self._ports.get((family, port), 0) if port else 0
        number = on_behalf.bind(sock.fileno(), self._own(family, real), self._key)
        if number:
            return number
        if port:
            self._ports[family, port] = sock.getsockname()[1]
        return 0

    def _bind_path(self, asked: seccomp.Notification, fd: int, address: bytes) -> int:
        """Landlock judges the path: the agent itself may make sockets in the sandbox's directories only."""
        if len(address) == 2:  # a name of the kernel's choice
            return on_behalf.bind(fd, address, self._key)
        if address[2] == 0:  # a name of the host, whose programs may look for a server there
            return errno.EACCES
        if b"\n" in address:  # /proc/net/unix shows names as they are: it would forge a line there
            return errno.EACCES
        umask = int(looking.field_of(f"/proc/{asked.pid}/status", b"\nUmask:"), 8)
        where = os.open(f"/proc/{asked.pid}/cwd", os.O_PATH | os.O_CLOEXEC)
        before = os.umask(umask)
        try:
            os.fchdir(where)
            return on_behalf.bind(fd, address, self._key)
        finally:
            os.chdir("/")
            os.umask(before)
            os.close(where)

    # -- connect --------------------------------------------------------------------------------------

    def _attempt(self, asked: seccomp.Notification) -> int:
        connects.start_guard()
        try:
            address = connects.read_address(asked)
            family = _family(address)
            sock, flags = self._take(asked, family)
        except OSError as exc:
            connects.end_guard()
            return connects.number_of(exc)
        place = -1
        try:
            domain = sock.getsockopt(socket.SOL_SOCKET, _SO_DOMAIN)
            if family not in (_INET, _INET6, _UNIX) or (family == _UNIX) != (domain == _UNIX):
                return errno.EAFNOSUPPORT if domain != _UNIX else errno.EINVAL
            if family == _UNIX and not (connects.has_path(address) or self.network["is_scoped"]):
                return errno.ECONNREFUSED
            if family == _UNIX and connects.has_path(address):
                place = self._open(asked.pid, address[2:].partition(b"\0")[0])
                address = connects.UNIX + b"/proc/self/fd/%d\0" % place
            if not seccomp.is_waiting(self._listener_fd, asked):
                return errno.EINTR  # its number may be another thread's by now; nobody hears this
            if family == _UNIX:
                number = self._connect(sock, family, address)
            else:
                number = self._connect_tcp(sock, domain, *_place(address))
            if not number:
                self._put(asked, sock, flags)
            return number
        except OSError as exc:
            return connects.number_of(exc)
        finally:
            if place >= 0:
                os.close(place)
            sock.close()
            connects.end_guard()

    def _open(self, thread: int, path: bytes) -> int:
        """The inode at a path of the caller's; no socket but those in the sandbox's own directories."""
        fd = os.open(connects.as_seen_here(thread, path), os.O_PATH | os.O_CLOEXEC)
        if not os.readlink(f"/proc/self/fd/{fd}").startswith(self._beneath):
            os.close(fd)
            raise PermissionError(errno.EACCES, "a socket of the host")
        return fd

    def _connect_tcp(self, sock: wire.Socket, domain: int, place: bytes, port: int) -> int:
        if _is_loopback(place) or not any(place):
            is_resolver = (place, port) == (_RESOLVER, _DNS)
            real, family = (0, 0) if is_resolver else self._server(len(place), port)
            if real:
                own = self.network["v4" if family == _INET else "v6"]
                target = _address(_INET, own, real)
                if domain == _INET6:
                    target = _address(_INET6, _MAPPED + own, real)
                number = self._reach(sock, target)
                if not number and not self._listens(family, real):
                    on_behalf.connect(sock.fileno(), _DISCONNECT, self._key)
                    return errno.ECONNREFUSED
                return number
            turned: Literal["loopback", "others"] = "loopback"
        else:
            turned = "others"
        way = self.network["way"]
        refused = errno.ECONNREFUSED if turned == "loopback" else errno.ENETUNREACH
        if way is None:
            return refused
        if not _leads(way[turned], place, port):
            if turned == "others" or port != _DNS:
                return refused
            place = _RESOLVER  # programs without a list of resolvers ask 127.0.0.1
        at = socket.inet_aton(way["at"][0])
        number = self._reach(
            sock,
            _address(_INET, at, way["at"][1])
            if domain == _INET
            else _address(_INET6, _MAPPED + at, way["at"][1]),
        )
        if not number:
            told = way["token"] + struct.pack("!16sH", _wide(place), port)
            try:
                sock.send(told, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:
                return errno.ECONNREFUSED
        return number

    def _reach(self, sock: wire.Socket, target: bytes) -> int:
        """Connect over the loopback, where the other end's queue alone can keep it waiting."""
        fd = sock.fileno()
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_NONBLOCK)
        try:
            number = on_behalf.connect(fd, target, self._key)
            if number in connects.UNDER_WAY:
                number = on_behalf.connect(fd, target, self._key)
        finally:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        if number in (errno.EINTR, *connects.UNDER_WAY):
            raise connects.UnderWayError(errno.ETIMEDOUT, 0)
        return number

    def dial(self, version: int, port: int) -> int:
        """A connection of the agent's to a server inside, on its way.

        Raises:
            OSError: ECONNREFUSED where none listens.
        """
        real, family = self._server(version if version == 4 else 16, port)
        sock = self._new(_INET, socket.SOCK_NONBLOCK)
        number = errno.ECONNREFUSED
        if real:
            own = self.network["v4" if family == _INET else "v6"]
            number = on_behalf.connect(sock.fileno(), _address(_INET, own, real), self._key)
        if number not in (0, *connects.UNDER_WAY):
            sock.close()
            raise OSError(number, os.strerror(number))
        return sock.detach()

    def _server(self, size: int, port: int) -> tuple[int, int]:
        """The real port at which the sandbox listens for `port`, and the family; 0 where it does not.

        Args:
            size: Of the address that is asked for. A server of IPv6 answers for IPv4, too.
        """
        for family in (_INET, _INET6) if size == 4 else (_INET6,):
            for real in {self._ports.get((family, port), 0), port}:
                if real and self._listens(family, real):
                    return real, family
        return 0, 0

    def _listens(self, family: int, real: int) -> bool:
        """Return whether a socket listens at just that address of the sandbox's own.

        The kernel prefers it to one of the host's that listens at every address.
        """
        if self._listeners is not None:
            return self._listeners.has(self.network["v4" if family == _INET else "v6"], real)
        if family == _INET:
            name, text = "tcp", _hexadecimal(self.network["v4"])
        else:
            name, text = "tcp6", _hexadecimal(_MAPPED + self.network["v6"])
        wanted = b" %s:%04X " % (text, real)
        with open(f"/proc/net/{name}", "rb") as file:
            return any(wanted in line and line.split(None, 4)[3] == _LISTENS for line in file)


def _address(family: int, place: bytes, port: int) -> bytes:
    return struct.pack("=H", family) + (_V4 if family == _INET else _V6).pack(port, place)


def _family(address: bytes) -> int:
    if len(address) < 2:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    family: int = struct.unpack_from("=H", address)[0]
    if len(address) < {_INET: 16, _INET6: 24}.get(family, 2):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return family


def _place(address: bytes) -> tuple[bytes, int]:
    """The address in network order, of IPv4 where it is one of these, and the port."""
    if _family(address) == _INET:
        port, place = _V4.unpack(address[2:16])
    else:
        port, place = struct.unpack_from("!H4x16s", address, 2)
    return place[12:] if len(place) == 16 and place.startswith(_MAPPED) else place, port


def _wide(place: bytes) -> bytes:
    return place if len(place) == 16 else _MAPPED + place


def _is_loopback(place: bytes) -> bool:
    return place[0] == 127 if len(place) == 4 else place == bytes(15) + b"\1"


def _leads(turns: list[tuple[bytes, int, int, int]], place: bytes, port: int) -> bool:
    """Return whether the egress process may allow that destination: it decides."""
    number = int.from_bytes(place, "big")
    return any(
        len(network) == len(place)
        and first <= port <= last
        and not (number ^ int.from_bytes(network, "big")) >> (8 * len(place) - bits)
        for network, bits, first, last in turns
    )


def _hexadecimal(place: bytes) -> bytes:
    """An address as /proc/net/tcp writes it: words of this machine's order."""
    words = struct.unpack(f"={len(place) // 4}I", place)
    return b"".join(b"%08X" % word for word in words)


def _unix_kind(inode: bytes) -> int | None:
    """The type of a Unix socket; None: it is none."""
    with open("/proc/net/unix", "rb") as file:
        for line in file:
            columns = line.split(None, 7)
            if len(columns) > 6 and columns[6] == inode:
                return int(columns[4], 16)
    return None
