"""The error for what the kernel refused while a sandbox was being made."""

from __future__ import annotations

import errno
import os

from ...errors import InvalidRequest, IsolationError
from .host.facts import out_of_files
from .host.mountinfo import kind_at

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...errors import RingfenceError
    from .answers import Refused

# Why there can be no mount at a target, as far as that is the target's own fault.
_BAD_TARGETS = {
    errno.EROFS: "the surrounding mount is read-only: create the directory in its source",
    errno.EOVERFLOW: "create it in the source of the mount around it",
    errno.ENOTDIR: "a parent is a file or a link, or the target is a file instead of a directory",
    errno.ELOOP: "a parent is a symbolic link: use its target",
    errno.EINVAL: "a file cannot be mounted on a directory",
}


_KERNELS_VIEWS = ("/proc/", "/sys/", "/dev/")


def hint_of_source(exc: OSError, source: str) -> str:
    """Explain a mount of a file system without id mapping; empty if the cause was another."""
    if exc.errno != errno.EINVAL or "mount_setattr" not in (exc.strerror or ""):
        return ""
    if f"{source}/".startswith(_KERNELS_VIEWS):
        return (
            "what the kernel itself shows there (proc, sysfs, devtmpfs, debugfs) is mounted in no sandbox "
            "that root makes: copy the files that are wanted into a directory and mount that, or start as an "
            "ordinary user, whose sandbox may read of it what he may; a tmpfs there, such as /dev/shm, can "
            "be mounted"
        )
    kind = kind_at(source)
    named = f"its file system, {kind}," if kind else "its file system"
    return (
        f"{named} cannot map ids on this kernel (tmpfs can since Linux 6.3, overlayfs "
        "since 5.19, network file systems cannot): keep the directory on another one, such as "
        "ext4, xfs or btrfs, or start as an ordinary user who owns it"
    )


def error_of(exc: Refused) -> RingfenceError:
    """The error for a start that the kernel refused, with the fix that fits."""
    if (exc.strerror or "").startswith("network "):
        from .network import refused_by_kernel

        return refused_by_kernel(exc)
    hint = "run `ringfence doctor` to see what this host allows"
    text = exc.strerror or str(exc)
    if problem := out_of_files(exc):
        return problem
    target = text.partition(": ")[0].partition(" ")[2]
    if refusal := error_of_target(exc, target):
        return refusal
    if is_of_the_host(exc):
        hint = way_on(exc)
    elif found := hint_of_source(exc, target):
        hint = found
    elif exc.errno == errno.EFBIG:
        hint = "raise `ulimit -f`: it counts for the sandbox's own files, too"
    return IsolationError(f"the sandbox was not started: {text}", hint=hint)


def error_of_target(exc: Refused, target: str) -> InvalidRequest | None:
    """The error for a mount whose target is at fault; None if it is another step's."""
    number, verb = exc.errno or 0, (exc.strerror or "").partition(" ")[0]
    if (
        verb not in ("bind", "bind_inside", "mount_point", "session_dir")
        or number not in _BAD_TARGETS
    ):
        return None
    reason = f"{target}: nothing can be mounted there: {os.strerror(number)}"
    return InvalidRequest(reason, field="mounts.target", hint=_BAD_TARGETS[number])


def is_of_the_host(exc: Refused) -> bool:
    """Return whether the host refuses what every sandbox takes: namespaces, a /proc, a root of its own."""
    step = (exc.strerror or str(exc)).partition(":")[0]
    if step == "create":
        return exc.errno in (errno.EPERM, errno.EACCES, errno.ENOSPC, errno.ENOSYS)
    if step == "lock down":
        return exc.errno == errno.EPERM and "sethostname" in str(exc)
    return exc.errno == errno.EPERM and step in ("proc", "pivot_root", "root", "unshare")


_SWITCHES = (
    "this host refuses user namespaces: check sysctl user.max_user_namespaces, "
    "kernel.unprivileged_userns_clone and kernel.apparmor_restrict_unprivileged_userns"
)


def way_on(exc: Refused) -> str:
    """Name the switch of this host, and the backend that needs no namespaces."""
    from .host import blockers

    causes = blockers.find(exc)
    found = [f"{each.why}: {each.fix}" if each.fix else each.why for each in causes]
    way, seen = "go without namespaces", "host processes and names of host files"
    if [each.name for each in causes] == ["proc"]:
        way, seen = "show the /proc of this container", "its processes and their command lines"
    return (
        f"{'; '.join(found) or _SWITCHES}; or {way}: `ringfence run --anywhere`, or "
        f'allow_degraded=["namespaces"]: {seen} can then be seen'
    )
