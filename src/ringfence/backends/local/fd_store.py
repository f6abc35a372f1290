"""Client of the fd store: hands over descriptors that must outlive this process, and takes them
back.

Everything is handed over before the kernel is told to do something with it: there is no moment at
which a kill of this process would end what it had begun and another one should find.
"""

from __future__ import annotations

import _socket as socket
import errno
import marshal
import os
import select
import sys
from _thread import RLock, start_new_thread

from ...errors import IoError, StorageFull
from ...launcher import fd_store as launched
from ...launcher import wire
from ...launcher.spawn import FD_STORE, spawn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PATIENCE_S = 600.0
_ANSWER_S = 30.0
_END_MS = 10_000
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN)
_NOTES = 4  # of marshal's versions: every Python since 3.4 reads it


class Item:
    """A stored item: a note of plain values, and descriptors.

    Args:
        whose: A sandbox's id, or another name that groups items.
    """

    def __init__(self, whose: str, name: str, note: Any, fds: list[int]) -> None:
        self.whose, self.name, self.note, self.fds = whose, name, note, fds

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


class FdStore:
    """The fd store of one state directory. Thread-safe. Nothing is started before `open`.

    Args:
        directory: Held by this process alone; its socket is in there.
        patience_s: How long everything lives on without a daemon.

    Attributes:
        refill: What to give to a new one when it was killed: all there is.
    """

    def __init__(self, directory: str, patience_s: float = PATIENCE_S) -> None:
        self.directory, self.patience_s = directory, patience_s
        self.refill: Callable[[], list[Item]] = list
        self._lock = RLock()
        self._socket: wire.Socket | None = None
        self._left = False
        self.pid = 0

    def open(self) -> list[Item]:
        """Find the fd store that an earlier daemon left, or start one; what it keeps.

        One that another version of Ringfence or Python started is ended: nobody can read its notes.
        One of another directory, whose socket was linked into this copy of it, is left alone.

        Raises:
            IoError: None can be started.
            StorageFull: There is no room for its socket.
        """
        launched.raise_file_limit()
        with self._lock:
            found = _connect(self.directory)
            if found is not None:
                says, self.pid = _greeting(found)
                if says == stamp(self.directory):
                    self._begin(found)
                    return self._take()
                _end_own(found, says, self.pid, self.directory)
            self._start()
            return []

    def change(self, put: list[Item], drop: list[tuple[str, str]] | None = None) -> bool:
        """Keep some things, and others no longer: (whose, name), or all of somebody's without a name.

        When this returns, they are kept whatever becomes of this process. False after `leave`: nothing
        was changed.
        """
        message = ("change", drop or [], [_packed(item) for item in put])
        with self._lock:
            if self._left or self._socket is None:
                return False
            try:
                wire.send(self._socket, message, [fd for item in put for fd in item.fds])
            except OSError as exc:
                if exc.errno not in _GONE:
                    raise
                self._revive(put)
        return True

    def leave(self) -> None:
        """Let go of it: everything lives on for the next daemon. Nothing is changed any more."""
        with self._lock:
            self._left = True
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def end(self) -> None:
        """End it; what nobody else has a copy of ends too."""
        with self._lock:
            ours, self._socket, self._left = self._socket, None, True
        if ours is not None:
            _end(ours, self.pid)

    @property
    def alive(self) -> bool:
        return self._socket is not None

    # -- inside -------------------------------------------------------------------------------

    def _start(self) -> None:
        arguments = (self.directory, stamp(self.directory), str(self.patience_s))
        try:
            started = spawn(FD_STORE, *arguments, outlives=True)
        except OSError as exc:
            raise IoError(f"the fd store was not started: {exc}") from exc
        sock = wire.adopt(started.control.detach())
        says, self.pid = _greeting(sock)
        if says != stamp(self.directory):
            sock.close()
            os.waitpid(started.pid, 0)
            room = os.statvfs(self.directory)
            if not room.f_bavail or (room.f_files and not room.f_favail):
                raise StorageFull(f"no room for a socket in {self.directory}")
            raise IoError(f"the fd store did not start in {self.directory}", field="state_dir")
        self._begin(sock)

    def _begin(self, sock: wire.Socket) -> None:
        sock.settimeout(None)
        self._socket = sock
        start_new_thread(self._watch, (sock, os.dup(sock.fileno())))

    def _take(self) -> list[Item]:
        assert self._socket is not None
        wire.send(self._socket, ("take",))
        found: list[Item] = []
        while True:
            message, fds = wire.receive(self._socket)
            if message is None or message[0] != "held":
                return found
            for whose, name, note, count in message[1]:
                mine, fds = fds[:count], fds[count:]
                found.append(Item(whose, name, marshal.loads(note), mine))

    def _watch(self, sock: wire.Socket, fd: int) -> None:
        """In a thread: start another one when it was killed."""
        poll = select.poll()
        poll.register(fd, select.POLLRDHUP)
        while not poll.poll():
            continue
        os.close(fd)
        with self._lock:
            if self._socket is sock:
                self._revive()

    def _revive(self, put: list[Item] | None = None) -> None:
        """It was killed: what it kept is ours still, so give it to another one."""
        dead, self._socket = self._socket, None
        if dead is not None:
            dead.close()
        _reap(self.pid)
        self._start()
        assert self._socket is not None
        for item in [*self.refill(), *(put or ())]:
            try:
                wire.send(self._socket, ("change", [], [_packed(item)]), item.fds)
            except OSError:
                continue  # it has ended, and its descriptors are closed


