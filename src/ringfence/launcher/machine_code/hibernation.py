"""Hibernation: an idle PID 1 of a sandbox becomes a program of one page, until it is needed.

An interpreter that waits has two megabytes of its own. They are in one memory for all that a zygote
has made, which has each again when it wakes; what one alone knows it hands to itself. See
`hibernation_program` for what runs meanwhile, `hibernated` for what that memory is of, and
`hibernation_image` for who makes it.
"""

from __future__ import annotations

import errno
import fcntl
import marshal
import posix as os

from ...linux import privileges
from .. import cgroups

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..plan import Plan, Shape

# Permanent descriptors of PID 1: the host's socket, SIGCHLD, its OOM score, its byte counts, the
# program, the seccomp listener (`notifications`; a descriptor without events where there is none),
# and the cgroups of `cgroups.around` (the same where there are fewer); during hibernation, also its
# saved state.
CONTROL, SIGNAL, OOM_SCORE, IO, PROGRAM, LISTENER, AROUND = range(3, 10)
KNOWN = AROUND + 2 * cgroups.MOST_APART
NAME = b"ringfence-init"
_KNOWN = (
    *(
        "tag_key",
        "netlink_sockets",
        "connects",
        "rlimits",
        "id_helpers",
        "memory_watchdog_bytes",
        "disk",
        "shared_memory_bytes",
    ),
    *("releases_idle_pages", "programs_cgroups"),
)


def hibernate(plan: Plan) -> None:
    """Become that program. What is needed of the plan comes back from `wake`.

    Raises:
        BlockingIOError: It is not there yet.
        OSError: We are still awake, and as before.

    Precondition: this process has no children, and only the descriptors below `KNOWN`.
    Source: execveat(2), AT_EMPTY_PATH.
    """
    if not fcntl.fcntl(PROGRAM, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:
        raise BlockingIOError(errno.EAGAIN, "the program is still writable")
    known = {key: plan[key] for key in _KNOWN}  # type: ignore[literal-required]
    privileges.set_name(NAME)  # by calls that the program makes as well: what may fail fails here
    privileges.set_dumpable(False)
    fd = os.memfd_create("known", 0)  # to be there in the program
    try:
        if fd != KNOWN:
            raise OSError(errno.EBUSY, "another descriptor is open")
        os.write(fd, marshal.dumps(known))
        _pass_on(True)
        os.execve(PROGRAM, [NAME], {})
    except OSError as exc:
        if exc.errno == errno.ETXTBSY:  # who has made it has not closed it yet
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from exc
        raise
    finally:
        os.close(fd)
        _pass_on(False)


def wake() -> Plan:
    """Load the saved state: the part of the plan that a serving PID 1 needs."""
    _pass_on(False)
    known: Plan = marshal.loads(os.pread(KNOWN, os.fstat(KNOWN).st_size, 0))
    os.close(KNOWN)
    return known


def apart(plan: Shape) -> cgroups.Apart:
    """The cgroups that PID 1 and its programs are in."""
    count = 2 * len(plan["programs_cgroups"])
    return cgroups.Apart(tuple(range(AROUND, AROUND + count)))


def _pass_on(inheritable: bool) -> None:
    for fd in range(CONTROL, KNOWN):
        os.set_inheritable(fd, inheritable)
