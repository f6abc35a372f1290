"""The gVisor backend: sandboxes built ahead, images, disks, and what is given back where one is not made."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends.gvisor import backend as module
from ringfence.backends.gvisor import places, posture, report, root, runsc, snapshots, views
from ringfence.backends.gvisor import plan as planning
from ringfence.backends.gvisor.ahead import Ahead
from ringfence.backends.gvisor.backend import GvisorBackend
from ringfence.backends.gvisor.draft import Draft
from ringfence.backends.gvisor.posture import GvisorReader
from ringfence.backends.gvisor.sandbox import GvisorNetwork
from ringfence.backends.gvisor.views import Views
from ringfence.backends.gvisor.warm import GvisorWarm, kind_of
from ringfence.backends.local.agents import agent_code
from ringfence.backends.local.answers import Refused
from ringfence.backends.local.host.facts import host
from ringfence.backends.local.mounts import disks, images, template, trusted
from ringfence.errors import (
    IsolationError,
    NetworkPolicyError,
    ResourceExhausted,
    RingfenceError,
    Unsupported,
)
from ringfence.launcher import wire
from ringfence.model import NetworkPolicy, NetworkRule
from ringfence.model import capabilities as can
from ringfence.model.capabilities import Protection
from ringfence.model.limits import Limits
from ringfence.model.mount import Mount
from ringfence.model.spec import SandboxSpec
from ringfence.model.state import State

pytestmark = pytest.mark.anyone
PATIENCE_S = 30.0
SPEC = SandboxSpec(tier="strong")


class Waiting:
    """A sandbox that waits, as `GvisorWarm` sees it."""

    def __init__(self, spec: SandboxSpec = SPEC) -> None:
        self.id, self.spec, self.state = "gvisor-1", spec, State.PROVISIONED
        self.begun: list[SandboxSpec] = []
        self.ended = threading.Event()

    def begin(self, spec: SandboxSpec) -> None:
        self.begun.append(spec)

    def terminate(self) -> None:
        self.state = State.TERMINATED
        self.ended.set()


def warm_of(sandbox: Any) -> GvisorWarm:
    return GvisorWarm(sandbox)


class Jailer:
    """A jailer that refuses all, and keeps what it was asked."""

    alive = True

    def __init__(self, problem: Exception | None = None) -> None:
        self.owner, self.asked = os.getpid(), list[Any]()
        self.problem = problem or Refused(errno.EPERM, "clone: no")

    def ask(self, verb: str, argument: Any, _fds: Any = (), **_how: Any) -> Any:
        self.asked.append((verb, argument))
        raise self.problem if verb == "create" else Refused(errno.EPERM, "not here")

    def tell(self, *_told: Any) -> None:
        pass

    note = tell

    def close(self) -> None:
        pass


class Ids:
    def __init__(self) -> None:
        self.taken, self.returned = list[int](), list[int]()

    def take(self) -> int:
        self.taken.append(500_000 + len(self.taken) * 1000)
        return self.taken[-1]

    def give_back(self, first: int) -> None:
        self.returned.append(first)

    def locks(self) -> list[int]:
        return []

    def close(self) -> None:
        pass


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "runsc"
    path.write_text("#!/bin/sh\necho runsc version release-20250101.0\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def backend(program: str) -> Iterator[GvisorBackend]:
    made: Any = GvisorBackend(path=program, own_pages=False)
    made._jailer, made._host_ids = Jailer(), Ids()
    made.runsc()
    before = len(os.listdir("/proc/self/fd"))
    yield made
    made.close()
    assert before == len(os.listdir("/proc/self/fd"))


class TestBuiltAhead:
    def test_a_create_takes_what_was_built_and_has_the_next_one_followed(
        self, program: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend: Any = GvisorBackend(path=program, prebuilt=True, own_pages=False)
        assert backend._ahead._build == backend.prewarm
        done: list[Any] = []
        ready: list[Any] = ["built"]

        def take(spec: SandboxSpec) -> Any:
            done.append(("take", spec))
            return ready.pop() if ready else None

        def provision(_spec: SandboxSpec, content: int) -> Any:
            done.append(("make", content))
            return "made"

        backend._ahead = SimpleNamespace(
            take=take,
            follow=lambda spec: done.append(("follow", spec)),
            close=lambda: done.append("close"),
        )
        monkeypatch.setattr(backend, "_provision", provision)
        assert ["built", "made"] == [backend.provision(SPEC) for _ in range(2)]
        assert [
            ("take", SPEC), ("follow", SPEC), ("take", SPEC), ("make", -1), ("follow", SPEC),
        ] == done  # fmt: skip
        backend.close()
        assert "close" == done[-1]

    def test_none_is_built_ahead_unless_it_is_asked_for(self, backend: GvisorBackend) -> None:
        assert backend._ahead is None

    def test_what_belongs_to_one_client_is_not_made_for_nobody(
        self, backend: GvisorBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[Any] = []

        def provision(spec: SandboxSpec, content: int) -> Any:
            made.append((spec, content))
            return Waiting(spec)

        monkeypatch.setattr(backend, "_provision", provision)
        with pytest.raises(Unsupported, match="belong to one client") as refusal:
            backend.prewarm(SPEC.altered(secrets={"A": "x"}))
        assert ("prewarm", []) == (refusal.value.operation, made)
        assert backend.prewarm(SPEC).alive
        assert [(SPEC, -1)] == made

    def test_the_end_of_the_backend_is_that_of_its_views_and_of_one_ahead(
        self, program: str
    ) -> None:
        done: list[str] = []
        backend: Any = GvisorBackend(path=program, prebuilt=True, own_pages=False)
        backend._ahead = SimpleNamespace(close=lambda: done.append("ahead"))
        sandbox = SimpleNamespace(terminate=lambda: done.append("sandbox"))
        backend._jailed["x"] = sandbox
        backend._views += [SimpleNamespace(close=lambda: done.append("view")) for _ in range(2)]
        backend.close()
        assert ["ahead", "sandbox", "view", "view"] == done[:4], "who sees by one ends before it"
        assert [] == backend._views

    def test_one_that_is_built_while_it_closes_is_discarded(self) -> None:
        go_on, made = threading.Event(), Waiting()

        def build(_spec: SandboxSpec) -> GvisorWarm:
            assert go_on.wait(PATIENCE_S)
            return warm_of(made)

        ahead = Ahead(build)
        for _ in range(2):
            ahead.follow(SPEC)
        assert ahead._next is not None
        closing = threading.Thread(target=ahead.close)
        closing.start()
        go_on.set()
        closing.join(PATIENCE_S)
        assert made.ended.is_set()
        assert ahead._next is None

    def test_whoever_was_quicker_keeps_it_and_one_left_is_discarded(self) -> None:
        ahead, sandbox = Ahead(lambda _spec: warm_of(Waiting())), Waiting()
        one: Any = SimpleNamespace(warm=warm_of(sandbox))
        ahead._let_go(one)
        assert not sandbox.ended.is_set(), "it was taken meanwhile"
        ahead._next = one
        ahead._let_go(one)
        assert sandbox.ended.is_set()
        assert ahead._next is None
        one.warm = None
        ahead._next = one
        ahead._let_go(one)

    @pytest.mark.parametrize("problem", [OSError(24, "too many files"), IsolationError("no")])
    def test_one_that_cannot_be_built_hinders_nobody(self, problem: Exception) -> None:
        def build(_spec: SandboxSpec) -> GvisorWarm:
            raise problem

        ahead = Ahead(build)
        one: Any = SimpleNamespace(kind=SPEC, warm=None, built=threading.Event())
        one.wanted = threading.Event()
        one.wanted.set()
        ahead._make(one)
        assert one.built.is_set()
        assert one.warm is None

    def test_one_of_an_image_is_claimed_as_the_image_says(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        full = SPEC.altered(image="sha256:a", user="1000", env={"HOME": "/x"})
        known: dict[str, SandboxSpec | None] = {"debian": full, "gone": None}
        monkeypatch.setattr(images, "resolved", lambda spec: known[spec.image])
        sandbox = Waiting(full)
        waiting = warm_of(sandbox)
        assert not waiting.fits(SPEC), "the template is no image"
        assert not waiting.fits(SPEC.altered(image="gone"))
        assert waiting.fits(SPEC.altered(image="debian"))
        waiting.claim(SPEC.altered(image="debian"))
        assert [full] == sandbox.begun
        assert kind_of(full) != kind_of(SPEC)
        assert kind_of(SPEC) == kind_of(SPEC.altered(ttl_s=5.0, labels={"a": "b"}))

    def test_one_may_be_claimed_under_its_own_id_but_no_other(self) -> None:
        sandbox = Waiting()
        warm_of(sandbox).claim(SPEC.altered(id="gvisor-1"))
        assert 1 == len(sandbox.begun)


class TestMaking:
    def spec(self, **changes: Any) -> SandboxSpec:
        return SPEC.altered(id="mine", **changes)

    def test_a_disk_and_an_authority_are_asked_for_and_let_go_where_none_is_made(
        self, backend: GvisorBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[Any] = []
        disk = disks.Disk(template.tree("/usr", template.READ_ONLY), os.open("/", os.O_PATH))

        def image_for(*given: Any) -> Any:
            made.append(given)
            return disk

        def trusted_for(policy: Any, egress: Any) -> Any:
            made.append((policy, egress))
            return SimpleNamespace(steps=[("file", "/etc/ca", b"x", 0o644)])

        monkeypatch.setattr(module, "sizes", lambda *_given, **how: self.size(**how))
        monkeypatch.setattr(disks, "image_for", image_for)
        monkeypatch.setattr(trusted, "trusted_for", trusted_for)
        backend._egress = lambda: "egress"  # type: ignore[assignment]
        policy = NetworkPolicy(rules=(NetworkRule("a.test", "443", methods=("GET",)),))
        spec = self.spec(network=policy)
        with pytest.raises(RingfenceError, match="clone: no"):
            backend.provision(spec)
        [(kind, sandbox_id, size, _first, same), (asked, egress)] = made
        assert ("gvisor", "mine", spec) == (kind, sandbox_id, same)
        assert (policy, "egress") == (asked, egress)
        jailer: Any = backend._jailer
        ids: Any = backend._host_ids
        [plan] = [argument for verb, argument in jailer.asked if verb == "create"]
        tree = plan["trees"][plan["guest"]["disk"]]
        assert (1, True) == (tree["inode"], tree["fd"] >= 0), "the jailer gets a descriptor"
        assert ("file", "/etc/ca", b"x", 0o644) in plan["guest"]["steps"]
        assert -1 == disk.fd, "it is closed"
        assert ids.taken == ids.returned
        assert size.most_pids == runsc.safe_pids()

    def size(self, **how: Any) -> Any:
        return SimpleNamespace(
            on_disk=True, pids=20, disk_bytes=1 << 26, inodes=999, memory_bytes=1 << 27,
            open_files=64, **how,
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("number", "expected"), [(errno.EMFILE, ResourceExhausted), (errno.EIO, OSError)]
    )
    def test_too_few_descriptors_are_told_with_the_way_out(
        self, backend: GvisorBackend, number: int, expected: type[Exception]
    ) -> None:
        jailer: Any = backend._jailer
        jailer.problem = OSError(number, "no")
        with pytest.raises(expected):
            backend.provision(self.spec())
        assert set() == backend._making

    @pytest.mark.parametrize("given", [None, "another"])
    def test_a_snapshot_is_kept_where_it_is_asked_for(
        self, backend: GvisorBackend, monkeypatch: pytest.MonkeyPatch, given: Any
    ) -> None:
        monkeypatch.setattr(backend, "catalogue", lambda: "own")
        monkeypatch.setattr(snapshots, "save", lambda *what: what)
        monkeypatch.setattr(snapshots, "save_with_memory", lambda *what: what)
        sandbox: Any = "sandbox"
        expected: Any = ("sandbox", given or "own", {"a": "b"})
        assert expected == backend.snapshot(sandbox, {"a": "b"}, given)
        assert ("sandbox", "own", {"a": "b"}) == backend.checkpoint(sandbox, {"a": "b"})

    def test_whether_pages_are_own_is_the_callers_before_the_environments(
        self, program: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for value, is_on in (("", True), ("OFF", False), ("0", False), ("yes", True)):
            monkeypatch.setenv("RINGFENCE_OWN_PAGES", value)
            assert is_on == views.is_on() == GvisorBackend(path=program)._own_pages
            assert GvisorBackend(path=program, own_pages=True)._own_pages
            assert not GvisorBackend(path=program, own_pages=False)._own_pages

    def test_a_jail_that_has_ended_is_heard_out(self) -> None:
        ours, theirs = wire.socketpair()
        theirs.close()
        module._say_head_is_written(ours)
        module._tell(ours, {})  # type: ignore[typeddict-item]
        ours.close()


class TestViews:
    def test_an_error_that_is_no_refusal_is_not_gone_on_without(self) -> None:
        jailer: Any = Jailer()

        def ask(*_asked: Any, **_how: Any) -> Any:
            raise ResourceExhausted("no memory")

        jailer.ask = ask
        owner: Any = SimpleNamespace(host_ids=Ids)
        with pytest.raises(ResourceExhausted):
            Views(owner, jailer, wanted=True)

    def test_a_server_that_ends_before_it_serves_is_gone_on_without(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        jailer: Any = Jailer()
        owner: Any = SimpleNamespace(host_ids=Ids)
        before = len(os.listdir("/proc/self/fd"))
        made = Views(owner, jailer, wanted=False)
        made.why = ""
        made._control, theirs = wire.socketpair()
        theirs.close()
        assert "the file server exited during startup" == made.why_not(None)
        assert made._control is None
        assert before == len(os.listdir("/proc/self/fd"))
        assert "the file server exited during startup" == made.why_not(None), "and not asked again"

    def test_all_that_a_guest_may_see_is_shown_once(self) -> None:
        shown = views._shown()
        tops = [tree["source"] for tree in shown]
        assert len(tops) == len({*tops})
        wanted = (
            *agent_code.interpreter()[1], *agent_code.foreign_trees(), *template.python_environment()
        )  # fmt: skip
        for source, *_more in wanted:
            assert any(source == top or source.startswith(f"{top}/") for top in tops)
        assert {template.READ_ONLY} == {tree["attributes"] for tree in shown}
        stamps = views._stamp(shown)
        assert [(os.stat(top).st_dev, os.stat(top).st_ino) for top in tops] == stamps

    def test_a_directory_that_was_replaced_is_not_what_it_shows(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        top = tmp_path / "shown"
        top.mkdir()
        shown = [template.tree(str(top), template.READ_ONLY)]
        monkeypatch.setattr(views, "_shown", lambda: [*shown])
        made: Any = object.__new__(Views)
        made._pidfd = os.open("/", os.O_PATH)
        made._shown, made._stamp = [*shown], views._stamp(shown)
        assert made.is_current
        (top / "more").mkdir()
        assert made.is_current, "its content may change"
        top.rename(tmp_path / "before")
        top.mkdir()
        assert not made.is_current
        made._stamp = views._stamp(shown)
        shown.append(template.tree("/", template.READ_ONLY))
        assert not made.is_current
        os.close(made._pidfd)

    def test_its_jail_has_one_id_that_is_nobodys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here = SimpleNamespace(**{**vars(host()), "trusted_root": True})
        monkeypatch.setattr(views, "host", lambda: here)
        trees = views._shown()[:1]
        plan = views._plan(trees, 700_000)
        assert ("0 700000 1", "0 700000 1") == (plan["uid_map"], plan["gid_map"])
        assert plan["keep_capabilities"]
        assert plan["filter"], "it has a filter of its own"
        assert [("bind", trees[0]["source"], 0)] == plan["guest"]["steps"]

    def test_without_a_server_it_lives_as_long_as_its_jailer(self) -> None:
        jailer: Any = Jailer()
        owner: Any = SimpleNamespace(host_ids=Ids)
        made = Views(owner, jailer, wanted=False)
        assert (True, True) == (made.alive, made.is_current)
        jailer.alive = False
        assert not made.alive


class TestImages:
    def draft(self, tmp_path: Path, **changes: Any) -> Draft:
        (tmp_path / "root").mkdir()
        image: Any = SimpleNamespace(id="sha256:a")
        held = images.Held(image, str(tmp_path / "root"), os.open("/", os.O_PATH))
        held.owner = 3, 4
        return Draft(SPEC.altered(**changes), "mine", 1000, 500_000, held)

    @pytest.mark.parametrize("is_root", [True, False])
    def test_an_images_files_are_the_guests_users_and_come_by_a_descriptor(
        self, tmp_path: Path, program: str, is_root: bool
    ) -> None:
        draft = self.draft(tmp_path, mounts=(Mount("/data/x", str(tmp_path)),))
        here: Any = SimpleNamespace(**{**vars(host()), "trusted_root": is_root})
        size: Any = SimpleNamespace(
            pids=20, disk_bytes=1 << 26, inodes=99, memory_bytes=1 << 27, open_files=64
        )
        try:
            plan = planning.make_plan(
                draft, here, runsc.find(program), size, has_content=False, process_image_bytes=9
            )
            below = plan["guest"]["image"]
            tree = plan["trees"][below]
            assert str(tmp_path / "root") == tree["source"]
            if is_root:
                assert os.path.samestat(os.fstat(draft.fds[tree["fd"]]), os.stat(tree["source"]))
                assert ("3 500000 1", "4 500000 1") == (tree["idmap"], tree["idmap_gid"])
            else:
                assert (-1, "") == (tree["fd"], tree["idmap"])
            sources = {
                plan["trees"][step[2]]["source"] for step in draft.guest if step[0] == "bind"
            }
            assert {each[0] for each in agent_code.foreign_trees()} <= sources
            assert "" == plan["guest"]["process_image"], "a stranger's files start no copied agent"
            verbs = [step[0] for step in draft.guest]
            assert "mount_point" not in verbs, "gVisor makes it itself"
            assert ("protect", f"{places.ROOTFS}/etc") not in plan["after"]
        finally:
            draft.close()
            assert draft.image is not None
            draft.image.close()

    def test_the_view_has_what_the_host_shows_and_not_what_the_user_mounts(
        self, tmp_path: Path, program: str
    ) -> None:
        draft = Draft(SPEC.altered(mounts=(Mount("/data", str(tmp_path)),)), "mine", 1000, 500_000)
        told: list[Any] = []

        def plan_of(*given: Any) -> Any:
            told.append(given)
            return "a view"

        seen: Any = SimpleNamespace(plan=plan_of)
        size: Any = SimpleNamespace(
            pids=20, disk_bytes=1 << 26, inodes=99, memory_bytes=1 << 27, open_files=64
        )
        try:
            plan: Any = planning.make_plan(
                draft, host(), runsc.find(program), size, has_content=False, views=seen, tenant="t"
            )
            assert "a view" == plan["view"]
            [(same, tenant, shown, below)] = told
            assert (draft, "t", -1) == (same, tenant, below)
            sources = {draft.trees[i]["source"] for i in shown}
            assert str(tmp_path) not in sources
            assert "/usr" in sources or any(each.startswith("/usr/") for each in sources)
            assert "/dev/null" not in sources, "gVisor's own program sees these"
        finally:
            draft.close()

    def test_an_environment_of_the_callers_is_shown_where_it_is_asked_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wanted = list(agent_code.interpreter()[1])
        more = [*wanted[:1], ("/usr/lib", "/their/python", template.READ_ONLY)]
        monkeypatch.setattr(template, "python_environment", lambda: more)
        counts = []
        for spec in (SPEC, SPEC.altered(python_env=True)):
            draft: Any = SimpleNamespace(spec=spec, image=None, guest=[], trees=[])
            root._show_python(draft)
            counts.append(len(draft.guest))
            assert spec.python_env == ("/their/python" in [step[1] for step in draft.guest])
        assert [len(wanted), len(wanted) + 1] == counts, "each once"

    def test_a_working_directory_is_made_where_nobody_has_one(self) -> None:
        for workdir, made in (("/work/deep", True), (None, False)):
            draft: Any = SimpleNamespace(
                spec=SPEC.altered(workdir=workdir) if workdir else SPEC,
                mounts=[],
                image=None,
                guest=[],
            )
            root._add_mounts(draft)
            draft.guest.clear()
            root._make_workdir(draft)
            assert made == bool(draft.guest)


class TestReading:
    def reader(self, **sandbox: Any) -> Any:
        made: Any = GvisorReader.__new__(GvisorReader)
        sizes = SimpleNamespace(pids=20, open_files=64, disk_bytes=1 << 20, inodes=99)
        made.sandbox = SimpleNamespace(
            sizes=sizes, group=SimpleNamespace(paths={}, version=0), **sandbox
        )
        made.bounds = (20, 64, 1 << 20, 99)
        return made

    def test_bounds_are_those_asked_for(self) -> None:
        made = self.reader()
        for name in ("pids_limit", "open_files_limit", "disk_quota", "inode_quota"):
            assert "enforced" == getattr(made, name)()[0]
        for i, name in ((1, "open_files_limit"), (3, "inode_quota")):
            bounds = [20, 64, 1 << 20, 99]
            bounds[i] += 1
            made.bounds = tuple(bounds)
            assert "missing" == getattr(made, name)()[0]

    @pytest.mark.parametrize("more", [None, 1, 2])
    def test_processes_of_the_host_are_told_of_where_a_cgroup_counts_them(
        self, more: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = None if more is None else runsc.host_pids(20) + more
        monkeypatch.setattr(posture, "pids_limit", lambda _group: found)
        made = self.reader()
        assert (more == 1) == ("of the host's by cgroup" in made.pids_limit()[1])
        made.bounds = (21, 64, 1 << 20, 99)
        assert "missing" == made.pids_limit()[0], "the guest's own is the first"

    def test_a_disk_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = SimpleNamespace(pids=1, open_files=2, disk_bytes=3, inodes=4)
        monkeypatch.setattr(posture, "Inspection", lambda _sandbox: seen)
        for disk in (None, object()):
            sandbox: Any = SimpleNamespace(disk=disk)
            made = GvisorReader(sandbox)
            assert (1, 2, 3, 4) == made.bounds
            assert (disk is not None) == ("disk" in made.files)


class TestReports:
    @pytest.mark.parametrize("is_root", [True, False])
    def test_what_it_can_is_found_by_doing_it(
        self, is_root: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(report, "host", lambda: SimpleNamespace(trusted_root=is_root))
        done: list[Any] = []
        problem: list[Exception] = []

        def attach(mount: Mount) -> None:
            done.append(mount)
            if problem:
                raise problem[0]

        sandbox: Any = SimpleNamespace(
            network=SimpleNamespace(change=done.append), attach=attach,
            program=SimpleNamespace(restores="a host like this"),
        )  # fmt: skip
        limits = tuple(
            Protection(name, "enforced", "") for name in (can.MEMORY_LIMIT, can.CPU_LIMIT)
        )

        def abilities() -> Any:
            listed = list(report._abilities(sandbox, limits))
            found = {each.name: each for each in listed}
            assert len(found) == len(listed), "each once"
            return found

        found = abilities()
        memory = found[can.MEMORY_SNAPSHOT]
        assert (is_root, True) == (memory.available, bool(memory.reason))
        assert found[can.ATTACH].available
        assert found[can.NETWORK_HOSTS].available
        for name in (can.FORK, can.GPU, can.NETWORK_UNRESTRICTED, can.IO_LIMIT):
            assert not found[name].available
        assert 2 == len(done)
        for each in (Unsupported("not this release"), OSError(22, "no")):
            problem[:] = [each]
            attached = abilities()[can.ATTACH]
            assert not attached.available
            assert attached.reason.startswith("a mount was refused: ")


def test_a_policy_is_taken_into_the_jail_and_its_sockets_out() -> None:
    entered: list[Any] = []

    def enter(verb: str, request: Any, fds: Any) -> Any:
        entered.append((verb, request, fds))
        return b"", [3, 4]

    network: Any = GvisorNetwork.__new__(GvisorNetwork)
    network._sandbox = SimpleNamespace(enter=enter, has_network=False, spec=SPEC)
    assert [3, 4] == network._enter("plan")
    assert [("network", {"network": "plan"}, [])] == entered
    with pytest.raises(NetworkPolicyError, match="without network"):
        network.check(NetworkPolicy.parse("a.test"))
    network._sandbox.has_network = True
    network.check(NetworkPolicy.parse("a.test"))
    with pytest.raises(NetworkPolicyError, match="the host's own network"):
        network.check(NetworkPolicy.parse("unrestricted"))


def test_limits_are_asked_for_beyond_what_the_guest_may_have(
    backend: GvisorBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    real = backend._plan_limits

    def plan_limits(plan: Any, spec: SandboxSpec, *most: int) -> Any:
        asked.append(most)
        return real(plan, spec, *most)

    monkeypatch.setattr(backend, "_plan_limits", plan_limits)
    with pytest.raises(RingfenceError):
        backend.provision(SPEC.altered(limits=Limits(pids=20, memory_bytes=128 << 20)))
    assert [((128 << 20) + runsc.KERNEL_BYTES, runsc.host_pids(20))] == asked
