"""Reasons why this host cannot make a sandbox: the exact switch, and how to turn it."""

from __future__ import annotations

import os

from .mountinfo import masks_in, read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_SYSCTL = "/proc/sys/"


class Blocker:
    """A host setting that prevents sandboxes."""

    def __init__(self, name: str, why: str, fix: str) -> None:
        self.name, self.why, self.fix = name, why, fix


def find(refusal: BaseException) -> list[Blocker]:
    """Find the causes of a refusal, most certain first; empty when none is known.

    Args:
        refusal: The failure to make a sandbox: its text names the step.
    """
    found = [each for look in _LOOKS if (each := look(str(refusal))) is not None]
    return [each for each in found if each is not None]


def _no_user_namespaces(_text: str) -> Blocker | None:
    if _sysctl("user/max_user_namespaces") != 0:
        return None
    fix = "sysctl -w user.max_user_namespaces=15000"
    return Blocker("user_namespaces", "user.max_user_namespaces is 0", fix)


def _nested(_text: str) -> Blocker | None:
    if not os.uname().nodename.startswith("ringfence") or _sysctl("user/max_user_namespaces") != 0:
        return None
    return Blocker(
        "nesting",
        "this process runs in a Ringfence sandbox, which does not allow nested sandboxes",
        "",
    )


def _unprivileged_clone(_text: str) -> Blocker | None:
    if os.geteuid() == 0 or _sysctl("kernel/unprivileged_userns_clone") != 0:
        return None
    fix = "sysctl -w kernel.unprivileged_userns_clone=1"
    return Blocker("user_namespaces", "kernel.unprivileged_userns_clone is 0", fix)


def _apparmor(_text: str) -> Blocker | None:
    if os.geteuid() == 0 or _sysctl("kernel/apparmor_restrict_unprivileged_userns") != 1:
        return None
    return Blocker(
        "user_namespaces",
        "kernel.apparmor_restrict_unprivileged_userns is 1: a user namespace gets no rights",
        "sudo ringfence doctor --fix gives Ringfence an AppArmor profile with `userns,`; or "
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    )


def _selinux(text: str) -> Blocker | None:
    if "Permission denied" not in text or _read("/sys/fs/selinux/enforce").strip() != "1":
        return None
    return Blocker(
        "user_namespaces",
        "SELinux is enforcing and may deny user namespaces to this domain",
        "look for user_namespace in `ausearch -m avc -ts recent`",
    )


def _outer_filter(text: str) -> Blocker | None:
    status = _read("/proc/self/status")
    if "Seccomp:\t2" not in status or not _is_refusal_of_a_call(text):
        return None
    return Blocker(
        "outer_seccomp",
        "a system-call filter around this process (a container's?) denies system calls that a sandbox needs",
        "start the container with --security-opt seccomp=unconfined, or run Ringfence outside it",
    )


def _is_refusal_of_a_call(text: str) -> bool:
    calls = (
        "create:",
        "clone3",
        "unshare",
        "mount",
        "open_tree",
        "move_mount",
        "pivot_root",
        "setns",
        "sethostname",
    )
    return any(call in text for call in calls)


def _masked_proc(text: str) -> Blocker | None:
    if "proc" not in text:
        return None
    covers = masks_in(_read("/proc/self/mountinfo").splitlines())
    if not covers:
        return None
    return Blocker(
        "proc",
        f"the kernel lets no new /proc be mounted while parts of this one are masked: {', '.join(covers[:4])}",
        "start the container with --security-opt systempaths=unconfined (Kubernetes: procMount: Unmasked)",
    )


def _changed_root(text: str) -> Blocker | None:
    try:
        inside = os.stat("/proc/1/root/.")
    except OSError:
        return None
    here = os.stat("/")
    if (inside.st_dev, inside.st_ino) == (here.st_dev, here.st_ino) or not text.count("create"):
        return None
    return Blocker(
        "chroot",
        "this process is in a chroot, where the kernel makes no user namespaces",
        "leave the chroot",
    )


def _old_kernel(text: str) -> Blocker | None:
    if "not implemented" not in text:
        return None
    release = os.uname().release
    return Blocker(
        "kernel", f"kernel {release} lacks a required system call: {text}", "Linux 5.13 or newer"
    )


_LOOKS: tuple[Callable[[str], Blocker | None], ...] = (
    _nested,
    _no_user_namespaces,
    _unprivileged_clone,
    _apparmor,
    _selinux,
    _masked_proc,
    _outer_filter,
    _changed_root,
    _old_kernel,
)


def _sysctl(name: str) -> int | None:
    text = _read(_SYSCTL + name).strip()
    return int(text) if text.isdigit() else None


def _read(path: str) -> str:
    try:
        return read_text(path)
    except OSError:
        return ""
