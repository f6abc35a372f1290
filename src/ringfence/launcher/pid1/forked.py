"""Starting a program where something else runs in the sandbox already.

The parent of a vfork(2) sleeps until its child has begun the new program, and anything with the
same uid can stop that child first, for good. PID 1 must not sleep on a guest's word: here it forks,
goes on, and learns from a pipe, once the child has ended, whether it ever began.
"""

from __future__ import annotations

import _signal as signal
import _stat as stat
import _struct as struct
import errno
import posix as os
import select

from ..machine_code import vforked
from . import programs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_FAILURE = struct.Struct("=i")
_SHELL = "/bin/sh"


def start(
    paths: list[str],
    argv: list[str],
    env: dict[str, str],
    actions: list[Any],
    become: Callable[[], None] | None = None,
    *,
    leads: bool = True,
    fork: Callable[[], int] = os.fork,
) -> tuple[int, int]:
    """Fork, and in the child begin the first of `paths` that can be; actions as for posix_spawn.

    Args:
        become: Called in the child, in its session and group, before anything of the program's is touched.
        leads: It leads a session of its own; else it follows in a process group, in our session.

    Returns:
        The pid, and a descriptor for `failure`.
    """
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        pid = fork()
    except OSError:
        os.close(read)
        os.close(write)
        raise
    if pid == 0:
        number = errno.EIO
        try:
            if leads:
                os.setsid()
            else:
                _follow()
            _prepare(actions, become)
            number = _begin(paths, argv, env)
        except OSError as exc:
            number = exc.errno or errno.EIO
        finally:
            os.write(write, _FAILURE.pack(number))
            os._exit(127)
    os.close(write)
    return pid, read


def begin_group() -> int:
    """Begin a process group in our session. Its leader is a child that ends at once.

    The group can be joined until `end_group`, and lasts for as long as it has members: a process in it leads
    neither a session nor a group, so that setsid(1) need not fork.
    """
    leader = vforked.ended_child()
    os.setpgid(leader, leader)
    return leader


def end_group(leader: int) -> None:
    """Wait for the leader, if there is one. Killed first: stopped by a guest it would hold us up."""
    if leader:
        os.kill(leader, signal.SIGKILL)
        os.waitpid(leader, 0)


def has_begun(fd: int) -> bool:
    """Return whether the child runs its program, or has ended: both close the other end of its pipe."""
    poll = select.poll()
    poll.register(fd, 0)  # POLLHUP is always told
    return bool(poll.poll(0))


def failure(fd: int) -> int:
    """Of an ended child: the errno because of which it never began its program, else 0. Closes `fd`."""
    try:
        data = os.read(fd, _FAILURE.size)
    except BlockingIOError:
        data = b""
    finally:
        os.close(fd)
    return int(_FAILURE.unpack(data)[0]) if len(data) == _FAILURE.size else 0


def _follow() -> None:
    leader = begin_group()
    try:
        os.setpgid(0, leader)
    finally:
        end_group(leader)


def _prepare(actions: list[Any], become: Callable[[], None] | None) -> None:
    if become is not None:
        become()
    for verb, fd, *rest in actions:
        if verb == os.POSIX_SPAWN_DUP2:
            os.dup2(fd, rest[0])
        else:
            path, flags, mode = rest
            opened = os.open(path, flags, mode)  # without O_NOCTTY: a terminal becomes ours
            os.dup2(opened, fd)
            if opened != fd:
                os.close(opened)
    for number in programs.ignored_signals():
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _begin(paths: list[str], argv: list[str], env: dict[str, str]) -> int:
    """Returns only when nothing could be begun, with the errno that a shell would report."""
    found = errno.ENOENT
    for path in paths:
        try:
            if stat.S_ISDIR(os.stat(path).st_mode):
                raise PermissionError(errno.EACCES, "is a directory", path)
            os.execve(path, argv, env)
        except (FileNotFoundError, NotADirectoryError):
            if found == errno.ENOENT and programs.lacks_another(path):
                found = errno.ELIBACC
        except PermissionError:
            found = errno.EACCES
        except OSError as exc:
            if exc.errno == errno.ENOEXEC:  # a script without #!, which a shell would run itself
                os.execve(_SHELL, ["sh", path, *argv[1:]], env)
            raise
    return found
