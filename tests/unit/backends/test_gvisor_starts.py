"""gVisor sandboxes made through a scripted jailer: what it is asked, and what is left of one that fails."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends.gvisor import asked, places, runsc, views
from ringfence.backends.gvisor import backend as module
from ringfence.backends.gvisor import plan as planning
from ringfence.backends.gvisor.backend import GvisorBackend
from ringfence.backends.gvisor.draft import Draft
from ringfence.backends.gvisor.views import Views
from ringfence.backends.local import journal
from ringfence.backends.local.answers import Refused
from ringfence.backends.local.host.facts import host
from ringfence.backends.local.mounts import template
from ringfence.errors import IsolationError, RingfenceError, SandboxLost, Unsupported
from ringfence.launcher import wire
from ringfence.launcher.machine_code.process_image import HEAD_IS_WRITTEN
from ringfence.launcher.machine_code.process_image_elf import MOST_BYTES
from ringfence.model.limits import Limits
from ringfence.model.mount import Mount
from ringfence.model.net.network import NetworkPolicy
from ringfence.model.spec import OWN_ROOT, SandboxSpec
from ringfence.model.state import State

pytestmark = pytest.mark.anyone
SPEC = SandboxSpec(tier="strong", id="mine")
_IMAGE = MOST_BYTES + 5  # bytes of an agent that has started: a head and a rest
_PROGRAM = """#!/bin/sh
case $1 in
--version) echo "runsc version release-20250101.0" ;;
flags) printf '  -overlay2 x\\n  -directfs\\n  -panic-log\\n  -file-access x\\n' ;;
esac
"""


class Jailer:
    """A jailer whose jails are processes that wait, with a thread that answers as their agent."""

    def __init__(self) -> None:
        self.owner, self.alive = os.getpid(), True
        self.asked: list[tuple[str, Any]] = []
        self.heard: list[Any] = []
        self.refused: dict[str, Refused] = {"process_image": Refused(95, "not here")}
        self.words: list[bytes] = []
        self.says = b""
        self.has_sockets = self.closed = False
        self.processes: list[subprocess.Popen[bytes]] = []
        self.agents: list[threading.Thread] = []

    def ask(self, verb: str, argument: Any, fds: Any = (), **_how: Any) -> tuple[bytes, list[int]]:
        self.asked.append((verb, argument))
        if verb in self.refused:
            raise self.refused[verb]
        if verb == "process_image":
            image = os.memfd_create("image")
            os.ftruncate(image, _IMAGE)
            return b"", [image]
        if verb != "create":
            return b"", []
        process = subprocess.Popen(["sleep", "1000"])
        self.processes.append(process)
        os.write(fds[1], self.says)
        control = wire.adopt(os.dup(fds[0]))
        agent = threading.Thread(target=self._be_agent, args=(argument, control, process))
        self.agents.append(agent)
        agent.start()
        return b"%d" % process.pid, [os.pidfd_open(process.pid)]

    def _be_agent(self, plan: Any, control: wire.Socket, process: Any) -> None:
        if not plan["argv"]:  # who serves files
            with contextlib.suppress(BrokenPipeError):
                wire.send_raw(control, b"O")
            control.close()
            return
        reply = control
        if plan["argv"] and "restore" in plan["argv"]:
            told, [fd] = wire.receive(control)
            reply = wire.adopt(fd)
            self.heard.append(told)
        elif plan["guest"]["process_image"]:
            self._be_copied(control)
        else:
            self.heard.append(wire.receive(control)[0])
        if plan["network"] is not None:
            pairs = [wire.socketpair() for _ in range(2)] if self.has_sockets else []
            wire.send_raw(control, b"O", [pair[0].fileno() for pair in pairs])
            for pair in pairs:
                pair[0].close()
                pair[1].close()
        word = self.words.pop(0) if self.words else b"O7"
        if word:
            wire.send_raw(reply, word)
        if reply is not control:
            reply.close()
        while word[:1] == b"O" and (got := wire.receive_raw(control))[0]:
            for fd in got[1]:
                answer = wire.adopt(fd)
                wire.send_raw(answer, b"O")
                answer.close()
        control.close()
        process.kill()

    def _be_copied(self, control: wire.Socket) -> None:
        file = os.memfd_create("copied")
        wire.send_raw(control, b"O", [file])
        self.heard.append(wire.receive_raw(control)[0])
        self.heard.append(wire.receive(control)[0])
        self.heard.append(os.fstat(file).st_size)
        os.close(file)

    def tell(self, *_told: Any) -> None:
        pass

    note = tell

    def close(self) -> None:
        self.closed = True
        for process, agent in zip(self.processes, self.agents, strict=True):
            process.kill()
            process.wait()
            agent.join(2.0)
            assert not agent.is_alive(), "its connection is still open"

    @property
    def plan(self) -> Any:
        return [argument for verb, argument in self.asked if verb == "create"][-1]


class Ids:
    def __init__(self) -> None:
        self.taken: list[int] = []
        self.returned: list[int] = []

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
def jailer() -> Jailer:
    return Jailer()


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "runsc"
    path.write_text(_PROGRAM)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def ids() -> Ids:
    return Ids()


@pytest.fixture
def backend(jailer: Jailer, ids: Ids, program: str) -> Iterator[GvisorBackend]:
    """One without a view of its own, of which nothing is left."""
    made: Any = GvisorBackend(path=program, own_pages=False)
    made.runsc()
    before = len(os.listdir("/proc/self/fd"))
    made._jailer, made._host_ids = jailer, ids
    yield made
    made.close()
    assert jailer.closed
    assert sorted(ids.taken) == sorted(ids.returned), "each once: else it is two sandboxes'"
    assert {} == made._jailed == made._tenants
    assert set() == made._making
    made._process_images = None
    assert before == len(os.listdir("/proc/self/fd"))


def failing(backend: GvisorBackend, spec: SandboxSpec = SPEC) -> str:
    with pytest.raises(RingfenceError) as refusal:
        backend.provision(spec)
    assert {} == backend._jailed
    assert set() == backend._making
    return str(refusal.value)


class TestStarting:
    def test_one_is_told_its_settings_and_gives_all_back(
        self, backend: GvisorBackend, jailer: Jailer, ids: Ids
    ) -> None:
        spec = SPEC.altered(limits=Limits(pids=20, memory_bytes=128 << 20))
        backend.belongs_to("mine", "tenant")
        sandbox = backend.provision(spec)
        assert {"mine": sandbox} == backend._jailed
        assert {} == backend._tenants
        [told] = jailer.heard
        assert (20, 128 << 20, True) == (told["pids"], told["memory_bytes"], told["own_kernel"])
        assert jailer.plan["view"] is None
        assert "turned off" in sandbox.shares_pages
        assert sandbox.control.gettimeout() is None
        memory = str((128 << 20) + runsc.KERNEL_BYTES)
        if jailer.plan["cgroup_version"]:
            assert memory in repr(jailer.plan["cgroup_values"])
        with pytest.raises(RingfenceError, match="already exists"):
            backend.provision(spec)
        sandbox.terminate()
        assert len(ids.taken) == len(ids.returned) == int(host().trusted_root)
        backend.provision(spec)

    def test_it_is_its_tenants(
        self, backend: GvisorBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, told = planning.make_plan, list[Any]()

        def make_plan(*given: Any, **how: Any) -> Any:
            told.append(how["tenant"])
            return real(*given, **how)

        monkeypatch.setattr(planning, "make_plan", make_plan)
        backend.belongs_to("mine", "tenant")
        backend.provision(SPEC).terminate()
        backend.provision(SPEC)
        assert ["tenant", ""] == told, "an id that is used again is nobody's"

    @pytest.mark.parametrize("step", ["create", "word", "silence", "sockets"])
    def test_nothing_is_left_of_one_that_fails(
        self, backend: GvisorBackend, jailer: Jailer, step: str, monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:  # fmt: skip
        given_up: list[str] = []
        monkeypatch.setattr(journal, "give_up", lambda *what: given_up.append(what[2]))
        spec = SPEC.altered(mounts=(Mount("/data", str(tmp_path)),))
        jailer.says = b"idle\npanic: no platform\ngoroutine 1\n"
        if step == "create":
            jailer.refused["create"] = Refused(1, "unshare: no")
            assert "unshare" in failing(backend, spec)
        elif step == "word":
            jailer.words = [b"E12 mount: no room"]
            assert "no room" in failing(backend, spec)
        else:
            jailer.words = [b""]
            if step == "sockets":
                jailer.has_sockets = True
                spec = spec.altered(network=NetworkPolicy.parse("a.test"))
            assert "gVisor did not start: panic: no platform" in failing(backend, spec)
        assert ["mine"] == given_up
        jailer.refused.pop("create", None)
        backend.provision(SPEC)

    def test_one_whose_network_is_not_served_has_ended_once(
        self, backend: GvisorBackend, jailer: Jailer, ids: Ids
    ) -> None:
        def serve(*what: Any, **_how: Any) -> None:
            for fd in what[4]:
                os.close(fd)
            raise IsolationError("no egress")

        jailer.has_sockets = True
        egress: Any = SimpleNamespace(serve=serve, drop=lambda *_: ())
        backend._egress = lambda: egress
        spec = SPEC.altered(network=NetworkPolicy.parse("a.test"))
        assert "no egress" in failing(backend, spec)
        assert len(ids.taken) == len(ids.returned)

    def test_a_limit_of_processors_is_had_or_refused(
        self, backend: GvisorBackend, monkeypatch: pytest.MonkeyPatch, jailer: Jailer
    ) -> None:
        layout: Any = SimpleNamespace(
            version=0, bases={}, why="nobody may", has=lambda _name: False
        )
        monkeypatch.setattr(backend, "_layout", layout)
        spec = SPEC.altered(limits=Limits(cpus=1.0))
        assert "nobody may" in failing(backend, spec)
        assert "create" not in [verb for verb, _ in jailer.asked]
        sandbox = backend.provision(spec.altered(allow_degraded=("cpu_limit",)))
        assert "memory_limit" in sandbox._degraded()

    def test_the_end_of_the_backend_is_that_of_all(
        self, backend: GvisorBackend, jailer: Jailer
    ) -> None:
        made = [backend.provision(SPEC.altered(id=None)) for _ in range(2)]
        backend.close()
        assert all(State.TERMINATED is each.state for each in made)
        assert [] == backend._views


class TestProcessImages:
    def test_an_agent_goes_on_from_what_was_started_once(
        self, backend: GvisorBackend, jailer: Jailer
    ) -> None:
        jailer.refused.clear()
        for _ in range(2):
            backend.provision(SPEC.altered(id=None))
        [first, told, size, *_more] = jailer.heard
        assert (HEAD_IS_WRITTEN, _IMAGE) == (first, size)
        assert told["own_kernel"]
        assert 1 == [verb for verb, _ in jailer.asked].count("process_image")
        assert "" == backend.without_process_images
        assert _IMAGE == jailer.plan["guest"]["process_image_bytes"]
        small = backend.provision(SPEC.altered(limits=Limits(disk_bytes=1 << 16, inodes=300)))
        assert "" == jailer.plan["guest"]["process_image"]
        small.terminate()
        # It has worked: what fails later fails for another reason.
        jailer.words = [b""]
        count = len(jailer.processes)
        with pytest.raises(IsolationError):
            backend.provision(SPEC)
        assert count + 1 == len(jailer.processes)

    def test_one_that_never_worked_is_given_up(
        self, backend: GvisorBackend, jailer: Jailer
    ) -> None:
        jailer.refused.clear()
        jailer.words = [b""]
        backend.provision(SPEC)
        assert "gVisor did not start" in backend.without_process_images
        assert ("", 0) == (
            jailer.plan["guest"]["process_image"],
            jailer.plan["guest"]["process_image_bytes"],
        )

    def test_where_none_is_taken_the_report_says_why(
        self, backend: GvisorBackend, jailer: Jailer
    ) -> None:
        from ringfence.backends.gvisor.report import _reason

        assert "" == _reason(backend)
        backend.provision(SPEC)
        assert "not here" in _reason(backend)
        another: Any = Jailer()
        another.refused.clear()
        assert backend._process_image(another) is not None, "another jailer is asked again"


class TestRestoring:
    def catalogue(self, taken_under: SandboxSpec, memory: str) -> Any:
        opened: list[int] = []

        def open_one(_name: str) -> Any:
            opened.append(os.memfd_create("content"))
            return None, taken_under, opened[-1]

        return SimpleNamespace(open=open_one, memory_of=lambda _name: memory, opened=opened)

    def test_files_come_back_under_a_spec_of_their_own(
        self, backend: GvisorBackend, jailer: Jailer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = SPEC.altered(env={"A": "1"}, secrets={"S": "old"})
        found = self.catalogue(before, "")
        monkeypatch.setattr(backend, "catalogue", lambda: found)
        monkeypatch.setattr(asked, "check_given_secrets", lambda _spec: None)
        sandbox = backend.restore("snap", secrets={"S": "new"})
        assert ({"A": "1"}, {"S": "new"}) == (dict(sandbox.spec.env), dict(sandbox.spec.secrets))
        assert "mine" != sandbox.id
        assert jailer.plan["guest"]["has_content"]
        assert "run" in jailer.plan["argv"]
        other = backend.restore("snap", SPEC)
        assert "mine" == other.id
        jailer.words = [b""]
        with pytest.raises(IsolationError):
            backend.restore("snap", SPEC.altered(id="x"))
        for fd in found.opened:
            with pytest.raises(OSError, match="Bad file"):
                os.fstat(fd)

    def test_memory_goes_on_under_the_same_spec_only(
        self,
        backend: GvisorBackend,
        jailer: Jailer,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        (tmp_path / "memory").touch()
        found = self.catalogue(SPEC, str(tmp_path / "memory"))
        monkeypatch.setattr(backend, "catalogue", lambda: found)
        sandbox = backend.restore("snap")
        [(verb, name)] = jailer.heard
        assert ("wake", True) == (verb, bool(name))
        plan = jailer.plan
        assert ["restore", f"--image-path={places.SAVED}"] == plan["argv"][-4:-2]
        assert f"{places.SAVED}/{places.MEMORY}" in [step[1] for step in plan["steps"]]
        assert 7 == sandbox._numbers, "execs are counted on"
        with pytest.raises(RingfenceError, match="own spec only"):
            backend.restore("snap", SPEC.altered(limits=Limits(pids=9)))
        told: list[Any] = []
        monkeypatch.setattr(module, "tell_limits", lambda *what: told.append(what))
        limited = backend.restore("snap", SPEC.altered(labels={"a": "b"}))
        assert [(limited, SPEC)] == told
        limited.terminate()
        jailer.words = [b""]
        with pytest.raises(IsolationError):
            backend.restore("snap")
        assert {sandbox.id} == {*backend._jailed}


class TestViews:
    def backend_of(self, ids: Ids) -> Any:
        return SimpleNamespace(host_ids=lambda: ids)

    def test_the_last_one_serves_who_comes_until_its_jailer_ends(
        self, backend: GvisorBackend, jailer: Jailer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        closed: list[Any] = []

        class View:
            is_closed, is_current, alive, why = False, True, True, ""

            def __init__(self, _backend: Any, jailer: Any, wanted: bool) -> None:
                self.jailer, self.wanted = jailer, wanted

            def close(self) -> None:
                closed.append(self)
                self.is_closed = True

        monkeypatch.setattr(module, "Views", View)
        here: Any = jailer
        other: Any = Jailer()
        third: Any = Jailer()
        view_for: Any = backend.views
        first = view_for(here)
        assert view_for(here) is first
        assert not first.wanted
        first.is_current = False
        second = view_for(here)
        assert second is not first
        assert ([], [first, second]) == (closed, backend._views), "its sandboxes still see by it"
        second.alive = False
        last = view_for(here)
        assert ([second], [first, last]) == (closed, backend._views)
        newest = view_for(other)
        assert ([second, first, last], [newest]) == (closed, backend._views)
        assert view_for(third) is not newest

    @pytest.mark.parametrize("step", ["mount_space", "create", ""])
    def test_a_jailer_that_refuses_is_gone_on_without(
        self, jailer: Jailer, ids: Ids, step: str
    ) -> None:
        jailer.refused = {step: Refused(1, f"mount_space: no {step}")} if step else {}
        before = len(os.listdir("/proc/self/fd"))
        made = Views(self.backend_of(ids), jailer, wanted=True)  # type: ignore[arg-type]
        if step:
            assert made.why_not(None).startswith(f"no {step}")
            assert made.is_closed
        else:
            assert (made.alive, made.is_current, made.is_closed) == (True, True, False)
            jailer.processes[0].kill()
            jailer.processes[0].wait()
            assert not made.alive
            made.close()
            made.close()
        assert ids.taken == ids.returned
        jailer.close()
        assert before == len(os.listdir("/proc/self/fd"))

    @pytest.mark.parametrize(("maps", "why"), [(b"1", ""), (b"0", views._NO_IDS)])
    def test_images_need_a_kernel_that_maps_ids(
        self, jailer: Jailer, ids: Ids, monkeypatch: pytest.MonkeyPatch, maps: bytes, why: str
    ) -> None:
        real = jailer.ask

        def ask(verb: str, argument: Any, fds: Any = (), **how: Any) -> Any:
            found = real(verb, argument, fds, **how)
            return (maps, []) if verb == "views" else found

        monkeypatch.setattr(jailer, "ask", ask)
        here = SimpleNamespace(**{**vars(host()), "trusted_root": True})
        monkeypatch.setattr(views, "host", lambda: here)
        made = Views(self.backend_of(ids), jailer, wanted=True)  # type: ignore[arg-type]
        image: Any = SimpleNamespace(owner=(3, 4))
        assert ("", why) == (made.why_not(None), made.why_not(image))
        [told] = [argument for verb, argument in jailer.asked if verb == "views"]
        assert jailer.processes[0].pid == told["server"]
        assert f"0 {ids.taken[0]} 1" == told["probe"]["idmap"]
        trees: Any = [{"source": "/a"}, {"source": "/image"}]
        draft: Any = SimpleNamespace(trees=trees, image=image, first_host_id=900, id="mine")
        planned = made.plan(draft, "tenant", [0], 1)
        assert ("tenant", False, [0], 1) == (
            planned["tenant"], planned["once"], planned["trees"], planned["image"],
        )  # fmt: skip
        assert planned["image_source"] is not None
        assert f"3 {ids.taken[0]} 1" == planned["image_source"]["idmap"]
        assert f"4 {ids.taken[0]} 1" == planned["image_source"]["idmap_gid"]
        assert "0 900 1" == draft.trees[1]["idmap"]
        assert made.plan(draft, "mine", [0], -1)["once"], "the only one of its tenant"
        made.close()
        assert ids.taken == ids.returned
        jailer.close()

    def test_images_of_an_ordinary_user_need_no_mapped_ids(
        self, jailer: Jailer, ids: Ids, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = jailer.ask

        def ask(verb: str, argument: Any, fds: Any = (), **how: Any) -> Any:
            found = real(verb, argument, fds, **how)
            return (b"0", []) if verb == "views" else found

        monkeypatch.setattr(jailer, "ask", ask)
        here = SimpleNamespace(**{**vars(host()), "trusted_root": False})
        monkeypatch.setattr(views, "host", lambda: here)
        made = Views(self.backend_of(ids), jailer, wanted=True)  # type: ignore[arg-type]
        image: Any = SimpleNamespace(owner=(3, 4))
        assert ("", "") == (made.why_not(None), made.why_not(image))
        assert [] == ids.taken
        made.close()
        jailer.close()

    def test_a_view_of_a_parent_is_not_ended_by_its_child(self, jailer: Jailer, ids: Ids) -> None:
        made = Views(self.backend_of(ids), jailer, wanted=True)  # type: ignore[arg-type]
        jailer.owner = 1
        made.close()
        assert jailer.processes[0].poll() is None
        assert [] == ids.returned
        jailer.close()

    def test_the_fix_is_for_the_reason(self) -> None:
        assert "unset RINGFENCE_OWN_PAGES" in views.fix_of(
            "it was turned off (RINGFENCE_OWN_PAGES)"
        )
        assert "6.12" in views.fix_of(views._NO_IDS)
        assert "/dev/fuse" in views.fix_of("no device")


class TestPlans:
    def plan(
        self, program: str, trusted: bool = True, disk_bytes: int = 1 << 26, **changes: Any
    ) -> Any:
        names = ("memory", "process_image_bytes", "has_content")
        how = {name: changes.pop(name) for name in names if name in changes}
        self.draft = Draft(
            SandboxSpec(tier="strong", **changes), "mine", 1000, 500_000 if trusted else 0
        )
        here: Any = SimpleNamespace(**{**vars(host()), "trusted_root": trusted})
        size: Any = SimpleNamespace(
            pids=20, disk_bytes=disk_bytes, inodes=99, memory_bytes=1 << 27, open_files=64
        )
        try:
            return planning.make_plan(
                self.draft, here, runsc.find(program), size, **{"has_content": False, **how}
            )
        finally:
            self.draft.close()

    def bundle(self, plan: Any) -> Any:
        [(content, mode)] = [step[2:] for step in plan["steps"] if step[1] == places.CONFIG]
        assert 0o600 == mode
        return json.loads(content)

    def test_saved_memory_is_shown_to_the_jail_read_only(
        self, program: str, tmp_path: Path
    ) -> None:
        (tmp_path / "memory").touch()
        plan = self.plan(program, memory=str(tmp_path / "memory"))
        shown = f"{places.SAVED}/{places.MEMORY}"
        [at] = [step[2] for step in plan["steps"] if step[:2] == ("show", shown)]
        tree = plan["trees"][at]
        wanted = template.tree(str(tmp_path / "memory"), template.READ_ONLY)
        assert (wanted["source"], wanted["attributes"]) == (tree["source"], tree["attributes"])
        assert ["restore", f"--image-path={places.SAVED}"] == [
            each for each in plan["argv"] if each == "restore" or each.startswith("--image-path")
        ]
        assert "restore" not in self.plan(program)["argv"]

    def test_the_jail_has_its_own_network_rights_and_limits(self, program: str) -> None:
        plan = self.plan(program)
        assert (True, None, runsc.DESCRIPTORS) == (
            plan["keep_capabilities"], plan["network"], plan["descriptors"],
        )  # fmt: skip
        most = runsc.host_pids(20)
        assert (resource.RLIMIT_NPROC, most, most) in plan["rlimits"]
        assert (resource.RLIMIT_CORE, 1, 1) in plan["rlimits"]
        guest = plan["guest"]
        assert (1 << 26, 99, 1000, -1, -1) == (
            guest["size_bytes"], guest["inodes"], guest["owner"], guest["disk"], guest["image"],
        )  # fmt: skip
        argv = plan["argv"]
        assert [places.RUNSC, f"--root={places.STATE}"] == argv[:2]
        assert ["run", "--bundle=/bundle", "mine"] == argv[-3:]
        assert {"--network=none", "--rootless=false", "--ignore-cgroups", "--overlay2=none"} <= {
            *argv
        }
        assert "--panic-log=/proc/self/fd/2" in argv
        assert "--host-uds=none" not in argv, "this version does not know it"
        shown = {step[1]: plan["trees"][step[2]] for step in plan["steps"] if step[0] == "show"}
        devices = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")}
        assert {places.RUNSC} | devices == {*shown}
        assert template.READ_ONLY == shown[places.RUNSC]["attributes"]
        assert template.DEVICE == shown["/dev/null"]["attributes"]
        assert ("dir", places.POINTS, 0, False) in plan["steps"]
        assert [("share", places.MOUNTS)] == [step for step in plan["after"] if step[0] == "share"]

    def test_the_container_has_no_privilege_to_gain(self, program: str) -> None:
        found = self.bundle(self.plan(program))
        process = found["process"]
        assert process["noNewPrivileges"]
        assert {"uid": 0, "gid": 0} == process["user"]
        assert {"bounding", "effective", "permitted"} == {*process["capabilities"]}
        assert not any(
            f"CAP_{name}" in process["capabilities"]["bounding"]
            for name in ("SYS_PTRACE", "NET_ADMIN", "NET_RAW", "SYS_MODULE", "MKNOD", "SYS_CHROOT")
        )
        kinds = [each["type"] for each in found["linux"]["namespaces"]]
        assert ["pid", "ipc", "uts", "mount", "network"] == kinds
        assert {"path": "rootfs", "readonly": False} == found["root"]
        assert ["/proc", "/dev"] == [each["destination"] for each in found["mounts"][:2]]
        plan = self.plan(program, network=NetworkPolicy.parse("a.test"))
        kinds = [each["type"] for each in self.bundle(plan)["linux"]["namespaces"]]
        assert "network" not in kinds, "it is the jail's, with our sockets"
        assert "--network=host" in plan["argv"]
        assert plan["network"] is not None

    def test_without_root_there_is_one_id_and_what_is_the_systems_is_read_only(
        self, program: str
    ) -> None:
        plan = self.plan(program, trusted=False)
        assert "--rootless=true" in plan["argv"]
        assert 0 == plan["guest"]["owner"]
        assert ("protect", f"{places.ROOTFS}/etc") in plan["after"]
        assert ("protect", f"{places.ROOTFS}/etc") not in self.plan(program)["after"]

    @pytest.mark.parametrize(
        ("how", "is_copied"),
        [
            ({"process_image_bytes": 1 << 25}, True),
            ({"process_image_bytes": (1 << 25) + 1}, False),
            ({"process_image_bytes": 0}, False),
            ({"process_image_bytes": 9, "has_content": True}, False),
        ],
    )
    def test_an_agent_is_copied_where_there_is_room_and_nothing_else(
        self, program: str, how: dict[str, Any], is_copied: bool
    ) -> None:
        plan = self.plan(program, **how)
        guest = plan["guest"]
        assert is_copied == (guest["process_image"] == places.PROCESS_IMAGE)
        assert (how["process_image_bytes"] if is_copied else 0) == guest["process_image_bytes"]
        argv = self.bundle(plan)["process"]["args"]
        assert is_copied == (argv == [places.PROCESS_IMAGE])
        files = [step[1] for step in guest["steps"] if step[0] == "file"]
        assert is_copied != (places.PROCESS_IMAGE in files)
        assert ("dir", places.AGENT, 0o700, False) in guest["steps"]

    def test_mounts_are_shown_as_they_may_be_used(self, program: str, tmp_path: Path) -> None:
        for name in ("a", "b", "b/in"):
            (tmp_path / name).mkdir()
        plan = self.plan(
            program,
            mounts=(
                Mount("/ro", str(tmp_path / "a")), Mount("/rw/in", str(tmp_path / "a")),
                Mount("/rw", str(tmp_path / "b"), "rw"),
            ),
        )  # fmt: skip
        shown = {each["destination"]: each for each in self.bundle(plan)["mounts"][2:]}
        assert {"/ro", "/rw", "/rw/in", places.IN_GUEST} == {*shown}
        assert ["rbind", "ro", "nosuid", "nodev"] == shown["/ro"]["options"]
        assert "rw" in shown["/rw"]["options"]
        assert self.draft.places == {
            target: each["source"] for target, each in shown.items() if target != places.IN_GUEST
        }
        points = [step[1] for step in plan["guest"]["steps"] if step[0] == "mount_point"]
        assert {"/ro", "/rw"} == {*points}, "in another mount, gVisor finds it there"

    def test_what_is_denied_is_hidden_in_the_jail(self, program: str) -> None:
        plan = self.plan(program, deny=("/usr/bin/env", "/etc/hostname"))
        hidden = [step[1] for step in plan["after"] if str(step[1]).startswith(places.ROOTFS)]
        assert {f"{places.ROOTFS}/usr/bin/env", f"{places.ROOTFS}/etc/hostname"} <= {*hidden}

    def test_who_may_be_root_has_accounts(self, program: str) -> None:
        usual = len(self.plan(program)["guest"]["steps"])
        found = self.plan(program, profile=OWN_ROOT)["guest"]["steps"]
        assert len(template.for_accounts()) == len(found) - usual


class TestAsking:
    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"tier": "light"}, "tier"),
            ({"template": "other"}, "template"),
            ({"profile": "other"}, "profile"),
            ({"user": "nobody-here"}, "user"),
            ({"network": NetworkPolicy.parse("unrestricted")}, "network"),
            ({"limits": Limits(io_bytes_per_s=1 << 20)}, "limits.io_bytes_per_s"),
            ({"limits": Limits(open_files=63)}, "limits.open_files"),
            ({"limits": Limits(memory_bytes=(32 << 20) - 1)}, "limits.memory_bytes"),
            ({"limits": Limits(inodes=255)}, "limits.inodes"),
            ({"mounts": (Mount("/x", "/not/there"),)}, None),
            ({"unprotect": ("nothing-such",)}, None),
        ],
    )
    def test_what_it_does_not_do_is_refused_first(
        self, changes: dict[str, Any], field: str | None, backend: GvisorBackend, jailer: Jailer
    ) -> None:
        with pytest.raises(RingfenceError) as refusal:
            backend.provision(SPEC.altered(**changes))
        assert field in (None, refusal.value.field)
        assert [] == jailer.asked


def test_a_jailer_that_is_gone_is_told_as_it_is(backend: GvisorBackend, jailer: Jailer) -> None:
    def ask(*_asked: Any, **_how: Any) -> Any:
        raise SandboxLost("the jailer process is gone")

    jailer.ask = ask  # type: ignore[method-assign]
    with pytest.raises((SandboxLost, Unsupported)):
        backend.provision(SPEC)
