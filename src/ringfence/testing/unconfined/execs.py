"""An exec: a process of the host, and a thread that waits for it."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import termios
import threading
import time
from typing import TYPE_CHECKING

from ...backends.local.agents.streams import open_streams
from ...errors import InvalidRequest, LifecycleError
from ...launcher.pid1.processes import send_to_group
from ...model.base.ids import new_id
from ...model.execs.exec import (
    KILLED_BY_CALLER,
    KILLED_BY_TIMEOUT,
    ExecRequest,
    ExecStatus,
    ResourceUsage,
)
from . import processes

if TYPE_CHECKING:
    from collections.abc import Sequence

_ON_TERMINAL = ("sh", "-c", 'exec "$@" <>"$0" >&0 2>&1')
"""Opens its first argument as its controlling terminal, since it leads a session, and runs the rest."""
_NOT_FOUND = (errno.ENOENT, errno.ENOTDIR)
_LONGEST_S = 2_000_000  # poll(2) takes milliseconds in an int


class UnconfinedExec:
    """A running process; see `BackendExec`.

    Args:
        scope: Of its sandbox; `processes` finds this exec's tree by what this appends.
    """

    def __init__(
        self,
        request: ExecRequest,
        env: dict[str, str],
        cwd: str,
        timeout_s: float | None,
        scope: str,
    ) -> None:
        self.id = new_id("exec")
        self._scope = f"{scope}{self.id}/"
        self._is_terminal = request.pty is not None
        self._lock = threading.RLock()
        self._started_s = time.monotonic()
        self._status: ExecStatus | None = None
        self._killed_by: str | None = None
        self._thread: threading.Thread | None = None
        opened: list[int] = []
        try:
            inner, argv = self._open(request, opened)
            self.done, self._end = os.pipe2(os.O_CLOEXEC)
        except BaseException:
            for fd in opened:
                os.close(fd)
            raise
        leader = None if request.session_leader else _begin_group()
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=inner[0] if len(inner) == 3 else subprocess.DEVNULL,
                stdout=inner[-2],
                stderr=inner[-1],
                env={**env, processes.TAG: self._scope},
                cwd=cwd,
                start_new_session=request.session_leader,
                process_group=leader,
            )
        except OSError as exc:  # as a shell: 127 not found, 126 found and not executable
            self._finish(ExecStatus(exit_code=127 if exc.errno in _NOT_FOUND else 126))
            return
        finally:
            if leader is not None:
                os.waitpid(leader, 0)
            for fd in set(opened) - {self.stdin, self.stdout, self.stderr}:
                os.close(fd)
        self._thread = threading.Thread(target=self._watch, args=(timeout_s,), daemon=True)
        self._thread.start()

    def _open(self, request: ExecRequest, opened: list[int]) -> tuple[list[int], Sequence[str]]:
        """Open the streams: the host's ends become attributes, those for inside are returned."""
        if request.pty is None:
            inner, (self.stdin, self.stdout, self.stderr) = open_streams(request, opened)
            return inner, request.argv
        master, terminal = os.openpty()
        opened += (master, terminal)
        termios.tcsetwinsize(master, request.pty)
        os.set_blocking(master, False)
        opened.append(os.dup(master))
        self.stdin, self.stdout, self.stderr = opened[-1], master, None
        return [terminal] * 3, (*_ON_TERMINAL, os.ttyname(terminal), *request.argv)

    def status(self) -> ExecStatus:
        if self._status is None:
            raise LifecycleError(f"exec {self.id} has not ended yet")
        return self._status

    def signal(self, signum: int, *, group: bool = False) -> None:
        if signum not in signal.valid_signals():
            raise InvalidRequest(f"{signum} is not a signal", field="signum")
        with self._lock:
            if self._status is None:  # not waited for: its number is nobody else's
                (send_to_group if group else os.kill)(self._process.pid, signum)

    def kill(self) -> None:
        self.blame(KILLED_BY_CALLER)
        processes.send_all(self._scope, signal.SIGKILL)

    def blame(self, killed_by: str) -> None:
        """Kill the first process and its group; `killed_by` is reported if that is what ended it."""
        with self._lock:
            if self._status is None:
                self._killed_by = self._killed_by or killed_by
                send_to_group(self._process.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Wait until `done` is readable."""
        if self._thread is not None:
            self._thread.join()

    @property
    def has_ended(self) -> bool:
        """True once its status is known; children of it may run on."""
        return self._status is not None

    def resize(self, rows: int, cols: int) -> None:
        if not self._is_terminal or self.stdout is None:
            raise InvalidRequest(f"exec {self.id} has no terminal", field="pty")
        termios.tcsetwinsize(self.stdout, (rows, cols))

    def close_stdin(self) -> None:
        with self._lock:
            fd, self.stdin = self.stdin, None
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        self.close_stdin()
        with self._lock:
            fds = (self.stdout, self.stderr, self.done)
            self.stdout, self.stderr, self.done = None, None, -1
        for fd in fds:
            if fd is not None and fd >= 0:
                os.close(fd)

    def _watch(self, timeout_s: float | None) -> None:
        pidfd = os.pidfd_open(self._process.pid)
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        in_time = timeout_s is None or timeout_s > _LONGEST_S or ended.poll(timeout_s * 1000)
        if not in_time:
            self.blame(KILLED_BY_TIMEOUT)
            processes.send_all(self._scope, signal.SIGKILL)
        ended.poll()
        os.close(pidfd)
        with self._lock:
            _pid, status, used = os.wait4(self._process.pid, 0)
            self._process.returncode = os.waitstatus_to_exitcode(status)
            self._finish(self._judge(self._process.returncode, used.ru_utime, used.ru_stime))

    def _judge(self, code: int, user_s: float, system_s: float) -> ExecStatus:
        """Make the status; whoever meant to kill it counts only if the kill is what ended it."""
        killed_by = self._killed_by if code == -signal.SIGKILL else None
        user_ns, system_ns = int(user_s * 1e9), int(system_s * 1e9)
        return ExecStatus(
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            timed_out=killed_by == KILLED_BY_TIMEOUT,
            killed_by=killed_by,
            duration_s=time.monotonic() - self._started_s,
            resource_usage=ResourceUsage(user_ns + system_ns, user_ns, system_ns),
        )

    def _finish(self, status: ExecStatus) -> None:
        self._status = status
        os.close(self._end)  # `done` is at its end, and so readable


def _begin_group() -> int:
    """Begin a process group in our session; it can be joined until its leader, which ends, is waited for."""
    return os.posix_spawn("/bin/true", ["true"], {}, setpgroup=0)
