"""Process trees that try to outlive a timeout. Each ends by itself after a few seconds."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE = {"x86_64": 56, "aarch64": 220}
_EXIT = {"x86_64": 60, "aarch64": 93}
_CLONE_PARENT = 0x8000
_LONG_S, _SHORT_S = 40, 20


def _clone(flags: int) -> int:
    return int(_libc.syscall(_CLONE[os.uname().machine], flags, 0, 0, 0, 0))


def _detached(run: Callable[[], object]) -> None:
    """Run something in a grandchild, in a session of its own, whose parent has ended."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            run()
        os._exit(0)


def _linger() -> None:
    time.sleep(_LONG_S)


def deaf() -> None:
    """A process that ignores every signal"""
    for number in range(1, 65):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            continue
    _linger()


def new_session() -> None:
    """A child in a session of its own"""
    if os.fork() == 0:
        os.setsid()
    _linger()


def double_fork() -> None:
    """A grandchild whose parent has ended"""
    _detached(_linger)
    _linger()


def many() -> None:
    """Many orphans in sessions of their own"""
    for _ in range(30):
        _detached(_linger)
    _linger()


def moving() -> None:
    """A process that forks and ends, over and over"""

    def run() -> None:
        end = time.monotonic() + _SHORT_S
        while time.monotonic() < end:
            if os.fork():
                os._exit(0)
            time.sleep(0.01)  # long enough to be seen

    _detached(run)
    _linger()


def first_thread_gone() -> None:
    """A process whose first thread has ended, so that it looks like a zombie"""
    threading.Thread(target=_linger, daemon=True).start()
    _libc.syscall(_EXIT[os.uname().machine], 0)


def stopped() -> None:
    """A stopped process with a stopped child"""
    # gVisor takes the group for orphaned when the child leaves it, and hangs up on who is stopped there.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
    os.kill(os.getpid(), signal.SIGSTOP)
    _linger()


def sibling() -> None:
    """A child that was made a child of PID 1 (CLONE_PARENT)"""
    if _clone(_CLONE_PARENT | signal.SIGCHLD) == 0:
        os.setsid()
    _linger()


def silent() -> None:
    """Orphans whose end is told by no signal"""
    for _ in range(5):
        if _clone(0) == 0:
            os.setsid()
            _linger()
            os._exit(0)
    _linger()


def waiting() -> None:
    """A parent that waits in vfork"""
    if os.fork() == 0:
        os.setsid()
    subprocess.run(["/bin/sleep", str(_LONG_S)], close_fds=False, check=False)


def replaced() -> None:
    """A process that a second thread has replaced by a new program"""
    arguments = ["sleep", str(_LONG_S)]
    threading.Thread(target=os.execv, args=("/bin/sleep", arguments)).start()
    _linger()


def flood() -> None:
    """A flood of orphans that keeps PID 1 busy"""
    end = time.monotonic() + _SHORT_S
    for _ in range(4):
        if os.fork() == 0:
            os.setsid()
            break
    while time.monotonic() < end:
        pid = os.fork()
        if pid == 0:
            os.fork()
            os._exit(0)
        os.waitpid(pid, 0)


def talking() -> None:
    """A child that keeps the output open"""

    def run() -> None:
        end = time.monotonic() + _LONG_S
        while time.monotonic() < end:
            time.sleep(0.05)
            os.write(1, b"x")

    _detached(run)
    _linger()


def regrouped() -> None:
    """A process that moves to every control group of which PID 1 has a descriptor, or of a file in it"""
    if os.fork() == 0:
        os.setsid()
        for group in _groups_of_init():
            try:
                with open(group, "w", encoding="ascii") as file:
                    file.write(str(os.getpid()))
            except OSError:
                continue
    _linger()


def _groups_of_init() -> list[str]:
    try:
        held = [f"/proc/1/fd/{fd}" for fd in os.listdir("/proc/1/fd")]
    except OSError:
        return []
    return [*(f"{each}/cgroup.procs" for each in held), *held]


# A signal to the one process ends these on a plain host too.
NOT_DETACHED = (deaf, first_thread_gone, replaced)
DETACHED = (
    *(new_session, double_fork, many, moving, stopped, sibling, silent, waiting, flood, talking),
    regrouped,
)


def stop_everybody() -> None:
    """Stop every other process, over and over."""
    end = time.monotonic() + _LONG_S
    while time.monotonic() < end:
        try:
            os.kill(-1, signal.SIGSTOP)
        except OSError:
            continue


def signal_parent(number: str) -> None:
    """Leave a grandchild behind and signal whoever started this process; PID 1 does not care."""
    parent = os.getppid()
    _detached(_linger)
    try:
        os.kill(parent, int(number))
    except OSError:
        pass
    _linger()


def tick(path: str) -> None:
    """Show signs of life in a file."""
    end = time.monotonic() + _LONG_S
    while time.monotonic() < end:
        with open(path, "a", encoding="ascii") as file:
            file.write("x")
        time.sleep(0.005)


def census() -> None:
    """Print every process but PID 1, this one, and the agent that started it: under Codex it is not PID 1.

    Without a PID namespace, those with a tag of this sandbox: see `guest.without_namespaces.landlocked`.
    """
    own = _tag("self")
    for name in os.listdir("/proc"):
        if not name.isdigit() or (pid := _number_here(name)) in (0, 1, os.getppid(), os.getpid()):
            continue
        if own > 1 << 60 and _tag(name) >> 20 != own >> 20:
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                state = file.read().rpartition(")")[2].split()[0]
            with open(f"/proc/{name}/cmdline", encoding="utf-8", errors="replace") as file:
                words = file.read().replace("\0", " ")
        except OSError:
            continue  # it ended while we looked
        print(pid, state, ascii(words[-60:]))


def _number_here(name: str) -> int:
    """The number of a process in our PID namespace, where /proc is of one above; 0 for others'."""
    if os.readlink("/proc/self") == str(os.getpid()):
        return int(name)
    try:
        with open(f"/proc/{name}/status", encoding="utf-8", errors="replace") as file:
            pid = int(file.read().partition("\nNSpid:")[2].partition("\n")[0].split()[-1])
        fd = os.pidfd_open(pid)
    except (OSError, IndexError):
        return 0
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
            return pid if f"\nPid:\t{name}\n" in file.read() else 0
    finally:
        os.close(fd)


def _tag(pid: str) -> int:
    """The hard RLIMIT_RTTIME of a process; 0 when it has none or has ended."""
    try:
        with open(f"/proc/{pid}/limits", encoding="ascii") as file:
            words = [line.split() for line in file if line.startswith("Max realtime timeout")]
    except OSError:
        return 0
    return int(words[0][4]) if words and words[0][4].isdigit() else 0
