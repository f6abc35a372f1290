"""What is read back of a gVisor sandbox, saved of it and mounted in it later; which program is used."""

from __future__ import annotations

import contextlib
import datetime
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends.gvisor import (
    asked,
    attach,
    inspection,
    places,
    posture,
    root,
    runsc,
    snapshots,
    statx,
)
from ringfence.backends.gvisor.inspection import HostProcess, Inspection
from ringfence.backends.gvisor.posture import GvisorReader
from ringfence.backends.local.mounts import runtime
from ringfence.backends.local.protections import PAGE
from ringfence.errors import BackendUnavailable, InvalidRequest, IsolationError, Unsupported
from ringfence.linux import mounts
from ringfence.model.mount import MEMORY_DIR, READ_ONLY, READ_WRITE, Mount
from ringfence.model.net.network import NetworkPolicy
from ringfence.model.session import ResolvedMount
from ringfence.model.spec import SandboxSpec

pytestmark = pytest.mark.anyone
SPEC = SandboxSpec(tier="strong")


def process(uid: int = 5, **changes: Any) -> Any:
    facts = {
        "is_filtered": True, "status": {"NoNewPrivs": "1"}, "uid": uid, "command": ["--network=none"],
        "interfaces": ["lo"], "shares": lambda _name: False, "has_same": lambda *_: True,
        "network": None,
    }  # fmt: skip
    return SimpleNamespace(**{**facts, **changes})


def line(target: str, device: str, options: str = "ro", kind: str = "fuse") -> Any:
    return SimpleNamespace(target=target, device=device, options=options.split(","), kind=kind)


def reader(**seen: Any) -> Any:
    made: Any = GvisorReader.__new__(GvisorReader)
    facts = {
        "kernel": [process(7)], "server": [process(8)], "launcher": process(8), "mounts": [],
        "host_ids": [(500, 3), (600, 2)], "inside": lambda _path: "Linux version 4.4.0 gVisor",
    }  # fmt: skip
    made.seen = SimpleNamespace(**{**facts, **seen})
    made.sandbox = SimpleNamespace(
        mounts=[], protected=[], shares_pages="", has_network=False, network=None, spec=SPEC,
        program=SimpleNamespace(version="x", released=0),
        group=SimpleNamespace(version=2), sizes=SimpleNamespace(memory_bytes=1 << 27, pids=20),
        owner=SimpleNamespace(layout=lambda: SimpleNamespace(why="nobody may")),
    )  # fmt: skip
    return made


def said(verdict: Any) -> str:
    return str(verdict[0])


