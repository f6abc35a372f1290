"""Host-side parts of the gVisor backend: prebuilt sandboxes, mounts of the root, ids, what is closed."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends.gvisor import ahead as module
from ringfence.backends.gvisor import asked, attach, places, plan, root, snapshots, warm
from ringfence.backends.gvisor import runsc as programs
from ringfence.backends.gvisor import sandbox as gvisor_sandbox
from ringfence.backends.gvisor.ahead import Ahead
from ringfence.backends.gvisor.sandbox import GvisorSandbox
from ringfence.backends.gvisor.warm import GvisorWarm, is_bindable, kind_of
from ringfence.backends.local import journal
from ringfence.backends.local.host import accounts
from ringfence.backends.local.host.facts import host
from ringfence.errors import InvalidRequest, IsolationError, LifecycleError, Unsupported
from ringfence.model.limits import Limits
from ringfence.model.mount import READ_ONLY, READ_WRITE, Mount
from ringfence.model.net.network import NetworkPolicy
from ringfence.model.spec import SandboxSpec
from ringfence.model.state import State

pytestmark = pytest.mark.anyone
PATIENCE_S = 30.0
SPEC = SandboxSpec(tier="strong")
MOUNT = Mount("/data", "/srv")


class Sandbox:
    """A sandbox that waits."""

    def __init__(self, spec: SandboxSpec = SPEC) -> None:
        self.id, self.spec, self.state = "gvisor-1", spec, State.PROVISIONED
        self.begun: list[SandboxSpec] = []
        self.ended = threading.Event()
        self.fails = False

    def begin(self, spec: SandboxSpec) -> None:
        if self.fails:
            raise IsolationError("it has just ended")
        self.begun.append(spec)

    def terminate(self) -> None:
        self.state = State.TERMINATED
        self.ended.set()


def warm_of(sandbox: Sandbox) -> GvisorWarm:
    made: Any = sandbox
    return GvisorWarm(made)


class TestWarm:
    @pytest.mark.parametrize(
        "change",
        [
            {"env": {"A": "1"}},
            {"labels": {"a": "b"}},
            {"limits": Limits(wall_time_s=5.0)},
            {"limits": Limits(output_bytes=4096)},
        ],
    )
    def test_what_the_host_alone_keeps_is_bound_by_the_claim(self, change: dict[str, Any]) -> None:
        sandbox = Sandbox()
        waiting, wanted = warm_of(sandbox), SPEC.altered(**change)
        assert waiting.alive
        assert waiting.fits(wanted)
        waiting.claim(wanted)
        assert [wanted] == sandbox.begun
        assert not waiting.alive
        with pytest.raises(LifecycleError):
            waiting.claim(wanted)
        waiting.discard()
        assert not sandbox.ended.is_set(), "it is its client's now"

    @pytest.mark.parametrize(
        "change",
        [
            {"user": "root"},
            {"network": NetworkPolicy.parse("api.test")},
            {"mounts": (MOUNT,)},
            {"secrets": {"A": "x"}},
            {"memory_dir": "/srv/m"},
            {"limits": Limits(pids=77)},
            {"limits": Limits(memory_bytes=128 << 20)},
            {"image": "debian"},
            {"deny": ("/srv",)},
            {"workdir": "/work"},
            {"id": "mine"},
        ],
    )
    def test_what_gvisor_is_told_at_its_start_is_not(self, change: dict[str, Any]) -> None:
        sandbox = Sandbox()
        wanted = SPEC.altered(**change)
        assert "id" in change or not warm_of(sandbox).fits(wanted)
        with pytest.raises((InvalidRequest, Unsupported)):
            warm_of(sandbox).claim(wanted)
        assert sandbox.ended.is_set()
        assert [] == sandbox.begun

    def test_one_that_ended_or_fails_at_the_claim_is_no_ones(self) -> None:
        sandbox = Sandbox()
        sandbox.fails = True
        with pytest.raises(IsolationError):
            warm_of(sandbox).claim(SPEC)
        assert sandbox.ended.is_set()
        with pytest.raises(LifecycleError):
            warm_of(sandbox).claim(SPEC)
        assert not warm_of(sandbox).alive

        def meanwhile() -> None:
            raise LifecycleError("cancelled")

        other = Sandbox()
        with pytest.raises(LifecycleError, match="cancelled"):
            warm_of(other).claim(SPEC, meanwhile)
        assert other.ended.is_set()
        third = Sandbox()
        waiting = warm_of(third)
        waiting.discard()
        assert third.ended.is_set()

    def test_what_belongs_to_one_client_cannot_wait(self) -> None:
        for change in ({"mounts": (MOUNT,)}, {"secrets": {"A": "x"}}, {"memory_dir": "/srv/m"}):
            spec = SPEC.altered(**change)
            assert not is_bindable(spec)
            with pytest.raises(Unsupported):
                warm.check(spec)
        warm.check(SPEC)
        assert kind_of(SPEC) == kind_of(SPEC.altered(env={"A": "1"}))


class TestAhead:
    def ahead(self) -> tuple[Ahead, list[Sandbox]]:
        made: list[Sandbox] = []

        def build(spec: SandboxSpec) -> GvisorWarm:
            made.append(Sandbox(spec))
            return warm_of(made[-1])

        return Ahead(build), made

    def built(self, ahead: Ahead) -> None:
        assert ahead._next is not None
        assert ahead._next.built.wait(PATIENCE_S)

    def test_the_second_create_of_a_kind_has_the_next_built_and_it_is_taken_once(self) -> None:
        ahead, made = self.ahead()
        ahead.follow(SPEC)
        assert ahead._next is None
        ahead.follow(SPEC.altered(env={"A": "1"}))
        self.built(ahead)
        ahead.follow(SPEC)
        assert 1 == len(made), "one at a time"
        assert ahead.take(SPEC.altered(user="root")) is None
        wanted = SPEC.altered(env={"B": "2"})
        assert ahead.take(wanted) is made[0]  # type: ignore[comparison-overlap]
        assert [wanted] == made[0].begun
        assert ahead.take(SPEC) is None
        ahead.close()
        assert not made[0].ended.is_set()

    @pytest.mark.parametrize("pause_s", [4.0, 6.0])
    def test_creates_far_apart_are_no_burst(self, pause_s: float) -> None:
        ahead, _made = self.ahead()
        ahead.follow(SPEC)
        ahead._last_s -= pause_s
        ahead.follow(SPEC)
        assert (pause_s < module.KEEP_S) == (ahead._next is not None)
        ahead.close()

    def test_another_kind_or_a_closed_one_builds_nothing(self) -> None:
        ahead, made = self.ahead()
        ahead.follow(SPEC)
        ahead.follow(SPEC.altered(user="root"))
        ahead.close()
        ahead.follow(SPEC.altered(user="root"))
        assert ahead._next is None
        assert [] == made

    @pytest.mark.parametrize(
        "change",
        [
            {"id": "x"},
            {"image": "debian"},
            {"network": NetworkPolicy.parse("a.test")},
            {"mounts": (MOUNT,)},
            {"disk_root": True, "limits": Limits(disk_bytes=1 << 30)},
        ],
    )
    def test_what_may_differ_by_the_next_create_is_not_prebuilt(self, change: Any) -> None:
        ahead, made = self.ahead()
        spec = SPEC.altered(**change)
        for _ in range(3):
            ahead.follow(spec)
            assert ahead.take(spec) is None
        assert [] == made

    def test_one_that_nobody_comes_for_is_discarded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ahead, made = self.ahead()
        ahead.follow(SPEC)
        monkeypatch.setattr(module, "KEEP_S", 0.05)
        ahead.follow(SPEC)
        while not made:
            os.sched_yield()
        assert made[0].ended.wait(PATIENCE_S)
        assert ahead.take(SPEC) is None

    def test_one_that_waits_is_discarded_by_closing_and_never_a_parents(self) -> None:
        for owner, is_ended in ((os.getpid(), True), (1, False)):
            ahead, made = self.ahead()
            ahead.follow(SPEC)
            ahead.follow(SPEC)
            self.built(ahead)
            assert ahead._next is not None
            ahead._next.owner = owner
            if not is_ended:
                assert ahead.take(SPEC) is None
            ahead.close()
            assert is_ended == made[0].ended.is_set()

    def test_one_that_cannot_be_built_or_has_ended_is_none(self) -> None:
        def build(_spec: SandboxSpec) -> GvisorWarm:
            raise IsolationError("no")

        ahead = Ahead(build)
        for _ in range(2):
            ahead.follow(SPEC)
        assert ahead.take(SPEC) is None
        other, made = self.ahead()
        for _ in range(2):
            other.follow(SPEC)
        self.built(other)
        made[0].terminate()
        assert other.take(SPEC) is None

    @pytest.mark.parametrize(
        ("value", "is_on"), [("", True), ("on", True), ("0", False), ("OFF", False), ("no", False)]
    )
    def test_the_environment_switches_it_off(
        self, value: str, is_on: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RINGFENCE_PREBUILT", value)
        assert is_on == module.is_on()


class TestIds:
    @pytest.mark.parametrize("uid", [0, 1, 2, 1000, 65534, 65535])
    @pytest.mark.parametrize("several", [True, False])
    def test_every_id_is_mapped_once_and_the_users_is_gvisors_own(
        self, uid: int, several: bool
    ) -> None:
        inside: dict[int, int] = {}
        for line in plan.id_map(uid, several=several).splitlines():
            first, below, count = map(int, line.split())
            for i in range(count):
                assert first + i not in inside
                inside[first + i] = below + i
        assert 0 == inside[uid]
        assert len({*inside.values()}) == len(inside)
        if several:
            assert set(range(65536)) == {*inside} == {*inside.values()}
        elif uid:
            assert 1 == inside[0]


def test_an_agent_bounds_what_it_starts() -> None:
    draft: Any = SimpleNamespace(uid=1000, spec=SPEC)
    here: Any = SimpleNamespace(trusted_root=True)
    size: Any = SimpleNamespace(
        open_files=99, disk_bytes=1 << 26, inodes=9, pids=7, memory_bytes=1 << 27
    )

    def limits() -> dict[int, tuple[int, int]]:
        told = plan.settings(draft, here, size)
        assert (7, 1 << 27, 1000) == (told["pids"], told["memory_bytes"], told["uid"])
        return {which: (soft, hard) for which, soft, hard in told["rlimits"]}

    expected = {
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_NOFILE: (99, 99),
        resource.RLIMIT_DATA: (1 << 27, 1 << 27),
        resource.RLIMIT_NPROC: (7, 7),
    }
    assert expected == limits()
    draft.spec = SPEC.altered(limits=Limits(disk_bytes=1 << 26, cpus=1.0))
    assert expected | {resource.RLIMIT_FSIZE: (1 << 26, 1 << 26)} == limits()
    assert not plan.settings(draft, here, size)["counts_cpu"]


class TestMounts:
    @pytest.mark.parametrize(
        ("path", "expected"),
        [
            ("/home/x", "/rootfs/home/x"),
            ("/data", "/place/1"),
            ("/data/deep/x", "/place/2/x"),
            ("/data2", "/rootfs/data2"),
        ],
    )
    def test_a_path_is_found_where_the_innermost_mount_has_it(
        self, path: str, expected: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(places, "ROOTFS", "/rootfs")
        more: Any = SimpleNamespace(places={"/data": "/place/1", "/data/deep": "/place/2"})
        assert expected == attach._in_jail(more, path)

    @pytest.mark.parametrize("fails", [True, False])
    def test_a_mount_that_cannot_be_shown_is_undone(
        self, fails: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        entered: list[Any] = []
        sandbox: Any = SimpleNamespace(shows_later=False)
        sandbox.enter = lambda verb, request, fds: entered.append((verb, request, fds))

        def run(_sandbox: Any, _program: Any) -> None:
            if fails:
                raise IsolationError("inside")

        monkeypatch.setattr(attach, "_run", run)
        place = f"{places.MOUNTS}/3"
        if fails:
            with pytest.raises(IsolationError):
                attach._show(sandbox, place, "/data", is_dir=True)
            assert [("unmount", {"path": place}, [])] == entered
        else:
            attach._show(sandbox, place, "/data", is_dir=True)
            assert [] == entered
        assert fails != sandbox.shows_later

    @pytest.mark.parametrize(
        ("is_root", "has_network", "shows_later", "is_saved"),
        [
            (True, False, False, True),
            (False, False, False, False),
            (True, True, False, False),
            (True, False, True, False),
        ],
    )
    def test_memory_is_saved_only_where_it_can_come_back(
        self,
        is_root: bool,
        has_network: bool,
        shows_later: bool,
        is_saved: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        known: Any = SimpleNamespace(trusted_root=is_root)
        monkeypatch.setattr(gvisor_sandbox, "host", lambda: known)
        sandbox: Any = SimpleNamespace(has_network=has_network, shows_later=shows_later)
        assert is_saved is (GvisorSandbox.not_saved(sandbox) == ("", ""))

    @pytest.mark.parametrize("access", ["ro", "rw"])
    def test_binds_run_no_set_id_programs_and_have_no_devices(self, access: str) -> None:
        draft: Any = SimpleNamespace(shown=[])
        root._show(draft, Mount("/data", "/srv", access), "/place")
        [bind] = draft.shown
        assert ("/data", "/place") == (bind["destination"], bind["source"])
        assert ["rbind", access, "nosuid", "nodev"] == bind["options"]

    @pytest.mark.parametrize(
        ("source", "access"), [("", "rw"), ("", "ro"), ("d", "ro"), ("d", "rw")]
    )
    @pytest.mark.parametrize("hidden", [True, False])
    def test_a_mount_of_the_sandboxs_own_files(
        self, source: str, access: str, hidden: bool
    ) -> None:
        draft: Any = SimpleNamespace(mounts=[], guest=[], shown=[], spec=SPEC)
        root._add_session_mount(draft, Mount("/data", source, access), hidden)
        assert [("/data", {"ro": READ_ONLY, "rw": READ_WRITE}[access])] == [
            (each.target, each.access) for each in draft.mounts
        ]
        verbs = [step[0] for step in draft.guest]
        if hidden:
            assert [] == verbs
        elif not source:
            assert (["session_dir", "protect"] if access == "ro" else ["session_dir"]) == verbs
        elif access == "ro":
            assert ["session_dir"] == verbs
            assert ["ro"] == [each["options"][1] for each in draft.shown]
        else:
            assert "symlink" == verbs[-1]
            assert [] == draft.shown


@pytest.mark.parametrize("error", [None, OSError("x")])
def test_names_of_an_image_are_closed_however_a_save_ends(error: Exception | None) -> None:
    opened: list[int] = []

    def open_names() -> int:
        opened.append(os.open("/dev/null", os.O_RDONLY))
        return opened[-1]

    sandbox: Any = SimpleNamespace(image=SimpleNamespace(open_names=open_names))

    def use(check: Callable[[], None]) -> None:
        with snapshots._names(sandbox) as names:
            assert opened == names
            os.fstat(names[0])
            check()

    def fail() -> None:
        if error is not None:
            raise error

    if error is None:
        use(fail)
    else:
        with pytest.raises(OSError, match="x"):
            use(fail)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(opened[0])
    plain: Any = SimpleNamespace(image=None)
    with snapshots._names(plain) as names:
        assert [] == names


def test_only_a_program_that_may_be_run_is_taken_for_gvisor(tmp_path: Path) -> None:
    for name, mode in (("a", 0o644), ("b", 0o755), ("c", 0o755)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "runsc").touch()
        (tmp_path / name / "runsc").chmod(mode)
    places = tuple(str(tmp_path / name) for name in ("none", *"abc"))
    assert str(tmp_path / "b" / "runsc") == programs._first_of(places)
    assert programs._first_of(places[:2]) is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tier": "light"}, "tier"),
        ({"template": "other"}, "template"),
        ({"profile": "other"}, "profile"),
        ({"profile": "own_root"}, "profile"),
        ({"network": NetworkPolicy.parse("unrestricted"), "profile": "unrestricted"}, "network"),
        ({"limits": Limits(io_bytes_per_s=1 << 20)}, "limits.io_bytes_per_s"),
        ({"limits": Limits(memory_bytes=1 << 20)}, "limits.memory_bytes"),
        ({"secrets": {"KEY": "x"}, "env": {"KEY": "y"}}, "secrets"),
        ({"mounts": (Mount("/data", "/no/such/directory"),)}, "mounts[0].source"),
    ],
)
def test_each_thing_that_gvisor_does_not_do_is_refused_by_its_field(
    changes: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = SimpleNamespace(**{**vars(host()), "trusted_root": False})
    monkeypatch.setattr(accounts, "host", lambda: here)
    asked.check(SandboxSpec(tier="strong"))
    with pytest.raises((Unsupported, InvalidRequest)) as refused:
        asked.check(SandboxSpec(**{"tier": "strong", **changes}))
    assert (refused.value.field or "").startswith(field.partition("[")[0])


def test_a_program_that_was_written_anew_in_place_is_asked_for_its_version(tmp_path: Path) -> None:
    path = tmp_path / "runsc"
    path.touch(mode=0o755)
    for number, version in enumerate(("20250101", "20260202")):
        path.write_text(f"#!/bin/sh\necho 'runsc version release-{version}.0'\n")
        os.utime(path, (number, number))
        found = programs.find(str(path))
        assert int(version) == found.released
        assert found is programs.find(str(path)), "asked once"


def test_what_a_sandbox_held_is_given_back_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(journal, "give_up", lambda *what: done.append(what))
    errors = os.open("/dev/null", os.O_RDONLY)
    owner = SimpleNamespace(released=done.append)
    one: Any = SimpleNamespace(
        errors=errors, protected=["paths"], note="note", id="mine", jailer="jailer", owner=owner
    )
    GvisorSandbox._let_go(one)
    assert [(["paths"], "note", "mine", "jailer"), one] == done
    assert -1 == one.errors
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(errors)
