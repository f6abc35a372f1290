"""Machines started through a scripted jailer: starts that fail, boots, what is saved and mounted later."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends.local import journal
from ringfence.backends.local.answers import Refused
from ringfence.backends.local.jailed import saving
from ringfence.backends.microvm import backend as module
from ringfence.backends.microvm import booted, initramfs, qemu, written
from ringfence.backends.microvm import sandbox as living
from ringfence.backends.microvm.backend import MicrovmBackend
from ringfence.backends.microvm.booted import Machines
from ringfence.backends.microvm.monitor import Monitor
from ringfence.backends.microvm.network import MicrovmNetwork
from ringfence.backends.microvm.sandbox import MicrovmSandbox
from ringfence.errors import (
    BackendUnavailable,
    InvalidRequest,
    IoError,
    IsolationError,
    LifecycleError,
    RingfenceError,
    SandboxLost,
    Unsupported,
)
from ringfence.guest import channels
from ringfence.guest.machine import BOOTED, READY
from ringfence.launcher import wire
from ringfence.launcher.link.line import CONTROL, DATA, frame
from ringfence.model.mount import Mount
from ringfence.model.net.network import NetworkPolicy
from ringfence.model.spec import SandboxSpec

SPEC = SandboxSpec(tier="strong", id="mine")


class Jailer:
    """A jailer whose emulators are processes that wait, with a thread that speaks as their machine."""

    def __init__(self) -> None:
        self.owner, self.alive = os.getpid(), True
        self.plans: list[Any] = []
        self.refused: Refused | None = None
        self.words: list[bytes] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.threads: list[threading.Thread] = []

    def ask(self, verb: str, argument: Any, fds: Any = (), **_how: Any) -> tuple[bytes, list[int]]:
        if verb != "create":
            return b"", []
        self.plans.append(argument)
        if self.refused is not None:
            raise self.refused
        os.write(fds[1], b"its last words\n")
        process = subprocess.Popen(["sleep", "1000"])
        self.processes.append(process)
        word = self.words.pop(0) if self.words else frame(DATA, CONTROL, READY)
        line, pidfd = os.dup(fds[0]), os.pidfd_open(process.pid)

        def be_machine() -> None:
            os.write(line, word) if word else process.kill()
            process.wait()
            os.close(line)

        self.threads.append(threading.Thread(target=be_machine))
        self.threads[-1].start()
        return b"%d" % process.pid, [pidfd]

    def tell(self, *_told: Any) -> None:
        pass

    note = tell

    def close(self) -> None:
        for process, thread in zip(self.processes, self.threads, strict=True):
            thread.join(10.0)
            runs_on = thread.is_alive()
            process.kill()
            thread.join()
            assert not runs_on, "an emulator was not ended"


class Ids:
    def __init__(self) -> None:
        self.taken: list[int] = []
        self.returned: list[int] = []

    def take(self) -> int:
        self.taken.append(500_000 + len(self.taken))
        return self.taken[-1]

    def give_back(self, first: int) -> None:
        self.returned.append(first)

    def close(self) -> None:
        pass


@pytest.fixture
def jailer() -> Jailer:
    return Jailer()


@pytest.fixture
def given_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(journal, "give_up", lambda *what: found.append(what[2]))
    return found


@pytest.fixture
def backend(jailer: Jailer, tmp_path: Path) -> Iterator[Any]:
    made: Any = MicrovmBackend(state_dir=str(tmp_path / "state"), cache_dir=str(tmp_path / "cache"))
    (tmp_path / "memory").touch()
    made._machines = SimpleNamespace(
        kernel=SimpleNamespace(path="/etc/hostname", has_overlays=False), accelerator=qemu.TCG,
        program=SimpleNamespace(path="/usr/bin/true"), key=lambda _mib: "key",
        machine=lambda _mib, _boot: (str(tmp_path / "memory"), "/etc/hostname"),
        initrd=lambda _place: "/etc/hostname",
    )  # fmt: skip
    made.layout()
    before = len(os.listdir("/proc/self/fd"))
    ids = Ids()
    made._jailer, made._host_ids = jailer, ids
    yield made
    made.close()
    assert sorted(ids.taken) == sorted(ids.returned), "each once: else it is two sandboxes'"
    assert {} == made._jailed
    assert set() == made._making
    assert before == len(os.listdir("/proc/self/fd"))


class TestStarting:
    def test_one_is_told_who_it_is_and_gives_all_back(
        self, backend: Any, jailer: Jailer, given_up: list[str], tmp_path: Path
    ) -> None:
        sandbox = backend.provision(SPEC.altered(mounts=(Mount("/data", str(tmp_path)),)))
        assert {"mine": sandbox} == backend._jailed
        with pytest.raises(InvalidRequest, match="already exists"):
            backend.provision(SPEC)
        [plan] = jailer.plans
        assert (5, "") == (plan["passes"], plan["note"])
        assert f"{module._MEMORY}" in "".join(plan["argv"][-1:])
        sandbox.terminate()
        assert ["mine"] == given_up
        backend.provision(SPEC)

    def test_its_limit_of_the_processor_holds_once_it_is_ready(
        self, backend: Any, jailer: Jailer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Until then it has all there is; one that is being ended has it again."""
        done: list[Any] = []
        monkeypatch.setattr(
            "ringfence.backends.local.host.cgroups.Group.unthrottle",
            lambda _group, on: done.append(on),
        )
        woken = backend._woken

        def then_woken(started: Any) -> Any:
            control = woken(started)
            done.append("ready")
            return control

        monkeypatch.setattr(backend, "_woken", then_woken)
        sandbox = backend.provision(SPEC)
        assert [True, "ready", False] == done
        sandbox.terminate()
        assert done[3] is True

    @pytest.mark.parametrize(
        ("word", "why"),
        [
            (None, "unshare"),
            (b"E12 mount: no room", "no room"),
            (frame(DATA, CONTROL, b"E5 root: no"), "root: no"),
            (b"", "the machine did not start: its last words"),
        ],
    )
    def test_nothing_is_left_of_one_that_fails(
        self, backend: Any, jailer: Jailer, given_up: list[str], word: bytes | None, why: str,
        tmp_path: Path,
    ) -> None:  # fmt: skip
        if word is None:
            jailer.refused = Refused(1, "unshare: no")
        else:
            jailer.words = [word]
        with pytest.raises(RingfenceError, match=why):
            backend.provision(SPEC.altered(mounts=(Mount("/data", str(tmp_path)),)))
        assert ["mine"] == given_up
        jailer.refused = None
        backend.provision(SPEC)

    def test_one_whose_network_is_not_served_has_ended_once(
        self, backend: Any, jailer: Jailer, given_up: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def serve(_network: Any) -> None:
            raise IsolationError("no egress")

        monkeypatch.setattr("ringfence.backends.microvm.network.MicrovmNetwork.serve", serve)
        with pytest.raises(IsolationError, match="no egress"):
            backend.provision(SPEC)
        assert ["mine"] == given_up

    def test_an_image_needs_a_kernel_that_has_overlays(self, backend: Any, jailer: Jailer) -> None:
        image: Any = object()
        with pytest.raises(Unsupported, match="no module overlay"):
            backend._provision_over(image, SPEC, -1, "", None)
        assert [] == jailer.plans

    @pytest.mark.parametrize("accelerator", [qemu.TCG, qemu.KVM])
    def test_emulation_is_no_boundary_that_is_taken_unasked(
        self, backend: Any, accelerator: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend._machines.accelerator = accelerator
        monkeypatch.setattr(backend, "provision", lambda spec: spec)
        if accelerator == qemu.KVM:
            assert backend.provision_unasked(SPEC) is SPEC
        else:
            with pytest.raises(BackendUnavailable, match="no security boundary"):
                backend.provision_unasked(SPEC)
        with pytest.raises(Unsupported):
            backend.provision_unasked(SandboxSpec())

    def test_another_kernel_is_looked_for_and_reported_anew(self, backend: Any) -> None:
        before = backend._machines
        backend._report = object()
        backend.use_kernel(None)
        assert backend._machines is before
        backend.use_kernel("/other")
        assert (None, None, "/other") == (backend._machines, backend._report, backend._kernel_place)
        other = backend.beside("/beside")
        assert ("/beside", "/other", backend._cache_dir) == (
            other._state_dir, other._kernel_place, other._cache_dir,
        )  # fmt: skip

    def test_a_report_that_failed_is_asked_for_again(
        self, backend: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told = [False, True, True]
        monkeypatch.setattr(
            "ringfence.backends.microvm.report.backend_report",
            lambda _backend: SimpleNamespace(available=told.pop(0)),
        )
        assert [False, True, True] == [backend.report().available for _ in range(3)]
        assert 1 == len(told)


class TestBooting:
    def boot(self, backend: Any, **how: Any) -> None:
        backend._boot_once(backend._machines, 256, "/etc/hostname", qemu.TCG, **how)

    def test_it_is_written_down_and_ended(
        self, backend: Any, jailer: Jailer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out: list[int] = []
        monkeypatch.setattr(Monitor, "write_down", lambda _monitor, fd: out.append(fd))
        for fd in (77, -1):
            jailer.words = [frame(DATA, CONTROL, BOOTED)]
            self.boot(backend, out=fd)
        assert [77] == out
        jailer.words = [frame(DATA, CONTROL, b"HELLO")]
        with pytest.raises(IsolationError, match="invalid"):
            self.boot(backend)

    def test_one_that_does_not_boot_does_it_again_where_its_kernel_is_heard(
        self, backend: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done: list[dict[str, Any]] = []

        def once(*_what: Any, **how: Any) -> None:
            done.append(how)
            raise IsolationError(f"attempt {len(done)}")

        monkeypatch.setattr(backend, "_boot_once", once)
        with pytest.raises(IsolationError, match="attempt 2"):
            backend.boot(backend._machines, 256, "/etc/hostname", 5)
        assert [{"out": 5}, {"console": True}] == done


class TestRestoring:
    @pytest.mark.parametrize("memory", ["", "/memory"])
    def test_what_was_saved_goes_on(
        self, backend: Any, memory: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = SPEC.altered(secrets={"A": "old"}, network=NetworkPolicy.parse("a.test"))
        content = os.memfd_create("content")
        found = SimpleNamespace(
            open=lambda _name: (None, before, content), memory_of=lambda _name: memory
        )
        given: list[Any] = []
        monkeypatch.setattr(backend, "catalogue", lambda: found)

        sandbox = SimpleNamespace(complete=lambda step: step())

        def provision(*what: Any) -> Any:
            given.append(what)
            return sandbox

        monkeypatch.setattr(backend, "_provision", provision)
        told: list[Any] = []
        monkeypatch.setattr(module, "tell_limits", lambda *what: told.append(what))
        assert sandbox is backend.restore("snap", secrets={"A": "new"})
        spec, fd, *more = given[0]
        assert (None, {"A": "new"}, content) == (spec.id, dict(spec.secrets), fd)
        assert ([memory, before.network] if memory else []) == more
        assert ([(sandbox, before)] if memory else []) == told
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(content)
        content = os.memfd_create("content")
        if memory:
            with pytest.raises(InvalidRequest, match="own spec only"):
                backend.restore("snap", SPEC.altered(env={"X": "1"}))
        else:
            backend.restore("snap", SPEC)
            assert given[-1][0] is SPEC

    def test_a_machine_that_goes_on_has_what_was_written_down_with_it(
        self, backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = backend.provision(SPEC)
        conditions, later = first.conditions, Mount("/later", str(tmp_path))
        first.terminate()
        monkeypatch.setattr(MicrovmSandbox, "resume_from_checkpoint", lambda _sandbox: None)
        handed: list[Any] = []
        monkeypatch.setattr(module, "_hand_over", lambda _share, known: handed.extend(known))
        policy = NetworkPolicy.parse("a.test")

        def go_on(key: str) -> Any:
            path = tmp_path / key
            before = written.Conditions(key, [*conditions.sources, str(tmp_path)])
            with path.open("wb") as file:
                written.begin(file.fileno(), before, [b"one", b"two"], [later])
            monkeypatch.setattr(MicrovmNetwork, "serve", lambda _network: None)
            return backend._provision(SPEC, -1, str(path), policy)

        made = go_on(conditions.key)
        assert ([b"one", b"two"], [later]) == (handed, made.attached)
        assert policy == made.network._before
        assert "/later" in [each.target for each in made.mounts]
        assert [*conditions.sources, str(tmp_path)] == made.conditions.sources
        made.terminate()
        with pytest.raises(Unsupported, match="another emulator"):
            go_on("other")


class TestMachines:
    @pytest.fixture
    def machines(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
        monkeypatch.setattr(initramfs, "build", lambda _kernel, _place: b"initrd")
        kernel: Any = SimpleNamespace(stamp=lambda: "kernel 1")
        program: Any = SimpleNamespace(stamp=lambda: "qemu 1", path="/usr/bin/qemu", version="1")
        return Machines(str(tmp_path / "machines"), kernel, program, qemu.TCG)

    def test_one_is_booted_once_and_kept_by_what_it_is_made_of(
        self, machines: Machines, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        booted_ones: list[str] = []

        def boot(initrd: str, out: int) -> None:
            booted_ones.append(Path(initrd).read_text())
            assert 0o644 == os.stat(initrd).st_mode & 0o777, "its reader need not own it"
            os.write(out, b"memory")

        first = machines.machine(256, boot)
        assert first == machines.machine(256, boot)
        assert ["initrd"] == booted_ones
        assert (b"memory", b"\n") == tuple(Path(path).read_bytes() for path in first)
        assert 0o700 == os.stat(machines.directory).st_mode & 0o777
        assert first != machines.machine(512, boot)
        usual = machines.key(256)
        for name in ("kernel", "program"):
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(getattr(machines, name), "stamp", lambda: "another")
                assert usual != machines.key(256)
        machines.accelerator = qemu.KVM
        natively = machines.key(256)
        monkeypatch.setattr(booted, "_processor", lambda: "another")
        assert 3 == len({usual, natively, machines.key(256)})

    def test_nothing_is_kept_of_one_that_did_not_boot(self, machines: Machines) -> None:
        def fail(_initrd: str, _out: int) -> None:
            raise IsolationError("no")

        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(IsolationError):
            machines.machine(256, fail)
        assert [f"{machines.key(256)}.lock"] == os.listdir(machines.directory)
        assert before == len(os.listdir("/proc/self/fd"))
        machines.machine(256, lambda _initrd, _out: None)

    @pytest.mark.parametrize(("mode", "is_taken"), [(0o755, True), (0o775, False), (0o757, False)])
    def test_a_directory_that_others_can_write_is_not_taken(
        self, machines: Machines, mode: int, is_taken: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        os.mkdir(machines.directory)
        os.chmod(machines.directory, mode)
        with contextlib.nullcontext() if is_taken else pytest.raises(IsolationError):
            machines.prepare()
        os.chmod(machines.directory, 0o700)
        machines.prepare()
        monkeypatch.setattr(os, "geteuid", lambda: 77_777)
        with pytest.raises(IsolationError, match="other users"):
            machines.prepare()


class TestLiving:
    def sandbox(self, **changes: Any) -> tuple[Any, list[Any]]:
        done: list[Any] = []
        ours, theirs = wire.socketpair()
        made: Any = MicrovmSandbox.__new__(MicrovmSandbox)
        facts: dict[str, Any] = {
            "control": ours, "theirs": theirs, "_send_lock": threading.Lock(), "told": 0,
            "monitor": SimpleNamespace(ask=done.append), "spec": SPEC, "mounts": [], "uid": 1000,
            "terminate": lambda: done.append("ended"), "ask": lambda *what: done.append(what),
            "lost_error": lambda: SandboxLost("lost"), "attached": [], "is_held": False,
            "conditions": SimpleNamespace(sources=["/a"]), "awake": contextlib.nullcontext,
            "mount_in_jail": lambda _more: done.append("jail"),
            "enter": lambda *what: done.append(what),
        }  # fmt: skip
        made = SimpleNamespace(**{**facts, **changes})
        for name in ("tell", "hear", "_freeze"):
            setattr(made, name, getattr(MicrovmSandbox, name).__get__(made))
        return made, done

    def close(self, made: Any) -> None:
        made.control.close()
        made.theirs.close()

    def test_a_machine_that_goes_on_is_told_the_time(self) -> None:
        made, done = self.sandbox()
        made._freeze(True)
        made._freeze(False)
        assert ["stop", "cont"] == done
        assert wire.receive_raw(made.theirs)[0].startswith(channels.CLOCK)
        wire.send_raw(made.theirs, b"word")
        assert b"word" == made.hear(1.0)
        with pytest.raises(SandboxLost, match="does not answer"):
            made.hear(0.001)
        assert made.control.gettimeout() is None
        made.theirs.close()
        with pytest.raises(SandboxLost, match="lost"):
            made.hear(1.0)
        self.close(made)

    def more(self) -> Any:
        tree = {"source": "/srv", "attributes": 1}
        return SimpleNamespace(
            add=lambda _mount: None, after=["step"], places={"/data": "/mounts/0"}, inner=[("bind",)],
            mounted=[tree],
        )  # fmt: skip

    def test_a_mount_is_known_once_the_machine_has_it(self) -> None:
        made, done = self.sandbox(
            mounts=[SimpleNamespace(host_path="/x"), SimpleNamespace(host_path="")]
        )
        for word in (b"7 E1 of one given up", b"1 O"):
            wire.send_raw(made.theirs, word)
        mount = Mount("/data", "/srv")
        living._attach(made, mount, self.more())
        assert ([mount], ["/a", "/srv"]) == (made.attached, made.conditions.sources)
        assert ["jail"] == done
        assert b"/1" in wire.receive_raw(made.theirs)[0], "after those that are there"
        self.close(made)

    @pytest.mark.parametrize(
        ("word", "problem"), [(b"1 E2 mount: no", Refused), (b"1 Ex mount", SandboxLost)]
    )
    def test_one_that_the_machine_refuses_is_undone(self, word: bytes, problem: Any) -> None:
        made, done = self.sandbox()
        wire.send_raw(made.theirs, word)
        with pytest.raises(problem):
            living._attach(made, Mount("/data", "/srv"), self.more())
        assert ["jail", ("unmount", {"path": "/mounts/0"}, [])] == done
        assert ([], ["/a"]) == (made.attached, made.conditions.sources)
        made.spec = SPEC.altered(deny=("/data",))
        with pytest.raises(InvalidRequest):
            living._attach(made, Mount("/data/x", "/srv"), self.more())
        self.close(made)

    @pytest.mark.parametrize(
        ("words", "problem"),
        [
            ([channels.QUIESCED, channels.RESTED], None),
            ([channels.BUSY + b" 2"], LifecycleError),
            ([b"what", channels.RESTED], SandboxLost),
            ([channels.QUIESCED, b"what"], SandboxLost),
        ],
    )
    def test_it_is_saved_only_where_nothing_is_under_way(
        self, words: list[bytes], problem: Any
    ) -> None:
        made, done = self.sandbox()
        for word in words:
            wire.send_raw(made.theirs, word)
        with pytest.raises(problem) if problem else contextlib.nullcontext():
            living._quiesce(made)
        assert (["ended"] if problem is SandboxLost else []) == done
        self.close(made)

    @pytest.mark.parametrize("case", ["saved", "held", "busy", "fails"])
    def test_one_that_was_saved_with_its_memory_has_ended(
        self, case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        made, done = self.sandbox(is_held=case == "held")

        def quiesce(_sandbox: Any) -> None:
            if case == "busy":
                raise LifecycleError("busy")

        def known(_sandbox: Any) -> list[bytes]:
            if case == "fails":
                raise IoError("no tables")
            return []

        monkeypatch.setattr(saving, "settle", lambda _sandbox: done.append("settled"))
        monkeypatch.setattr(saving, "keep", lambda *_what, memory: memory)
        monkeypatch.setattr(living, "_quiesce", quiesce)
        monkeypatch.setattr(living, "_known", known)
        catalogue: Any = SimpleNamespace(
            workspace=lambda _uid: contextlib.nullcontext(str(tmp_path))
        )
        expected = {"busy": LifecycleError, "fails": IoError}.get(case)
        with pytest.raises(expected) if expected else contextlib.nullcontext():
            assert f"{tmp_path}/memory" == str(living._checkpoint(made, catalogue, {}))
        last: Any = ("freeze", False) if case == "busy" else "ended"
        assert [*(["settled"] if case != "held" else []), ("freeze", True), last] == done
        self.close(made)

    def test_certificates_and_secrets_are_not_saved(self) -> None:
        for trusted, secrets, is_saved in (
            (None, {}, True),
            (1, {}, False),
            (None, {"A": "x"}, False),
        ):
            made: Any = SimpleNamespace(
                network=SimpleNamespace(trusted=trusted), spec=SimpleNamespace(secrets=secrets)
            )
            assert is_saved == (MicrovmSandbox.not_saved(made) == ("", ""))

    @pytest.mark.parametrize("fails", [True, False])
    def test_its_files_are_packed_while_its_programs_stand_still(
        self, fails: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made, done = self.sandbox(owner=SimpleNamespace(catalogue=lambda: "usual"), _save=None)

        def keep(_sandbox: Any, catalogue: Any, *_more: Any) -> Any:
            done.append(catalogue)
            if fails:
                raise IoError("no room")

        monkeypatch.setattr(saving, "keep", keep)
        for catalogue, name in ((None, "usual"), ("given", "given")):
            done.clear()
            with pytest.raises(IoError) if fails else contextlib.nullcontext():
                MicrovmSandbox._snapshot(made, {}, catalogue)  # type: ignore[arg-type]
            assert [("freeze", True), name, ("freeze", False)] == done
        self.close(made)
