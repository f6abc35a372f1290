"""What a sandbox is said to be able to do is what it can do: each claim beside a real attempt."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence import Limits, Sandbox
from ringfence.backends.native.backend import NativeBackend
from ringfence.errors import LifecycleError
from ringfence.model.granted import SandboxCapabilities
from ringfence.policy import categories
from tests.native.conftest import MakeSandbox, has_cgroups
from tests.native.outside import until

MIB = 1 << 20


def granted(sandbox: Sandbox) -> SandboxCapabilities:
    return sandbox._inner.granted()


def test_paths_are_as_programs_find_them(make: MakeSandbox, private_dir: Path) -> None:
    (private_dir / "file").write_text("x")
    sandbox = make(
        mounts=[
            f"{private_dir}:/shown:ro",
            f"{private_dir}:/work:rw",
            f"{private_dir}/file:/one:rw",
        ]
    )

    found = granted(sandbox)

    for path in found.writable_paths:
        target = path if path == "/one" else f"{path}/probe"
        assert sandbox.shell(f"echo x >> {target}").ok, path
    for path in set(found.readable_paths) - set(found.writable_paths) - {"/"}:
        assert not sandbox.shell(f"echo x > {path}/probe").ok, path
        assert sandbox.shell(f"ls {path} > /dev/null").ok, path
    assert {"/shown", "/work", "/one", "/usr"} <= set(found.readable_paths)
    assert {"/work", "/one", "/tmp", "/mnt/memory"} <= set(found.writable_paths)
    assert "/shown" not in found.writable_paths
    assert found.can_write_filesystem
    assert found.is_persistent
    assert "probe" in names(private_dir)


def names(directory: Path) -> set[str]:
    return {each.name for each in directory.iterdir()}


def test_trying_leaves_nothing_behind(make: MakeSandbox, private_dir: Path) -> None:
    sandbox = make(mounts=[f"{private_dir}:/work:rw"], protect=())
    before = names(private_dir), sandbox.shell("find / -xdev 2>/dev/null | sort").text

    granted(sandbox)

    after = names(private_dir), sandbox.shell("find / -xdev 2>/dev/null | sort").text
    assert before == after
    assert until(lambda: 0 == (sandbox.stats().pids or 0))


def test_limits_are_the_kernel_s(make: MakeSandbox) -> None:
    wanted = Limits(pids=77, open_files=99, disk_bytes=5 * MIB, inodes=400, memory_bytes=64 * MIB)
    limits = granted(make(limits=wanted)).limits

    assert (99, 5 * MIB, 400, 64 * MIB, 77) == (
        limits.open_files,
        limits.disk_bytes,
        limits.inodes,
        limits.memory_bytes,
        limits.pids,
    )
    if has_cgroups():
        assert 0.25 == granted(make(limits=Limits(cpus=0.25))).limits.cpus
        assert limits.cpus is None


def test_a_network_is_there_or_not(make: MakeSandbox) -> None:
    none, whole = granted(make()), granted(make(network="unrestricted"))

    assert (False, ()) == (none.has_network, none.allowed_destinations)
    assert (True, ("*",)) == (whole.has_network, whole.allowed_destinations)


def test_every_category_is_blocked_and_the_filter_is_why(
    make: MakeSandbox, with_controls: NativeBackend
) -> None:
    """The control: without the filter, the kernel itself lets most of them be tried."""
    filtered = granted(make(backend=with_controls))
    control = granted(make(backend=with_controls, profile="no-seccomp"))

    assert set(categories.numbered()) == set(filtered.blocked_syscall_categories)
    assert filtered.syscall_filter_active
    assert not control.syscall_filter_active
    let_through = set(categories.numbered()) - set(control.blocked_syscall_categories)
    for category in ("namespaces", "mounting", "tracing", "keyrings", "clock_setting"):
        assert category in let_through
    assert "no-seccomp" == control.profile


def test_the_debug_profile_lets_tracing_through(make: MakeSandbox) -> None:
    found = granted(make(profile="debug"))

    assert "tracing" not in found.blocked_syscall_categories
    assert "memory_of_others" not in found.blocked_syscall_categories
    assert "mounting" in found.blocked_syscall_categories


@pytest.mark.parametrize("how", ["suspend", "terminate"])
def test_who_cannot_answer_says_so(make: MakeSandbox, how: str) -> None:
    sandbox = make()
    getattr(sandbox, how)()

    with pytest.raises(LifecycleError):
        granted(sandbox)


def test_many_at_once_while_it_works(make: MakeSandbox) -> None:
    sandbox = make()
    process = sandbox.start(["sh", "-c", "while :; do true; done"])

    for _ in range(10):
        assert granted(sandbox).syscall_filter_active
    assert process.running
    process.kill()
