"""Making, joining and removing the cgroups of a plan, version 1 and 2. Decides nothing."""

from __future__ import annotations

import errno
import posix as os
import time

_REMOVE_TRIES = 200


def make(directories: list[str], values: list[tuple[str, str]]) -> None:
    """Create the directories and set the limits in them.

    Raises:
        OSError: naming the file that refused its value.
    """
    for directory in directories:
        try:
            os.mkdir(directory, 0o755)
        except FileExistsError:
            pass  # two v1 controllers in one hierarchy
    put(values)


def put(values: list[tuple[str, str]]) -> None:
    """Set limits, where others may have been set before.

    Raises:
        OSError: naming the file that refused its value.
    """
    early: list[tuple[str, str]] = []
    for path, value in values:
        try:
            write(path, value)
        except FileNotFoundError:
            if not path.endswith("/memory.swap.max"):  # a kernel that does not account swap
                raise
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            early.append((path, value))  # v1: memory may not be more than memory and swap, as yet
    for path, value in early:
        write(path, value)


def write(path: str, value: str) -> None:
    """Write one control file."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    except OSError as exc:
        raise OSError(exc.errno, f"{os.strerror(exc.errno or 0)}: {value}", path) from exc
    finally:
        os.close(fd)


def open_tasks(directories: list[str]) -> list[int]:
    """Version 1: descriptors that a new process writes "0" to.

    `tasks`, not `cgroup.procs`: a thread that moves itself takes no global lock, whereas a write to
    `cgroup.procs` waits for an RCU grace period, 8 to 20 ms on an idle machine.
    """
    return [os.open(d + "/tasks", os.O_WRONLY | os.O_CLOEXEC) for d in directories]


def open_procs(directories: list[str], version: int) -> list[int]:
    """Descriptors for a process that joins later, when a pause of some milliseconds does no harm."""
    if version == 1:
        return open_tasks(directories)
    return [os.open(d + "/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for d in directories]


def join(descriptors: list[int]) -> None:
    """Move the calling, single-threaded process in."""
    for fd in descriptors:
        os.write(fd, b"0")
        os.close(fd)


def thaw(directories: list[str]) -> None:
    """Let frozen processes run again, so that SIGKILL reaches them."""
    for directory in directories:
        for name, value in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
            try:
                write(f"{directory}/{name}", value)
            except OSError:
                continue


def remove(directories: list[str]) -> None:
    """Remove cgroups whose processes have ended; the kernel may take a moment to notice."""
    for directory in directories:
        for _ in range(_REMOVE_TRIES):
            try:
                os.rmdir(directory)
            except FileNotFoundError:
                break
            except OSError as exc:
                if exc.errno != errno.EBUSY:
                    break
                time.sleep(0.005)
            else:
                break
