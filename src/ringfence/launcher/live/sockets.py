"""Sockets of a process that is copied: what its kernel tells of them."""

from __future__ import annotations

import _socket as socket
import _struct as struct
import marshal
import posix as os

from ...linux import namespaces, on_behalf, unix_diag


class CannotCopy(Exception):  # noqa: N818  its text is a reason, told in a report
    """The process has something that no copy can have."""


class Server:
    """A TCP socket that listens. Connections that wait at it stay behind.

    Attributes:
        options: Level, name and value of those that are on.
        address: struct sockaddr_in or sockaddr_in6.
    """

    def __init__(self, family: int, options: list[tuple[int, int, int]], address: bytes) -> None:
        self.family, self.options, self.address = family, options, address
        self.backlog = 0


def server_of(pid: int, number: int) -> Server | None:
    """Describe a socket that listens for TCP; None: it does not."""
    sock = socket.socket(fileno=on_behalf.descriptor(pid, number, 0))
    try:
        families = (socket.AF_INET, socket.AF_INET6)
        if sock.family not in families or sock.type != socket.SOCK_STREAM:
            return None
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return None
        host, port, *_rest = sock.getsockname()
        name = socket.inet_pton(sock.family, host)
        if sock.family == socket.AF_INET:
            address = struct.pack("=H", sock.family) + port.to_bytes(2, "big") + name + bytes(8)
        else:
            if _rest[1]:
                raise CannotCopy(f"descriptor {number} is a server of one network interface")
            address = struct.pack("=H", sock.family) + port.to_bytes(2, "big") + bytes(4)
            address += name + bytes(4)
        names = [(socket.SOL_SOCKET, socket.SO_REUSEADDR), (socket.SOL_SOCKET, socket.SO_REUSEPORT)]
        if sock.family == socket.AF_INET6:
            names.append((socket.IPPROTO_IPV6, socket.IPV6_V6ONLY))
        options = [(*name, sock.getsockopt(*name)) for name in names]
        found = Server(sock.family, options, address)
        # struct tcp_info of one that listens: tcpi_sacked is its backlog, net/ipv4/tcp.c.
        information = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        (found.backlog,) = struct.unpack_from("=I", information, 28)
        return found
    finally:
        sock.close()


def unix_sockets(pid: int) -> dict[int, tuple[int, int, int]]:
    """Return kind, peer and bytes that wait, by inode, of all in the network namespace of a process.

    A child of ours goes there: nobody comes back from another user namespace.
    """
    read, write = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            with open(write, "wb") as file:
                file.write(marshal.dumps(_look_there(pid)))
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    found: dict[int, tuple[int, int, int]] | None = marshal.loads(data) if data else None
    if found is None:
        raise CannotCopy("it has sockets, and this kernel does not report their peers")
    return found


def _look_there(pid: int) -> dict[int, tuple[int, int, int]] | None:
    try:
        for name, kind in (("user", namespaces.CLONE_NEWUSER), ("net", namespaces.CLONE_NEWNET)):
            ours, theirs = (os.stat(f"/proc/{each}/ns/{name}") for each in ("self", pid))
            if ours.st_ino != theirs.st_ino:
                fd = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
                namespaces.setns(fd, kind)
                os.close(fd)
        return {
            inode: (each.kind, each.peer, each.waiting)
            for inode, each in unix_diag.sockets().items()
        }
    except OSError:
        return None
