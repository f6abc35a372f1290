"""Sandboxes under launchers, as the host has them: one made by bubblewrap, and those that do not start."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.features import require

from ringfence.backends.command import backend as module
from ringfence.backends.command import codex as codex_module
from ringfence.backends.command import launchers, limits, lxc, report
from ringfence.backends.command import place as place_module
from ringfence.backends.command.backend import CommandBackend
from ringfence.backends.command.launchers import Launcher
from ringfence.backends.command.report import CommandReader
from ringfence.backends.command.sandbox import NO_STOP, CommandSandbox
from ringfence.backends.local.agents.agents import NoIsolationError, settings
from ringfence.backends.local.agents.contained import AGENT
from ringfence.backends.local.agents.posture import ContainedReader
from ringfence.backends.local.answers import Refused
from ringfence.backends.local.host import cgroups, ranges
from ringfence.backends.local.host.facts import host
from ringfence.errors import (
    BackendUnavailable,
    InvalidRequest,
    IsolationError,
    LifecycleError,
    RingfenceError,
    Unsupported,
)
from ringfence.launcher import wire
from ringfence.model import NetworkPolicy, NetworkRule
from ringfence.model import capabilities as can
from ringfence.model.capabilities import ENFORCED, MISSING, Protection
from ringfence.model.limits import Limits
from ringfence.model.mount import Mount
from ringfence.model.spec import SandboxSpec
from ringfence.model.state import State

pytestmark = pytest.mark.anyone

SPEC = SandboxSpec(id="mine")


def failing(backend: CommandBackend, spec: SandboxSpec = SPEC) -> str:
    with pytest.raises(RingfenceError) as refusal:
        backend.provision(spec)
    assert {} == backend._live
    assert set() == backend._making
    return str(refusal.value)


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What was made for sandboxes, of which nothing may be left."""
    made: list[Any] = []
    real = place_module.Place

    def place(*args: Any) -> Any:
        made.append(real(*args))
        return made[-1]

    monkeypatch.setattr(place_module, "Place", place)
    monkeypatch.setattr(place_module, "sweep", lambda: None)
    yield made
    assert not [each.words["own"] for each in made if os.path.exists(each.words["own"])]


def backend_of(launcher: Launcher) -> CommandBackend:
    made = CommandBackend(launcher)
    made.layout()
    return made