class TestReading:
    def test_the_guests_kernel_is_another_than_the_hosts(self) -> None:
        assert "enforced" == said(reader().guest_kernel())
        hosts = f"Linux version {os.uname().release} more"
        assert "missing" == said(reader(inside=lambda _path: hosts).guest_kernel())

    @pytest.mark.parametrize(
        ("age", "expected"),
        [(0, "enforced"), (365, "enforced"), (366, "degraded"), (None, "degraded")],
    )
    def test_an_old_release_lacks_fixes(self, age: int | None, expected: str) -> None:
        made = reader()
        if age is not None:
            day = datetime.datetime.now(datetime.UTC).date() - datetime.timedelta(age)
            made.sandbox.program.released = int(day.strftime("%Y%m%d"))
        assert expected == said(made.gvisor_release())

    @pytest.mark.parametrize("who", ["kernel", "server"])
    def test_every_process_that_a_guest_reaches_is_filtered(self, who: str) -> None:
        assert "enforced" == said(reader().seccomp())
        assert "missing" == said(reader(**{who: []}).seccomp())
        loose = [process(), process(is_filtered=False)]
        assert "missing" == said(reader(**{who: loose}).seccomp())

    @pytest.mark.parametrize("who", ["kernel", "server", "launcher"])
    def test_no_process_gains_privileges_or_shares_a_namespace(self, who: str) -> None:
        assert ("enforced", "enforced") == (
            said(reader().no_new_privs()), said(reader().namespaces()),
        )  # fmt: skip
        bad = process(status={"NoNewPrivs": "0"}, shares=lambda name: name == "net")
        made = reader(**{who: bad if who == "launcher" else [process(), bad]})
        assert "missing" == said(made.no_new_privs())
        assert "enforced" != said(made.namespaces())

    def test_whose_ids_it_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here = SimpleNamespace(trusted_root=True)
        monkeypatch.setattr(posture, "host", lambda: here)
        assert "host ids 500 to 601" in reader().host_identity()[1]
        assert "missing" == said(reader(host_ids=[(500, 1), (0, 1)]).host_identity())
        assert "degraded" == said(reader(server=[process(7)]).host_identity())
        here.trusted_root = False
        assert "enforced" == said(reader(server=[process(7)]).host_identity())

    def test_only_what_was_asked_for_can_be_written(self) -> None:
        own = [line("/", "1"), line(places.ROOTFS, "2", "rw"), line("/in", "2", "rw")]
        shown = [line("/mounts/0", "3", "rw"), line("/mounts/0/below", "4", "rw"), line("/ro", "5")]
        made = reader(mounts=[*own, *shown, line("/proc", "9", "rw", "proc")])
        assert "missing" == said(made.read_only_mounts())
        made.sandbox.mounts = [ResolvedMount("/data", READ_WRITE, "/srv")]
        assert "enforced" == said(made.read_only_mounts())
        made.sandbox.mounts = [ResolvedMount("/data", READ_ONLY, "/srv")]
        assert "missing" == said(made.read_only_mounts())
        made.sandbox.mounts = [ResolvedMount("/data", READ_WRITE, "/srv")]
        made.seen.mounts = [*own, line("/usr/x", "3", "rw")]
        made.seen.mounts[-1].target = "/usr/x"
        assert "missing" == said(made.read_only_mounts())

    def test_pages_are_its_tenants_where_no_tree_is_the_hosts_own(self) -> None:
        own = [line("/", "1"), line(places.ROOTFS, "2", "rw", "tmpfs")]
        below = [
            line(f"{places.ROOTFS}/usr", "3"),
            line(f"{places.ROOTFS}/tmp", "2", "rw", "tmpfs"),
        ]
        assert "enforced" == said(reader(mounts=[*own, *below]).own_pages())
        direct = line(f"{places.ROOTFS}/lib", "4", kind="ext4")
        assert "missing" == said(reader(mounts=[*own, *below, direct]).own_pages())
        made = reader()
        made.sandbox.shares_pages = "no device"
        assert "degraded" == said(made.own_pages())

    def test_protected_paths_are_counted_in_the_jail(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(posture, "paths_of", lambda _protected: ["a", "b"])
        made = reader(
            mounts=[
                line("/mounts/0", "1"),
                line("/mounts/0/a", "1"),
                line("/mounts/0/b", "1", "rw"),
            ]
        )
        assert made.protected_paths() is None
        made.sandbox.mounts = [ResolvedMount("/data", READ_WRITE, "/srv")]
        assert "missing" == said(made.protected_paths())
        made.seen.mounts[-1].options = ["ro"]
        assert "enforced" == said(made.protected_paths())

    def test_there_is_no_network_but_the_one_made_for_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert "enforced" == said(reader().network())
        assert "missing" == said(reader(kernel=[process(interfaces=["lo", "eth0"])]).network())
        assert "missing" == said(reader(kernel=[process(command=["x"])]).network())
        assert "missing" == said(reader(kernel=[]).network())
        monkeypatch.setattr(posture, "of_network", lambda *_: ("enforced", "ours", ""))
        for same, expected in ((True, "enforced"), (False, "missing")):
            kernel = [process(command=["--network=host"], has_same=lambda *_, same=same: same)]
            made = reader(kernel=kernel)
            made.sandbox.has_network, made.sandbox.network = True, object()
            assert expected == said(made.network())

    @pytest.mark.parametrize(
        ("more", "expected"),
        [(0, "enforced"), (PAGE, "enforced"), (PAGE + 1, "missing")],
    )
    def test_memory_is_bounded_with_gvisors_own(
        self, more: int, expected: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made, most = reader(), (1 << 27) + runsc.KERNEL_BYTES
        monkeypatch.setattr(posture, "memory_limit_bytes", lambda _group: most + more)
        assert expected == said(made.memory_limit())
        monkeypatch.setattr(posture, "memory_limit_bytes", lambda _group: None)
        assert "missing" == said(made.memory_limit())
        made.sandbox.group.version = 0
        assert "degraded" == said(made.memory_limit())

    def test_a_process_is_read_from_proc(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = HostProcess(os.getpid())
        assert made.shares("net")
        assert made.has_same("net", made)
        assert os.stat("/proc/self").st_uid == made.uid
        made.status = {"Uid": "1\t2\t3\t4"}
        assert 2 == made.uid, "its effective one"
        texts = {"1": "Name\nSeccomp:\t2\nx", "2": "Name\nSeccomp:\t0\nx"}
        monkeypatch.setattr(os, "listdir", lambda _path: [*texts])
        monkeypatch.setattr(inspection, "read_text", lambda path: texts[path.split("/")[-2]])
        assert not made.is_filtered, "one thread is enough"
        texts["2"] = texts["1"]
        assert made.is_filtered

    def test_a_server_of_files_is_told_from_the_kernel(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commands = {1: ["runsc"], 2: ["runsc-gofer"], 3: ["runsc-sandbox"], 4: ["exe"]}

        def found(pid: int) -> Any:
            if pid == 4:
                raise ProcessLookupError
            return SimpleNamespace(pid=pid, command=commands[pid])

        monkeypatch.setattr(inspection, "HostProcess", found)
        monkeypatch.setattr(inspection, "descendants", lambda _pid: [2, 3, 4])
        sandbox: Any = SimpleNamespace(pid=1, ask=lambda _what: (b"1 2 3 4", []))
        made = Inspection(sandbox)
        assert ([2], [3]) == ([p.pid for p in made.server], [p.pid for p in made.kernel])
        assert (1, 2, 3, 4) == (made.pids, made.open_files, made.disk_bytes, made.inodes)
        monkeypatch.setattr(inspection, "read_text", lambda _path: "0 500 3\n3 600 2\n")
        assert [(500, 3), (600, 2)] == made.host_ids


class TestSaving:
    def sandbox(self, done: list[Any], **changes: Any) -> Any:
        @contextlib.contextmanager
        def still() -> Iterator[None]:
            done.append("still")
            yield
            done.append("goes on")

        facts = {
            "spec": SPEC.altered(deny=("/srv",)), "image": None, "stand_still": still, "id": "mine",
            "enter": lambda verb, request, fds: done.append((verb, request, len(fds))),
            "is_held": False, "flags": lambda: ["--flag"], "pid": os.getpid(),
            "terminate": lambda: done.append("ended"),
        }  # fmt: skip
        return SimpleNamespace(**{**facts, **changes})

    @pytest.fixture
    def done(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        done: list[Any] = []

        def keep(
            _sandbox: Any, _catalogue: Any, _metadata: Any, pack: Any, memory: str = ""
        ) -> Any:
            pack(1)
            if memory:
                done.append(memory)
            if "fails" in done:
                raise IsolationError("no room")
            return "snapshot"

        monkeypatch.setattr(snapshots, "keep", keep)
        monkeypatch.setattr(snapshots, "settle", lambda _sandbox: done.append("settled"))
        return done

    def test_it_stands_still_while_its_files_are_packed(self, done: list[Any]) -> None:
        made: Any = snapshots.save(self.sandbox(done), None, {})  # type: ignore[arg-type]
        assert "snapshot" == made
        shown = {"path": places.ROOTFS, "shown": [runtime.PLACE, "/srv"]}
        assert ["still", ("pack", shown, 1), "goes on"] == done

    @pytest.mark.parametrize("is_held", [True, False])
    @pytest.mark.parametrize("fails", [True, False])
    def test_one_whose_memory_is_saved_has_ended(
        self, done: list[Any], is_held: bool, fails: bool, tmp_path: Path
    ) -> None:
        owners: list[int] = []

        @contextlib.contextmanager
        def workspace(owner: int) -> Iterator[str]:
            owners.append(owner)
            yield str(tmp_path)

        catalogue: Any = SimpleNamespace(workspace=workspace)
        done += ["fails"] if fails else []
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(IsolationError) if fails else contextlib.nullcontext():
            snapshots.save_with_memory(self.sandbox(done, is_held=is_held), catalogue, {})
        assert [os.stat("/proc/self").st_uid] == owners
        assert before == len(os.listdir("/proc/self/fd"))
        assert "ended" == done[-1]
        assert is_held != ("settled" in done)
        [(verb, request, count)] = [each for each in done if isinstance(each, tuple)]
        assert ("checkpoint", 2, places.ROOTFS) == (verb, count, request["path"])
        assert ["checkpoint", "--image-path=/proc/self/fd/3", "mine"] == request["argv"][-3:]
        assert f"{tmp_path}/{places.MEMORY}" in done


class TestAttaching:
    def attach(
        self, monkeypatch: pytest.MonkeyPatch, mount: Mount, **changes: Any
    ) -> tuple[Any, list[Any]]:
        done: list[Any] = []
        monkeypatch.setattr(attach, "is_here", lambda: True)
        monkeypatch.setattr(attach, "_run", lambda _sandbox, _program: done.append("run"))

        def add(_mount: Mount) -> str:
            more.mounted.append({"source": "/srv"})
            return f"{places.MOUNTS}/4"

        more: Any = SimpleNamespace(
            count=4, places={}, after=[], mounts=[], mounted=[], add_of_host=add
        )
        facts = {
            "spec": SPEC, "shows_later": False, "enter": lambda *what: done.append(what),
            "mount_in_jail": lambda _more: done.append("mounted"),
        }  # fmt: skip
        sandbox: Any = SimpleNamespace(**{**facts, **changes})
        attach.attach(sandbox, mount, more)
        assert bool(sandbox.shows_later) == ("mounted" in done)
        return more, done

    def test_the_hosts_are_mounted_in_the_jail_and_then_shown(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _more, done = self.attach(monkeypatch, Mount("/data", "/srv"))
        assert ["mounted", "run"] == done

    def test_its_own_are_one_place_and_read_only_by_the_hosts_kernel(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        more, done = self.attach(monkeypatch, Mount("/data", "x", "rw"))
        assert ["run"] == done
        assert more.places["/data"].endswith("/x")
        assert [("/data", READ_WRITE)] == [(m.target, m.access) for m in more.mounts]
        more, done = self.attach(monkeypatch, Mount("/data", "x", "ro"))
        assert ["run", "mounted", "run"] == done
        assert f"{places.MOUNTS}/4" == more.places["/data"]
        [(_, source, target, attributes)] = [s for s in more.after if s[0] == "bind_inside"]
        assert mounts.MOUNT_ATTR_RDONLY == attributes
        assert (f"{places.ROOTFS}{SPEC.workdir or ''}", f"{places.MOUNTS}/4") == (
            source[: len(places.ROOTFS) + len(SPEC.workdir or "")], target,
        )  # fmt: skip
        assert [("/data", READ_ONLY)] == [(m.target, m.access) for m in more.mounts]

    def test_not_at_what_is_denied_nor_by_another_processor(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(InvalidRequest):
            self.attach(monkeypatch, Mount("/secret/x"), spec=SPEC.altered(deny=("/secret",)))
        monkeypatch.undo()
        monkeypatch.setattr(attach, "is_here", lambda: False)
        nothing: Any = None
        with pytest.raises(Unsupported, match="x86-64"):
            attach.attach(nothing, Mount("/data"), nothing)

    @pytest.mark.parametrize(("trusted", "user"), [(True, 1000), (False, 0)])
    def test_the_program_runs_as_root_of_all_inside_with_few_rights(
        self, trusted: bool, user: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        entered: list[Any] = []
        awake: list[int] = []
        monkeypatch.setattr(attach, "host", lambda: SimpleNamespace(trusted_root=trusted))

        @contextlib.contextmanager
        def be_awake() -> Iterator[None]:
            awake.append(1)
            yield
            awake.append(0)

        sandbox: Any = SimpleNamespace(
            uid=1000, id="mine", flags=lambda: ["--flag"], awake=be_awake,
            enter=lambda *what: entered.append((what, list(awake))),
        )  # fmt: skip
        program: Any = SimpleNamespace(packed=lambda: b"program")
        attach._run(sandbox, program)
        [((verb, request, fds), during)] = entered
        assert ("run", [], [1], [1, 0]) == (verb, fds, during, awake)
        assert f"--user={user}:{user}" in request["argv"]
        rights = [word for word in request["argv"] if word.startswith("--cap=")]
        assert ["--cap=CAP_SYS_ADMIN", "--cap=CAP_DAC_OVERRIDE", "--cap=CAP_CHOWN"] == rights
        assert (f"{places.POINTS}/mount-mine", b"program") == request["file"]


class TestProgram:
    def program(self, tmp_path: Path, text: str) -> str:
        path = tmp_path / "runsc"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    @pytest.mark.parametrize(
        ("version", "released"),
        [("release-20250101.0", 20250101), ("0.0~20240102.0-1", 20240102), ("VERSION_MISSING", 0)],
    )
    def test_its_release_is_read(self, tmp_path: Path, version: str, released: int) -> None:
        made = runsc.find(self.program(tmp_path, f"echo runsc version {version}"))
        assert (version, released, []) == (made.version, made.released, made.words)
        assert runsc.find(made.path) is made, "asked once"

    def test_one_that_was_replaced_is_asked_again(self, tmp_path: Path) -> None:
        first = runsc.find(self.program(tmp_path, "echo runsc version 1"))
        (tmp_path / "runsc").unlink()
        assert (
            "2"
            == runsc.find(self.program(tmp_path, "echo runsc version 2")).version
            != first.version
        )

    def test_one_that_does_not_run_is_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(BackendUnavailable, match="does not run"):
            runsc.find(self.program(tmp_path, "true"))
        monkeypatch.setattr(runsc, "_PATIENCE_S", 0.05)
        (tmp_path / "runsc").unlink()
        with pytest.raises(BackendUnavailable, match="does not run"):
            runsc.find(self.program(tmp_path, "exec sleep 100"))
        monkeypatch.setenv("PATH", str(tmp_path / "none"))
        monkeypatch.setattr(runsc, "_PLACES", (str(tmp_path / "none"),))
        with pytest.raises(BackendUnavailable, match="not installed"):
            runsc.find()
        monkeypatch.setattr(runsc, "_PLACES", (str(tmp_path),))
        (tmp_path / "runsc").unlink()
        self.program(tmp_path, "echo runsc version usual")
        assert "usual" == runsc.find().version
        (tmp_path / "bin").mkdir()
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        self.program(tmp_path / "bin", "echo runsc version first")
        assert "first" == runsc.find().version

    @pytest.mark.parametrize(
        ("most", "said"),
        [(1024, True), (runsc._AMPLE_FILES, False), (resource.RLIM_INFINITY, False)],
    )
    def test_few_descriptors_are_not_kept_by_its_cache(
        self, tmp_path: Path, most: int, said: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = runsc.find(self.program(tmp_path, "echo runsc version 1; echo '  -dcache x'"))
        monkeypatch.setattr(resource, "getrlimit", lambda _which: (1, most))
        flags = made.flags(rootless=True, network=True)
        assert said == (f"--dcache={most // 8}" in flags)
        assert ["--network=host", "--ignore-cgroups", "--rootless=true"] == flags[-3:]
        monkeypatch.setattr(made, "_known", frozenset())
        assert ["--network=none", "--ignore-cgroups", "--rootless=false"] == made.flags(
            rootless=False, network=False
        )

    def test_all_that_it_must_be_told_is_told(self, tmp_path: Path) -> None:
        names = " ".join(runsc._WANTED)
        text = f'echo runsc version 1; for n in {names}; do echo "  -$n x"; done'
        flags = runsc.find(self.program(tmp_path, text)).flags(rootless=True, network=False)
        expected = ("overlay2=none", "directfs=false", "host-uds=none", "host-fifo=none", "net-raw=false",
                    "file-access=exclusive", "file-access-mounts=shared")  # fmt: skip
        assert {f"--{each}" for each in expected} <= {*flags}

    def test_the_hosts_processes_are_not_all_its(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(runsc, "_most_of_the_host", lambda: 8000)
        assert (100 + 4096, 8000, 200) == (
            runsc.host_pids(10), runsc.host_pids(1000), runsc.safe_pids(),
        )  # fmt: skip

    def test_memory_needs_the_same_program_processor_and_system(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = runsc.find(self.program(tmp_path, "echo runsc version 1"))
        usual = made.restores
        for name in ("_processor_features", "_system"):
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(runsc, name, lambda: "another")
                assert usual != made.restores
        monkeypatch.setattr(made, "version", "2")
        assert usual != made.restores

    def test_the_reason_of_a_panic_is_told_not_its_stacks(self) -> None:
        errors = os.memfd_create("errors")
        os.write(errors, b"] membarrier(\nlast line\n")
        assert "last line" == runsc.last_words(errors)
        os.write(errors, b"fatal error: x\ngoroutine\nmore\n")
        assert "fatal error: x" == runsc.last_words(errors)
        os.close(errors)
        assert runsc.lacks_processes("fork: resource temporarily unavailable")
        assert not runsc.lacks_processes("panic")


class TestRoots:
    @pytest.mark.parametrize(
        ("needs", "image", "expected"),
        [(False, False, []), (True, False, [2]), (False, True, [1]), (True, True, [2])],
    )
    def test_the_list_of_what_is_loaded_ahead_is_ours(
        self, needs: bool, image: bool, expected: list[int]
    ) -> None:
        draft: Any = SimpleNamespace(image=object() if image else None, guest=[])
        root._preload(draft, needs)
        assert (expected or [0])[0] == len(draft.guest)
        assert all(step[0] == ("image_file" if image else "file") for step in draft.guest)
        if draft.guest:
            last = draft.guest[-1]
            assert statx.PRELOAD == last[1]
            assert needs == bool(last[2])
            assert (True,) == last[4:] or not image

    @pytest.mark.parametrize("memory_dir", ["", "/srv"])
    def test_a_memory_directory_is_the_users_where_it_is_one(self, memory_dir: str) -> None:
        spec = SPEC.altered(memory_dir=memory_dir) if memory_dir else SPEC
        draft: Any = SimpleNamespace(
            spec=spec,
            mounts=[],
            guest=[],
            shown=[],
            image=None,
            add_of_host=lambda _mount: "/mounts/0",
        )
        root._add_mounts(draft)
        found = [each.target for each in draft.mounts]
        assert (not memory_dir) == (MEMORY_DIR in found)
        assert len(found) == len({*found})


def test_a_network_of_the_hosts_is_refused_with_the_way_out() -> None:
    with pytest.raises(Unsupported) as refusal:
        asked.check_network(SPEC.altered(network=NetworkPolicy.parse("unrestricted")))
    assert ("network", True) == (refusal.value.field, "tier light" in str(refusal.value.hint))
