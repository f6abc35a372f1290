"""Host-side parts of the microVM backend: its monitor, line, saved files, kernels and command."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends.local.answers import Refused
from ringfence.backends.microvm import accelerator, kernel, network, qemu, written
from ringfence.backends.microvm import plan as plans
from ringfence.backends.microvm.line import Line
from ringfence.backends.microvm.monitor import Monitor
from ringfence.backends.microvm.network import MicrovmNetwork, check_kernel
from ringfence.backends.microvm.written import Conditions
from ringfence.errors import (
    BackendUnavailable,
    ExecError,
    InvalidRequest,
    IsolationError,
    NetworkPolicyError,
    SandboxLost,
    SnapshotCorrupt,
    Unsupported,
)
from ringfence.guest import channels
from ringfence.launcher.link.line import CONTROL, MESSAGE, frame
from ringfence.model.limits import Limits
from ringfence.model.mount import READ_WRITE, Mount
from ringfence.model.net.network import NetworkPolicy
from ringfence.model.spec import SandboxSpec

pytestmark = pytest.mark.anyone
PATIENCE_S = 30.0


class TestMonitor:
    @contextmanager
    def emulator(self, *answers: object) -> Iterator[tuple[Monitor, list[Any]]]:
        near, far = socket.socketpair()
        far.settimeout(PATIENCE_S)
        asked: list[Any] = []

        def serve() -> None:
            far.sendall(b'{"event": "x"}\n{"QMP": {}}\n')
            for answer in ({"return": {}}, *answers):
                data, fds, _flags, _addr = socket.recv_fds(far, 1 << 16, 4)
                asked.append((json.loads(data), len(fds)))
                for fd in fds:
                    os.close(fd)
                far.sendall(b'{"event": "NOISE"}\n' + json.dumps(answer).encode() + b"\n")
            far.close()

        thread = threading.Thread(target=serve)
        thread.start()
        monitor = Monitor(near)
        try:
            yield monitor, asked
        finally:
            monitor.close()
            thread.join(PATIENCE_S)

    def test_commands_are_answered_in_turn_past_events(self) -> None:
        with self.emulator({"return": {"a": 1}}, {"return": 2}) as (monitor, asked):
            file = os.memfd_create("x")
            assert {"a": 1} == monitor.ask("getfd", {"fdname": "m"}, fd=file)
            assert 2 == monitor.ask("stop")
            os.close(file)
        names = [(each["execute"], count) for each, count in asked]
        assert [("qmp_capabilities", 0), ("getfd", 1), ("stop", 0)] == names

    def test_a_refusal_and_a_lost_emulator_are_errors(self) -> None:
        with self.emulator({"error": {"desc": "bad state"}}) as (monitor, _asked):
            with pytest.raises(ExecError, match="cont: bad state"):
                monitor.ask("cont")
            with pytest.raises(ExecError, match=r"gone|answer"):
                monitor.ask("cont")

    @pytest.mark.parametrize("status", ["completed", "failed", "cancelled"])
    def test_a_machine_is_written_down_or_that_is_told(self, status: str) -> None:
        moving, done = {"return": {"status": "active"}}, {"return": {"status": status}}
        answers = [*[{"return": {}}] * 3, moving, done]
        file = os.memfd_create("x")
        with self.emulator(*answers) as (monitor, asked):
            if status == "completed":
                monitor.write_down(file)
            else:
                with pytest.raises(IsolationError, match="was not saved"):
                    monitor.write_down(file)
        os.close(file)
        assert [0, 1, 0, 0, 0, 0] == [count for _each, count in asked]


class TestLine:
    @contextmanager
    def line(self) -> Iterator[tuple[Line, int]]:
        line = Line()
        process = os.pidfd_open(os.getpid())
        try:
            yield line, process
        finally:
            line.far.close()
            line.close()
            os.close(process)

    def test_the_first_word_comes_in_pieces(self) -> None:
        with self.line() as (line, process):
            whole = frame(MESSAGE, CONTROL, b"\0\0hello")
            line.far.sendall(whole[:3])
            threading.Timer(0.01, lambda: line.far.sendall(whole[3:] + b"rest")).start()
            assert line.first_word(process, PATIENCE_S).endswith(b"hello")
            assert b"rest" == line._data

    def test_a_jail_that_was_not_built_says_why(self) -> None:
        with self.line() as (line, process):
            line.far.sendall(b"E%d mount: no" % errno.EPERM)
            with pytest.raises(Refused, match="mount: no"):
                line.first_word(process, PATIENCE_S)

    def test_silence_and_the_end_are_told_apart(self) -> None:
        with self.line() as (line, process):
            with pytest.raises(IsolationError, match="sent no message"):
                line.first_word(process, 0.01)
            line.say(b"unread")
            line.far.close()
            with pytest.raises(IsolationError, match=r"^$"):
                line.first_word(process, PATIENCE_S)
            line.say(b"nobody hears")

    def test_the_end_of_the_emulator_is_the_end_of_waiting(self) -> None:
        line = Line()
        child = os.fork()
        if child == 0:
            os._exit(0)
        pidfd = os.pidfd_open(child)
        with pytest.raises(IsolationError, match=r"^$"):
            line.first_word(pidfd, PATIENCE_S)
        os.waitpid(child, 0)
        os.close(pidfd)
        line.far.close()
        line.close()


class TestSavedMachines:
    def written(self, *known: bytes) -> int:
        file = os.memfd_create("machine")
        mounts = [Mount("/data", "/srv", "rw")]
        written.begin(file, Conditions("key", ["/a", "/b"]), known, mounts)
        os.write(file, b"the emulator's")
        os.lseek(file, 0, os.SEEK_SET)
        return file

    def test_what_was_written_is_read_and_the_stream_follows(self) -> None:
        file = self.written(b"one", b"", b"three")
        head = written.read(file)
        assert head.before is not None
        assert ("key", ["/a", "/b"]) == (head.before.key, head.before.sources)
        assert [b"one", b"", b"three"] == head.known
        assert [("/data", "/srv", READ_WRITE)] == [
            (e.target, e.source, e.access) for e in head.attached
        ]
        assert b"the emulator's" == os.read(file, 100)
        os.close(file)

    def test_what_is_no_saved_machine_is_refused(self) -> None:
        file = self.written(b"known")
        whole = os.pread(file, 1 << 16, 0)
        os.close(file)
        length = len(b"ringfence machine 1\n")
        bad = [b"", whole[:10], b"x" + whole[1:], whole[: length + 4], whole[: length + 30]]
        bad += [whole[:length] + b"\xff" * 8 + whole[length + 8 :]]
        forms: Any = ({}, [], {"key": "k"}, {"key": "k", "sources": [], "known": [1 << 27]})
        for changed in forms:
            text = json.dumps(changed).encode()
            bad.append(whole[:length] + len(text).to_bytes(8, "little") + text)
        for content in bad:
            other = os.memfd_create("bad")
            os.write(other, content)
            os.lseek(other, 0, os.SEEK_SET)
            with pytest.raises(SnapshotCorrupt):
                written.read(other)
            os.close(other)

    @pytest.mark.parametrize(
        ("key", "sources", "why"),
        [
            ("k", ["/a"], ""),
            ("l", ["/a"], "another emulator"),
            ("k", ["/b"], "have changed"),
            ("k", [], "have changed"),
        ],
    )
    def test_it_is_restored_by_what_saved_it(self, key: str, sources: list[str], why: str) -> None:
        before, now = Conditions("k", ["/a"]), Conditions(key, sources)
        if why:
            with pytest.raises(Unsupported, match=why):
                before.check(now)
        else:
            before.check(now)
            both = Conditions("k", ["/a", "/b"])
            both.check(Conditions("k", ["/a", "/b"]))
            with pytest.raises(Unsupported, match="host files have changed"):
                both.check(Conditions("k", ["/b", "/a"]))  # the machine knows them by their numbers


class TestKernels:
    def make(
        self, place: Path, release: str, *modules: str, built_in: tuple[str, ...] = ()
    ) -> None:
        (place / "boot").mkdir(exist_ok=True)
        (place / "boot" / f"vmlinuz-{release}").touch()
        top = place / "lib/modules" / release
        top.mkdir(parents=True)
        for name in modules:
            (top / f"{name}.ko").write_bytes(b"\0")
        (top / "modules.builtin").write_text("".join(f"kernel/{name}.ko\n" for name in built_in))

    def test_the_newest_that_has_all_is_taken(self, tmp_path: Path) -> None:
        needed = kernel._NEEDED
        self.make(tmp_path, "6.9.0", *needed)
        self.make(tmp_path, "6.10.0", *needed[:-1], built_in=(needed[-1].replace("_", "-"),))
        self.make(tmp_path, "6.11.0", *needed[1:])
        found = kernel.find(str(tmp_path))
        assert ("6.10.0", []) == (found.release, found.lacks)
        assert not found.has_overlays
        assert not found.has_rules
        assert [needed[0]] == kernel.Kernel(str(tmp_path), "6.11.0").lacks
        names = [name for name, _content in found.modules()]
        assert set(needed[:-1]) == {*names}, "what is built in is not loaded"

    def test_without_one_it_says_what_is_missing(self, tmp_path: Path) -> None:
        self.make(tmp_path, "6.11.0", *kernel._NEEDED[1:])
        with pytest.raises(BackendUnavailable, match=f"lacks {kernel._NEEDED[0]}"):
            kernel.find(str(tmp_path))
        with pytest.raises(BackendUnavailable, match="none in"):
            kernel.find(str(tmp_path / "nothing"))

    def test_dependencies_are_loaded_before(self, tmp_path: Path) -> None:
        self.make(tmp_path, "6.1.0", *kernel._NEEDED, "base-one")
        top = tmp_path / "lib/modules/6.1.0"
        first = kernel._NEEDED[0]
        (top / f"{first}.ko").write_bytes(b"\0depends=base-one\0")
        names = [name for name, _ in kernel.Kernel(str(tmp_path), "6.1.0").modules()]
        assert names.index("base_one") < names.index(first)
        assert len({*names}) == len(names)

    @pytest.mark.parametrize("rules", [True, False])
    def test_a_policy_needs_a_kernel_that_redirects(self, rules: bool) -> None:
        guest: Any = SimpleNamespace(has_rules=rules, path="/boot/x")
        check_kernel(NetworkPolicy.none(), guest)
        policy = NetworkPolicy.parse("api.test")
        if rules:
            check_kernel(policy, guest)
        else:
            with pytest.raises(NetworkPolicyError):
                check_kernel(policy, guest)

    def test_packed_modules_are_unpacked(self, tmp_path: Path) -> None:
        import gzip
        import lzma

        for name, content in (
            ("a.ko", b"x"),
            ("a.ko.gz", gzip.compress(b"x")),
            ("a.ko.xz", lzma.compress(b"x")),
        ):
            (tmp_path / name).write_bytes(content)
            assert b"x" == kernel._content(str(tmp_path / name))


class TestCommands:
    def argv(self, **changes: Any) -> list[str]:
        how: dict[str, Any] = {"line": 3, "monitor": 4, "network": 5, "shares": (6, 7)}
        return qemu.argv("/qemu", "kvm", 128, **{**how, **changes})

    def test_a_machine_has_its_lines_and_no_network_device(self) -> None:
        argv = self.argv()
        text = " ".join(argv)
        for each in ("id=line,fd=3", "id=monitor,fd=4", "id=network,fd=5", "fd=6", "fd=7"):
            assert each in text
        assert "-nodefaults" in argv
        assert "128M" == argv[argv.index("-m") + 1]
        assert "kvm" == argv[argv.index("-accel") + 1]
        assert "-incoming" not in argv
        assert "-serial" not in argv or "chardev:console" not in argv
        assert "fd:9" == self.argv(incoming=9)[-1]
        assert "chardev:console" in self.argv(console=True)
        assert (
            self.argv()[argv.index("-accel") + 1]
            != qemu.argv("/qemu", qemu.TCG, 128, line=3, monitor=4, network=5, shares=(6, 7))[
                argv.index("-accel") + 1
            ]
        )

    @pytest.mark.parametrize("extra", [0, 1])
    def test_sizes_are_few_and_hold_what_is_asked(self, extra: int) -> None:
        own = qemu._OWN_MIB
        assert qemu._ENOUGH_MIB == qemu.memory_mib(1)
        whole = (qemu._ENOUGH_MIB - own) << 20
        found = qemu.memory_mib(whole + extra)
        assert (qemu._ENOUGH_MIB == found) == (extra == 0)
        for mib in (700, 1000, 1024, 5000):
            size = qemu.memory_mib(mib << 20)
            assert mib + own <= size <= max(qemu._ENOUGH_MIB, 2 * (mib + own))
            assert size & (size - 1) == 0 or size == qemu._ENOUGH_MIB

    @pytest.mark.parametrize("fails", [True, False])
    def test_an_accelerator_is_tried_once_for_each_boot_of_the_host(
        self, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        device = tmp_path / "kvm"
        device.touch()
        boot = tmp_path / "boot"
        boot.write_text("one")
        monkeypatch.setattr(accelerator, "_DEVICE", str(device))
        monkeypatch.setattr(accelerator, "_BOOT_ID", str(boot))
        stamped = SimpleNamespace(stamp=lambda: "s")
        machines: Any = SimpleNamespace(directory=str(tmp_path), program=stamped, kernel=stamped)
        machines.prepare = lambda: None
        tried: list[str] = []

        def tries(_machines: Any, which: str, _patience_s: float) -> None:
            tried.append(which)
            if fails:
                raise IsolationError("it did not boot")

        expected = qemu.TCG if fails else qemu.KVM
        for _ in range(2):
            assert expected == accelerator.accelerator(machines, tries)
        assert 1 == len(tried)
        boot.write_text("two")
        assert expected == accelerator.accelerator(machines, tries)
        (tmp_path / "accelerator.json").write_text('{"half')
        assert expected == accelerator.accelerator(machines, tries)
        assert 3 == len(tried)
        device.unlink()
        assert qemu.TCG == accelerator.accelerator(machines, tries)
        assert 3 == len(tried)


class TestSpecs:
    @pytest.mark.parametrize(
        ("form", "field"),
        [
            ({"tier": "light"}, "tier"),
            ({"template": "other"}, "template"),
            ({"profile": "none-such"}, "profile"),
            ({"network": NetworkPolicy.unrestricted()}, "network"),
            ({"disk_root": True, "limits": Limits(disk_bytes=1 << 30)}, "disk_root"),
            ({"limits": Limits(io_bytes_per_s=1 << 20)}, "limits.io_bytes_per_s"),
            ({"limits": Limits(memory_bytes=16 << 20)}, "limits.memory_bytes"),
        ],
    )
    def test_what_a_machine_does_not_do_is_refused(self, form: dict[str, Any], field: str) -> None:
        spec = SandboxSpec(**{"tier": "strong", **form})
        with pytest.raises((Unsupported, InvalidRequest)) as refused:
            plans.check(spec)
        assert field == refused.value.field

    def test_a_plan_that_fails_leaves_no_placeholder(self, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.mkdir()
        good = Mount("/data", str(source), "rw")
        missing = Mount("/other", str(tmp_path / "none"), "rw")
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(InvalidRequest):
            plans.Draft(SandboxSpec(tier="strong", mounts=(good, missing)), "microvm-1", 0)
        assert [] == os.listdir(source)
        assert before == len(os.listdir("/proc/self/fd"))
        draft = plans.Draft(SandboxSpec(tier="strong", mounts=(good,)), "microvm-1", 0)
        assert [] != os.listdir(source), "the control: paths that are protected had to be made"
        for each in draft.protected:
            each.remove_placeholders()
        draft.close()
        assert [] == os.listdir(source)

    def test_what_was_mounted_later_is_there_when_the_machine_goes_on(self, tmp_path: Path) -> None:
        spec, later = SandboxSpec(tier="strong"), Mount("/later", str(tmp_path))
        for attached in ((), (later,)):
            draft = plans.Draft(spec, "microvm-1", 0, attached=attached)
            assert bool(attached) == ("/later" in [each.target for each in draft.mounts])
            draft.close()

    def test_an_agent_of_a_machine_makes_no_core_and_few_files(self) -> None:
        spec = SandboxSpec(tier="strong", limits=Limits(disk_bytes=64 << 20, cpus=1.0))
        draft = plans.Draft(spec, "microvm-1", 0)
        size: Any = SimpleNamespace(open_files=99, disk_bytes=64 << 20, inodes=9, pids=7)
        size.memory_bytes = 1 << 27
        waking: Any = plans.waking(draft, size)
        limits = {which: (soft, hard) for which, soft, hard in waking["agent"]["rlimits"]}
        assert {
            resource.RLIMIT_CORE: (0, 0),
            resource.RLIMIT_NOFILE: (99, 99),
            resource.RLIMIT_FSIZE: (64 << 20, 64 << 20),
        } == limits
        assert not waking["agent"]["counts_cpu"], "it is kept waiting for a processor"
        assert 64 == len(waking["entropy"])
        assert waking["entropy"] != plans.waking(draft, size)["entropy"]
        draft.close()

    def test_the_rest_is_taken(self) -> None:
        plans.check(SandboxSpec(tier="strong", limits=Limits(memory_bytes=64 << 20, cpus=1.0)))


class TestRelays:
    def network(self) -> Any:
        made: Any = MicrovmNetwork.__new__(MicrovmNetwork)
        made._deaths, made._relay, made.relay_pid = [], None, 7
        made._line, far = socket.socketpair()
        made.far = far
        return made

    def test_sockets_of_a_policy_that_the_guest_refuses_are_closed(self) -> None:
        relay = self.network()
        opened: list[int] = []

        def enter(_verb: str, _request: Any, _fds: Any) -> tuple[bytes, list[int]]:
            opened.extend(os.pipe())
            return b"", opened

        relay._sandbox = SimpleNamespace(awake=nullcontext, enter=enter)
        relay._relay, relay._leads = object(), True
        relay._tell_guest = lambda *_: (_ for _ in ()).throw(IsolationError("no answer"))
        nothing: Any = None
        with pytest.raises(IsolationError):
            relay._enter(nothing)
        assert [False, False] == [os.path.exists(f"/proc/self/fd/{fd}") for fd in opened]
        opened.clear()
        relay._tell_guest = lambda *_: None
        assert opened == relay._enter(nothing)
        for fd in opened:
            os.close(fd)
        relay._line.close()
        relay.far.close()

    def test_a_relay_that_does_not_start_leaves_no_socket(self) -> None:
        relay = self.network()
        told: list[bytes] = []

        def enter(_verb: str, request: Any, fds: list[int]) -> Any:
            assert (16, 2) == (len(request["token"]), len(fds))
            raise IsolationError("not in this jail")

        group = SimpleNamespace(directories=[], version=2)
        relay._sandbox = SimpleNamespace(enter=enter, tell=told.append, group=group)
        relay._had_relay = True
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(IsolationError):
            relay._start_relay()
        assert before == len(os.listdir("/proc/self/fd"))
        assert relay._relay is None
        assert [16] == [len(each) - len(channels.RELAY) for each in told]
        relay._give_up_relay()
        with pytest.raises(SandboxLost):
            relay._start_relay()
        relay.far.close()

    def test_without_a_relay_only_no_network_is_taken(self) -> None:
        relay = self.network()
        owner = SimpleNamespace(
            machines=lambda: SimpleNamespace(kernel=SimpleNamespace(has_rules=True))
        )
        relay._sandbox = SimpleNamespace(owner=owner, spec=SandboxSpec(tier="strong"))
        relay._trusted = None
        policy = NetworkPolicy.parse("api.test")
        relay.check(policy)
        with pytest.raises(NetworkPolicyError, match="when the sandbox is created"):
            relay.check(NetworkPolicy.parse("unrestricted"))
        relay._give_up_relay()
        relay.check(NetworkPolicy.none())
        with pytest.raises(NetworkPolicyError, match="has ended"):
            relay.check(policy)
        relay.far.close()

    def test_so_many_deaths_within_a_minute_are_enough(self) -> None:
        relay = self.network()
        begun: list[int] = []
        relay._begin_as_before = lambda: begun.append(1)
        for _ in range(network._MOST_DEATHS):
            relay._replace_relay()
        assert relay.is_carried
        relay._deaths = [each - network._WITHIN_S for each in relay._deaths]
        relay._replace_relay()
        assert relay.is_carried
        for _ in range(network._MOST_DEATHS):
            relay._replace_relay()
        assert not relay.is_carried
        assert network._MOST_DEATHS * 2 == len(begun)
        assert b"" == relay.far.recv(1)
        relay.far.close()

    def test_a_machine_that_does_not_answer_is_waited_for_once(self) -> None:
        for error, count in ((IsolationError("late"), 1), (OSError("died"), network._MOST_DEATHS)):
            relay = self.network()
            tried: list[float] = []

            def begin(error: Exception = error, tried: list[float] = tried) -> None:
                tried.append(time.monotonic())
                raise error

            relay._begin_as_before = begin
            relay._replace_relay()
            assert not relay.is_carried
            assert count == len(tried)
            assert 0 == relay.relay_pid
            relay.far.close()
