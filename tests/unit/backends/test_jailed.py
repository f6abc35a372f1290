"""A guest in a jail as the host has it: mounts that come later, what is saved, what its backend shares."""

from __future__ import annotations

import errno
import marshal
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends.local import journal
from ringfence.backends.local.agents.guest import GuestExec
from ringfence.backends.local.answers import Refused
from ringfence.backends.local.host import cgroups
from ringfence.backends.local.jailed import jails, saving, whole
from ringfence.backends.local.jailed.jail_mounts import JailMounts
from ringfence.backends.local.jailed.jailed import JailedSandbox
from ringfence.backends.local.jailed.jails import Jails
from ringfence.errors import InvalidRequest, LifecycleError, Unsupported
from ringfence.launcher import wire
from ringfence.model.execs.exec import ExecRequest
from ringfence.model.limits import Limits
from ringfence.model.mount import READ_ONLY, READ_WRITE, Mount
from ringfence.model.net.network import NetworkPolicy, NetworkRule
from ringfence.model.session import ResolvedMount
from ringfence.model.spec import SandboxSpec
from ringfence.model.state import State

pytestmark = pytest.mark.anyone
PLACE = "/mounts"


class Group:
    """Cgroups with fixed counts."""

    holds_cpus, can_freeze = True, False
    directories = ("/none/such",)

    def cpu_ns(self) -> int:
        return 1

    def memory_bytes(self) -> int:
        return 2

    def peak_memory_bytes(self) -> int:
        return 3

    def oom_kills(self) -> int:
        return 0

    def unthrottle(self, on: bool) -> None:
        """No processor limit."""


