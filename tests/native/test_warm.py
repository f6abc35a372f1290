"""Sandboxes built ahead: what waits holds nothing, what dies is noticed, what is left is nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence import Limits, Mount, Sandbox, SandboxSpec
from ringfence.backends.native.backend import NativeBackend
from ringfence.errors import InvalidRequest, LifecycleError, SandboxLost
from ringfence.launcher.pid1.processes import TAG_BASE
from ringfence.model.net.network import NetworkPolicy
from tests.native.callers import Caller
from tests.native.outside import cgroups_of, open_fds, pin, survivors, until

GONE_WITHIN_S = 30.0
ALLOWED = ("cpu_limit",)  # without a cgroup there is none


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[NativeBackend]:
    made = NativeBackend(state_dir=str(tmp_path / "snapshots"))
    yield made
    made.close()


def test_one_that_waits_holds_its_streams_and_what_is_its_own(backend: NativeBackend) -> None:
    """Its own ends of the zygote's socket and of ours, and none of the others': nothing to be kept open by."""
    waiting = [backend.prewarm(SandboxSpec()) for _ in range(3)]

    for warm in waiting:
        assert until(lambda warm=warm: has_rehearsed(warm.pid))  # type: ignore[misc]
        kinds = [text.partition(":")[0] for _, text in sorted(open_fds(warm.pid).items())]
        assert ["/dev/null"] * 3 + ["socket", "anon_inode"] == kinds[:5]  # signals
        assert ["/1/oom_score_adj", "/proc/1/io"] == kinds[5:7]
        # To sleep in; for who asks for netlink sockets; twice two cgroups, or none; its own pidfd.
        apart = [kind.rpartition("/")[2] for kind in kinds[9:13]]
        assert apart in (["tasks"] * 4, ["anon_inode"] * 4)
        assert ["/memfd", "anon_inode"] == kinds[7:9]
        assert ["anon_inode", "mnt", "pid", "socket"] == kinds[13:]


def sockets_of(pid: int) -> list[str]:
    return [text for text in open_fds(pid).values() if text.startswith("socket:")]


def has_rehearsed(pid: int) -> bool:
    """Whether it has been through everything: the last that it lets go of are sockets."""
    limits = Path(f"/proc/{pid}/limits").read_text()
    tagged = next(line for line in limits.splitlines() if "realtime timeout" in line)
    return str(TAG_BASE) in tagged and len(sockets_of(pid)) == 2


def test_one_that_has_rehearsed_is_as_one_that_has_not(backend: NativeBackend) -> None:
    """What it goes through while it waits leaves no trace that a client could find."""
    seen = "cat /proc/self/limits /proc/self/oom_score_adj; grep -E '^(Cap|No|Sec|Sig)' /proc/self/status"
    warm = backend.prewarm(SandboxSpec())
    assert until(lambda: has_rehearsed(warm.pid))

    with Sandbox(warm.claim(SandboxSpec()), SandboxSpec()) as sandbox:
        assert 0 == sandbox.stats().execs
        found = sandbox.shell(f"{seen}; ls /proc/self/fd; pwd").text

    with Sandbox(backend.provision(SandboxSpec()), SandboxSpec()) as sandbox:
        assert sandbox.shell(f"{seen}; ls /proc/self/fd; pwd").text == found


def test_it_runs_nothing_and_is_its_namespace_alone(backend: NativeBackend) -> None:
    warm = backend.prewarm(SandboxSpec())
    assert until(lambda: has_rehearsed(warm.pid))

    children = Path(f"/proc/{warm.pid}/task/{warm.pid}/children").read_text()

    assert "" == children
    with Sandbox(warm.claim(SandboxSpec()), SandboxSpec()) as sandbox:
        assert "2" == sandbox.shell("echo $$").text.strip()  # the first process after PID 1


def test_limits_are_those_of_the_claim(backend: NativeBackend) -> None:
    limits = Limits(pids=37, disk_bytes=5 << 20, inodes=300, open_files=99, cpus=0.5)
    spec = SandboxSpec(limits=limits, allow_degraded=ALLOWED)
    sandbox = Sandbox(backend.prewarm(SandboxSpec()).claim(spec), spec)
    said = sandbox.shell("ulimit -n; df -i / | tail -1; df -k / | tail -1")

    numbers = said.text.split()

    assert "99" == numbers[0]
    assert "300" == numbers[2]
    assert str(5 << 10) in numbers
    sandbox.terminate()


def test_every_one_of_many_mounts_is_there(backend: NativeBackend, tmp_path: Path) -> None:
    mounts = []
    for number in range(40):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "name").write_text(f"{number}\n")
        mounts.append(Mount(f"/mnt/m{number}", str(tmp_path / str(number))))
    spec = SandboxSpec(mounts=tuple(mounts))

    sandbox = Sandbox(backend.prewarm(SandboxSpec()).claim(spec), spec)

    said = sandbox.shell("cat /mnt/m*/name").text.split()
    assert {str(number) for number in range(40)} == set(said)
    sandbox.terminate()


def test_a_mount_source_is_where_it_was_named(backend: NativeBackend, tmp_path: Path) -> None:
    """No symlink stands in for a target, and a written file lands in the source."""
    tmp_path.chmod(0o755)
    spec = SandboxSpec(mounts=(Mount("/workspace", str(tmp_path), "read_write"),))
    sandbox = Sandbox(backend.prewarm(SandboxSpec()).claim(spec), spec)

    said = sandbox.shell("cd /workspace && pwd -P && echo yes > made").text

    assert "/workspace\n" == said
    assert "yes\n" == (tmp_path / "made").read_text()
    sandbox.terminate()


@pytest.mark.parametrize(
    "other",
    [
        SandboxSpec(network=NetworkPolicy.unrestricted()),
        SandboxSpec(user="nobody"),
        SandboxSpec(profile="unrestricted"),
        SandboxSpec(python_env=True),
    ],
)
def test_what_cannot_be_bound_later_does_not_fit(
    backend: NativeBackend, other: SandboxSpec
) -> None:
    plain, same = backend.prewarm(SandboxSpec()), backend.prewarm(other)

    assert not plain.fits(other)
    assert same.fits(other)
    with pytest.raises(InvalidRequest):
        plain.claim(other)
    assert not plain.alive


def test_the_zygote_is_killed(backend: NativeBackend) -> None:
    waiting = [backend.prewarm(SandboxSpec()) for _ in range(3)]
    pinned = pin(warm.pid for warm in waiting)

    os.kill(backend.zygote().pid, signal.SIGKILL)

    assert [] == survivors(pinned, GONE_WITHIN_S)
    with pytest.raises((SandboxLost, LifecycleError)):  # the other: somebody saw it before us
        waiting[0].claim(SandboxSpec())
    assert until(lambda: not any(warm.alive for warm in waiting))
    assert until(lambda: not [each for warm in waiting for each in cgroups_of(warm.id)])
    with Sandbox(backend.prewarm(SandboxSpec()).claim(SandboxSpec()), SandboxSpec()) as sandbox:
        assert sandbox.exec(["true"]).ok  # the next zygote


def test_it_is_killed_itself(backend: NativeBackend) -> None:
    warm = backend.prewarm(SandboxSpec())
    pinned = pin([warm.pid])

    os.kill(warm.pid, signal.SIGKILL)

    assert [] == survivors(pinned, GONE_WITHIN_S)
    with pytest.raises(SandboxLost):
        warm.claim(SandboxSpec())
    assert until(lambda: [] == cgroups_of(warm.id))


_WAIT = """
from ringfence import SandboxSpec
from ringfence.backends.registry import backend_named
waiting = [backend_named("native").prewarm(SandboxSpec()) for _ in range(3)]
say([[warm.id, warm.pid] for warm in waiting])
listen()
"""


def test_the_caller_is_killed() -> None:
    with Caller(_WAIT) as caller:
        waiting = caller.hear()
        pinned = pin(pid for _id, pid in waiting)
        assert 3 == len(pinned)

        caller.kill(signal.SIGKILL)

        assert [] == survivors(pinned, GONE_WITHIN_S)
        assert until(lambda: not [c for name, _pid in waiting for c in cgroups_of(name)])
