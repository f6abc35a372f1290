"""Making, joining and removing the cgroups of a plan, version 1 and 2. Decides nothing."""

from __future__ import annotations

import errno
import posix as os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .plan import Shape

MOST_APART = 2  # cgroups that programs are in and PID 1 is not: version 1, memory and processor
_PATIENCE_S, _PAUSE_S = 1.0, 0.005


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


def around(shape: Shape) -> list[str]:
    """Where the programs of a sandbox are and its PID 1 is not, and then, as many, where that is."""
    inner = shape["programs_cgroups"]
    return inner + [each.rpartition("/")[0] for each in inner]


class Apart:
    """The cgroups of `around`, for a PID 1 that starts a program in the first half and stays in the second.

    Where it were with them, whatever it asks for when memory has run out there could kill it, and the
    sandbox with it: the page tables of what was killed are charged until an RCU grace period is over. And
    it would get no more of the processor than each of a thousand programs.

    Args:
        descriptors: Of `open_tasks`; none: all are in the same.
    """

    def __init__(self, descriptors: tuple[int, ...] = ()) -> None:
        self._descriptors = descriptors

    def enter(self) -> None:
        for fd in self._descriptors[: len(self._descriptors) // 2]:
            os.write(fd, b"0")

    def leave(self) -> None:
        """Move the caller back. What cannot be undone is left: a program has started."""
        for fd in self._descriptors[len(self._descriptors) // 2 :]:
            try:
                os.write(fd, b"0")
            except OSError:
                continue


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


def remove(directories: list[str], patience_s: float = _PATIENCE_S) -> list[str]:
    """Remove cgroups whose processes have ended, and all below them; returns those that are still there.

    Args:
        patience_s: For all of them together, as the kernel may take a moment to notice that they are empty.
    """
    kept: list[str] = []
    deadline = time.monotonic() + patience_s
    while True:
        busy: list[str] = []
        for directory in directories:
            number = _remove_tree(directory)
            if number:
                (busy if number == errno.EBUSY else kept).append(directory)
        if not busy or time.monotonic() >= deadline:
            return kept + busy
        time.sleep(_PAUSE_S)
        directories = busy


def below(directory: str) -> list[str]:
    """A cgroup and all that are below it, each after the one above it."""
    found, i = [directory], 0
    while i < len(found):
        try:
            with os.scandir(found[i]) as entries:
                found += [each.path for each in entries if each.is_dir(follow_symlinks=False)]
        except OSError:
            pass  # it has gone, or is not ours
        i += 1
    return found


def _remove_tree(directory: str) -> int:
    """Remove a cgroup, and first those below it if there are any; the errno, or 0."""
    number = _rmdir(directory)
    if number == errno.EBUSY:
        for each in reversed(below(directory)):
            number = _rmdir(each)
    return number


def _rmdir(directory: str) -> int:
    try:
        os.rmdir(directory)
    except FileNotFoundError:
        return 0
    except OSError as exc:
        return exc.errno or errno.EIO
    return 0
