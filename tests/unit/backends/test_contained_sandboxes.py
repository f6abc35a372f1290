"""A sandbox whose agent made namespaces, as the host has it: who goes in, mounts, snapshots and its end."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.native.outside import same_descriptors

from ringfence.backends.local import journal
from ringfence.backends.local.agents.contained import Changes, ContainedNetwork, ContainedSandbox
from ringfence.backends.local.answers import Refused
from ringfence.backends.local.jailed import saving
from ringfence.backends.local.mounts.mounting import Mounting
from ringfence.errors import (
    InvalidRequest,
    IoError,
    IsolationError,
    LifecycleError,
    SandboxLost,
    Unsupported,
)
from ringfence.launcher import wire
from ringfence.model.mount import READ_WRITE, Mount
from ringfence.model.net.network import NetworkPolicy, NetworkRule
from ringfence.model.session import ResolvedMount
from ringfence.model.spec import SandboxSpec
from ringfence.model.state import State
from ringfence.model.stats import SandboxStats

pytestmark = pytest.mark.anyone
SPACES = ("user", "mnt", "net", "pid")
POLICY = NetworkPolicy(rules=(NetworkRule("a.example", "443"),))


class Jailer:
    """Notes what it is asked, with which namespaces, and refuses it where it is to."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.told: list[Any] = []
        self.refusal: Exception | None = None

    def ask(self, verb: str, told: Any, fds: list[int], *, timeout_s: float | None) -> Any:
        self.asked.append(
            (verb, told, [os.readlink(f"/proc/self/fd/{fd}") for fd in fds], timeout_s)
        )
        if self.refusal is not None:
            raise self.refusal
        answers = [os.dup(fd) for fd in fds[:2]] if "network" == told["op"] else []
        return b"", answers

    def tell(self, *what: Any) -> None:
        self.told.append(what)


class One(ContainedSandbox):
    """One that notes when it stands still."""

    def _freeze(self, frozen: bool) -> None:
        self.notes.append(frozen)

    def _read_stats(self, state: State) -> SandboxStats:
        return SandboxStats(state)

    def changes(self) -> Changes:
        return Changes(["/changed"], ["/gone"], ["/own"])

    notes: list[bool]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def notes() -> str:
        (tmp_path / "notes").mkdir(exist_ok=True)
        return str(tmp_path / "notes")

    monkeypatch.setattr(journal, "runtime_directory", notes)

    def create(spaces: tuple[str, ...] = SPACES, **spec: Any) -> Any:
        far, control = wire.socketpair()
        process = subprocess.Popen(["sleep", "1000"])
        jailer = Jailer()
        owner: Any = SimpleNamespace(
            name="bubblewrap", jailer=lambda: jailer, catalogue=lambda: "its own"
        )
        one: Any = One(
            owner, SandboxSpec(**spec), "held-1", 1234, [], control, os.pidfd_open(process.pid)
        )
        flags = os.O_RDONLY | os.O_CLOEXEC
        one.namespace_fds = [os.open(f"/proc/self/ns/{name}", flags) for name in spaces]
        one.owner, one.pid, one.jailer, one.notes = owner, os.getpid(), jailer, []
        one.far, one.process, one.sizes = far, process, SimpleNamespace(disk_bytes=8 << 20)
        one._state = State.RUNNING
        made.append(one)
        return one

    with same_descriptors():
        yield create
        for one in made:
            one.jailer.refusal = None
            one.terminate()
            one.process.wait()
            one.far.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    return path


def places(names: tuple[str, ...]) -> list[str]:
    return [os.readlink(f"/proc/self/ns/{name}") for name in names]