class TestStarting:
    @pytest.mark.parametrize(
        ("argv", "why"),
        [
            (
                ("sh", "-c", "echo idle >&2; echo broken >&2; exit 3", "sh"),
                "the agent: broken \\(run",
            ),
            (("/no/such/launcher",), "did not start"),
        ],
    )
    def test_one_that_ends_says_why_and_leaves_nothing(
        self, argv: tuple[str, ...], why: str, places: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = backend_of(Launcher("mine", argv, idle=("idle",)))
        before, ids = len(os.listdir("/proc/self/fd")), backend._ids()
        taken: list[int] = []
        groups: list[str] = []
        take, give_back, make = ids.take, ids.give_back, limits.make

        def taking() -> int:
            taken.append(take())
            return taken[-1]

        def giving_back(first: int) -> None:
            taken.remove(first)
            give_back(first)

        filters: list[bool] = []

        def tell(*given: Any, **how: Any) -> Any:
            filters.append(how["filtered"])
            return settings(*given, **how)

        def making(group: Any, spec: Any) -> None:
            make(group, spec)
            groups.extend(group.directories)
            assert all(map(os.path.isdir, groups)), "the control: they were there"

        monkeypatch.setattr(ids, "take", taking)
        monkeypatch.setattr(ids, "give_back", giving_back)
        monkeypatch.setattr(limits, "make", making)
        monkeypatch.setattr(module, "settings", tell)
        with pytest.raises(IsolationError, match=why):
            backend.provision(SPEC)
        assert 1 == len(places)
        assert [False] == filters, "what a launcher filters is its own"
        assert [] == taken
        assert [] == [each for each in groups if os.path.exists(each)]
        assert {} == backend._live
        assert set() == backend._making
        backend.close()
        assert before == len(os.listdir("/proc/self/fd"))

    def test_without_a_pid_namespace_nothing_starts(
        self, places: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And the descriptors that its agent passed out are closed."""
        backend = backend_of(Launcher("mine", ("sleep", "1000", "#")))
        opened: list[int] = []
        started: list[Any] = []
        real = limits.start

        def start(group: Any, spec: Any, argv: list[str], /, **how: Any) -> Any:
            started.append(real(group, spec, argv[:2], **how))
            return started[-1]

        def agent(_control: Any, _errors: int) -> list[int]:
            opened.append(os.open("/dev/null", os.O_RDONLY))
            return [opened[0]]

        monkeypatch.setattr(limits, "start", start)
        monkeypatch.setattr(backend, "_wait_for_agent", agent)
        monkeypatch.setattr(module, "first_inside", lambda _pid: None)

        def end(process: Any) -> None:
            assert -signal.SIGKILL == process.wait(30), "it is killed before it is waited for"

        monkeypatch.setattr(module, "end", end)
        assert "gives no PID namespace" in failing(backend)
        assert started[0].returncode is not None
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(opened[0])
        backend.close()

    def test_what_a_kernel_refused_is_told_as_that(
        self, places: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = backend_of(Launcher("mine", ("sleep", "1000", "#")))

        def refuse(_control: Any, _errors: int) -> list[int]:
            raise Refused(errno.EPERM, "not allowed")

        monkeypatch.setattr(backend, "_wait_for_agent", refuse)
        with pytest.raises(Refused, match="not allowed"):
            backend.provision(SPEC)
        assert 1 == len(places)
        backend.close()

    @pytest.mark.parametrize(
        ("said", "error", "why"),
        [
            (b"E1 isolation: unshare", NoIsolationError, "isolation: unshare"),
            (b"E1 mount", IsolationError, "did not start the agent: .*mount"),
            (b"", IsolationError, "did not start the agent: its last words"),
        ],
    )
    def test_the_first_word_of_an_agent_says_whether_it_may_isolate(
        self, said: bytes, error: type[Exception], why: str, tmp_path: Path
    ) -> None:
        backend = backend_of(Launcher("mine", ("x",)))
        ours, theirs = wire.socketpair()
        with closing(ours), (tmp_path / "says").open("w+b") as errors:
            if said:
                wire.send_raw(theirs, said)
            else:
                errors.write(b"its last words\n")
                errors.flush()
            theirs.close()
            with pytest.raises(error, match=why) as refusal:
                backend._wait_for_agent(ours, errors.fileno())
        assert error is type(refusal.value)

    @pytest.mark.parametrize("version", [0, 2])
    def test_an_agent_samples_what_no_cgroup_bounds(
        self, version: int, places: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layout = SimpleNamespace(version=version, bases={}, why="nobody may", has=lambda _: False)
        monkeypatch.setattr(cgroups, "Layout", lambda: layout)
        monkeypatch.setattr(cgroups, "sweep", lambda _layout: None)
        told: list[dict[str, Any]] = []

        def tell(*given: Any, **how: Any) -> Any:
            told.append(how)
            return settings(*given, **how)

        def start(*_args: Any, **_how: Any) -> Any:
            raise OSError("there is none")

        monkeypatch.setattr(module, "settings", tell)
        monkeypatch.setattr(limits, "start", start)
        backend = backend_of(Launcher("mine", ("x",)))
        spec = SPEC.altered(
            limits=Limits(pids=33, memory_bytes=1 << 28), allow_degraded=("pids_limit",)
        )
        failing(backend, spec)
        assert [(0, 0) if version else (33, 1 << 28)] == [how["samples"] for how in told]
        assert 1 == len(places)
        backend.close()

    def test_what_others_left_is_swept_once(
        self, places: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        swept: list[Any] = []
        monkeypatch.setattr(module, "start_new_thread", lambda work, _args: swept.append(work))
        backend = backend_of(Launcher("mine", ("/no/such/launcher",)))
        for _ in range(2):
            failing(backend)
        assert [place_module.sweep] == swept
        assert 2 == len(places)
        backend.close()

    @pytest.mark.parametrize("fails", [True, False])
    def test_an_agent_that_may_not_isolate_is_not_asked_again(
        self, fails: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = backend_of(Launcher("mine", ("x",), within=("y",), filtered=True))
        asked: list[bool] = []
        joined: list[int] = []
        network = SimpleNamespace()

        def make(_spec: Any, _id: str, *, isolated: bool) -> Any:
            asked.append(isolated)
            if isolated and fails:
                raise NoIsolationError("isolation: unshare")
            made: Any = SimpleNamespace(network=network, join_network=lambda _n: joined.append(1))
            made.complete = lambda step: step()
            return made

        monkeypatch.setattr(backend, "_make_one", make)
        for _ in range(2):
            backend.provision(SandboxSpec())
        assert ([True, False, False] if fails else [True, True]) == asked
        assert [1, 1] == joined
        backend.provision(SandboxSpec(profile="unrestricted"))
        assert not asked[-1]
        if fails:
            for changes in (
                {"deny": ("/usr/bin/env",)},
                {"network": NetworkPolicy.parse("a.test")},
            ):
                count = len(asked)
                with pytest.raises(Unsupported):
                    backend.provision(SandboxSpec(**changes))
                assert count == len(asked)

    def test_one_that_nobody_goes_into_is_asked_for_no_mount_although_its_agent_isolates(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = backend_of(Launcher("mine", ("x",), anew=("/run",), filtered=True))
        asked: list[bool] = []
        made: Any = SimpleNamespace(network=None, complete=lambda _step: None)

        def make(_spec: Any, _id: str, *, isolated: bool) -> Any:
            asked.append(isolated)
            return made

        monkeypatch.setattr(backend, "_make_one", make)
        monkeypatch.setattr(backend, "check", lambda _spec: None)  # which refuses it before
        with pytest.raises(Unsupported, match="no namespaces of its own"):
            backend.provision(SandboxSpec(deny=("/usr/bin/env",)))
        assert [] == asked
        assert made is backend.provision(SandboxSpec())
        assert [True] == asked

    def test_a_snapshot_comes_back_only_where_the_host_goes_in(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = backend_of(Launcher("mine", ("x",), within=("y",)))
        done: list[Any] = []
        sandbox: Any = SimpleNamespace(
            namespace_fds=[], terminate=lambda: done.append("ended"), load=done.append
        )
        sandbox.complete = lambda step: step()
        monkeypatch.setattr(backend, "provision", lambda _spec: sandbox)
        with pytest.raises(Unsupported, match="no namespaces of its own"):
            backend.provision_with(SPEC, SPEC, 77)
        assert ["ended"] == done
        sandbox.namespace_fds.append(3)
        assert backend.provision_with(SPEC, SPEC, 77) is sandbox
        assert ["ended", 77] == done

    def test_what_is_made_without_an_authority_of_its_own_is_not_asked_for(
        self, places: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = backend_of(Launcher("mine", ("x",), within=("y",), filtered=True))
        backend._egress = lambda: "egress"  # type: ignore[assignment]
        asked: list[Any] = []

        def trusted_for(*given: Any) -> Any:
            asked.append(given)
            raise IsolationError("nobody signs")

        monkeypatch.setattr(module, "trusted_for", trusted_for)
        policy = NetworkPolicy(rules=(NetworkRule("a.test", "443", methods=("GET",)),))
        assert "nobody signs" in failing(backend, SPEC.altered(network=policy))
        assert [(policy, "egress")] == asked
        assert [] == places
        backend.close()

    def test_what_is_beside_it_has_the_same_launcher_and_another_place(
        self, tmp_path: Path
    ) -> None:
        launcher = Launcher("mine", ("x",))
        other = CommandBackend(launcher).beside(str(tmp_path))
        assert (launcher, str(tmp_path), "mine") == (other.launcher, other._state_dir, other.name)

    @pytest.mark.parametrize("version", [0, 2])
    def test_limits_are_those_of_the_cgroups_there(
        self, version: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layout = SimpleNamespace(version=version, bases={}, why="nobody may", has=lambda _: False)
        monkeypatch.setattr(cgroups, "Layout", lambda: layout)
        monkeypatch.setattr(cgroups, "sweep", lambda _layout: None)
        for within in ((), ("y",)):
            backend = backend_of(Launcher("mine", ("x",), within=within))
            assert bool(within) == ("network_bytes" in backend.held)
            assert bool(version) == ("pids" in backend.held)
            assert "cpus" not in backend.held
            assert bool(version) != ("nobody may" in backend.no_limits)
            assert not backend.saves or within
            lacks = report.lacking(backend)
            assert bool(within) != ("mount" in lacks)
            for stops in (True, False):
                backend.can_stop = stops
                found = report.lacking(backend)
                why = None if stops else NO_STOP
                assert [why] * 2 == [found.get(name) for name in (can.SUSPEND, can.RESUME)]
            with pytest.raises(Unsupported):
                backend.check(SandboxSpec(limits=Limits(cpus=1.0)))
            backend.check(SandboxSpec(limits=Limits(cpus=1.0), allow_degraded=("cpu_limit",)))
            with pytest.raises(InvalidRequest):
                backend.check(SandboxSpec(limits=Limits(memory_bytes=1 << 20)))


def test_the_launchers_own_processes_are_beside_the_limit() -> None:
    """PID 1 is one of the sandbox's, as natively; the launcher's process is not."""
    asked: list[int] = []

    def values(_limits: Limits, _memory: int, pids: int) -> list[tuple[str, str]]:
        asked.append(pids)
        return []

    group: Any = SimpleNamespace(directories=[], values=values)
    for pids in (20, 21):
        limits.make(group, SandboxSpec(limits=Limits(pids=pids)))
    assert [21, 22] == asked


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    return []


@pytest.fixture(scope="module")
def started() -> list[dict[str, Any]]:
    return []


@pytest.fixture(scope="module")
def checked() -> list[tuple[Any, int]]:
    return []


@pytest.fixture(scope="module")
def sandbox(
    told: list[dict[str, Any]], started: list[dict[str, Any]], checked: list[tuple[Any, int]]
) -> Iterator[CommandSandbox]:
    require("user namespaces")
    require("bwrap")
    backend = CommandBackend()

    def tell(*given: Any, **how: Any) -> Any:
        told.append(how)
        return settings(*given, **how)

    start, check = limits.start, limits.check

    def starting(group: Any, spec: Any, argv: Any, /, **how: Any) -> Any:
        started.append(how)
        return start(group, spec, argv, **how)

    def checking(group: Any, pid: int) -> None:
        checked.append((group, pid))
        check(group, pid)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "settings", tell)
        patched.setattr(limits, "start", starting)
        patched.setattr(limits, "check", checking)
        made = backend.provision(SandboxSpec(limits=Limits(open_files=200)))
    place, launcher = made.place.words["own"], made._launcher
    yield made
    given_back: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        give_back = backend._ids().give_back

        def giving_back(first: int) -> None:
            given_back.append(first)
            give_back(first)

        patched.setattr(backend._ids(), "give_back", giving_back)
        made.terminate()
    assert ([made.host_ids] if made.host_ids else []) == given_back
    assert {} == backend._live
    assert not os.path.exists(place)
    assert launcher.returncode is not None
    assert not [each for each in made.group.directories if os.path.exists(each)]
    backend.close()


class TestUnderBubblewrap:
    def test_its_agent_covers_the_hosts_and_is_told_the_limits(
        self, sandbox: CommandSandbox, told: list[dict[str, Any]]
    ) -> None:
        [how] = told
        assert AGENT in how["covered"]
        assert (True, False, True) == (how["filtered"], how["anew"], how["unix_sockets"])
        layout = sandbox.owner.layout()
        assert bool(layout.version) == (how["samples"] == (0, 0))
        assert bool(how["processes"]) == bool(layout.version and host().trusted_root)
        assert 3 <= len(sandbox.namespace_fds)
        names = sandbox.namespaces()
        assert names is not None
        assert names["pid"] != os.stat("/proc/self/ns/pid").st_ino
        assert sandbox.control.gettimeout() is None

    def test_its_launcher_is_of_a_user_and_session_of_its_own_and_stays_in_its_cgroup(
        self,
        sandbox: CommandSandbox,
        started: list[dict[str, Any]],
        checked: list[tuple[Any, int]],
    ) -> None:
        [how] = started
        user = sandbox.host_ids or None
        assert bool(user) == host().trusted_root
        assert (user, user, [] if user else None) == (
            how["user"],
            how["group"],
            how["extra_groups"],
        )
        assert (True, "/") == (how["start_new_session"], how["cwd"])
        assert {"PATH"} == {*how["env"]}
        version = sandbox.owner.layout().version
        assert ([(sandbox.group, sandbox.pid)] if version else []) == checked
        assert sandbox._launcher.pid == os.getsid(sandbox._launcher.pid)
        if user:
            status = Path(f"/proc/{sandbox.pid}/status").read_text()
            assert f"Uid:\t{user}\t{user}\t{user}\t{user}\n" in status
            assert "Groups:\t \n" in status

    def test_who_sees_a_directory_of_the_hosts_reaches_no_sockets_in_it(
        self, sandbox: CommandSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[bool] = []

        def tell(*given: Any, **how: Any) -> Any:
            told.append(how["unix_sockets"])
            return settings(*given, **how)

        monkeypatch.setattr(module, "settings", tell)
        tmp_path.chmod(0o755)
        mount = Mount("/mnt/x", str(tmp_path), "read_only")
        made = sandbox.owner.provision(SandboxSpec(mounts=(mount,)))
        made.terminate()
        assert [False] == told

    def test_what_it_has_changed_is_all_that_is_not_shown_to_it(
        self, sandbox: CommandSandbox
    ) -> None:
        with sandbox.files.open_write("/home/new") as file:
            file.write(b"x")
        found = sandbox.changes()
        assert ([], []) == (found.changed, found.gone)
        assert {"/home", "/tmp"} <= {*found.own}
        assert not {"/dev", "/proc", "/sys", "/etc", "/usr", AGENT} & {*found.own}

    def test_it_stands_still_only_where_a_cgroup_can_do_it(self, sandbox: CommandSandbox) -> None:
        if sandbox.group.can_freeze:
            sandbox.suspend()
            assert State.SUSPENDED is sandbox.state
            sandbox.resume()
        else:
            with pytest.raises(Unsupported, match="cgroup to freeze"):
                sandbox.suspend()
        assert State.SUSPENDED is not sandbox.state
        stats = sandbox.stats()
        assert stats.pids is not None
        assert stats.memory_bytes is not None

    def test_nothing_is_frozen_where_no_cgroup_can_do_that(self, sandbox: CommandSandbox) -> None:
        done: list[str] = []
        group: Any = SimpleNamespace(
            freeze=lambda: done.append("freeze"), thaw=lambda: done.append("thaw")
        )
        one: Any = SimpleNamespace(group=group, owner=sandbox.owner)
        for group.can_freeze in (False, True):
            for frozen in (True, False):
                if group.can_freeze:
                    CommandSandbox._freeze(one, frozen)
                else:
                    with pytest.raises(Unsupported, match="cgroup to freeze"):
                        CommandSandbox._freeze(one, frozen)
        assert ["freeze", "thaw"] == done

    def test_one_that_has_ended_says_so_before_it_says_that_nobody_connects(self) -> None:
        def ended() -> None:
            raise LifecycleError("it has ended")

        launcher = Launcher("mine", ("x",), lacks={can.CONNECT: "nobody may"})
        backend: Any = SimpleNamespace(launcher=launcher, name="mine")
        one: Any = SimpleNamespace(owner=backend, backend=backend, require_awake=ended)
        with pytest.raises(LifecycleError, match="it has ended"):
            CommandSandbox.connect(one, 80)
        one.require_awake = lambda: None
        with pytest.raises(Unsupported, match="nobody may"):
            CommandSandbox.connect(one, 80)

    def test_where_nothing_can_stand_still_nothing_is_saved(
        self, sandbox: CommandSandbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sandbox.owner, "saves", False)
        with pytest.raises(Unsupported, match="cgroup to freeze"):
            sandbox.snapshot({})

    def test_a_launcher_that_lets_nobody_connect_says_why(
        self, sandbox: CommandSandbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lacking = Launcher("mine", ("x",), lacks={"connect": "it lets nobody"})
        monkeypatch.setattr(sandbox.owner, "launcher", lacking)
        with pytest.raises(Unsupported, match="it lets nobody"):
            sandbox.connect(80)


def test_an_agent_that_isolates_where_nobody_comes_in_leaves_no_descriptors_of_that() -> None:
    require("user namespaces")
    require("bwrap")
    outer = launchers.bubblewrap()
    launcher = Launcher(
        "mine",
        outer.within,
        show=outer.show,
        programs=outer.programs,
        filtered=True,
        anew=("/run",),
    )
    backend = backend_of(launcher)
    made = backend.provision(SandboxSpec())
    try:
        assert [] == [*made.namespace_fds]
        names = made.namespaces()
        assert names is not None
        assert names["pid"] == os.stat(f"/proc/{made.pid}/ns/pid").st_ino
        links = [os.readlink(f"/proc/self/fd/{fd}") for fd in descriptors()]
        assert not [each for each in links if each == f"pid:[{names['pid']}]"]
    finally:
        made.terminate()
        backend.close()


def descriptors() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


class TestReading:
    def reader(self, version: int = 2, **more: Any) -> Any:
        launcher = Launcher("mine", ("x",), seals={"namespaces": "it does", "extra": "too"})
        made: Any = CommandReader.__new__(CommandReader)
        made._seals = launcher.seals
        owner = SimpleNamespace(launcher=launcher, no_limits="no cgroup")
        facts: dict[str, Any] = {
            "owner": owner, "group": SimpleNamespace(version=version), "namespace_fds": [],
            "namespaces": lambda: None, "spec": SandboxSpec(limits=Limits(cpus=1.0)), "network": None,
        }  # fmt: skip
        made.sandbox = SimpleNamespace(**{**facts, **more})
        return made

    @pytest.mark.parametrize(
        ("found", "status"), [(None, "missing"), (1 << 60, "missing"), (1 << 27, "enforced")]
    )
    def test_a_limit_is_what_the_cgroup_says(
        self, found: int | None, status: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(report, "memory_limit_bytes", lambda _group: found)
        monkeypatch.setattr(report, "memory_said", lambda *_: "said")
        monkeypatch.setattr(report, "pids_limit", lambda _group: found)
        made = self.reader()
        assert (status, status) == (made.memory_limit()[0], made.pids_limit()[0])

    @pytest.mark.parametrize(("found", "status"), [(None, "degraded"), (1.0, "enforced")])
    def test_a_limit_of_processors_is_what_the_cgroup_says(
        self, found: float | None, status: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(report, "cpu_limit", lambda _group: found)
        assert status == self.reader().cpu_limit()[0]
        assert self.reader(spec=SandboxSpec()).cpu_limit() is None
        assert "degraded" == self.reader(version=0).cpu_limit()[0]

    def test_without_a_cgroup_limits_are_sampled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(report, "memory_limit_bytes", lambda _group: None)
        made = self.reader(version=0)
        for verdict in (made.memory_limit(), made.pids_limit(), made.disk_quota()):
            assert "degraded" == verdict[0]

    def test_what_was_read_is_told_before_what_is_declared(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read = Protection("namespaces", MISSING, "it has none")
        monkeypatch.setattr(ContainedReader, "read", lambda _self: (read,))
        made = self.reader()
        made._seals = {"namespaces": "it makes them", "seccomp": "it filters"}
        found = {each.name: each for each in made.read()}
        assert read is found["namespaces"]
        assert (ENFORCED, "as its documentation says: it filters") == (
            found["seccomp"].status,
            found["seccomp"].why,
        )
        assert {"namespaces", "seccomp"} == {*found}

    def test_what_is_declared_is_told_only_where_nothing_is_read(self) -> None:
        made, read = self.reader(), ("missing", "x", "")
        made._seals = {"seccomp": "declared"}
        assert made._read_or_declared("seccomp", read) is None
        assert read == made._read_or_declared("other", read)
        inside = self.reader(namespaces=lambda: {"pid": 1})
        inside._seals = made._seals
        assert read == inside._read_or_declared("seccomp", read)
        assert made.read_only_mounts() is None


class TestLxc:
    def config(
        self, tmp_path: Path, *, isolated: bool, monkeypatch: Any, trusted: bool
    ) -> list[str]:
        for name in ("own", "etc", "agent", "with space"):
            (tmp_path / name).mkdir()
        monkeypatch.setattr(lxc, "host", lambda: SimpleNamespace(trusted_root=trusted))
        monkeypatch.setattr(lxc, "_subordinate_id", lambda: 7000)
        words = {name: str(tmp_path / name) for name in ("own", "etc", "agent")}
        words |= {"root": str(tmp_path), "uid": "1000", "host_id": "500"}
        shown = [("/usr", "/usr"), (str(tmp_path / "with space"), "/with space")]
        lxc.lxc().prepare(words, shown, isolated=isolated)
        assert 0o755 == (tmp_path / "own/root").stat().st_mode & 0o777
        return (tmp_path / "own/config").read_text().splitlines()

    @pytest.mark.parametrize("isolated", [True, False])
    @pytest.mark.parametrize("trusted", [True, False])
    def test_a_container_has_ids_and_files_that_cannot_be_written(
        self, tmp_path: Path, isolated: bool, trusted: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = self.config(tmp_path, isolated=isolated, monkeypatch=monkeypatch, trusted=trusted)
        for line in ("lxc.cap.keep = none", "lxc.no_new_privs = 1", "lxc.net.0.type = empty",
                     "lxc.init.uid = 1000", "lxc.init.gid = 1000"):  # fmt: skip
            assert line in found
        root = 501 if trusted else 7000
        for kind in "ug":
            assert f"lxc.idmap = {kind} 0 {root} 1" in found
            assert f"lxc.idmap = {kind} 1000 500 1" in found
        mounts = [line.split(" = ", 1)[1].split() for line in found if "mount.entry" in line]
        assert {6} == {len(each) for each in mounts}, "a space would end a word"
        options = {each[1]: each[3].split(",") for each in mounts}
        for place in ("etc", ".ringfence", "usr", "with\\040space"):
            assert {"rbind", "ro", "nosuid", "nodev"} <= {*options[place]}
        assert isolated != ("ro" in options["proc"])
        hidden = [place for place in options if place.startswith("proc/")]
        assert isolated != bool(hidden)

    def test_its_own_files_are_in_its_own_directory(self, tmp_path: Path) -> None:
        found = lxc.lxc().environment({"own": "/own"})
        assert ("/own", "/own") == (found["HOME"], found["XDG_RUNTIME_DIR"])
        assert lxc.lxc().maps_ids

    def test_where_no_second_id_may_be_had_there_is_none(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def find() -> Any:
            raise ranges.NoRangeError("no range", "add one")

        monkeypatch.setattr(ranges, "find", find)
        launcher = lxc.LxcLauncher("lxc", ("sh",), programs=("sh",))
        for trusted in (True, False):
            here = SimpleNamespace(trusted_root=trusted)
            monkeypatch.setattr(lxc, "host", lambda here=here: here)
            if trusted:
                launcher.check()
            else:
                with pytest.raises(BackendUnavailable, match="no range") as refusal:
                    launcher.check()
                assert "add one" == refusal.value.hint


class TestCodex:
    def launcher(self, tmp_path: Path, text: str, timeout_s: float = 20.0) -> Launcher:
        path = tmp_path / "bin" / "codex"
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        made = codex_module.codex(str(path), probe_timeout_s=timeout_s)
        assert (str(tmp_path),) == made.shows, "its package is seen inside"
        return codex_module.CodexLauncher(
            "codex", made.argv, programs=("sh", str(path)), probe_timeout_s=timeout_s
        )

    def test_it_says_its_version_once(self, tmp_path: Path) -> None:
        launcher = self.launcher(tmp_path, f"echo x >>{tmp_path}/asked; echo codex 1.2")
        for _ in range(2):
            launcher.check()
        assert f"codex 1.2 at {tmp_path}/bin/codex" == launcher.describe()
        assert "x\n" == (tmp_path / "asked").read_text()

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("echo first >&2; echo last >&2; exit 1", "--version failed: last"),
            ("echo out; exit 1", "failed: out"),
            ("exit 4", "failed: exit code 4"),
            ("exec sleep 100", "did not answer within 0.05 s"),
        ],
    )
    def test_one_that_does_not_is_not_used(self, tmp_path: Path, text: str, why: str) -> None:
        with pytest.raises(BackendUnavailable, match=why):
            self.launcher(tmp_path, text, 0.05 if "sleep" in text else 20.0).check()

    def test_one_that_is_not_there_or_cannot_run(self, tmp_path: Path) -> None:
        launcher = self.launcher(tmp_path, "")
        (tmp_path / "bin/codex").write_text("#!/no/such\n")
        with pytest.raises(BackendUnavailable, match="No such file"):
            launcher.check()
        (tmp_path / "bin/codex").unlink()
        with pytest.raises(BackendUnavailable, match="is not installed") as refusal:
            launcher.check()
        assert "npm install" in str(refusal.value.hint)

    def test_npms_script_leads_to_the_binary_beside_it(self, tmp_path: Path) -> None:
        script = tmp_path / "codex/bin/codex.js"
        binary = tmp_path / "codex-linux-x64/vendor/x86/bin/codex"
        assert str(script) == codex_module._native(str(script))
        binary.parent.mkdir(parents=True)
        binary.touch()
        assert str(binary) == codex_module._native(str(script))
        assert "/a/codex" == codex_module._native("/a/codex")
        assert str(binary.parent.parent) == codex_module._package_of(str(binary))
        assert "/opt/x" == codex_module._package_of("/opt/x/codex")

    def test_settings_are_passed_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/h")
        told: Any = SimpleNamespace(binary="~/codex", subcommand="jail", probe_timeout_s=3.0)
        made = codex_module.of(told)
        assert "/h/codex" in made.argv
        assert "jail" in made.argv
        assert 3.0 == made.probe_timeout_s
        assert (True, ("/run",)) == (made.filtered, made.anew)


def test_bubblewrap_masks_and_closes_only_where_the_agent_does_not() -> None:
    words = {"root": "/r", "etc": "/e", "agent": "/a", "uid": "1000"}
    made = launchers.bubblewrap()
    outer, inner = (made.command(words, [], isolated=each) for each in (False, True))
    assert "--disable-userns" in outer
    assert "--disable-userns" not in inner
    assert ["--remount-ro", "/proc"] == outer[outer.index("/proc", outer.index("--dev")) - 1 :][:2]
    assert "/proc/keys" in outer or "/proc/kcore" in outer
    assert "/dev/null" not in inner
    for command in (outer, inner):
        for flag in ("--unshare-net", "--unshare-pid", "--as-pid-1", "--clearenv", "--cap-drop"):
            assert flag in command


def test_a_program_of_a_launchers_is_looked_up_on_the_path(tmp_path: Path) -> None:
    Launcher("mine", ("sh",), programs=("sh", "/bin/sh")).check()
    with pytest.raises(BackendUnavailable, match="'nowhere' is not installed"):
        Launcher("mine", ("sh",), programs=("sh", "nowhere")).check()
