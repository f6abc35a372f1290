"""Ranges of host ids assigned to an ordinary user by /etc/subuid and /etc/subgid, split into slots."""

from __future__ import annotations

import os
import pwd
import stat

from ....linux import privileges
from ....model.base.record import dataclass
from . import identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

Extent = tuple[int, int]  # the first id, and the one after the last

_HELPERS = ("newuidmap", "newgidmap")
_PLACES = ("/usr/bin", "/bin", "/run/wrappers/bin")
_FILES = ("/etc/subuid", "/etc/subgid")
# Below are ids of the system's, of accounts and of what systemd makes up: systemd.io/UIDS-GIDS.
_FIRST_USED = 1 << 16
_LAST_USED = (1 << 32) - 2
_MOST_SLOTS = 4096  # of one range, however large it is


class NoRangeError(Exception):
    """There are none to use: why, and what the host's administrator can do."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why)
        self.why, self.fix = why, fix


@dataclass(frozen=True, eq=False, repr=False)
class Ranges:
    """Ids that this account may map.

    Attributes:
        slots: First host id of each part; a sandbox uses one part, see `identity.slot_map`.
        helpers: Paths of newuidmap and newgidmap.
    """

    slots: list[int]
    helpers: list[str]


def find() -> Ranges:
    """Read afresh: an administrator may have changed them.

    Raises:
        NoRangeError: This account has none, or they cannot be mapped.
    """
    uid = os.geteuid()
    helpers = [_helper(name) for name in _HELPERS]
    if privileges.prctl(privileges.PR_GET_NO_NEW_PRIVS):
        why = "this process has no_new_privs, so newuidmap cannot gain privileges"
        raise NoRangeError(
            why, "start Ringfence without no_new_privs (systemd: NoNewPrivileges=no)"
        )
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        why = f"uid {uid} has no account, and newuidmap needs an account"
        raise NoRangeError(why, "run Ringfence as a user in /etc/passwd") from None
    lines = [_text(path) for path in _FILES]
    taken = [*_ids(_text("/etc/passwd")), *_ids(_text("/etc/group")), uid, os.getegid()]
    owned = [_extents(text, (name, str(uid)), own=True) for text in lines]
    foreign = [each for text in lines for each in _extents(text, (name, str(uid)), own=False)]
    slots = usable(owned[0], owned[1], [*foreign, *((each, each + 1) for each in taken)])
    if slots:
        return Ranges(slots, helpers)
    if not (owned[0] and owned[1]):
        why = f"{' and '.join(_FILES)} have no id range for {name}"
    else:
        why = (
            f"in the ranges of {name} are no {identity.IDS_EACH} ids together that are"
            f" in both {' and '.join(_FILES)}, above {_FIRST_USED - 1} and nobody else's"
        )
    fix = f"sudo usermod --add-subuids FIRST-LAST --add-subgids FIRST-LAST {name}"
    raise NoRangeError(why, fix)


def usable(uids: Iterable[Extent], gids: Iterable[Extent], foreign: Iterable[Extent]) -> list[int]:
    """First ids of slots in both `uids` and `gids`, without any id of somebody else's."""
    found: set[int] = set()
    kept_out = [*foreign, identity.OF_ROOT]
    for first_uid, end_uid in uids:
        for first_gid, end_gid in gids:
            first = max(first_uid, first_gid, _FIRST_USED)
            end = min(end_uid, end_gid, _LAST_USED + 1)
            # Always the same parts of the same ids, so that a lock means the same to every process.
            first += -first % identity.IDS_EACH
            slots = range(first, end - identity.IDS_EACH + 1, identity.IDS_EACH)
            found.update(slots[:_MOST_SLOTS])
    return sorted(
        slot
        for slot in found
        if not any(first < slot + identity.IDS_EACH and slot < end for first, end in kept_out)
    )


def _extents(text: str, owner: tuple[str, str], *, own: bool) -> list[Extent]:
    """Of subuid(5): "owner:first:count" lines of this owner, by name or number; or all others."""
    found = []
    for line in text.splitlines():
        words = line.strip().split(":")
        if len(words) != 3 or (words[0] in owner) != own:
            continue
        if all(word.isascii() and word.isdigit() for word in words[1:]):
            found.append((int(words[1]), int(words[1]) + int(words[2])))
    return found


def _ids(text: str) -> list[int]:
    """The third word of each line of passwd(5) or group(5)."""
    words = [line.split(":") for line in text.splitlines()]
    return [int(each[2]) for each in words if len(each) > 2 and each[2].isdecimal()]


def _helper(name: str) -> str:
    for place in _PLACES:
        path = f"{place}/{name}"
        try:
            info = os.stat(path)
        except OSError:
            continue
        is_roots = info.st_uid == 0 and not info.st_mode & 0o022 and stat.S_ISREG(info.st_mode)
        if is_roots and _has_rights(path, info):
            return path
    raise NoRangeError(f"{name} is not installed, set-user-id", "sudo apt install uidmap")


def _has_rights(path: str, info: os.stat_result) -> bool:
    """Return whether it is set-user-id or has file capabilities, on a mount that honours them."""
    if os.statvfs(path).f_flag & os.ST_NOSUID:
        return False
    return bool(info.st_mode & stat.S_ISUID) or "security.capability" in os.listxattr(path)


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""
