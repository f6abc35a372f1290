"""What is read of a machine, saved of it and mounted in it, who relays its connections, what it starts from."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends.local.answers import Refused
from ringfence.backends.local.host.facts import host
from ringfence.backends.local.mounts import template
from ringfence.backends.local.network import SandboxNetwork
from ringfence.backends.microvm import backend as module
from ringfence.backends.microvm import initramfs, network, qemu, report
from ringfence.backends.microvm import plan as planning
from ringfence.backends.microvm import sandbox as living
from ringfence.backends.microvm.backend import MicrovmBackend
from ringfence.backends.microvm.mounts import MOUNTS, SHARE, MachineMounts
from ringfence.backends.microvm.network import MicrovmNetwork
from ringfence.backends.microvm.report import MicrovmReader
from ringfence.backends.microvm.sandbox import MicrovmSandbox
from ringfence.errors import (
    BackendUnavailable,
    InvalidRequest,
    IoError,
    NetworkPolicyError,
    SandboxLost,
    Unsupported,
)
from ringfence.guest import channels
from ringfence.launcher import wire
from ringfence.launcher.fuse import serving
from ringfence.model import capabilities as can
from ringfence.model.capabilities import Protection
from ringfence.model.limits import Limits
from ringfence.model.mount import Mount
from ringfence.model.net.network import NetworkPolicy
from ringfence.model.spec import SandboxSpec

pytestmark = pytest.mark.anyone
SPEC = SandboxSpec(tier="strong")


class TestReading:
    def reader(self, version: str = "Linux version 6.1-guest x", **sandbox: Any) -> Any:
        contents = {"/proc/version": version, "/proc/net/dev": "a\nb\n lo: 1\n"}

        @contextlib.contextmanager
        def open_read(path: str) -> Iterator[Any]:
            yield SimpleNamespace(read=lambda: bytes(contents[path], "utf-8"))

        machines = SimpleNamespace(
            accelerator=qemu.KVM,
            program=SimpleNamespace(version="7.2"),
            restores="a host like this",
        )
        facts: dict[str, Any] = {
            "ask": lambda _what: ("11 12 13 14", []), "files": SimpleNamespace(open_read=open_read),
            "owner": SimpleNamespace(
                machines=lambda: machines, layout=lambda: SimpleNamespace(why="nobody may")
            ),
            "sizes": SimpleNamespace(memory_bytes=1 << 27), "group": "group", "spec": SPEC,
            "network": "its network",
        }  # fmt: skip
        self.machines, self.contents = machines, contents
        made: Any = SimpleNamespace(**{**facts, **sandbox})
        return MicrovmReader(made)

    def test_its_kernel_is_another_than_the_hosts(self) -> None:
        made = self.reader()
        assert (11, 12, 13, 14) == made.bounds
        assert "enforced" == made.guest_kernel()[0]
        same = self.reader(f"Linux version {os.uname().release} x")
        assert "missing" == same.guest_kernel()[0]

    def test_emulation_is_no_boundary(self) -> None:
        made = self.reader()
        assert "enforced" == made.virtual_machine()[0]
        self.machines.accelerator = qemu.TCG
        assert "degraded" == made.virtual_machine()[0]

    def test_a_machine_has_no_interface_beside_its_jails(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(MicrovmReader, "of_policy", lambda _self, net: ("judged", net))
        made = self.reader()
        assert ("judged", "its network") == made.network()
        self.contents["/proc/net/dev"] += " eth0: 1\n"
        assert "missing" == made.network()[0]

    @pytest.mark.parametrize("more", [None, 0, 1])
    def test_memory_is_the_machines_and_the_cgroups_where_there_is_one(
        self, more: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        most = (qemu.memory_mib(1 << 27) << 20) + planning.EMULATOR_BYTES
        monkeypatch.setattr(
            report, "memory_limit_bytes", lambda _group: None if more is None else most + more
        )
        found = self.reader().memory_limit()
        assert "enforced" == found[0]
        assert found[1].startswith("128 MiB by the guest's kernel")
        assert (more == 0) == (f"{most >> 20} MiB with the emulator, by cgroup" in found[1])

    def test_what_it_can_is_found_by_doing_it(self) -> None:
        applied: list[Any] = []
        made: Any = self.reader(apply_network_policy=applied.append).sandbox
        limits = (Protection(can.CPU_LIMIT, "degraded", "sampled"),)
        listed = list(report._abilities(made, limits))
        found = {each.name: each for each in listed}
        assert len(found) == len(listed), "each once"
        assert "a host like this" == found[can.MEMORY_SNAPSHOT].reason
        assert "sampled" == found[can.CPU_LIMIT].reason
        assert found[can.FORK].available
        assert found[can.NETWORK_HOSTS].available
        assert 1 == len(applied)
        for name in planning.NEVER:
            assert not found[name].available


class TestMounts:
    def test_each_has_its_steps_in_the_jail_or_inside(self, tmp_path: Path) -> None:
        made = MachineMounts(SPEC, 0)
        made.add(Mount("/a", str(tmp_path)))
        made.add(Mount("/own", "", "rw"))
        made.add(Mount("/b", str(tmp_path), "rw"))
        binds = [step for step in made.inner if step[0] == "bind"]
        assert [("bind", "/a", 0), ("bind", "/b", 1)] == binds
        assert ["/a", "/own", "/b"] == [each.target for each in made.mounts]
        made.close()

    def test_what_is_denied_is_hidden_from_the_machines_kernel_too(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = MachineMounts(SPEC, 0)
        inner = [("deny", "/usr/bin/env", False), ("deny", "/opt", True), ("deny", "/usr2/x", True)]
        monkeypatch.setattr(made, "deny_of_host", lambda: inner)
        before = list(made.after)
        shown = [("/usr", 3), ("/opt/in", 4), ("/optional", 5), ("/", 0)]
        assert inner == made.deny(shown)
        assert [
            ("hide", f"{SHARE}/3/bin/env", False), ("hide", f"{SHARE}/0/usr/bin/env", False),
            ("hide", f"{SHARE}/4", False), ("hide", f"{SHARE}/0/opt", False),
            ("hide", f"{SHARE}/0/usr2/x", False),
        ] == made.after[len(before) :]  # fmt: skip
        made.close()


class TestPlans:
    def size(self) -> Any:
        return SimpleNamespace(
            pids=20, disk_bytes=1 << 26, inodes=99, memory_bytes=1 << 27, open_files=64
        )

    def test_an_image_comes_first_and_is_the_users(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[Any] = []
        for trusted in (True, False):
            monkeypatch.setattr(
                planning, "host", lambda trusted=trusted: SimpleNamespace(trusted_root=trusted)
            )
            image: Any = SimpleNamespace(
                root=str(tmp_path), tree={"source": str(tmp_path), "attributes": 1},
                appear_as=lambda *how: asked.append(how), close=lambda: None,
            )  # fmt: skip
            spec = SPEC.altered(user="1000", deny=("/usr/bin/x",))
            draft = planning.Draft(spec, "m", 700, image)
            assert (700, trusted) == asked[-1]
            assert (0 if trusted else -1) == image.tree["fd"]
            assert str(tmp_path) == draft.sources()[0]
            assert ("hide", f"{SHARE}/0/usr/bin/x", False) in draft.after
            waking = planning.waking(draft, self.size())
            assert (0, f"{SHARE}/0") == (waking["image"], waking["trees"][0][0])
            devices = [step for step in waking["steps"] if step[0] == "show"]
            assert devices
            assert [step[1] for step in devices] == [
                waking["trees"][step[2]][0] for step in devices
            ]
            before = len(os.listdir("/proc/self/fd"))
            draft.close()
            assert before == len(os.listdir("/proc/self/fd")) + 1

    def test_the_machine_is_told_mounts_by_their_places_and_what_is_hidden_last(
        self, tmp_path: Path
    ) -> None:
        mounts = (Mount("/a", str(tmp_path)), Mount("/b", str(tmp_path), "rw"))
        spec = SPEC.altered(mounts=mounts, deny=("/usr/bin/env",), workdir="/work/deep")
        draft = planning.Draft(spec, "m", 0)
        told = planning.waking(draft, self.size())
        binds = {step[1]: told["trees"][step[2]] for step in told["steps"] if step[0] == "bind"}
        assert f"{MOUNTS}/0" == binds["/a"][0]
        assert f"{MOUNTS}/1" == binds["/b"][0]
        assert draft.hidden
        assert draft.hidden == told["steps"][-len(draft.hidden) :]
        assert ("session_dir", "/work/deep") in told["steps"]
        assert ("protect", "/proc/sys") in told["steps"]
        assert -1 == told["image"]
        draft.close()

    def test_an_environment_and_an_authority_are_shown(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(template, "python_environment", lambda: [("/usr/lib", "/their", 1)])
        draft = planning.Draft(SPEC.altered(python_env=True), "m", 0)
        [bind] = [step for step in draft.guest if step[:2] == ("bind", "/their")]
        assert "/usr/lib" == draft.shown[bind[2]]["source"]
        trusted: Any = SimpleNamespace(steps=[("file", "/etc/ca", b"x", 0o644)])
        draft.trust(trusted)
        assert (trusted, trusted.steps[0]) == (draft.trusted, draft.guest[-1])
        draft.close()

    def test_memory_that_is_not_asked_for_is_not_all_of_the_hosts(self) -> None:
        here: Any = host()
        usual = planning.sizes_of(SPEC, here)
        assert usual.memory_bytes <= planning.DEFAULT_MEMORY
        asked = planning.sizes_of(SPEC.altered(limits=Limits(disk_bytes=1 << 22, inodes=300)), here)
        assert (1 << 22, 300) == (asked.disk_bytes, asked.inodes)


class TestRelays:
    def made(self, monkeypatch: pytest.MonkeyPatch, policy: str = "a.test", **facts: Any) -> Any:
        made: Any = MicrovmNetwork.__new__(MicrovmNetwork)
        self.done: list[Any] = []
        spec = SPEC.altered(network=NetworkPolicy.parse(policy))
        made._sandbox = SimpleNamespace(
            spec=spec, awake=contextlib.nullcontext, tell=self.done.append,
            changing=contextlib.nullcontext, group=SimpleNamespace(directories=["d"], version=2),
        )  # fmt: skip
        made._sockets, made.inodes, made._relay, made._line = [], [], None, None
        made._before, made._had_relay, made._leads, made.relay_pid = None, False, True, 0
        made._deaths = []
        monkeypatch.setattr(SandboxNetwork, "serve", lambda _self: self.done.append("serve"))
        for name, value in facts.items():
            setattr(made, name, value)
        return made

    def test_a_new_machine_is_told_its_policy_before_anybody_serves(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened = [os.memfd_create("socket") for _ in range(2)]

        def tell(_plan: Any) -> list[int]:
            self.done.append("tell")
            return opened

        made = self.made(monkeypatch, _tell_kernel=tell)
        made.serve()
        assert ["tell", "serve"] == self.done
        assert [os.fstat(fd).st_ino for fd in opened] == made.inodes
        for fd in opened:
            os.close(fd)
        none = self.made(monkeypatch, "none", _tell_kernel=tell)
        none.serve()
        assert ["serve"] == self.done

    @pytest.mark.parametrize(
        ("before", "policy", "is_told"),
        [("a.test", "none", True), ("none", "a.test", True), ("none", "none", False)],
    )
    def test_a_restored_machine_first_loses_the_tables_that_it_was_saved_with(
        self, before: str, policy: str, is_told: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = self.made(monkeypatch, policy, _before=NetworkPolicy.parse(before), _had_relay=True)
        made._start_relay = lambda: self.done.append("relay")
        made._forget = self.done.append
        made._tell_kernel = lambda _plan: []
        made.serve()
        expected = ["relay", made._before] if is_told else []
        assert [*expected, "serve"] == self.done

    def test_its_line_is_carried_by_one_relay_and_told_its_token_where_there_was_another(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for had, length in ((False, 0), (True, 16)):
            line, far = wire.socketpair()
            asked: list[Any] = []

            def enter(verb: str, request: Any, fds: Any, asked: list[Any] = asked) -> Any:
                asked.append((verb, request, len(fds)))
                return b"77", [os.memfd_create("pidfd")]

            watched = threading.Event()
            made = self.made(monkeypatch, _line=line, _had_relay=had)
            made._sandbox.enter = enter

            def watch(pidfd: int, _relay: Any, watched: Any = watched) -> None:
                os.close(pidfd)
                watched.set()

            made._watch = watch
            made._start_relay()
            assert watched.wait(30)
            [(verb, request, count)] = asked
            assert ("relay", 2, length) == (verb, count, len(request["token"]))
            assert (["d"], 2, 77) == (
                request["cgroup_dirs"], request["cgroup_version"], made.relay_pid,
            )  # fmt: skip
            told = [channels.RELAY + request["token"]] if had else []
            assert told == self.done
            assert made._had_relay
            made._close_relay()
            assert (None, 0) == (made._relay, made.relay_pid)
            line.close()
            far.close()

    @pytest.mark.parametrize("is_its", [True, False])
    def test_a_relay_that_ended_is_replaced_unless_another_has_come(
        self, is_its: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read, write = os.pipe()
        os.close(write)
        made = self.made(monkeypatch)
        ours, theirs = wire.socketpair()
        other: Any = SimpleNamespace(close=lambda: self.done.append("closed another's"))
        made._relay = ours if is_its else other
        made._replace_relay = lambda: self.done.append("replaced")
        # A pipe that nobody writes to any more is ready, as a process that has ended is.
        made._watch(read, ours)
        assert (["replaced"] if is_its else []) == self.done
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(read)
        for each in (ours, theirs):
            each.close()

    def test_the_next_relay_has_the_policy_that_holds(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for policy, expected in (("a.test", ["relay", "forget", True]), ("none", ["relay"])):
            made = self.made(monkeypatch, policy)
            made._start_relay = lambda: self.done.append("relay")
            made._forget = lambda _policy: self.done.append("forget")
            made._tell_guest = lambda _plan, leads, _time: self.done.append(leads)
            made._begin_as_before()
            assert expected == self.done

    def test_what_the_guest_no_longer_has_is_forgotten_all_the_same(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def tell(_plan: Any, leads: bool, _timeout: float) -> None:
            self.done.append(leads)
            raise Refused(2, "no such table")

        made = self.made(monkeypatch, _tell_guest=tell)
        made._forget(NetworkPolicy.parse("a.test"))
        made._forget(NetworkPolicy.none())
        assert [False] == self.done

    def test_a_guest_that_answers_is_told_and_one_whose_relay_ended_is_an_error(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = self.made(monkeypatch)
        plan: Any = {"port": 1}
        with pytest.raises(NetworkPolicyError, match="just ended") as refusal:
            made._tell_guest(plan, True)
        assert "try again" in str(refusal.value.hint)
        made._relay, theirs = wire.socketpair()
        wire.send_raw(theirs, b"O")
        made._tell_guest(plan, True)
        assert (plan, True) == wire.receive(theirs)[0]
        wire.send_raw(theirs, b"E2 no")
        with pytest.raises(Refused):
            made._tell_guest(plan, True)
        theirs.close()
        with pytest.raises(NetworkPolicyError):
            made._tell_guest(plan, True)
        made._relay.close()

    def test_whether_it_leads_anywhere_is_known_before_the_change(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = self.made(monkeypatch)
        monkeypatch.setattr(
            SandboxNetwork, "change", lambda self, policy: leads.append(self._leads)
        )
        leads: list[bool] = []
        made.change(NetworkPolicy.none())
        made.change(NetworkPolicy.parse("a.test"))
        assert [False, True] == leads

    def test_a_kernel_without_rules_gets_none(self) -> None:
        for has_rules in (True, False):
            guest: Any = SimpleNamespace(has_rules=has_rules, path="/boot/k")
            network.check_kernel(NetworkPolicy.none(), guest)
            with contextlib.nullcontext() if has_rules else pytest.raises(NetworkPolicyError):
                network.check_kernel(NetworkPolicy.parse("a.test"), guest)


class TestSaving:
    @pytest.mark.parametrize("fails", ["", "request", "answer"])
    @pytest.mark.parametrize("has_image", [True, False])
    def test_names_of_an_image_go_along_and_all_is_closed(
        self, fails: str, has_image: bool
    ) -> None:
        asked: list[Any] = []

        def request(verb: str, told: Any, fds: Any) -> Any:
            asked.append((verb, told, len(fds)))
            if fails == "request":
                raise SandboxLost("gone")
            ours, theirs = wire.socketpair()
            wire.send_raw(theirs, b"E28 no room" if fails == "answer" else b"O")
            theirs.close()
            return ours

        image = SimpleNamespace(open_names=lambda: os.memfd_create("names"))
        made: Any = SimpleNamespace(image=image if has_image else None, request=request)
        before = len(os.listdir("/proc/self/fd"))
        expected = {"request": SandboxLost, "answer": Refused}.get(fails)
        with pytest.raises(expected) if expected else contextlib.nullcontext():
            MicrovmSandbox._save(made, 1)
        assert [("save", (), 1 + has_image)] == asked
        assert before == len(os.listdir("/proc/self/fd"))
        made.unpack = lambda *what: asked.append(what)
        MicrovmSandbox.load(made, 9)
        assert ((has_image,), 9) == asked[-1]

    @pytest.mark.parametrize("fails", ["", "share", "wake", "number"])
    def test_one_that_goes_on_counts_on_or_says_why_not(self, fails: str) -> None:
        share, theirs = wire.socketpair()
        wire.send_raw(theirs, b"E5 no" if fails == "share" else b"O")
        done: list[Any] = []

        def ask(*what: Any) -> Any:
            done.append(what)
            if what[0] == "wake" and fails == "wake":
                raise Refused(5, "no")
            return "x" if fails == "number" else "41", []

        made: Any = SimpleNamespace(share=share, ask=ask, _numbers=0)
        with pytest.raises(IoError, match="resumed") if fails else contextlib.nullcontext():
            MicrovmSandbox.resume_from_checkpoint(made)
        if not fails:
            assert ("wake", ("freeze", False)) == (done[0][0], done[1])
            assert (41, 41) == (made._numbers, made._execs_before)
        share.close()
        theirs.close()

    @pytest.mark.parametrize("fails", [True, False])
    def test_tables_of_the_kernel_are_written_by_who_serves_and_closed(self, fails: bool) -> None:
        share, theirs = wire.socketpair()

        def serve() -> None:
            word, files = wire.receive_raw(theirs)
            assert b"W" == word
            for i, fd in enumerate(files):
                os.write(fd, b"%d" % i)
                os.close(fd)
            wire.send_raw(theirs, b"E5 no" if fails else b"O")

        thread = threading.Thread(target=serve)
        before = len(os.listdir("/proc/self/fd"))
        thread.start()
        made: Any = SimpleNamespace(share=share)
        if fails:
            with pytest.raises(IoError, match="not saved"):
                living._known(made)
        else:
            assert [b"%d" % i for i in range(serving.LINES)] == living._known(made)
        thread.join(30)
        assert before == len(os.listdir("/proc/self/fd"))
        share.close()
        theirs.close()

    def test_whom_programs_may_be_and_what_comes_later(self) -> None:
        made: Any = SimpleNamespace(spec=SPEC, first_host_id=0, mounts=[])
        assert [True, True, False] == [
            MicrovmSandbox._may_be(made, uid) for uid in (0, 0xFFFF, 0x10000)
        ]
        more = MicrovmSandbox._more_mounts(made)
        assert isinstance(more, MachineMounts)
        more.close()


class TestBackend:
    def backend(self, tmp_path: Path) -> Any:
        made: Any = MicrovmBackend(
            path="/q", kernel_place="/k", state_dir=str(tmp_path), cache_dir=str(tmp_path / "c")
        )
        return made

    def test_one_beside_it_has_the_same_program_kernel_and_machines(self, tmp_path: Path) -> None:
        other: Any = self.backend(tmp_path).beside(str(tmp_path / "other"))
        assert ("/q", "/k", str(tmp_path / "c"), str(tmp_path / "other")) == (
            other._path, other._kernel_place, other._cache_dir, other._state_dir,
        )  # fmt: skip

    def test_a_kernel_that_is_not_there_is_refused_where_it_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(BackendUnavailable, match=r"no-such-kernel"):
            self.backend(tmp_path).check_kernel(str(tmp_path / "no-such-kernel"))

    def test_none_waits_and_what_is_refused_is_refused_first(self, tmp_path: Path) -> None:
        made = self.backend(tmp_path)
        with pytest.raises(Unsupported) as refusal:
            made.prewarm(SPEC)
        assert "prewarm" == refusal.value.operation
        with pytest.raises(InvalidRequest, match="profile"):
            made.prewarm(SPEC.altered(profile="none such"))

    def test_an_emulator_or_a_kernel_that_is_not_there_is_told_each_time(
        self, tmp_path: Path
    ) -> None:
        made = self.backend(tmp_path)
        for _ in range(2):
            with pytest.raises(BackendUnavailable):
                made.machines()

    def test_a_machine_is_tried_and_ended_in_a_place_of_its_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made, done = self.backend(tmp_path), list[Any]()
        machines: Any = SimpleNamespace(initrd=lambda place: f"{place}/i", accelerator="kvm")
        made._machines = machines

        def boot(_machines: Any, mib: int, initrd: str, accelerator: str, **how: Any) -> None:
            assert os.path.isdir(os.path.dirname(initrd))
            done.append((initrd, mib, accelerator, how))

        monkeypatch.setattr(made, "_boot_once", boot)
        made._tries(machines, "tcg", 3.0)
        with made.bootable() as once:
            once()
        usual = qemu.memory_mib(0)
        assert [(usual, "tcg", {"timeout_s": 3.0}), (usual, "kvm", {})] == [x[1:] for x in done]
        assert not any(os.path.exists(os.path.dirname(each[0])) for each in done)

    @pytest.mark.parametrize("memory", ["", "/its/memory"])
    def test_a_snapshot_comes_back_with_its_memory_under_its_policy(
        self, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        policy = NetworkPolicy.parse("a.test")
        before = SPEC.altered(id="old", network=policy, secrets={"A": "x"})
        content = os.memfd_create("content")
        catalogue = SimpleNamespace(
            open=lambda _id: (None, before, content), memory_of=lambda _id: memory
        )
        made, done = self.backend(tmp_path), list[Any]()

        sandbox = SimpleNamespace(complete=lambda step: step())

        def provision(*what: Any) -> Any:
            done.append(what)
            return sandbox

        monkeypatch.setattr(made, "catalogue", lambda: catalogue)
        monkeypatch.setattr(made, "_provision", provision)
        monkeypatch.setattr(module, "tell_limits", lambda *what: done.append(what))
        assert sandbox is made.restore("s", secrets={"A": "y"})
        again = done[0][0]
        assert (None, {"A": "y"}) == (again.id, dict(again.secrets))
        if memory:
            assert [(again, content, memory, policy), (sandbox, before)] == done
        else:
            assert [(again, content)] == done
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(content)

    def test_tables_of_a_kernel_wait_for_who_will_serve(self) -> None:
        ours, theirs = wire.socketpair()
        before = len(os.listdir("/proc/self/fd"))
        module._hand_over(ours, [b"one", b"two"])
        assert before == len(os.listdir("/proc/self/fd"))
        word, files = wire.receive_raw(theirs)
        assert (b"R", [b"one", b"two"]) == (word, [os.pread(fd, 9, 0) for fd in files])
        for fd in files:
            os.close(fd)
        ours.close()
        theirs.close()

    @pytest.mark.parametrize("keep", [True, False])
    @pytest.mark.parametrize("fails", [True, False])
    def test_an_id_of_the_hosts_is_kept_only_where_nothing_went_wrong(
        self, keep: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "host", lambda: SimpleNamespace(trusted_root=True))
        returned: list[int] = []
        ids = SimpleNamespace(take=lambda: 700, give_back=returned.append)
        backend: Any = SimpleNamespace(jailer=lambda: None, host_ids=lambda: ids)
        with (
            pytest.raises(ValueError, match="x") if fails else contextlib.nullcontext(),
            module._HostId(backend, keep=keep) as first,
        ):
            assert 700 == first
            if fails:
                raise ValueError("x")
        assert ([] if keep and not fails else [700]) == returned


class TestInitialFiles:
    def entries(self, content: bytes) -> dict[str, tuple[int, bytes]]:
        """Of an archive in cpio's newc form: mode and data by name."""
        found: dict[str, tuple[int, bytes]] = {}
        at = 0
        while True:
            fields = [int(content[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
            size, names = fields[6], fields[11]
            name = content[at + 110 : at + 110 + names - 1].decode()
            begin = (at + 110 + names + 3) & ~3
            if name == "TRAILER!!!":
                return found
            found[name] = (fields[1], content[begin : begin + size])
            at = (begin + size + 3) & ~3

    def test_a_machine_begins_with_its_modules_and_the_files_of_its_python(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("lib", "bin"):
            (tmp_path / name).mkdir()
        (tmp_path / "lib/libx.so.1.2").write_bytes(b"library")
        (tmp_path / "lib/libx.so.1").symlink_to("libx.so.1.2")
        (tmp_path / "bin/python3.9").write_bytes(b"\x7fELF")
        (tmp_path / "bin/python3").symlink_to("python3.9")
        wanted = ["bin/python3", "lib/libx.so.1.2", "lib/none"]
        monkeypatch.setattr(
            initramfs,
            "_files_of_python",
            lambda _scratch: [f"{tmp_path}/{name}" for name in wanted],
        )
        monkeypatch.setattr(initramfs, "_add_loader", lambda *_: None)
        modules = [("second", b"22"), ("first", b"1")]
        kernel: Any = SimpleNamespace(modules=lambda: modules, release="6.1")
        found = self.entries(initramfs.build(kernel, str(tmp_path)))
        contents = [(name, found[name][1]) for name in found if name.startswith("modules/")]
        assert [("modules/00-second", b"22"), ("modules/01-first", b"1")] == contents, "in order"
        top = str(tmp_path).lstrip("/")
        assert b"library" == found[f"{top}/lib/libx.so.1.2"][1]
        mode, data = found[f"{top}/lib/libx.so.1"]
        assert (stat.S_IFLNK, b"libx.so.1.2") == (stat.S_IFMT(mode), data)
        mode, data = found[f"{top}/bin/python3.9"]
        assert (b"\x7fELF", 0o755) == (data, stat.S_IMODE(mode))
        assert stat.S_ISLNK(found[f"{top}/bin/python3"][0])
        assert f"{top}/lib/none" not in found
        assert 0o700 == stat.S_IMODE(found["init"][0])
        assert stat.S_ISCHR(found["dev/console"][0])
        for name in found:
            parent = os.path.dirname(name)
            assert not parent or stat.S_ISDIR(found[parent][0]), "each is where it can be"