_OF = " directory "


def stamp(directory: str) -> str:
    """Which Ringfence and which Python this is, and the directory's device and inode.

    Who wrote the notes must be who reads them, and the sandboxes of another directory are none of ours.
    """
    ringfence = sys.modules["ringfence"].__version__
    python = ".".join(map(str, sys.version_info[:2]))
    info = os.stat(directory)
    return f"ringfence {ringfence} python {python}{_OF}{info.st_dev:x}-{info.st_ino:x}"


def end_of(directory: str) -> bool:
    """End the fd store of a state directory, from any process of its user; whether there was one."""
    sock = _connect(directory)
    if sock is None:
        return False
    return _end_own(sock, *_greeting(sock), directory)


def _connect(directory: str) -> wire.Socket | None:
    sock = wire.Socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sock.connect(launched.address(directory_fd))
    except OSError as exc:
        sock.close()
        if exc.errno not in (errno.ENOENT, errno.ECONNREFUSED):
            # One that is there but out of reach: another in its place would end what it keeps.
            raise IoError(f"the fd store of {directory}: {exc.strerror}") from exc
        return None
    finally:
        os.close(directory_fd)
    return sock


def _greeting(sock: wire.Socket) -> tuple[str, int]:
    """Its stamp and its pid; empty and 0 when it does not answer."""
    sock.settimeout(_ANSWER_S)
    try:
        message, _fds = wire.receive(sock)
        _word, says, pid = message
    except (OSError, ValueError, EOFError, TypeError):
        return "", 0
    return str(says), int(pid)


def _end_own(sock: wire.Socket, says: str, pid: int, directory: str) -> bool:
    """End an fd store unless it says that it is of another directory; whether it was ended."""
    _version, _, whose = says.partition(_OF)
    if whose and whose != stamp(directory).partition(_OF)[2]:
        sock.close()
        return False
    _end(sock, pid)
    return True


def _end(sock: wire.Socket, pid: int) -> None:
    """End it, and wait until it has."""
    try:
        pidfd = os.pidfd_open(pid)
    except (OSError, ValueError):
        sock.close()
        return
    try:
        wire.send(sock, ("end",))
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(_END_MS)
        _reap(pid)
    except OSError:
        pass
    finally:
        os.close(pidfd)
        sock.close()


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass  # another process had started it


def _packed(item: Item) -> tuple[str, str, bytes, int]:
    return item.whose, item.name, marshal.dumps(item.note, _NOTES), len(item.fds)
