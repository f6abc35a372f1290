"""The host's side of a launcher process: start it, send it requests, end it."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import select
from _thread import allocate_lock

from ...errors import IsolationError, ResourceExhausted, SandboxLost
from ...launcher import wire
from ...launcher.spawn import LEAST_FILES, Started, spawn
from .answers import answer
from .host.facts import out_of_files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


ROOM = 1 << 20  # gVisor's last words, with every stack, are long
_READ = 1 << 16
_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def room_for_words(name: str) -> int:
    """A file for them that takes no more memory than that, whoever comes to write to it.

    A program may leave it open in a process that what it confines can look into, as Codex does; and no limit
    of a sandbox counts what its user has written to a file of ours.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, ROOM)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def appended_words(name: str) -> int:
    """A file for them that several processes open and write to, of a program that has as large files anyway."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    return fd


def last_words(errors: int, *idle: str) -> str:
    """The last lines of what the program, or one in it, wrote to its standard error.

    Args:
        idle: A line with one of these in it says nothing of how it ended.
    """
    text = os.pread(errors, ROOM, 0).rstrip(b"\0")[-_READ:]
    said = text.decode("utf-8", "replace").splitlines()
    lines = [
        line.strip() for line in said if line.strip() and not any(word in line for word in idle)
    ]
    return " / ".join(lines[-3:])[:1000]


_ANSWER_S = 60.0
_END_MS = 10_000


def _spawn(code: str, outlives: bool) -> Started:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < LEAST_FILES:
        raise ResourceExhausted(
            f"this process can open only {most} files, but creating sandboxes needs {LEAST_FILES}",
            hint="raise `ulimit -n`",
        )
    try:
        return spawn(code, outlives=outlives)
    except OSError as exc:
        if out_of_files(exc):
            raise
        raise IsolationError(
            f"the sandbox was not started: no process can be started: {exc}",
            hint="check `ulimit -u`, and the system-call filter of a surrounding container",
        ) from exc


class Launched:
    """A process of the launcher that serves this one. Thread-safe; never forks the caller.

    Args:
        what: What errors call it.
        code, outlives: See `spawn`.
    """

    def __init__(
        self, what: str, code: str, started: Started | None = None, *, outlives: bool = False
    ) -> None:
        started = started or _spawn(code, outlives)
        self.what = what
        self.pid, self._socket = started.pid, started.control
        self._pidfd = os.pidfd_open(self.pid)
        self._send_lock = allocate_lock()
        self.owner = os.getpid()
        self._hung_up = False

    def tell(self, verb: str, argument: Any, fds: list[int]) -> None:
        """Send a request whose answer comes another way."""
        ours, theirs = wire.socketpair()
        ours.close()
        try:
            self.tell_from(theirs, verb, argument, fds)
        finally:
            theirs.close()

    def tell_from(self, reply: wire.Socket, verb: str, argument: Any, fds: list[int]) -> None:
        """Send a request whose answer comes on the other end of `reply`.

        Raises:
            SandboxLost: The process is gone.
        """
        self.note(verb, argument, [reply.fileno(), *fds])

    def note(self, verb: str, argument: Any, fds: list[int]) -> None:
        """Something that nobody answers.

        Raises:
            SandboxLost: It is gone.
        """
        try:
            with self._send_lock:
                wire.send(self._socket, (verb, argument), fds)
        except OSError as exc:
            if exc.errno not in (errno.EPIPE, errno.ECONNRESET, errno.EBADF):
                raise
            self._hung_up = True  # its sockets close a moment before it has ended
            text = f"the {self.what} process is gone"
            raise SandboxLost(text, hint="create a new sandbox") from exc

    def ask(
        self,
        verb: str,
        argument: Any,
        fds: list[int] | None = None,
        *,
        timeout_s: float | None = _ANSWER_S,
    ) -> tuple[bytes, list[int]]:
        """Send a request and return its answer.

        Raises:
            Refused: The process could not do it.
            SandboxLost: The process is gone.
        """
        ours, theirs = wire.socketpair()
        try:
            try:
                self.tell_from(theirs, verb, argument, fds or [])
            finally:
                theirs.close()
            return answer(ours, timeout_s)
        finally:
            ours.close()

    @property
    def control_fd(self) -> int:
        return self._socket.fileno()

    def wait(self) -> None:
        """Return when it has ended, whoever reaps it."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        while not poll.poll():
            continue

    @property
    def alive(self) -> bool:
        if self._pidfd < 0 or self._hung_up:
            return False
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    def release(self) -> None:
        """Close what we hold of one that has ended."""
        self.close()
        pidfd, self._pidfd = self._pidfd, -1
        os.close(pidfd)

    def leave(self) -> None:
        """Let go of it, without its end: somebody else has a copy of our end of its socket."""
        self._socket.close()

    def close(self) -> None:
        """End it; it kills every sandbox and removes every cgroup first."""
        self._socket.close()
        if self.owner == os.getpid():
            try:
                os.waitpid(self.pid, 0)
            except ChildProcessError:
                self._wait_for_stranger()

    def _wait_for_stranger(self) -> None:
        """It is an earlier process's child, or has been reaped."""
        if self._pidfd >= 0:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            poll.poll(_END_MS)
