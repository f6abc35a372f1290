"""The host's side of the zygote: start it, ask it, end with it."""

from __future__ import annotations

import os
import select
import sys
from _thread import allocate_lock

from ...errors import IsolationError, SandboxLost
from ...launcher import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_CODE = (
    "import sys; sys.path.append(sys.argv[1]); from ringfence.launcher.zygote import main; main()"
)
_ANSWER_S = 60.0


class Refused(OSError):
    """The zygote or PID 1 said no: errno, and a text that names the step."""


class Zygote:
    """A zygote process of this process. Thread-safe; never forks the caller."""

    def __init__(self) -> None:
        package_parent = os.path.dirname(
            os.path.dirname(os.path.abspath(sys.modules["ringfence"].__file__ or ""))
        )
        ours, theirs = wire.socketpair()
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        # The base interpreter, isolated: no site-packages, no environment, no current directory.
        python = getattr(sys, "_base_executable", sys.executable) or sys.executable
        actions = [
            (os.POSIX_SPAWN_DUP2, null, 0),
            (os.POSIX_SPAWN_DUP2, null, 1),
            (os.POSIX_SPAWN_DUP2, theirs.fileno(), 3),
        ]
        # A duplicate onto itself would keep close-on-exec: make sure that 3 is not the source.
        if theirs.fileno() == 3:
            moved = wire.Socket(fileno=os.dup(3))
            theirs.close()
            theirs = moved
            actions[2] = (os.POSIX_SPAWN_DUP2, theirs.fileno(), 3)
        try:
            # A session of its own: an interrupt from the terminal is the caller's to handle.
            self.pid = os.posix_spawn(
                python,
                [python, "-I", "-S", "-c", _CODE, package_parent],
                {},
                file_actions=actions,
                setsid=True,
                setsigmask=[],
            )
        finally:
            theirs.close()
            os.close(null)
        self._socket = ours
        self._pidfd = os.pidfd_open(self.pid)
        self._send_lock = allocate_lock()
        self.owner = os.getpid()

    def tell(self, verb: str, argument: Any, fds: list[int]) -> None:
        """One request whose answer comes another way."""
        ours, theirs = wire.socketpair()
        ours.close()
        try:
            self.tell_from(theirs, verb, argument, fds)
        finally:
            theirs.close()

    def tell_from(self, reply: wire.Socket, verb: str, argument: Any, fds: list[int]) -> None:
        """One request that is answered on the other end of `reply`.

        Raises:
            SandboxLost: The zygote is gone.
        """
        try:
            with self._send_lock:
                wire.send(self._socket, (verb, argument), [reply.fileno(), *fds])
        except (BrokenPipeError, ConnectionResetError) as exc:
            raise SandboxLost("the zygote process is gone", hint="create a new sandbox") from exc

    def ask(
        self,
        verb: str,
        argument: Any,
        fds: list[int] | None = None,
        *,
        timeout_s: float | None = _ANSWER_S,
    ) -> tuple[bytes, list[int]]:
        """One request, one answer.

        Raises:
            Refused: The zygote could not do it.
            SandboxLost: The zygote is gone.
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

    def wait(self) -> None:
        """Return when it has ended, whoever reaps it."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        while not poll.poll():
            continue

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """End it; it kills every sandbox and removes every cgroup first."""
        self._socket.close()
        if self.owner == os.getpid():
            try:
                os.waitpid(self.pid, 0)
            except ChildProcessError:
                pass


def answer(sock: wire.Socket, timeout_s: float | None) -> tuple[bytes, list[int]]:
    """Read one answer: the body behind "O", and its descriptors.

    Raises:
        Refused: It was "E".
        SandboxLost: The other end closed without an answer, or sent nonsense.
        IsolationError: Nothing came in time.
    """
    sock.settimeout(timeout_s)
    try:
        data, fds = wire.receive_raw(sock)
    except TimeoutError as exc:
        raise IsolationError(
            f"no answer within {timeout_s} s", hint="the host may be overloaded"
        ) from exc
    if data[:1] == b"O":
        return data[1:], fds
    if data[:5] == b"READY":
        return data[5:], fds
    for fd in fds:
        os.close(fd)
    if data[:1] == b"E":
        number, _, text = data[1:].partition(b" ")
        raise Refused(int(number), text.decode("utf-8", "replace"))
    raise SandboxLost("the process that should answer is gone", hint="create a new sandbox")