class One(JailedSandbox):
    """One whose jailer takes everything, unless it is to refuse."""

    why = ("", "")
    refusal: Exception | None = None
    handed: list[Any]

    def _more_mounts(self) -> JailMounts:
        return JailMounts(self.spec, 0, PLACE, there=self.mounts)

    def _attach(self, mount: Mount, more: JailMounts) -> None:
        more.add_of_host(mount)
        self.mount_in_jail(more)
        if self.refusal is not None:
            raise self.refusal

    def enter(self, op: str, request: Any, fds: list[int]) -> tuple[bytes, list[int]]:
        self.handed.append((op, {**request}, len(fds)))
        return b"", []

    def not_saved(self) -> tuple[str, str]:
        return self.why

    def _checkpoint(self, metadata: Any) -> Any:
        self.handed.append(("checkpoint", metadata))
        return "with memory"

    def _snapshot(self, metadata: Any, catalogue: Any) -> Any:
        self.handed.append(("snapshot", metadata, catalogue))
        return "files"

    def _release(self) -> None:
        os.close(self.pidfd)
        self.pidfd = -1


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    def notes() -> str:
        (tmp_path / "notes").mkdir(exist_ok=True)  # the last note takes it along
        return str(tmp_path / "notes")

    monkeypatch.setattr(journal, "runtime_directory", notes)
    notes()
    before = len(os.listdir("/proc/self/fd"))
    agent, control = wire.socketpair()
    with subprocess.Popen(["sleep", "1000"]) as process:
        backend: Any = SimpleNamespace(name="gvisor")
        made: Any = One(
            backend, SandboxSpec(), "jailed-1", 1000, [], control, os.pidfd_open(process.pid)
        )
        made.protected, made.note, made.group, made.handed = [], None, Group(), []
        made._state, made.agent = State.RUNNING, agent
        yield made
        made.terminate()
    for part in made.protected:
        part.remove_placeholders()
    agent.close()
    control.close()
    assert before == len(os.listdir("/proc/self/fd"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    (path / "kept").touch()
    return path


class TestLaterMounts:
    def test_what_is_protected_in_each_is_noted_until_the_end(
        self, one: Any, source: Path, tmp_path: Path
    ) -> None:
        for name in ("first", "second"):
            mount = Mount(f"/{name}", str(source), READ_WRITE, protect=(f"absent {name}",))
            assert one.attach(mount).target == f"/{name}"
        assert ["/first", "/second"] == [each.target for each in one.mounts]
        assert {"absent first", "absent second", "kept"} == {*os.listdir(source)}
        made = [each for part in one.protected for each in part.placeholders]
        assert 2 == len(made)
        [(op, first, count), (_, second, _)] = one.handed
        assert ("mount", 1, "jailed-1", 0) == (op, count, first["id"], first["uid"])
        assert (made[:1], made) == (first["placeholders"], second["placeholders"])
        assert one.note == second["note"] == first["note"]
        assert Path(one.note).read_bytes().endswith(marshal.dumps(made)), "also of the first"
        assert [os.path.basename(one.note)] == os.listdir(tmp_path / "notes")
        one.attach(Mount("/third", str(tmp_path / "notes"), READ_ONLY))
        assert one.note == one.handed[2][1]["note"]
        assert made == one.handed[2][1]["placeholders"]
        journal.erase(one.note)

    def test_one_that_fails_leaves_nothing(self, one: Any, source: Path, tmp_path: Path) -> None:
        mount = Mount("/data", str(source), READ_WRITE, protect=("absent",))
        for problem, kind in (
            (Refused(errno.ENOTDIR, "not a directory"), InvalidRequest),
            (LifecycleError("ended"), LifecycleError),
        ):
            one.refusal = problem
            with pytest.raises(kind):
                one.attach(mount)
            assert ([], [], None) == (one.mounts, one.protected, one.note)
            assert ["kept"] == os.listdir(source)
            assert [] == list(tmp_path.glob("notes/*"))
        one.refusal = None
        one.attach(mount)
        assert f"{PLACE}/0" in str(one.handed[-1][1]["steps"]), "the number is free again"
        journal.erase(one.note)

    def test_one_that_has_ended_gets_none(self, one: Any, source: Path) -> None:
        one.terminate()
        with pytest.raises(LifecycleError):
            one.attach(Mount("/data", str(source)))
        assert [] == one.handed

    def test_a_helper_is_given_the_jail_that_lives(self, one: Any) -> None:
        asked: list[Any] = []

        def ask(verb: str, request: Any, fds: list[int], *, timeout_s: float | None) -> Any:
            asked.append((verb, request, [os.fstat(fd).st_ino for fd in fds], timeout_s))
            return b"done", []

        one.jailer = SimpleNamespace(ask=ask)
        with open("/dev/null", "rb") as file:
            found = JailedSandbox.enter(one, "mount", {"steps": []}, [file.fileno()])
            inodes = [os.fstat(fd).st_ino for fd in (one.pidfd, file.fileno())]
        assert (b"done", []) == found
        assert [("enter", {"op": "mount", "steps": []}, inodes, None)] == asked


class TestMountsInAJail:
    def mounts(self, there: tuple[ResolvedMount, ...] = (), points: str = "", **how: Any) -> Any:
        return JailMounts(SandboxSpec(**how), 0, PLACE, points, there)

    def test_each_has_a_place_of_its_own_after_those_that_are_there(self, source: Path) -> None:
        there = tuple(ResolvedMount(f"/{at}", READ_ONLY, f"/host/{at}") for at in "ab")
        more = self.mounts((ResolvedMount("/own", READ_WRITE), *there), "/points")
        assert ({"/a": f"{PLACE}/0", "/b": f"{PLACE}/1"}, 2) == (more.places, more.count)
        assert f"{PLACE}/2" == more.add_of_host(Mount("/c", str(source)))
        assert f"{PLACE}/3" == more.add_of_host(Mount("/d", str(source / "kept")))
        assert [
            ("dir", "/points/2", 0o755, False), ("bind", f"{PLACE}/2", 0),
            ("file", "/points/3", b"", 0o644), ("bind", f"{PLACE}/3", 1),
        ] == more.after  # fmt: skip
        assert [str(source), str(source / "kept")] == [each["source"] for each in more.mounted]
        assert ["/own", "/a", "/b", "/c", "/d"] == [each.target for each in more.mounts]
        assert 2 == len(more.fds)
        more.close()
        assert [] == more.fds
        more.close()

    def test_what_is_protected_is_so_where_the_jail_has_it(
        self, source: Path, tmp_path: Path
    ) -> None:
        inner = tmp_path / "inner"
        inner.mkdir()
        (inner / "secret").touch()
        more = self.mounts(deny=("/data/hidden", "/elsewhere", "/data/new/deep/secret"))
        more.add_of_host(Mount("/data", str(source), READ_WRITE, protect=("absent",)))
        more.add_of_host(Mount("/data/new/deep", str(inner)))
        assert (source / "new/deep").is_dir()
        left = more.deny_of_host()
        assert ["/elsewhere"] == [step[1] for step in left]
        paths = {(step[0], step[1]) for step in more.after}
        assert ("protect", f"{PLACE}/0/absent") in paths
        assert ("pin", f"{PLACE}/0/new") in paths
        assert ("hide", f"{PLACE}/0/hidden") in paths
        assert ("hide", f"{PLACE}/1/secret") in paths, "in the innermost"
        assert ("bind", f"{PLACE}/1") in paths
        verbs = [step[:2] for step in more.after]
        assert verbs.index(("bind", f"{PLACE}/0")) < verbs.index(("protect", f"{PLACE}/0/absent"))
        assert not any(path.startswith("/data") for _verb, path in paths)
        assert {"absent", "new", "deep", "hidden"} <= {each[1] for each in more.placeholders}
        for part in more.protected:
            part.remove_placeholders()
        more.close()
        assert ["kept"] == os.listdir(source)


class TestSaving:
    def test_one_that_is_held_takes_nothing_from_another_thread(self, one: Any) -> None:
        one.held_by = threading.get_ident() + 1
        with pytest.raises(LifecycleError, match="being saved"):
            one.send(("exec",), [])
        assert not one.is_held
        with pytest.raises(Unsupported, match="another thread"):
            one.hold([])
        one.held_by = threading.get_ident()
        assert one.is_held
        one.send(("freeze",), [])
        assert ("freeze",) == wire.receive(one.agent)[0]

    def test_who_holds_it_has_its_memory_and_lets_go(self, one: Any) -> None:
        assert "files" == one.snapshot({"a": "b"}, "a catalogue")
        assert [("snapshot", {"a": "b"}, "a catalogue")] == one.handed
        one.held_by = threading.get_ident()
        assert "with memory" == one.snapshot({"c": "d"})
        assert ("checkpoint", {"c": "d"}) == one.handed[-1]
        one.held_by, one.why = threading.get_ident(), ("it has sockets", "close them")
        with pytest.raises(Unsupported, match="it has sockets") as refused:
            one.snapshot({})
        assert ("close them", 0) == (refused.value.hint, one.held_by)
        one.terminate()
        with pytest.raises(LifecycleError):
            one.snapshot({})

    def test_one_that_stands_still_is_not_saved_with_its_memory(self, one: Any) -> None:
        one._state = State.SUSPENDED
        with pytest.raises(LifecycleError, match="suspended"):
            one.checkpoint({})
        with pytest.raises(Unsupported, match="suspended"):
            one.hold([])
        with pytest.raises(Unsupported, match="suspended"):
            one.template(SimpleNamespace(id="exec-1"))
        assert ([], 0) == (one.handed, one.held_by)

    def test_it_is_held_only_where_it_can_be_saved(
        self, one: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held: list[Any] = []
        monkeypatch.setattr(whole, "hold", lambda *what: held.append(what))
        one.why = ("it has sockets", "")
        with pytest.raises(Unsupported, match="it has sockets"):
            one.hold(["template"])
        one.why, plain = ("", ""), one.spec
        one.spec = SandboxSpec(secrets={"TOKEN": "x"})
        with pytest.raises(Unsupported, match="placeholders"):
            one.hold(["template"])
        one.spec = plain
        assert [] == held
        one.hold(["template"])
        assert ([(one, ["template"])], True) == (held, one.is_held)
        one.held_by = 0

        def fail(*_what: Any) -> None:
            raise ValueError("x")

        monkeypatch.setattr(whole, "hold", fail)
        with pytest.raises(ValueError, match="x"):
            one.hold([])
        assert 0 == one.held_by

    def test_only_what_is_relayed_can_go_on_in_a_copy(
        self, one: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kinds: list[Any] = []
        monkeypatch.setattr(one, "_start", lambda _request, kind: kinds.append(kind))
        plain = ExecRequest(("true",))
        one.start(plain)
        one.start(ExecRequest(("true",), pty=(24, 80)))
        one.start_attended(plain)
        assert [whole.RelayedExec, GuestExec, GuestExec] == kinds
        for stderr, why in ((None, "terminal"), (2, "waits for its end")):
            run: Any = GuestExec.__new__(GuestExec)
            run.id, run.stderr = "exec-7", stderr
            with pytest.raises(Unsupported, match=why):
                one.template(run)
        relayed: Any = whole.RelayedExec.__new__(whole.RelayedExec)
        relayed.id, relayed.number = "exec-8", 8
        found = one.template(relayed)
        assert (relayed, one, 8) == (found.run, found.home, one.number_of(found))

    def test_a_copy_may_differ_in_what_the_host_keeps(self, one: Any) -> None:
        one.check_copy(SandboxSpec(limits=Limits(cpus=0.5)))
        with pytest.raises(Unsupported, match=r"limits\.pids"):
            one.check_copy(SandboxSpec(limits=Limits(pids=9)))
        other = SandboxSpec(network=NetworkPolicy(rules=(NetworkRule("a.example", "443"),)))
        with pytest.raises(Unsupported, match="network"):
            one.check_copy(other)
        one.can_change_network = True
        one.check_copy(other)

    def test_its_agent_is_asked_only_while_it_answers(
        self, one: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []

        def ask(what: str) -> Any:
            asked.append(what)
            return b"5 6 7 8", []

        monkeypatch.setattr(one, "ask", ask)
        one.crowded = 9
        found = one._read_stats(State.RUNNING)
        counts = (found.pids, found.memory_bytes, found.disk_bytes, found.inodes)
        assert ((5, 6, 7, 8), 9, 3) == (counts, found.forks_refused, found.peak_memory_bytes)
        found = one._read_stats(State.SUSPENDED)
        assert (None, 2, None) == (found.pids, found.memory_bytes, found.disk_bytes)
        assert (["usage"], ()) == (asked, found.degraded)
        one.spec, one.group.holds_cpus = SandboxSpec(limits=Limits(cpus=1.0)), False
        assert ("cpu_limit",) == one._read_stats(State.TERMINATED).degraded


class Jailer:
    """A jailer that is told what to hold."""

    def __init__(self, what: str, _code: str) -> None:
        self.what, self.owner, self.alive = what, os.getpid(), True
        self.told: list[Any] = []
        self.ended = threading.Event()
        self.is_released = False

    def tell(self, *told: Any) -> None:
        self.told.append(told)

    def wait(self) -> None:
        self.ended.wait(20)

    def release(self) -> None:
        self.is_released = True

    def close(self) -> None:
        self.alive = False
        self.ended.set()


class Family(Jails):
    name = "family"


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(jails, "Launched", Jailer)
    made: Any = Family(None, None)
    made._layout = cgroups.Layout((0, {}, "none is delegated"))
    made.returned = []
    made._host_ids = SimpleNamespace(
        locks=lambda: [11, 12], give_back=made.returned.append, close=lambda: None
    )
    yield made
    made.close()


class TestBackends:
    def test_a_name_is_one_sandboxs_also_while_it_is_made(self, family: Any) -> None:
        assert family._new_id(SandboxSpec()) != family._new_id(SandboxSpec())
        assert "mine" == family._new_id(SandboxSpec(id="mine"))
        with pytest.raises(InvalidRequest, match="already exists") as refused:
            family._new_id(SandboxSpec(id="mine"))
        assert "id" == refused.value.field
        family._making.discard("mine")
        family._jailed["mine"] = SimpleNamespace(terminate=family._jailed.clear)
        with pytest.raises(InvalidRequest, match="already exists"):
            family._new_id(SandboxSpec(id="mine"))

    def test_a_limit_of_the_processor_that_cannot_be_had_must_be_allowed_to_be_missing(
        self, family: Any
    ) -> None:
        spec = SandboxSpec(limits=Limits(cpus=0.5))
        plan: Any = {"id": "x"}
        with pytest.raises(Unsupported, match="none is delegated") as refused:
            family._plan_limits(plan, spec, 1 << 28, 50)
        assert ("family", "limits.cpus") == (refused.value.backend, refused.value.field)
        for allowed in ("cpu_limit", "*"):
            group = family._plan_limits(plan, spec.altered(allow_degraded=(allowed,)), 1 << 28, 50)
            assert not group.holds_cpus
        with pytest.raises(Unsupported):
            family._plan_limits(plan, spec.altered(allow_degraded=("memory_limit",)), 1 << 28, 50)
        family._plan_limits(plan, SandboxSpec(), 1 << 28, 50)
        bases = {name: f"/cg/{name}" for name in ("memory", "pids", "cpu")}
        family._layout = cgroups.Layout((1, bases, ""))
        group = family._plan_limits(plan, spec, 1 << 28, 50)
        assert group.holds_cpus
        assert (1, group.directories) == (plan["cgroup_version"], plan["cgroup_dirs"])
        values = {name.rpartition("/")[2]: value for name, value in plan["cgroup_values"]}
        assert (str(1 << 28), "51", "50000") == (
            values["memory.limit_in_bytes"], values["pids.max"], values["cpu.cfs_quota_us"],
        )  # fmt: skip

    @pytest.mark.parametrize("first", [0, 1 << 20])
    @pytest.mark.parametrize("has_image", [True, False])
    def test_what_ended_gives_all_back(self, family: Any, first: int, has_image: bool) -> None:
        closed: list[str] = []
        image = SimpleNamespace(close=lambda: closed.append("image")) if has_image else None
        ended: Any = SimpleNamespace(id="x", group=Group(), image=image, first_host_id=first)
        family._jailed["x"] = ended
        family.released(ended)
        assert ([first] if first else []) == family.returned
        assert (["image"] if has_image else []) == closed
        assert {} == family._jailed

    def test_another_jailer_holds_the_ids_that_are_ours_too(self, family: Any) -> None:
        first = family.jailer()
        assert family.jailer() is first
        assert [("hold", None, [11]), ("hold", None, [12])] == first.told
        family._hold(13)
        assert ("hold", None, [13]) == first.told[-1]
        first.owner = os.getppid()
        second = family.jailer()
        assert second is not first, "it is our parent's"
        second.alive = False
        third = family.jailer()
        assert third is not second
        assert [("hold", None, [11]), ("hold", None, [12])] == third.told
        for each in (first, second):
            each.ended.set()

    def test_the_end_of_a_jailer_is_that_of_its_sandboxes_alone(self, family: Any) -> None:
        mine, other = Jailer("jailer", ""), Jailer("jailer", "")
        ended: list[str] = []
        for name, jailer in (("a", mine), ("b", other), ("c", mine)):
            family._jailed[name] = SimpleNamespace(
                jailer=jailer, end_unwatched=lambda name=name: ended.append(name),
                terminate=lambda name=name: family._jailed.pop(name),
            )  # fmt: skip
        mine.ended.set()
        family._watch(mine)
        assert ["a", "c"] == ended
        assert (True, False) == (mine.is_released, other.is_released)
        jailer = family.jailer()
        family.close()
        assert ({}, False, None) == (family._jailed, jailer.alive, family._jailer)

    def test_a_jail_that_did_not_come_up_is_ended(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        with subprocess.Popen(["sleep", "1000"]) as process:
            jails.kill(os.pidfd_open(process.pid))
            assert -9 == process.wait(20)
        assert before == len(os.listdir("/proc/self/fd"))

    def test_the_code_of_the_agent_is_handed_over_from_its_beginning(self) -> None:
        found: list[Any] = []

        def ask(verb: str, wanted: Any, fds: list[int]) -> Any:
            found.append((verb, wanted, os.read(fds[0], 4)))
            return b"", [os.dup(fds[0])]

        before = len(os.listdir("/proc/self/fd"))
        jailer: Any = SimpleNamespace(ask=ask)
        image = jails.ask_for_process_image(jailer, {"x": 1})
        [(verb, wanted, beginning)] = found
        assert ("process_image", {"x": 1}, 4) == (verb, wanted, len(beginning))
        del image
        assert before <= len(os.listdir("/proc/self/fd")) <= before + 1


def test_a_secret_that_differs_is_not_kept_outside() -> None:
    spec = SandboxSpec(secrets={"A": "x"})
    assert "secrets" == saving.kept_inside(spec, SandboxSpec(), network=True)
    assert "" == saving.kept_inside(spec, SandboxSpec(secrets={"A": "x"}), network=True)