class TestGoingIn:
    def test_a_helper_gets_the_namespaces_that_it_needs(self, make: Any) -> None:
        one = make()
        with open("/dev/null", "rb") as file:
            assert [] == one.join("contained", {"do": "it"}, [file.fileno()], 3.0)
        answered = one.join("network", {}, [])
        assert places(("user", "net")) == [os.readlink(f"/proc/self/fd/{fd}") for fd in answered]
        for fd in answered:
            os.close(fd)
        told = {"op": "contained", "uid": 1234, "gid": 1234, "do": "it"}
        first, second = one.jailer.asked
        assert ("join", told, [*places(("user", "mnt")), "/dev/null"], 3.0) == first
        assert places(("user", "net")) == second[2]
        one.jailer.refusal = SandboxLost("the jailer is gone")
        with same_descriptors(), pytest.raises(SandboxLost):
            one.join("network", {}, [])
        found = one.namespaces()
        assert {name: os.stat(f"/proc/self/ns/{name}").st_ino for name in SPACES} == found

    def test_where_there_is_no_way_in_nothing_is_tried(self, make: Any, source: Path) -> None:
        one = make(())
        for call in (
            lambda: one.join("network", {}, []),
            lambda: one.attach(Mount("/data", str(source))),
            lambda: one.snapshot({}),
            lambda: one.apply_network_policy(NetworkPolicy()),
            lambda: ContainedNetwork(one, None).check(POLICY),
        ):
            with pytest.raises(Unsupported, match="no namespaces of its own"):
                call()
        assert ([], []) == (one.jailer.asked, one.notes)
        assert one.namespaces() is None
        ContainedNetwork(one, None).check(NetworkPolicy())  # as it is
        one.terminate()
        with pytest.raises(LifecycleError):
            one.apply_network_policy(NetworkPolicy())

    def test_its_network_is_made_inside(self, make: Any) -> None:
        one = make(network=POLICY)
        served: list[Any] = []
        one.owner.egress = lambda: SimpleNamespace(
            serve=lambda *args, **_: served.append(args), drop=lambda _: []
        )
        network = ContainedNetwork(one, None)
        network.serve()
        assert "batches" in one.jailer.asked[0][1]["network"]
        assert [os.fstat(fd).st_ino for fd in served[0][4]] == network.inodes
        assert ("held-1", POLICY) == served[0][:2]
        for fd in served[0][4]:
            os.close(fd)
        network.close()
        other = make()
        ContainedNetwork(other, None).serve()
        assert [] == other.jailer.asked, "nothing can be reached"


class TestMounts:
    def test_those_of_the_spec_are_made_at_once(self, make: Any, source: Path) -> None:
        mount = Mount("/data", str(source), READ_WRITE, protect=("absent",))
        one = make(mounts=(mount,), deny=("/hidden",))
        one.furnish(Mounting(one.spec))
        [(_, told, fds, timeout_s)] = one.jailer.asked
        assert [("bind", "/data"), ("protect", "/data/absent")] == [
            step[:2] for step in told["steps"]
        ]
        assert 60.0 == timeout_s
        assert str(source) == fds[2]
        assert ("/hidden",) == tuple(step[1] for step in told["hidden"])
        assert ("furnish", "held-1", "/.ringfence") == (told["do"], told["id"], told["place"])
        assert [("absent", str(source))] == [(made[1], made[0]) for made in told["placeholders"]]
        assert os.path.exists(told["note"])
        assert one.mounting.fds == []
        assert "/data" == one.mounts[-1].target
        one.terminate()
        assert [] == os.listdir(source)
        assert not os.path.exists(told["note"])
        assert [("released", "held-1", [])] == one.jailer.told

    def test_a_step_that_is_refused_is_the_mounts_fault(self, make: Any, source: Path) -> None:
        one = make(mounts=(Mount("/data", str(source), READ_WRITE, protect=("absent",)),))
        one.jailer.refusal = Refused(errno.ENOTDIR, "bind /data: Not a directory")
        with pytest.raises(InvalidRequest, match="Not a directory") as refused:
            one.furnish(Mounting(one.spec))
        assert "mounts" == refused.value.field
        assert [] == one.mounting.fds
        one.jailer.refusal = None
        one.terminate()
        assert [] == os.listdir(source)

    def test_without_any_nobody_goes_in(self, make: Any) -> None:
        one = make()
        one.furnish(Mounting(one.spec))
        assert [] == one.jailer.asked
        assert {"/mnt/memory", "/mnt/session/outputs"} <= {each.target for each in one.mounts}

    def test_each_later_one_is_noted_with_those_before(self, make: Any, source: Path) -> None:
        one = make()
        one.furnish(Mounting(one.spec))
        for name in ("first", "second"):
            mount = Mount(f"/{name}", str(source), READ_WRITE, protect=(f"absent {name}",))
            assert one.attach(mount).target == f"/{name}"
        first, second = (told["placeholders"] for _, told, *_ in one.jailer.asked)
        assert ["absent first"] == [made[1] for made in first]
        assert ["absent first", "absent second"] == [made[1] for made in second]
        assert one.may_reach_sockets
        assert ["/first", "/second"] == [each.target for each in one.mounts[-2:]]
        assert [os.path.basename(one.mounting.note)] == os.listdir(
            os.path.dirname(one.mounting.note)
        )
        one.terminate()
        assert [] == os.listdir(source), "of both"

    def test_one_that_fails_leaves_nothing(self, make: Any, source: Path) -> None:
        one = make(deny=("/denied",))
        one.furnish(Mounting(one.spec))
        before = list(one.mounts)
        one.jailer.refusal = Refused(errno.EINVAL, "mount_setattr")
        with same_descriptors(), pytest.raises(InvalidRequest, match="/data: mount_setattr"):
            one.attach(Mount("/data", str(source), READ_WRITE, protect=("absent",)))
        one.jailer.refusal = None
        asked = len(one.jailer.asked)
        with pytest.raises(InvalidRequest, match="is denied"):
            one.attach(Mount("/denied/x", str(source)))
        with socket.socket(socket.AF_UNIX) as service:
            service.bind(str(source / "service"))
            with same_descriptors(), pytest.raises(IsolationError, match="is a unix socket"):
                one.attach(Mount("/data", str(source), READ_WRITE))
        os.unlink(source / "service")
        assert (before, [], []) == (one.mounts, one.mounting.protected, os.listdir(source))
        assert asked == len(one.jailer.asked)
        assert not one.may_reach_sockets
        one.attach(Mount("/own"))
        assert not one.may_reach_sockets, "nothing of the host's is in it"

    def test_one_that_showed_the_host_may_show_more_of_it(self, make: Any, source: Path) -> None:
        one = make(mounts=(Mount("/data", str(source)),))
        one.furnish(Mounting(one.spec))
        with socket.socket(socket.AF_UNIX) as service:
            service.bind(str(source / "service"))
            one.attach(Mount("/more", str(source)))
        assert not one.may_reach_sockets, "it connects to sockets of its own only"


