"""The process in a machine's jail that serves files to the machine's kernel.

It is one like the emulator beside it: in the same namespaces and with the same isolation, without any
capability, with an id of its own, on a root that holds only what is shown.
"""

from __future__ import annotations

import errno
import posix as os
import select

from ...linux import fuse
from .. import wire
from .share import Share
from .shared_mounts import SharedMounts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypedDict

    class SharePlan(TypedDict):
        """Directories to serve; plain values, decided by the host."""

        shown: str  # a directory in the jail's root: of what cannot be changed
        mounts: str  # and of what the user has mounted
        whose: int  # the guest's id of whom the files in `mounts` belong to


_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_PIECE = 1 << 16
LINES = 2  # how many there are


class _Line:
    """A stream with one of the guest's file systems at its other end."""

    def __init__(self, fd: int, share: Share) -> None:
        self.fd, self.share, self._data = fd, share, bytearray()

    def serve(self) -> bool:
        """Answer what has come; false once nobody is there."""
        piece = os.read(self.fd, _PIECE)
        self._data += piece
        at = 0
        while len(self._data) - at >= fuse.HEADER.size:
            length = fuse.HEADER.unpack_from(self._data, at)[0]
            if not fuse.HEADER.size <= length <= fuse.BUFFER:
                raise OSError(errno.EPROTO, "a message of a wrong length")
            if len(self._data) - at < length:
                break
            said = memoryview(self.share.answer(memoryview(bytes(self._data[at : at + length]))))
            while said:
                said = said[os.write(self.fd, said) :]
            at += length
        del self._data[:at]
        return bool(piece)


def serve(plan: SharePlan, fds: list[int], control: wire.Socket) -> None:
    """Answer a guest's kernel until somebody is gone.

    Args:
        fds: Stream sockets, as many as `LINES`: for what is shown, and for mounts.
        control: To the host. "R" says to go on where another has left off, and what that one has written
            comes along, a file for each line. "W" asks to write it, into files that come along.
    """
    os.umask(
        0
    )  # the guest's kernel has taken off what the program's own umask says, and no more is to go
    shown = Share(os.open(plan["shown"], _DIRECTORY))
    mounted = SharedMounts(os.open(plan["mounts"], _DIRECTORY), plan["whose"])
    lines = {fd: _Line(fd, share) for fd, share in zip(fds, (shown, mounted), strict=True)}
    poll = select.poll()
    for fd in (control.fileno(), *lines):
        poll.register(fd, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll()]
        if control.fileno() in ready:
            # First: what was written by another is read before anything is answered.
            if not _obey(control, (shown, mounted)):
                return
            continue
        if not all(lines[fd].serve() for fd in ready):
            return


def _obey(control: wire.Socket, shares: tuple[Share, ...]) -> bool:
    said, fds = wire.receive_raw(control)
    if not said:
        return False
    try:
        for fd, share in zip(fds, shares, strict=True):
            if said == b"R":
                share.read_back(_all_of(fd))
            else:
                content = memoryview(share.written())
                while content:
                    content = content[os.write(fd, content) :]
        wire.send_raw(control, b"O")
    except OSError as exc:
        wire.send_raw(control, b"E%d" % (exc.errno or errno.EIO))
    finally:
        for fd in fds:
            os.close(fd)
    return True


def _all_of(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)
