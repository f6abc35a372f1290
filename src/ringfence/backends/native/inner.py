"""What the host needs to send a helper into a running sandbox."""

from __future__ import annotations

import os

from ...errors import IsolationError, SandboxLost
from ...launcher import wire
from ..local.answers import Refused, answer
from ..local.host import host

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ...launcher.plan import Plan
    from .sandbox import NativeSandbox


def replay(sandbox: NativeSandbox, *, uid: int | None = None) -> Plan:
    """The sandbox's plan again, as far as the lock-down goes, for `uid` inside."""
    plan = sandbox.lockdown.copy()
    if uid is not None:
        plan["uid"] = plan["gid"] = uid
    return plan


def send(
    sandbox: NativeSandbox,
    request: dict[str, Any],
    fds: list[int],
    timeout_s: float | None,
    *,
    namespaces: int = 3,
) -> bytes:
    """One helper, one answer; it gets the first `namespaces` of user, mount and PID, then `fds`.

    Raises:
        Refused: As the kernel told the helper.
        SandboxLost: The sandbox ended meanwhile.
    """
    borrowed = sandbox.borrow_namespaces()
    try:
        body, _fds = sandbox.zygote.ask(
            "enter", request, [*borrowed[:namespaces], *fds], timeout_s=timeout_s
        )
    finally:
        for fd in borrowed:
            os.close(fd)
    return body


def start_agent(sandbox: NativeSandbox, uid: int) -> wire.Socket:
    """An agent of another user inside; its control socket.

    Raises:
        IsolationError: It could not be locked down, or the kernel refused it.
    """
    ours, theirs = wire.socketpair()
    request = {
        "op": "agent",
        "plan": replay(sandbox, uid=uid),
        "cgroup_dirs": sandbox.group.directories,
    }
    try:
        try:
            pidfd = sandbox.borrow_pidfd()
            try:
                sandbox.zygote.tell("enter", request, [pidfd, theirs.fileno()])
            finally:
                os.close(pidfd)
        finally:
            theirs.close()
        answer(ours, 30.0)
    except Refused as exc:
        ours.close()
        raise IsolationError(f"no process as uid {uid}: {exc.strerror}") from exc
    except SandboxLost:
        ours.close()
        raise sandbox.lost_error() from None
    ours.settimeout(None)
    return ours


def is_trusted_root() -> bool:
    """Whether several users can exist inside."""
    return host().trusted_root
