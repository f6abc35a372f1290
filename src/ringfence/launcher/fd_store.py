"""The fd store: keeps copies of descriptors that a daemon's sandboxes depend on, for the next
daemon.

A sandbox ends when the last copy of its control socket closes, a command when nobody is left to read
its output. So a second process has copies, with a note to each, and gives them to whoever connects to
its socket in the state directory. It looks into none of it. When nobody has come for long enough, or
it is told to, it ends; the zygote then sees that its host is gone, and ends everything.

Requests are ("change", [(whose, name)], [(whose, name, note, how many descriptors)]): what is dropped,
all of somebody's where the name is empty, and what is put; then ("take",) and ("end",). Notes are
bytes to it.
"""

from __future__ import annotations

import _socket as socket
import _struct as struct
import gc
import posix as os
import resource
import select
import sys
import time

from ..linux import files, privileges
from . import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CONTROL_FD = 3
NAME = "fd-store.sock"
_BACKLOG = 8
_SEND_S = 30.0
MOST_FDS = 60  # in a message: wire takes 64
_MOST_ITEMS = 64
_UCRED = struct.Struct("=iii")  # include/linux/socket.h: pid, uid, gid


def main() -> None:
    """Serve on descriptor 3, which is the daemon that started us, and whoever comes later.

    sys.argv: the package's parent, the state directory, the stamp, seconds to wait for a daemon.
    """
    _package, directory, stamp, patience_s = sys.argv[1:5]
    files.close_from(CONTROL_FD + 1)
    os.set_inheritable(CONTROL_FD, False)
    privileges.set_name(b"ringfence-hold")
    raise_file_limit()
    gc.disable()
    # Kept open: as long as we run, no other directory gets this one's identity, and our socket is
    # found, and removed, wherever the directory was moved.
    directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fd_store = FdStore(listen(directory_fd), stamp, float(patience_s))
    inode = os.stat(NAME, dir_fd=directory_fd).st_ino
    fd_store.greet(wire.adopt(CONTROL_FD))
    fd_store.run()
    try:
        if os.stat(NAME, dir_fd=directory_fd).st_ino == inode:
            os.unlink(NAME, dir_fd=directory_fd)
    except OSError:
        pass  # the whole directory is gone
    os._exit(0)


def raise_file_limit() -> None:
    """As many open files as we may have: a thousand sandboxes take some thousands."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def address(directory_fd: int) -> str:
    """The name of the socket in an open directory: a path of any length fits into a sockaddr_un so."""
    return f"/proc/self/fd/{directory_fd}/{NAME}"


def listen(directory_fd: int) -> wire.Socket:
    """The socket in the state directory, which the daemon that started us holds the lock of."""
    try:
        os.unlink(NAME, dir_fd=directory_fd)  # of an fd store that was killed
    except FileNotFoundError:
        pass
    listener = wire.Socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    os.umask(0o177)
    listener.bind(address(directory_fd))
    listener.listen(_BACKLOG)
    return listener


class FdStore:
    """Stored descriptors and connected daemons.

    Args:
        stamp: Sent to each daemon that connects: the versions of Ringfence and Python that wrote the notes,
            and the directory.
        patience_s: How long everything is kept without a connected daemon.
    """

    def __init__(self, listener: wire.Socket, stamp: str, patience_s: float) -> None:
        self.listener, self.stamp, self.patience_s = listener, stamp, patience_s
        self.items: dict[str, dict[str, tuple[bytes, list[int]]]] = {}
        self.daemons: dict[int, wire.Socket] = {}
        self.poll = select.poll()
        self.poll.register(listener.fileno(), select.POLLIN)
        self.alone_since = time.monotonic()
        self.over = False

    def run(self) -> None:
        """Serve until told to end, or left alone for too long."""
        while not self.over:
            ready = self.poll.poll(self._timeout_ms())
            if not ready and self._timeout_ms() == 0:
                return
            for fd, _event in ready:
                if fd == self.listener.fileno():
                    self._accept()
                else:
                    self._serve(self.daemons[fd])

    def _timeout_ms(self) -> float | None:
        if self.daemons:
            return None
        return max(0.0, self.alone_since + self.patience_s - time.monotonic()) * 1000

    def _accept(self) -> None:
        fd, _address = self.listener._accept()  # type: ignore[attr-defined]
        peer = wire.adopt(fd)
        os.set_inheritable(fd, False)
        raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        if _UCRED.unpack(raw)[1] in (0, os.geteuid()):
            self.greet(peer)
        else:
            peer.close()

    def greet(self, peer: wire.Socket) -> None:
        peer.settimeout(_SEND_S)  # one that does not read must not keep us from the others
        self.daemons[peer.fileno()] = peer
        self.poll.register(peer.fileno(), select.POLLIN)
        self._send(peer, ("fd_store", self.stamp, os.getpid()))

    def _serve(self, peer: wire.Socket) -> None:
        try:
            message, fds = wire.receive(peer)
        except OSError:
            message, fds = None, []
        if message is None:
            self._leave(peer)
            return
        verb, *args = message
        if verb == "change":
            self._change(fds, *args)
        elif verb == "take":
            self._hand_over(peer)
        elif verb == "end":
            self.over = True

    def _change(
        self, fds: list[int], drop: list[tuple[str, str]], put: list[tuple[str, str, bytes, int]]
    ) -> None:
        for whose, name in drop:
            theirs = self.items.get(whose, {})
            for each in [name] if name else list(theirs):
                _close(theirs.pop(each, None))
            if not theirs:
                self.items.pop(whose, None)
        for whose, name, note, count in put:
            mine, fds = fds[:count], fds[count:]
            theirs = self.items.setdefault(whose, {})
            _close(theirs.pop(name, None))
            if len(mine) == count:  # else out of descriptors: what is not whole is not kept
                theirs[name] = note, mine

    def _hand_over(self, peer: wire.Socket) -> None:
        items: list[tuple[str, str, bytes, int]] = []
        passed: list[int] = []
        for whose, theirs in self.items.items():
            for name, (note, fds) in theirs.items():
                if len(passed) + len(fds) > MOST_FDS or len(items) == _MOST_ITEMS:
                    if not self._send(peer, ("held", items), passed):
                        return
                    items, passed = [], []
                items.append((whose, name, note, len(fds)))
                passed += fds
        if self._send(peer, ("held", items), passed):
            self._send(peer, ("all", []))

    def _send(self, peer: wire.Socket, message: Any, fds: list[int] | tuple[int, ...] = ()) -> bool:
        try:
            wire.send(peer, message, fds)
        except OSError:
            self._leave(peer)
            return False
        return True

    def _leave(self, peer: wire.Socket) -> None:
        if self.daemons.pop(peer.fileno(), None) is not None:
            self.poll.unregister(peer.fileno())
            peer.close()
            self.alone_since = time.monotonic()


def _close(item: tuple[bytes, list[int]] | None) -> None:
    for fd in item[1] if item else ():
        os.close(fd)
