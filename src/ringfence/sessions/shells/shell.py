"""A persistent shell for many commands: directory, variables and functions survive between them.

The shell sources each command from a file, so the command text cannot break our framing. A random
mark, unknown to the command, ends it on both streams.
"""

from __future__ import annotations

import os
import shlex
import threading
import time

from ...sandbox.stream import Stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...sandbox.process import Process
    from ...sandbox.sync import Sandbox
    from .bash import BashOutput

_KEPT_BY_PROCESS = 1 << 16  # what the process keeps itself; we collect each command's output
_ENDS_WITHIN_S = 10.0


class PersistentShell:
    """A shell in a sandbox; commands wait for each other. A new one is started when it has ended.

    Args:
        shell: `bash` or `sh`, as the sandbox has it.
    """

    def __init__(self, sandbox: Sandbox, shell: str) -> None:
        self._sandbox, self._shell = sandbox, shell
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._cancelled: threading.Event | None = None  # of the command that runs
        self._out, self._err = _Collector(), _Collector()
        self._count = 0

    def run(
        self,
        command: str,
        directory: str,
        timeout_s: float | None,
        cancelled: threading.Event | None = None,
    ) -> BashOutput:
        """Run one command. Where the first one begins is `directory`; later ones stay where they are.

        A command that ends the shell (`exit 3`), or takes too long, ends what was remembered too.

        Args:
            cancelled: By which `cancel` finds it.
        """
        from .bash import BashOutput

        with self._lock:
            self._cancelled = cancelled
            if cancelled is not None and cancelled.is_set():
                return BashOutput("", "", None)
            process = self._running(directory)
            if cancelled is not None and cancelled.is_set():
                process.kill()  # `cancel` may have come before there was a process to kill
            mark = os.urandom(16).hex().encode()
            self._out.expect(mark)
            self._err.expect(mark)
            self._count += 1
            path = f"/tmp/.command-{self._count}"
            self._sandbox.files.write(path, command.encode("utf-8", "surrogateescape") + b"\n")
            assert process.stdin is not None
            process.stdin.write(_line(path, mark))
            over = self._wait(process, timeout_s)
            if over:
                stdout, stderr = self._out.text(), self._err.text()
                return BashOutput(stdout, stderr, int(self._out.status))
            timed_out = process.running
            process.kill()
            self._process = None
            result = process.wait(_ENDS_WITHIN_S)
            stdout, stderr = self._out.text(), self._err.text()
            return BashOutput(stdout, stderr, result.exit_code, timed_out, result.signal)

    def cancel(self, cancelled: threading.Event) -> None:
        """End the command that was started with that event, and the shell with it; no other one."""
        cancelled.set()
        process = self._process
        if self._cancelled is cancelled and process is not None:
            process.kill()

    def _running(self, directory: str) -> Process:
        if self._process is None or not self._process.running:
            flags = ["--norc", "--noprofile"] if self._shell.endswith("bash") else []
            self._process = self._sandbox.start(
                [self._shell, *flags],
                cwd=directory,
                stream_stdin=True,
                max_output_bytes=_KEPT_BY_PROCESS,
                on_stdout=self._out.feed,
                on_stderr=self._err.feed,
            )
        return self._process

    def _wait(self, process: Process, timeout_s: float | None) -> bool:
        """Wait for the command's mark; False if the shell ended or the time is up."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        # The end of the shell must wake us as well as the mark does.
        process.future.add_done_callback(lambda _: self._out.wake())
        process.future.add_done_callback(lambda _: self._err.wake())
        for collector in (self._out, self._err):
            left = None if deadline is None else deadline - time.monotonic()
            if not collector.wait(lambda: not process.running, left):
                return False
        return True


def _line(path: str, mark: bytes) -> bytes:
    name = shlex.quote(path)
    says = mark.decode()
    # `command` keeps a POSIX shell alive when what it sources fails.
    return (
        f'command . {name} </dev/null; set -- $? "$@"; command rm -f {name};'
        f" command printf '%s %d\\n' {says} \"$1\"; command printf '%s 0\\n' {says} >&2; shift\n"
    ).encode()


class _Collector:
    """The output of one command on one stream, up to its mark."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._mark = b""
        self._stream = Stream()
        self._held = b""  # may be the beginning of the mark
        self.status = b""

    def expect(self, mark: bytes) -> None:
        with self._changed:
            self._mark, self.status, self._held = mark, b"", b""
            self._stream = Stream()

    def feed(self, data: bytes) -> None:
        """From the reactor's thread."""
        with self._changed:
            if self.status:
                return  # of what still runs in the background, between two commands
            data = self._held + data
            before, found, after = data.partition(self._mark + b" ")
            if found and b"\n" in after:
                self._stream.feed(before)
                self.status, self._held = after.partition(b"\n")[0], b""
                self._changed.notify_all()
                return
            sent = len(before) if found else max(0, len(data) - len(self._mark))
            self._stream.feed(data[:sent])
            self._held = data[sent:]

    def wait(self, is_over: object, timeout_s: float | None) -> bool:
        """Wait for the mark, `is_over` or the timeout; return whether the mark came."""
        with self._changed:
            self._changed.wait_for(lambda: self.status or is_over(), timeout_s)  # type: ignore[operator]
            return bool(self.status)

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def text(self) -> str:
        """Return the output without the mark."""
        with self._changed:
            rest = b"" if self.status else self._held
            return (self._stream.getvalue() + rest).decode("utf-8", "replace")
