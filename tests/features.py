"""What a test may need of the machine, probed once.

Outside CI a missing feature skips the test by name; in CI it fails it, so that nothing goes
untested unseen.
"""

from __future__ import annotations

import functools
import glob
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import NoReturn

import pytest


def _runs(*argv: str) -> bool:
    try:
        return 0 == subprocess.run(argv, capture_output=True, timeout=20, check=False).returncode
    except OSError:
        return False


def _user_namespaces() -> bool:
    # `unshare -r` also maps an id, which is what AppArmor-restricted hosts refuse.
    return _runs("unshare", "--user", "--map-root-user", "true")


def _amx() -> bool:
    with open("/proc/cpuinfo", encoding="ascii") as processors:
        return " amx_tile " in processors.read()


def _landlock() -> bool:
    try:
        with open("/sys/kernel/security/lsm", encoding="ascii") as lsm:
            return "landlock" in lsm.read().split(",")
    except OSError:
        # Without securityfs, ask the kernel: the ABI version, or -1.
        probe = (
            "import ctypes, sys; libc = ctypes.CDLL(None, use_errno=True);"
            "sys.exit(libc.syscall(444, None, ctypes.c_size_t(0), 1) < 1)"
        )
        return _runs(sys.executable, "-c", probe)


def _cgroup_v1() -> bool:
    return all(os.access(f"/sys/fs/cgroup/{name}", os.W_OK) for name in ("memory", "pids"))


def _cgroup_v2() -> bool:
    try:
        with open("/sys/fs/cgroup/cgroup.controllers", encoding="ascii") as controllers:
            return "memory" in controllers.read().split() and os.access("/sys/fs/cgroup", os.W_OK)
    except OSError:
        return False


def _id_ranges() -> bool:
    """Whether root can show a user who may map ids of a range."""
    from tests.strangers import AS_RANGED

    return program("newuidmap") is not None and 0 == os.geteuid() and _runs(*AS_RANGED, "true")


def guest_kernel() -> str | None:
    """Where CI has unpacked a kernel for guests: `tools/guest_kernel.sh`. Users' place is another."""
    place = os.environ.get("RINGFENCE_TEST_KERNEL", "/var/cache/ringfence-tests/kernel")
    return place if glob.glob(f"{place}/boot/vmlinuz-*") else None


def _fuse() -> bool:
    """Whether we may mount file systems in user space, in namespaces of our own."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


PROBES: dict[str, Callable[[], bool]] = {
    "linux": lambda: sys.platform == "linux",
    "root": lambda: 0 == os.geteuid(),
    "guest kernel": lambda: guest_kernel() is not None,
    "user namespaces": _user_namespaces,
    "landlock": _landlock,
    "amx": _amx,
    "fuse": _fuse,
    "id ranges": _id_ranges,
    "cgroup": lambda: _cgroup_v1() or _cgroup_v2(),
    "cgroup v1": _cgroup_v1,
    "cgroup v2": _cgroup_v2,
}

# A machine has one cgroup version, and an ordinary user may have none: absent, not broken.
# Containers have no /dev/fuse unless they are given one.
NEVER_A_FAILURE = {
    "root",
    "fuse",
    "cgroup",
    "cgroup v1",
    "cgroup v2",
    "podman",
    "amx",
    "java",
    "node",
    "zsh",
    "fish",
}


@functools.cache
def has(feature: str) -> bool:
    """Whether this machine has `feature`: a name in PROBES, or else a program on PATH."""
    probe = PROBES.get(feature)
    return probe() if probe else program(feature) is not None


def program(name: str) -> str | None:
    """Where a program is: on PATH, or where Debian keeps what only services start."""
    places = [
        os.environ.get("PATH", ""),
        "/usr/sbin",
        "/sbin",
        *glob.glob("/usr/lib/postgresql/*/bin"),
    ]
    return shutil.which(name, path=os.pathsep.join(places))


def require(feature: str) -> None:
    """Go on only where `feature` is there: else skip by name, or fail in CI."""
    if not has(feature):
        lack(feature, optional=feature in NEVER_A_FAILURE)


def lack(feature: str, *, optional: bool = False) -> NoReturn:
    """Skip the test because this machine lacks `feature`; in CI fail it, unless it is optional."""
    reason = f"this machine lacks: {feature}"
    if os.environ.get("CI") and not optional:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
