"""Id maps of an ordinary user's ranges: newuidmap(1) and newgidmap(1) write them, for only root may."""

from __future__ import annotations

import _signal as signal
import errno
import posix as os
import select
import time

from ..linux import namespaces
from .pid1.programs import ALL_SIGNALS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .plan import Shape

_WAIT_S = 10.0  # both take milliseconds; but who has which range may be asked of a server
_MOST_SAID_BYTES = 500


def write_id_maps(pid: int, shape: Shape) -> None:
    """Map the ids of the user namespace of `pid`, a child of ours that nobody has reaped.

    What the helpers say is not believed: the kernel must have the very maps that were asked for.

    Raises:
        OSError: EPROTO, with what a helper said, or because the kernel has another map; ETIMEDOUT.
    """
    maps = ("uid_map", shape["uid_map"]), ("gid_map", shape["gid_map"])
    give_up = time.monotonic() + _WAIT_S
    for helper, (_name, wanted) in zip(shape["id_helpers"], maps, strict=True):
        _run([helper, str(pid), *wanted.split()], give_up)
    for name, wanted in maps:
        found = namespaces.read_id_map(pid, name)
        if found != namespaces.parse_id_map(wanted):
            raise OSError(errno.EPROTO, f"the kernel has another {name} than was asked for")


def _run(argv: list[str], give_up: float) -> None:
    """Run a helper to its end, with no environment and nothing of ours open."""
    said, saying = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    actions = [(os.POSIX_SPAWN_OPEN, fd, "/dev/null", os.O_RDWR, 0) for fd in (0, 1)]
    try:
        pid = os.posix_spawn(
            argv[0],
            argv,
            {},
            file_actions=[*actions, (os.POSIX_SPAWN_DUP2, saying, 2)],
            setsigmask=[],
            setsigdef=ALL_SIGNALS,
        )
        _wait(pid, argv[0], give_up)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            # Not EPERM, which would say that the kernel refuses user namespaces.
            raise OSError(errno.EPROTO, _text(said) or f"{argv[0]} failed")
    finally:
        os.close(said)
        os.close(saying)


def _wait(pid: int, name: str, give_up: float) -> None:
    """Until it has ended. One that does not is killed, and reaped with our other children."""
    pidfd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if poll.poll(max(0.0, give_up - time.monotonic()) * 1000):
            return
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)
    raise OSError(errno.ETIMEDOUT, f"{name} did not end within {_WAIT_S:.0f} s")


def _text(fd: int) -> str:
    try:
        return os.read(fd, _MOST_SAID_BYTES).decode("utf-8", "replace").strip()
    except BlockingIOError:
        return ""  # it said nothing