class TestSaving:
    def keep(self, monkeypatch: pytest.MonkeyPatch, problem: Exception | None = None) -> list[Any]:
        kept: list[Any] = []

        def keep(one: Any, catalogue: Any, metadata: Any, pack: Any) -> str:
            kept.append((one.id, catalogue, metadata, list(one.notes)))
            if problem is not None:
                raise problem
            pack(0)
            return "saved"

        monkeypatch.setattr(saving, "keep", keep)
        return kept

    def test_it_stands_still_meanwhile(self, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        one = make()
        one.mounts[:] = [
            ResolvedMount("/own", "read_write"),
            ResolvedMount("/x", "read_only", "/h"),
        ]
        kept = self.keep(monkeypatch)
        assert "saved" == one.snapshot({"a": "b"})
        assert [("held-1", "its own", {"a": "b"}, [True])] == kept
        assert [True, False] == one.notes
        told = one.jailer.asked[0][1]
        assert (["/changed"], ["/gone"], ["/own"], ["/x"]) == tuple(
            told[each] for each in ("changed", "gone", "own", "hosts")
        )
        one.suspend()
        one.notes.clear()
        one.snapshot({}, "another")
        assert ("another", []) == (kept[1][1], one.notes), "it stands still already"
        one.resume()
        one.notes.clear()
        self.keep(monkeypatch, IoError("no room"))
        with pytest.raises(IoError):
            one.snapshot({})
        assert [True, False] == one.notes
        one.terminate()
        with pytest.raises(LifecycleError, match="snapshot: "):
            one.snapshot({})

    def test_one_that_is_not_unpacked_has_ended(self, make: Any) -> None:
        one = make()
        with open("/dev/null", "rb") as content:
            one.load(content.fileno())
            assert "/dev/null" == one.jailer.asked[0][2][2]
            assert "load" == one.jailer.asked[0][1]["do"]
            one.jailer.refusal = Refused(errno.ENOSPC, "no room")
            with pytest.raises(IoError, match="not unpacked: no room"):
                one.complete(lambda: one.load(content.fileno()))
        assert (State.TERMINATED, []) == (one._state, one.namespace_fds)


def test_ids_are_those_of_its_first_process(make: Any) -> None:
    one = make()
    assert int(Path("/proc/self/uid_map").read_text(encoding="ascii").split()[1]) == one.host_id()
