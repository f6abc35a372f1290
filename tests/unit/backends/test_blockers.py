"""What a host that refuses is told: each switch by its name, and nothing where nothing is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ringfence.backends.local.host import blockers

CREATE = "the sandbox was not started: create: [Errno 1] clone3: Operation not permitted"
MOUNT = "the sandbox was not started: make mounts private: [Errno 13] mount: Permission denied"
PROC = "the sandbox was not started: proc : [Errno 1] mount: Operation not permitted: 'proc'"
OLD = "the sandbox was not started: create: [Errno 38] clone3: Function not implemented"
USER, ROOT = 1000, 0
MASKED = "22 23 0:5 /null /proc/kcore rw - devtmpfs none rw\n23 1 0:9 / /proc rw - proc proc rw\n"

Host = Callable[..., list[str]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Host:
    """`told(text, uid, {path: content})`: the names of what is found on such a host."""

    def find(text: str, uid: int, files: dict[str, str]) -> list[str]:
        monkeypatch.setattr(blockers, "_read", lambda path: files.get(path, ""))
        monkeypatch.setattr("os.geteuid", lambda: uid)
        found = blockers.find(OSError(text))
        assert all(each.why for each in found)
        return [f"{each.name}: {each.why} | {each.fix}" for each in found]

    return find


@pytest.mark.parametrize(
    ("text", "uid", "path", "content", "why", "fix"),
    [
        (CREATE, USER, "/proc/sys/user/max_user_namespaces", "0\n", "max_user_namespaces", "sysctl"),
        (CREATE, ROOT, "/proc/sys/user/max_user_namespaces", "0\n", "max_user_namespaces", "sysctl"),
        (CREATE, USER, "/proc/sys/kernel/unprivileged_userns_clone", "0\n", "userns_clone", "sysctl"),
        (
            MOUNT, USER, "/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1\n",
            "apparmor_restrict", "AppArmor profile",
        ),
        (CREATE, USER, "/proc/self/status", "Name:\tx\nSeccomp:\t2\n", "filter", "seccomp=unconfined"),
        (PROC, USER, "/proc/self/mountinfo", MASKED, "/proc/kcore", "systempaths=unconfined"),
        (MOUNT, USER, "/sys/fs/selinux/enforce", "1", "SELinux", "ausearch"),
    ],
)  # fmt: skip
def test_the_switch_is_named(
    told: Host, text: str, uid: int, path: str, content: str, why: str, fix: str
) -> None:
    """The control: without that one file nothing is blamed."""
    found = told(text, uid, {path: content})

    assert 1 == len(found)
    assert why in found[0].partition(" | ")[0]
    assert fix in found[0].partition(" | ")[2]
    assert [] == told(text, uid, {})


def test_an_old_kernel_is_named(told: Host) -> None:
    assert told(OLD, USER, {})[0].startswith("kernel: kernel ")


@pytest.mark.parametrize(
    "name", ["unprivileged_userns_clone", "apparmor_restrict_unprivileged_userns"]
)
def test_switches_for_users_are_not_held_against_root(told: Host, name: str) -> None:
    value = "0" if "clone" in name else "1"

    assert [] == told(CREATE, ROOT, {f"/proc/sys/kernel/{name}": value})


def test_a_filter_is_not_blamed_for_what_no_filter_does(told: Host) -> None:
    files = {"/proc/self/status": "Seccomp:\t2\n"}

    assert [] == told("no space left on device", USER, files)
