"""The host's side of the starter: has guardians forked, and waits for them as for any child."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from _thread import allocate_lock

from ...launcher.spawn import ZYGOTE
from ..local.launched import Launched

STARTER = ZYGOTE.replace("launcher.zygote", "guest.without_namespaces.starter")


class Guardian:
    """A child of this process, with what the sandbox uses of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int | None:
        """Return its exit status; None where somebody else has reaped it.

        Raises:
            subprocess.TimeoutExpired: It still runs after `timeout` seconds.
        """
        if self._pidfd < 0:
            return self.returncode
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired("guardian", timeout or 0)
        try:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            pass  # a caller that waits for any child got its status
        os.close(self._pidfd)
        self._pidfd = -1
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Send a signal, if it still runs."""
        if self._pidfd >= 0:
            try:
                signal.pidfd_send_signal(self._pidfd, signum)
            except ProcessLookupError:
                pass


class Starter:
    """The starter of one backend, started when it is first needed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._launched: Launched | None = None

    def start(self, control: int, errors: int, tasks: list[int]) -> Guardian:
        """Fork a guardian that reads its settings from the socket `control`.

        Args:
            control: The guardian's end of its control socket; it is copied.
            errors: Descriptor for its last words; it is copied.
            tasks: Cgroups of version 1 that it joins first, as `open_tasks` opened them; they are copied.

        Raises:
            Refused: No process can be forked.
            SandboxLost: The starter was killed; the next call starts another.
        """
        answered, _fds = self._running().ask("start", None, [control, errors, *tasks])
        pid = int(answered)
        try:
            return Guardian(pid)
        except BaseException:  # we have no descriptor left
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise

    def _running(self) -> Launched:
        with self._lock:
            found = self._launched
            # After a fork of this process its guardians would be children of another one.
            if found is None or found.owner != os.getpid() or not found.alive:
                self._launched = None
                if found is not None:
                    found.release()
                found = self._launched = Launched("starter", STARTER)
            return found

    def close(self) -> None:
        """End it; the guardians live on."""
        with self._lock:
            if self._launched is not None:
                self._launched.release()
                self._launched = None
