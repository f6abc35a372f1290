"""Changes to the root of a live sandbox: mounts, and its boot id."""

from __future__ import annotations

import os

from ...errors import FileExists, InvalidRequest
from ...launcher import newroot
from ...model.mount import READ_ONLY
from ...model.session import ResolvedMount
from ...policy import landlock
from ..local import journal
from ..local.answers import Refused
from ..local.host.facts import host
from ..local.mounts.denied import check_mount
from ..local.mounts.protect import prepare_mount_point, protect_mount
from ..local.mounts.sources import refuse_sockets
from ..local.refusals import error_of_target, hint_of_source
from . import planner
from .inner import replay, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ...launcher.placeholders import Placeholder
    from ...model.mount import Mount
    from .live import LiveSandbox


def attach(sandbox: LiveSandbox, mount: Mount) -> ResolvedMount:
    """Do it, in the sandbox's own namespaces, by a helper that resolves no symlink of the guest's.

    Raises:
        InvalidRequest: The source does not exist, or the target is taken.
        IsolationError: It would open a way out.
    """
    check_mount(mount.target, sandbox.spec.deny)
    if not mount.is_host_path:
        return _attach_session_dir(sandbox, mount)
    here = host()
    tree, pinned = planner.host_tree(mount, sandbox.uid, sandbox.first_host_id, here)
    tree["fd"] = 0 if here.trusted_root else -1
    try:
        if may_reach_sockets(sandbox):
            refuse_sockets(tree["source"])
        target = mount.target
        link = ""
        if mount.is_writable and (
            not _is_writable(sandbox, target) or _may_make_sockets(sandbox, target)
        ):
            target, link = f"{planner.ATTACHED}/{len(sandbox.mounts)}", target
        # In another one that is writable: what is missing there is made, and removed again.
        point = prepare_mount_point(target, tree["source"], sandbox.mounts)
        parts = [point[0]] if point else []
        steps: list[tuple[Any, ...]] = [*(parts[0].steps if point else ()), ("bind", target, 0)]
        try:
            if mount.is_writable:
                parts.append(protect_mount(_at(mount, target), sandbox.spec, tree))
                steps += parts[-1].steps
            made = [each for part in parts for each in part.placeholders]
            _send(sandbox, tree, target, link, steps, [pinned], made)
        except BaseException:
            for part in parts:
                part.remove_placeholders()
            raise
        sandbox.protected += parts
        made = [made for part in sandbox.protected for made in part.placeholders]
        journal.erase(sandbox.note)
        sandbox.note = journal.note(sandbox.id, made, sandbox.backend.label())
    finally:
        os.close(pinned)
    sandbox.host_directory |= not os.path.isfile(tree["source"])
    return ResolvedMount(mount.target, mount.access, tree["source"])


def _attach_session_dir(sandbox: LiveSandbox, mount: Mount) -> ResolvedMount:
    target, link = mount.target, ""
    steps: list[tuple[Any, ...]]
    if mount.is_writable and not _is_writable(sandbox, target):
        target, link = f"{planner.ATTACHED}/{len(sandbox.mounts)}", target
    if mount.source:
        source = f"{sandbox.root}/{mount.source}"
        steps = [("session_dir", source), ("bind_inside", source, target, 0)]
    else:
        steps = [("session_dir", target)]
    if mount.access == READ_ONLY:
        steps.append(("protect", target))
    _send(sandbox, None, target, link, steps, [], [])
    return ResolvedMount(mount.target, mount.access)


def renew_boot_id(sandbox: LiveSandbox) -> None:
    """Write another boot id over the one that the sandbox shows."""
    steps = [("rewrite", newroot.BOOT_ID, newroot.boot_id())]
    _send(sandbox, None, newroot.BOOT_ID, "", steps, [], [])


def _send(
    sandbox: LiveSandbox,
    tree: Any,
    target: str,
    link: str,
    steps: list[tuple[Any, ...]],
    fds: list[int],
    placeholders: list[Placeholder],
) -> None:
    request = {
        "op": "mount",
        "plan": replay(sandbox),
        "tree": tree,
        "target": target,
        "link": link,
        "steps": steps,
        "placeholders": placeholders,
        "note": (journal.path_of(sandbox.id, sandbox.backend.label()) or "")
        if placeholders
        else "",
    }
    try:
        send(sandbox, request, fds, 30.0, namespaces=2)
    except Refused as exc:
        if exc.errno == 17:
            raise FileExists(f"{link}: the path already exists", path=link) from exc
        if exc.errno == 30:
            what = f"{link or target}: lies in a read-only mount, or is one"
            hint = "choose a target that no read-only mount covers"
            raise InvalidRequest(what, field="mount", hint=hint) from exc
        if found := error_of_target(exc, link or target):
            raise found from exc
        hint = hint_of_source(exc, tree["source"] if tree else "")
        raise InvalidRequest(f"{link or target}: {exc.strerror}", field="mount", hint=hint) from exc


def _is_writable(sandbox: LiveSandbox, target: str) -> bool:
    """Return whether Landlock, fixed at the sandbox's start, allows writing below `target`."""
    if not sandbox.profile.landlock or not host().landlock_abi:
        return True
    return any((target + "/").startswith(top + "/") for top in sandbox.landlock_writable)


def _may_make_sockets(sandbox: LiveSandbox, target: str) -> bool:
    """Return whether Landlock allows making Unix sockets there; no host directory may be mounted there."""
    rules = sandbox.lockdown["landlock"]
    if not sandbox.lockdown["connects"] or rules is None:
        return False
    return any(
        access & landlock.MAKE_SOCK and (target + "/").startswith(top.rstrip("/") + "/")
        for top, access in rules[-1]
    )


def _at(mount: Mount, target: str) -> Mount:
    from dataclasses import replace

    return mount if mount.target == target else replace(mount, target=target)


def may_reach_sockets(sandbox: LiveSandbox) -> bool:
    """Return whether a host socket in the mount could be connected to, without the user having allowed it."""
    if not sandbox.unix_sockets or sandbox.profile.unix_sockets or sandbox.lockdown["connects"]:
        return False
    rules = landlock.plan_landlock(host().landlock_abi, writable=(), writable_files=())
    return not (sandbox.profile.landlock and rules.refuses_host_sockets)
