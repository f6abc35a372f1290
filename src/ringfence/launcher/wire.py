"""Messages between host, zygote and PID 1: one datagram each, file descriptors alongside.

Requests flow from the trusted host inwards and are `marshal` (both ends are the same
interpreter). What comes back out of a sandbox is never unmarshalled: it is a fixed struct or text.
"""

from __future__ import annotations

import _socket as socket
import _struct as struct
import _thread
import errno
import marshal
import posix as os

TYPE_CHECKING = False  # `typing` costs milliseconds that every start would pay
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

Socket = socket.socket

# Longer requests travel in a memfd. A buffer for more would be mapped afresh for each message, and a
# page is the dearest thing that a process touches just after it was forked.
_INLINE_BYTES = 16_000
_RECEIVE_BYTES = 1 << 14
_MAX_FDS = 253  # SCM_MAX_FD of include/net/scm.h: with one more, nothing is sent
_SEEK_END = 2  # include/uapi/linux/fs.h
MOST_NETLINK_SOCKETS = 64  # of some 208 KiB each, the default of net.core.rmem_default
# Inside, the real and saved user id of agents: no program has it, so that none may signal an agent.
AGENT_UID = 65_536
MSG_CMSG_CLOEXEC = 0x40000000  # include/linux/socket.h

_RAISED = _thread.allocate_lock()  # the limit is the process's

# PID 1's answer to an exec: see ExecReport.
_REPORT = struct.Struct("=iiiiQQQQQQQ")


UNKNOWN = (1 << 64) - 1  # for a count that this kernel does not keep


class ExecReport:
    """How one exec ended, as the kernel told PID 1. Times in ns, sizes in bytes."""

    FIELDS = (
        "spawn_errno",
        "wait_status",
        "timed_out",
        "killed_by",
        "user_ns",
        "system_ns",
        "peak_memory_bytes",
        "io_read_bytes",
        "io_write_bytes",
        "duration_ns",
        "failed_stage",
    )
    spawn_errno: int
    wait_status: int
    timed_out: int
    killed_by: int
    user_ns: int
    system_ns: int
    peak_memory_bytes: int
    io_read_bytes: int
    io_write_bytes: int
    duration_ns: int
    failed_stage: int

    def __init__(self, **values: int) -> None:
        self.__dict__.update(_NO_REPORT)
        self.__dict__.update(values)

    def pack(self) -> bytes:
        return b"R" + _REPORT.pack(*map(self.__dict__.__getitem__, self.FIELDS))

    @classmethod
    def unpack(cls, data: bytes) -> ExecReport:
        """Raises ValueError for anything but a whole report."""
        if len(data) != 1 + _REPORT.size or data[:1] != b"R":
            raise ValueError("not an exec report")
        return cls(**dict(zip(cls.FIELDS, _REPORT.unpack(data[1:]), strict=True)))


_NO_REPORT = dict.fromkeys(ExecReport.FIELDS, 0)

# ExecReport.failed_stage, when spawn_errno is set
STAGE_TERMINAL, STAGE_CWD, STAGE_COMMAND = range(1, 4)
# ExecReport.killed_by
KILLED_BY_NOBODY, KILLED_BY_TIMEOUT, KILLED_BY_REQUEST, KILLED_BY_MEMORY_WATCHDOG = range(4)
CROWDED = (
    16  # beside one of them: processes of it were killed, for there were more than there may be
)
FULL = 32  # beside one of them: while it ran there were as many processes as there may be


def socketpair() -> tuple[Socket, Socket]:
    """Two connected sockets that keep message boundaries."""
    kind = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC
    left, right = socket.socketpair(socket.AF_UNIX, kind)
    return left, right


def adopt(fd: int) -> Socket:
    """The socket behind a descriptor of ours, without asking the kernel what it is."""
    return Socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fd)


def send(sock: Socket, message: Any, fds: list[int] | tuple[int, ...] = ()) -> None:
    """Send one request with file descriptors.

    Raises:
        OSError: EPIPE or ECONNRESET when the other end is gone.
    """
    data = marshal.dumps(message)
    if len(data) <= _INLINE_BYTES:
        send_raw(sock, b"M" + data, fds)
        return
    memfd = os.memfd_create("request", os.MFD_CLOEXEC)
    try:
        with open(memfd, "wb", closefd=False) as file:
            file.write(data)
        send_raw(sock, b"F", [memfd, *fds])
    finally:
        os.close(memfd)


def send_raw(sock: Socket, data: bytes, fds: list[int] | tuple[int, ...] = ()) -> None:
    if fds:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"={len(fds)}i", *fds))]
        try:
            sock.sendmsg([data], rights)
        except OSError as exc:
            if exc.errno != errno.ETOOMANYREFS:
                raise
            _send_beyond(sock, data, rights)
    else:
        sock.sendmsg([data])  # some sandboxes' filters let sendmsg(2) through, and not sendto(2)


def _send_beyond(sock: Socket, data: bytes, rights: list[tuple[int, int, bytes]]) -> None:
    """Send descriptors with the hard limit of open files for the soft one, meanwhile.

    Linux refuses them while the descriptors that this user has in flight, a guest's among them, are
    more than the sender's soft limit: too_many_unix_fds() of net/unix/scm.c. A guest stops at its own.
    """
    import resource  # PID 1 has it already

    with _RAISED:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            sock.sendmsg([data], rights)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def receive_raw(sock: Socket, flags: int = 0) -> tuple[bytes, list[int]]:
    """Receive a datagram and its file descriptors; empty bytes when the other end is gone.

    Args:
        flags: MSG_PEEK leaves it there, and gives copies of the descriptors.
    """
    flags |= MSG_CMSG_CLOEXEC
    room = socket.CMSG_SPACE(_MAX_FDS * 4)
    try:
        data, control, _flags, _addr = sock.recvmsg(_RECEIVE_BYTES, room, flags)
    except ConnectionResetError:
        # The other end closed with a message of ours unread. The kernel reports this first, but
        # once: its last message may follow.
        data, control, _flags, _addr = sock.recvmsg(_RECEIVE_BYTES, room, flags)
    fds: list[int] = []
    for level, kind, payload in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds += memoryview(payload[: len(payload) & ~3]).cast("i").tolist()
    return data, fds


def receive(sock: Socket) -> tuple[Any, list[int]]:
    """Receive a request from the trusted side; (None, []) when the other end is gone."""
    data, fds = receive_raw(sock)
    if not data:
        return None, fds
    if data[:1] == b"M":
        return marshal.loads(data[1:]), fds
    size = os.lseek(fds[0], 0, _SEEK_END)
    body = os.pread(fds[0], size, 0)
    os.close(fds[0])
    return marshal.loads(body), fds[1:]


def answer(reply: Socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send one datagram to whoever asked, if they still want to know."""
    try:
        send_raw(reply, data, tuple(fds))
    except OSError:
        pass  # the host no longer wants to know


def refuse(reply: Socket, exc: OSError, step: str = "") -> None:
    """Answer with an errno and a text that names the step."""
    text = f"{step}: {exc}" if step else str(exc)
    body = text.encode("utf-8", "replace")[:2000]
    answer(reply, b"E%d " % (exc.errno or errno.EIO) + body)
