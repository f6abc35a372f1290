"""Id maps of a native sandbox: one user, or many where the host has ids to map."""

from __future__ import annotations

import os

from ...errors import Unsupported
from ..local.host import identity
from ..local.host.facts import Host, host
from ..local.host.own_places import own_directory, place_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ...launcher.plan import Ids
    from ...model.mount import Mount
    from .profiles import Profile


def are_wanted(profile: Profile) -> bool:
    """Return whether a sandbox of this profile gets its own ids on the host; see decision 0094."""
    return host().trusted_root or profile.root_capabilities != 0


def check(profile: Profile) -> None:
    """Refuse a root that would have nobody to rule.

    Raises:
        Unsupported: We are an ordinary user without a range of ids.
    """
    if host().trusted_root or not are_wanted(profile):
        return
    from ..local.host import ranges

    try:
        ranges.find()
    except ranges.NoRangeError as none:
        raise Unsupported(
            f"a sandbox made here has one user inside: {none.why}",
            backend="native",
            operation=f"profile {profile.name}",
            field="profile",
            hint=f"{none.fix}, or run Ringfence as root",
        ) from None


def check_mount(mount: Mount, first_host_id: int) -> None:
    """Refuse what root inside could leave on the host in ids that its owner cannot clear up.

    Raises:
        Unsupported: The kernel maps the ids of a mount for the host's root only.
    """
    if first_host_id and mount.is_writable and not host().trusted_root:
        raise Unsupported(
            f"{mount.source} could contain files of users other than you",
            backend="native",
            operation="a writable host directory with the profile own_root",
            field="mounts",
            hint="mount it read-only, or run Ringfence as root",
        )


def host_ids(hold: Callable[[int], None]) -> identity.HostIds:
    """Return the ids that we may assign to sandboxes; see `HostIds`.

    Raises:
        IsolationError: There is no safe place for the locks.
    """
    if host().trusted_root:
        return identity.HostIds("/run/ringfence/ids", hold)
    from ..local.host import ranges

    try:
        slots = ranges.find().slots
    except ranges.NoRangeError:
        slots = []  # only those that an earlier process of ours holds
    uid = os.geteuid()
    # Ignore the environment: all processes of this account must find the same locks.
    run = f"/run/user/{uid}"
    base = f"{run}/ringfence"
    if not (os.path.isdir(run) and own_directory(base)):
        base = place_in("/tmp", f"ringfence-{uid}")
    return identity.HostIds(f"{base}/ids", hold, slots)


def plan(first_host_id: int, uid: int, here: Host) -> Ids:
    """The ids of one sandbox.

    Args:
        first_host_id: Of its slot; 0: the caller's own ids are all there is.
        uid: Inside, of its programs.
    """
    if here.trusted_root:
        own = identity.slot_map(first_host_id, uid)
        return _ids(own, own, [], deny_setgroups=False, setup=0)
    if not first_host_id:
        maps = f"{uid} {here.uid} 1", f"{uid} {here.gid} 1"
        return _ids(*maps, [], deny_setgroups=True, setup=uid)
    from ..local.host import ranges

    uid_map, gid_map = (identity.shared_map(first_host_id, uid, n) for n in (here.uid, here.gid))
    return _ids(uid_map, gid_map, ranges.find().helpers, deny_setgroups=False, setup=0)


def _ids(
    uid_map: str, gid_map: str, helpers: list[str], *, deny_setgroups: bool, setup: int
) -> Ids:
    return {
        "uid_map": uid_map,
        "gid_map": gid_map,
        "id_helpers": helpers,
        "deny_setgroups": deny_setgroups,
        "setup_uid": setup,
        "setup_gid": setup,
    }
