"""Leaks of the host: descriptors, environment, identity."""

from __future__ import annotations

import hashlib
import os
import socket
import stat

from .kit import (
    BOTH,
    HOST,
    HOST_FD,
    MOUNTED,
    Outcome,
    escaped,
    held,
    pids,
    probe,
    read,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SHARED_KERNEL = "none: it fires in sandboxes whose kernel is shared and shows it"


def _digest(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()


# -- descriptors ------------------------------------------------------------------------------


@probe("leaks.descriptors", "critical", HOST_FD, where=BOTH)
def descriptors(context: dict[str, Any]) -> Outcome:
    """A program must start with its three streams and nothing else."""
    extra = [fd for fd in context["inherited"] if fd > 2]
    if extra:
        return escaped(f"descriptors {extra}")
    return held("only 0, 1 and 2")


@probe("leaks.stream-kinds", "high", HOST_FD, where=BOTH)
def stream_kinds(context: dict[str, Any]) -> Outcome:
    """No inherited descriptor may be a directory, a file or a socket of the host."""
    for fd in context["inherited"]:
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
            return escaped(f"descriptor {fd} is {stat.filemode(mode)}")
    return held("pipes and /dev/null")


@probe("leaks.planted-descriptor", "critical", HOST_FD, where=BOTH)
def planted_descriptor(context: dict[str, Any]) -> Outcome:
    """A descriptor that the host process left inheritable must not arrive."""
    for fd in range(4096):
        try:
            found = os.fstat(fd)
        except OSError:
            continue
        if [found.st_dev, found.st_ino] == context["secret_directory_id"]:
            return escaped(f"descriptor {fd} is the planted directory")
    return held("the planted descriptor is not here")


# -- environment ------------------------------------------------------------------------------

_EXPECTED = {
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "PWD", "TERM", "SHLVL", "_", "OLDPWD", "LC_CTYPE"),
    *(
        "GIT_TEMPLATE_DIR",
        "PIP_BREAK_SYSTEM_PACKAGES",
        "RINGFENCE_MEMORY_DIR",
        "RINGFENCE_OUTPUTS_DIR",
    ),
}


@probe("leaks.environment", "critical", HOST, where=BOTH)
def environment(context: dict[str, Any]) -> Outcome:
    """The host's environment, where keys and tokens are, must not arrive."""
    for pid in [*map(str, pids()), "self"]:
        for variable in read(f"/proc/{pid}/environ").split(b"\0"):
            if (
                hashlib.sha256(variable.partition(b"=")[2]).hexdigest()
                == context["environment_digest"]
            ):
                return escaped(f"pid {pid} has the host's {variable.partition(b'=')[0].decode()}")
    return held("the planted variable is nowhere")


@probe("leaks.environment-names", "high", HOST)
def environment_names(_context: dict[str, Any]) -> Outcome:
    """No variable may be there that was not asked for."""
    extra = sorted(set(os.environ) - _EXPECTED)
    return (
        escaped(f"also {' '.join(extra[:5])}")
        if extra
        else held(f"{len(os.environ)} variables, all expected")
    )


# -- identity ---------------------------------------------------------------------------------


@probe("leaks.host-name", "low", HOST)
def host_name(context: dict[str, Any]) -> Outcome:
    """The host's name must not show."""
    names = [
        socket.gethostname(),
        read("/etc/hostname").decode(),
        read("/proc/sys/kernel/hostname").decode(),
    ]
    if context["host_name_digest"] in map(_digest, names):
        return escaped("the host's name")
    return held(f"it is called {names[0]}")


@probe("leaks.machine-id", "medium", "none: a host need not have one")
def machine_id(_context: dict[str, Any]) -> Outcome:
    """Files that identify the host must not be there."""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id", "/etc/hostid", "/etc/ssh"):
        if os.path.exists(path):
            return escaped(f"{path} exists")
    return held("no identity file")


@probe("leaks.user-name", "medium", HOST)
def user_name(_context: dict[str, Any]) -> Outcome:
    """The accounts of the host must not show."""
    for line in read("/etc/passwd").decode("utf-8", "replace").splitlines():
        name = line.partition(":")[0]
        if name not in ("root", "sandbox", "nobody", "user"):
            return escaped(f"/etc/passwd has {name}")
    return held("/etc/passwd is the sandbox's own")


@probe("leaks.resolver", "medium", HOST)
def resolver(context: dict[str, Any]) -> Outcome:
    """The host's resolver and hosts must not show."""
    for name in ("resolv.conf", "hosts"):
        digest = context["etc_digests"].get(name)
        if digest and hashlib.sha256(read(f"/etc/{name}")).hexdigest() == digest:
            return escaped(f"/etc/{name} is the host's")
    return held("resolv.conf and hosts are the sandbox's own")


@probe("leaks.host-paths", "medium", HOST)
def host_paths(context: dict[str, Any]) -> Outcome:
    """Command lines of the sandbox's own processes must not show paths of the host."""
    paths = [context["package_directory"].encode(), context["directory"].encode()]
    for pid in pids():
        if any(path in read(f"/proc/{pid}/cmdline") for path in paths):
            return escaped(f"the command line of {pid}")
    return held("no command line shows one")


@probe("leaks.system-state", "medium", HOST)
def system_state(_context: dict[str, Any]) -> Outcome:
    """Logs and state of the host's services must not be there."""
    for path in (
        "/var/log",
        "/var/lib",
        "/var/cache",
        "/var/spool",
        "/var/mail",
        "/boot",
        "/etc/cron.d",
        "/etc/systemd",
    ):
        try:
            found = os.listdir(path)
        except OSError:
            continue
        if found:
            return escaped(f"{path} has {len(found)} entries")
    return held("none is there")


@probe("leaks.control-group-path", "low", HOST)
def control_group_path(context: dict[str, Any]) -> Outcome:
    """The path of the sandbox's control group, which names processes of the host, must not show."""
    text = read("/proc/self/cgroup").decode("utf-8", "replace")
    paths = {line.split(":", 2)[2] for line in text.splitlines()}
    if paths <= {"/"} and os.readlink("/proc/self/ns/cgroup") != context["namespaces"].get(
        "cgroup"
    ):
        return held("every control group is /")
    return escaped(f"control groups {sorted(paths)[:3]}")


@probe("leaks.mount-sources", "low", _SHARED_KERNEL, where=MOUNTED)
def mount_sources(context: dict[str, Any]) -> Outcome:
    """The host path behind a mount must not show."""
    if context["ro_source"] in read("/proc/self/mountinfo", 1 << 20).decode("utf-8", "replace"):
        return escaped("/proc/self/mountinfo shows where a mount comes from")
    return held("it does not show")


@probe("leaks.boot-id", "low", _SHARED_KERNEL)
def boot_id(context: dict[str, Any]) -> Outcome:
    """The id of this boot of the host must not show."""
    if _digest(read("/proc/sys/kernel/random/boot_id").decode()) == context["boot_digest"]:
        return escaped("/proc/sys/kernel/random/boot_id is the host's")
    return held("it is another one")


@probe("leaks.kernel-command-line", "low", _SHARED_KERNEL)
def kernel_command_line(_context: dict[str, Any]) -> Outcome:
    """The command line of the host's kernel must not show."""
    return (
        escaped("/proc/cmdline has content")
        if read("/proc/cmdline").strip()
        else held("/proc/cmdline is empty")
    )


@probe("leaks.locks", "low", "none: a lock is planted only by others")
def locks(context: dict[str, Any]) -> Outcome:
    """Locks held by processes of the host must not be listed."""
    listed = read("/proc/locks").decode().splitlines()
    if any(line.split()[4:5] == [str(context["marker_pid"])] for line in listed):
        return escaped("/proc/locks names a process of the host")
    return held(f"{len(listed)} locks, none of the planted process")
