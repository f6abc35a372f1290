"""The pipes of one exec, and ends of connections."""

from __future__ import annotations

import _socket
import _struct as struct
import fcntl
import os

from ....launcher import wire
from ..host.facts import out_of_files

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

    from ....model.execs.exec import ExecRequest

_F_SETPIPE_SZ = 1031  # include/uapi/linux/fcntl.h
_Outer = tuple[int | None, int | None, int | None]


def open_channels(request: ExecRequest) -> tuple[wire.Socket, wire.Socket, list[int], _Outer]:
    """The reply's two ends, the streams' ends for inside, and for the host: all of them or none.

    Raises:
        ResourceExhausted: This process has too many files open.
    """
    opened: list[int] = []
    try:
        inner, outer = open_streams(request, opened)
        return (*wire.socketpair(), inner, outer)
    except OSError as exc:
        for fd in opened:
            os.close(fd)
        if problem := out_of_files(exc):
            raise problem from exc
        raise


def open_streams(request: ExecRequest, opened: list[int]) -> tuple[list[int], _Outer]:
    """Pipes for one exec, noted in `opened`; a terminal needs none."""
    if request.pty is not None:
        return [], (None, None, None)
    out_read, out_write = _pipe(opened)
    err_read, err_write = _pipe(opened)
    for fd in (out_read, err_read):
        os.set_blocking(fd, False)
    if not request.has_stdin:  # PID 1 opens the sandbox's own /dev/null
        return [out_write, err_write], (None, out_read, err_read)
    in_read, in_write = _pipe(opened)
    os.set_blocking(in_write, False)
    return [in_read, out_write, err_write], (in_write, out_read, err_read)


def lend(pipes: list[int]) -> None:
    """Let a guest open its own streams anew, as /dev/stdout: only a pipe's owner may, and that is us.

    It cannot be given away where the guest's ids are not ours to give, or its kernel knows other ones.
    Others cannot come by it: they may not look into the descriptors of who has it open.
    """
    for fd in pipes:
        os.fchmod(fd, 0o666)


def _pipe(opened: list[int]) -> tuple[int, int]:
    ends = os.pipe2(os.O_CLOEXEC)
    opened.extend(ends)
    return ends


def reset_on_close(sock: socket.socket) -> None:
    """The peer is to read that it was refused, not that all went well."""
    try:
        sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:
        pass  # it has gone already


def grow(pipe: int) -> None:
    """Let a pipe hold a megabyte, where this user may have that much: fewer turns for as many bytes."""
    try:
        fcntl.fcntl(pipe, _F_SETPIPE_SZ, 1 << 20)
    except OSError:
        pass
