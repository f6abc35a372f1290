"""A process of the fake: a thread that runs a Python function as if it were a program."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from .nodes import oserror
from .streams import write_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .filesystem import FileSystem
    from .streams import Stream

    Main = Callable[["Process"], int]

_HARMLESS = {signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH}
_NEVER_CAUGHT = {signal.SIGKILL, signal.SIGSTOP}
EXIT_BROKEN = 70  # the built-in program itself has a bug; sysexits.h EX_SOFTWARE


class Signalled(BaseException):
    """Unwinds the thread of a process that a signal ends."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Exited(BaseException):
    """Unwinds the thread of a process that called exit."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Machine:
    """The kernel of one sandbox: its processes, its clock gate, its files."""

    def __init__(
        self, files: FileSystem, programs: Mapping[str, Main], most_processes: int | None = None
    ) -> None:
        self.files = files
        self.programs = programs
        self.most_processes = most_processes
        self.changed = threading.Condition()  # a process ended, was signalled, or thawed
        self.processes: dict[int, Process] = {}
        self.is_frozen = False
        self._pids = itertools.count(2)  # 1 would be init

    def next_pid(self) -> int:
        """A pid that was never used before."""
        return next(self._pids)

    def freeze(self, frozen: bool) -> None:
        """Stop every process at its next step, or let them go on."""
        with self.changed:
            self.is_frozen = frozen
            self.changed.notify_all()

    def tree(self, tag: int) -> list[Process]:
        """The living processes of one exec."""
        with self.changed:
            return [process for process in self.processes.values() if process.tag == tag]

    def kill_tree(self, tag: int) -> None:
        """Kill every process of one exec and wait until they are gone."""
        with self.changed:
            while tree := self.tree(tag):
                for process in tree:
                    process.deliver(signal.SIGKILL)
                self.changed.wait(0.1)


class Process:
    """A running program.

    Attributes:
        tag: The exec it belongs to, inherited by all descendants.
        streams: 0, 1 and 2, owned.
        traps: Signal actions: None ignores it, a callable runs between steps.
        exit_code: Set when it ended by itself; else `signum` is.
    """

    def __init__(
        self,
        machine: Machine,
        tag: int,
        argv: tuple[str, ...],
        env: dict[str, str],
        cwd: str,
        streams: list[Stream],
    ) -> None:
        self.machine = machine
        self.tag = tag
        self.argv = argv
        self.env = env
        self.cwd = cwd
        self.streams = streams
        self.pid = machine.next_pid()
        self.traps: dict[int, Callable[[], None] | None] = {}
        self.exit_code: int | None = None
        self.signum: int | None = None
        self._fatal: int | None = None
        self._caught: list[Callable[[], None]] = []
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)

    def start(self, main: Main) -> None:
        """Run `main` in a thread of its own; EAGAIN when there are too many processes."""
        machine = self.machine
        with machine.changed:
            most = machine.most_processes
            if most is not None and len(machine.processes) >= most:
                self._close()
                raise oserror(errno.EAGAIN)
            machine.processes[self.pid] = self
        name = f"fake-{self.pid}-{self.argv[0]}"
        threading.Thread(target=self._run, args=(main,), name=name, daemon=True).start()

    def fork(
        self, argv: tuple[str, ...] | None = None, streams: Mapping[int, Stream] | None = None
    ) -> Process:
        """A child with the same environment and directory, not yet started.

        The given streams are handed over, the others copied.
        """
        given = streams or {}
        own = [given[fd] if fd in given else self.streams[fd].dup() for fd in range(3)]
        env = dict(self.env)
        child = Process(self.machine, self.tag, argv or self.argv, env, self.cwd, own)
        ignored = [signum for signum, action in self.traps.items() if action is None]
        child.traps = dict.fromkeys(ignored)
        return child

    def check(self) -> None:
        """A step: stand still while frozen, then act on signals that came."""
        machine = self.machine
        with machine.changed:
            machine.changed.wait_for(lambda: not machine.is_frozen or self._fatal == signal.SIGKILL)
            fatal, caught = self._fatal, self._caught
            self._caught = []
        if fatal is not None:
            raise Signalled(fatal)
        for action in caught:
            action()

    def sleep(self, seconds: float) -> None:
        """Wait; a signal that is not ignored ends it by raising."""
        self._wait_until(lambda: False, time.monotonic() + seconds)

    def wait(self, child: Process) -> int:
        """The child's exit status as a shell has it: 128+n for signal n."""
        self._wait_until(lambda: child.has_ended)
        return 128 + child.signum if child.signum is not None else child.exit_code or 0

    def read(self) -> bytes:
        """Some of stdin; b"" at its end."""
        while True:
            self.check()
            data = self.streams[0].read(self._wake_read)
            if data is not None:
                return data
            self._drain()

    def write(self, data: bytes, fd: int = 1) -> None:
        """Write all to stdout, or to stderr when `fd` is 2."""
        try:
            write_all(self.streams[fd], data, self._wake_read, self._woken)
        except BrokenPipeError:
            self.deliver(signal.SIGPIPE)
            self.check()
            raise

    @property
    def has_ended(self) -> bool:
        """True once it and its streams are gone."""
        return self.pid not in self.machine.processes

    def deliver(self, signum: int) -> None:
        """Send a signal: fatal, ignored or trapped."""
        machine = self.machine
        with machine.changed:
            if self.has_ended or (signum in _HARMLESS and signum not in self.traps):
                return
            if signum in _NEVER_CAUGHT or signum not in self.traps:
                if self._fatal != signal.SIGKILL:
                    self._fatal = signum
            elif (action := self.traps[signum]) is not None:
                self._caught.append(action)
            else:
                return
            machine.changed.notify_all()
            try:
                os.write(self._wake_write, b"!")
            except BlockingIOError:
                pass  # enough wake-ups are waiting

    def _woken(self) -> None:
        self._drain()
        self.check()

    def _drain(self) -> None:
        os.set_blocking(self._wake_read, False)
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            pass

    def _wait_until(self, happened: Callable[[], bool], deadline_s: float | None = None) -> None:
        changed = self.machine.changed
        while True:
            self.check()  # not under the lock: a trap may write, and wait for its reader
            with changed:
                left = None if deadline_s is None else deadline_s - time.monotonic()
                if happened() or (left is not None and left <= 0):
                    return
                if self._fatal is None and not self._caught:
                    changed.wait(left)

    def _run(self, main: Main) -> None:
        try:
            self.check()
            self.exit_code = main(self) & 0xFF
        except Signalled as end:
            self.signum = end.signum
        except Exited as end:
            self.exit_code = end.code & 0xFF
        except Exception as exc:  # noqa: BLE001 (a bug must not look like success, nor hang)
            self.exit_code = EXIT_BROKEN
            self._complain(exc)
        finally:
            machine = self.machine
            with machine.changed:
                self._close()
                del machine.processes[self.pid]
                machine.changed.notify_all()

    def _complain(self, exc: Exception) -> None:
        try:
            self.write(f"{self.argv[0]}: {exc}\n".encode(), 2)
        except (OSError, Signalled):
            pass

    def _close(self) -> None:
        for stream in self.streams:
            stream.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
