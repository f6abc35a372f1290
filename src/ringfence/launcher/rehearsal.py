"""A dress rehearsal of what the PID 1 of a prebuilt sandbox does for its first client, before it is claimed.

A process just forked shares its memory with the zygote, and each page that it first writes to is copied
for it: some microseconds each, a hundred times before the first command runs. Who has gone once
through the same functions has its own pages. Everything here has no effect, and is of our own making:
the sandbox is not claimed yet. What fails is left out, as it was never needed.
"""

from __future__ import annotations

import posix as os
import resource

from ..linux import landlock, privileges
from . import lockdown, wire
from .pid1 import init

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .plan import Plan, Shape

# A directory, found twice on the PATH: looked up, and refused before anything is cloned.
_NO_PROGRAM, _PATH = ".", "/:/"
_NUMBER = 0  # of an exec before the first: the tag of the first is lower, as it must be
_ENVIRONMENT = {"PATH": _PATH, "HOME": "/", "LANG": "C.UTF-8"}
_FILTER_BYTES = 4000
_LIMITS = (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)


def rehearse(shape: Shape, signal_fd: int, oom_score_fd: int, io_fd: int) -> None:
    """Go through a claim and an exec. Preconditions: nothing has been run, nothing is locked down."""
    plan = _plan_of(shape)
    try:
        _rehearse_claim()
        _rehearse_exec(plan, signal_fd, oom_score_fd, io_fd)
    except OSError:
        pass  # a kernel without Landlock; no descriptor to be had


def _plan_of(shape: Shape) -> Plan:
    return {
        **shape,
        "template": b"",
        "steps": [],
        "rlimits": [(which, *resource.getrlimit(which)) for which in _LIMITS],
        "no_new_privs": True,
        "seccomp": bytes(_FILTER_BYTES),
        "terminals": 0,
        "netlink_sockets": 0,
        "connects": False,
        "tag_key": 0,
        "landlock": None,
        "memory_watchdog_bytes": 0,
        "releases_idle_pages": True,
        "network": None,
    }


def _rehearse_claim() -> None:
    privileges.set_dumpable(True)  # as it is
    ruleset = landlock.create_ruleset(1, 0, 0, abi=1)
    try:
        landlock.allow_beneath(ruleset, "/", 1)
    finally:
        os.close(ruleset)


def _rehearse_exec(plan: Plan, signal_fd: int, oom_score_fd: int, io_fd: int) -> None:
    """PID 1 itself, for one request; it is over as the host's end is closed."""
    host, control = wire.socketpair()
    answers, reply = wire.socketpair()
    null = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
    try:
        wire.send(host, plan)
        found, _ = wire.receive(control)
        lockdown.apply_rlimits(found["rlimits"])  # as they are
        request = "exec", _NUMBER, [_NO_PROGRAM], _ENVIRONMENT, "/", 0.0, None, True
        wire.send(host, request, [reply.fileno(), null, null])
        host.close()
        init.Init(plan, control, signal_fd, oom_score_fd, io_fd).run()
        wire.ExecReport.unpack(wire.receive_raw(answers)[0])
    finally:
        os.close(null)
        for each in (host, control, answers, reply):
            each.close()
