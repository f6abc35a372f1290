"""Requests from the host to helpers in a running sandbox."""

from __future__ import annotations

import os

from ...errors import IsolationError, SandboxLost, Unsupported
from ...launcher import wire
from ...linux import namespaces as linux
from ..local.answers import Refused, answer, bound_sends
from ..local.host import identity
from ..local.host.facts import host

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ...launcher.plan import Plan
    from .live import LiveSandbox

_NAMES = {
    "ipc": linux.CLONE_NEWIPC,
    "uts": linux.CLONE_NEWUTS,
    "cgroup": linux.CLONE_NEWCGROUP,
    "net": linux.CLONE_NEWNET,
}
_BORROWED = [linux.CLONE_NEWUSER, linux.CLONE_NEWNS, linux.CLONE_NEWPID]


def replay(sandbox: LiveSandbox, *, uid: int | None = None) -> Plan:
    """The sandbox's plan again, as far as the lock-down goes, for `uid` inside."""
    plan = sandbox.lockdown.copy()
    if uid is not None:
        plan["uid"] = plan["gid"] = uid
    return plan


def send(
    sandbox: LiveSandbox,
    request: dict[str, Any],
    fds: list[int],
    timeout_s: float | None,
    *,
    namespaces: int = 3,
) -> bytes:
    """Run a helper and return its answer; it gets the first `namespaces` of user, mount and PID,
    then `fds`.

    Raises:
        Refused: With the errno the helper got.
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


def namespace_fds_of(sandbox: LiveSandbox) -> tuple[list[int], list[int]]:
    """Kinds of its namespaces, and a descriptor for each, the caller's to close."""
    if host().trusted_root:
        return [sum(_NAMES.values(), sum(_BORROWED))], [sandbox.borrow_pidfd()]
    # Only root gets by a pidfd into who cannot be traced: it opens its own for us. A network that it
    # shares with the host is ours as well.
    names = dict(_NAMES)
    if not sandbox.lockdown["namespaces"] & linux.CLONE_NEWNET:
        del names["net"]
    places = sandbox.borrow_namespaces()
    try:
        for name in names:
            places += sandbox.ask("open", f"/proc/self/ns/{name}", os.O_RDONLY, 0)[1]
    except BaseException:
        for fd in places:
            os.close(fd)
        raise
    return [*_BORROWED, *names.values()], places


def start_agent(sandbox: LiveSandbox, uid: int) -> wire.Socket:
    """An agent of another user inside; its control socket.

    Raises:
        IsolationError: It could not be locked down, or the kernel refused it.
    """
    ours, theirs = wire.socketpair()
    request: dict[str, Any] = {
        "op": "agent",
        "plan": replay(sandbox, uid=uid),
        "cgroup_dirs": sandbox.group.directories,
    }
    try:
        try:
            request["namespaces"], places = namespace_fds_of(sandbox)
            try:
                sandbox.zygote.tell("enter", request, [theirs.fileno(), *places])
            finally:
                for fd in places:
                    os.close(fd)
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


def control_of(sandbox: LiveSandbox, uid: int) -> wire.Socket:
    """The control socket of an agent of another user than the sandbox's, started on first use.

    Raises:
        Unsupported: There is only one user inside, or none with that id.
    """
    if not sandbox.first_host_id:
        raise Unsupported(
            f"a sandbox made by an ordinary user has one user inside, uid {sandbox.uid}",
            backend="native",
            operation="exec as another user",
            field="user",
            hint="create the sandbox with this user, or with the profile own_root (`ringfence doctor`"
            " tells whether it works here), or run Ringfence as root",
        )
    if uid >= identity.LOW_IDS and uid != identity.NOBODY:
        raise Unsupported(
            f"uid {uid} is not mapped in this sandbox",
            backend="native",
            operation="exec as another user",
            field="user",
            hint=f"uids below {identity.LOW_IDS} and {identity.NOBODY} are; or create it with this user",
        )
    if uid not in sandbox.agents:
        agent = start_agent(sandbox, uid)
        bound_sends(agent)
        sandbox.agents[uid] = agent
        sandbox.backend.handover.add_agent(sandbox, uid)
    return sandbox.agents[uid]
