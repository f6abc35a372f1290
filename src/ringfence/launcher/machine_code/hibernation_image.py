"""Program for hibernating PID 1s of a zygote, made once, when the first of them is idle."""

from __future__ import annotations

import _signal as signal
import errno
import fcntl
import io
import posix as os
import sys

from ...linux import libc, privileges
from . import hibernation

_CODE = (
    "import gc, sys; gc.disable(); sys.path.append(sys.argv[1]); "
    "from ringfence.launcher.machine_code.hibernated import main; main()"
)
# Forbid sealing, shrinking, growing and writing. Source: fcntl(2).
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_RUN_ONLY = 0o111
IDLE_S = 0.5  # less than PID 1 waits itself: making the program takes a moment
_LONGEST_S = 3.0  # between two looks: a PID 1 with nothing to do gives up after some five seconds
_MFD_EXEC = 0x10  # Linux 6.3, memfd_create(2); a host may have others not be programs


class HibernationImage:
    """The memory, empty at first.

    Attributes:
        fd: By which it can be read and run; every PID 1 has a copy from before it was filled.
        is_made: Whether somebody has begun to, or nobody need ever.
    """

    def __init__(self) -> None:
        writable = _memfd("ringfence-hibernation")
        self.fd = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
        # A process running an unreadable file is not dumpable from the start, and, as host root,
        # stays owned by the host's user namespace: no capability inside reaches it. Source: exec.c,
        # would_dump.
        os.fchmod(self.fd, _RUN_ONLY)
        os.close(writable)  # nothing can be run that somebody may write to
        self.is_made = libc.MACHINE != "x86_64"  # see `fill`, which finds out about all else
        self._look_s, self._pause_s = 0.0, IDLE_S

    def tend(self, since_s: dict[int, float], now: float) -> float | None:
        """Have it made once somebody has had nothing to do for a while; in how many ms to look again.

        Args:
            since_s: By its pid, since when each PID 1 is somebody's; who waits for a claim is not.
        """
        if self.is_made or not since_s:
            self._pause_s = IDLE_S
            return None
        if now >= self._look_s:
            try:
                if any(now >= since + IDLE_S and is_idle(pid) for pid, since in since_s.items()):
                    self.make()
                    return None
            except NotImplementedError:
                self.is_made = True  # nobody can be seen to be idle, neither now nor later
                return None
            self._look_s = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_S)
        return (self._look_s - now) * 1000 + 1

    def make(self) -> None:
        """Have it filled by a process of its own. What fails leaves everybody awake."""
        self.is_made, us = True, os.getpid()
        try:
            if os.fork() == 0:
                _fill_and_end(self.fd, us)
        except OSError:
            pass  # no process to be had


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_EXEC)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
    return os.memfd_create(name, flags)


def _fill_and_end(fd: int, parent: int) -> None:
    try:
        privileges.die_with_parent(signal.SIGKILL)
        if os.getppid() == parent:
            fill(fd)
    finally:
        os._exit(0)


def fill(fd: int) -> None:
    """Write the program, and close it to all change.

    Raises:
        OSError: There is none for this machine, or it could not be kept: see `process_images`.
    """
    from . import (  # by the one process that needs them: every start would pay
        hibernation_program,
        process_images,
    )

    os.fchmod(fd, 0o600)
    writable = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    os.fchmod(fd, _RUN_ONLY)
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    # With UTF-8 for a fact it needs no locale, which would be kept: 0.4 MB.
    argv = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _CODE, sys.argv[1]]
    regions, registers = process_images.take_memory(argv, null)
    memory = io.BytesIO()
    process_images.write_pieces(regions, memory)
    waits = [hibernation.CONTROL, hibernation.SIGNAL]
    head = hibernation_program.head(
        regions, registers, hibernation.PROGRAM, hibernation.NAME, waits
    )
    with open(writable, "wb") as file:
        file.write(head)
        file.write(memory.getbuffer())
        file.flush()
        fcntl.fcntl(writable, fcntl.F_ADD_SEALS, _SEALS)


def is_idle(pid: int) -> bool:
    """Return whether it has no children.

    Raises:
        NotImplementedError: This kernel lacks the file. Source: proc(5), children, CONFIG_PROC_CHILDREN.
    """
    try:
        fd = os.open(f"/proc/{pid}/task/{pid}/children", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        if os.access(f"/proc/{pid}/task/{pid}/stat", os.F_OK):
            raise NotImplementedError from exc
        return False  # it has just ended
    except OSError:
        return False
    try:
        return not os.read(fd, 1)
    finally:
        os.close(fd)
