"""A sandbox of the landlock backend from its check to its end, as this process has it."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ringfence import Limits, Mount, NetworkPolicy, NetworkRule, SandboxSpec
from ringfence.backends.command import limits, place
from ringfence.backends.landlock import backend as module
from ringfence.backends.landlock import filters, rules, stopping
from ringfence.backends.landlock.backend import LandlockBackend, _mount_of_workdir
from ringfence.backends.landlock.network import LandlockNetwork, Loopback
from ringfence.backends.landlock.place import Place
from ringfence.backends.landlock.sandbox import LandlockSandbox
from ringfence.backends.landlock.starter import Guardian, Starter
from ringfence.errors import (
    BackendUnavailable,
    InvalidRequest,
    IoError,
    LifecycleError,
    RingfenceError,
    Unsupported,
)
from ringfence.guest.without_namespaces.landlocked import members
from ringfence.model.capabilities import NAMESPACES
from ringfence.model.execs.exec import ExecRequest
from ringfence.model.mount import MEMORY_DIR
from ringfence.model.state import State
from tests.features import require
from tests.native.test_handed_over import request, text_of
from tests.waiting import readable

RULES = NetworkPolicy(rules=(NetworkRule("a.example", "443"),))


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LandlockBackend]:
    require("landlock")
    with closing(LandlockBackend(state_dir=str(tmp_path_factory.mktemp("saved")))) as made:
        yield made


@pytest.fixture(scope="module")
def sandbox(backend: LandlockBackend) -> Iterator[LandlockSandbox]:
    made = backend.provision(SandboxSpec(id="lives", env={"OWN": "1", "RES_OPTIONS": "mine"}))
    yield made
    made.terminate()


def held(backend: LandlockBackend) -> dict[str, Any]:
    bases, own = set(backend.layout().bases.values()), f".{os.getpid()}."
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "places": sorted(os.listdir(place.base())),
        "cgroups": sorted(each for base in bases for each in os.listdir(base) if own in each),
        "ids": len(backend._ids()._free) if backend._host_ids else 0,
        "sandboxes": sorted(backend._live),
        "names": sorted(backend._making),
    }


def is_listening(network: LandlockNetwork) -> bool:
    with socket.socket() as client:
        return 0 == client.connect_ex(network._at)


def fail(*_what: object, **_how: object) -> Any:
    raise OSError(errno.ENOSPC, "no room")


class TestChecking:
    def test_nobody_is_somebody_else(self, backend: LandlockBackend) -> None:
        for user in (None, "sandbox", *([str(os.geteuid())] if os.geteuid() else [])):
            backend.check(SandboxSpec(user=user))
        for user in ("root", "0"):
            with pytest.raises(Unsupported, match="would be root on the host"):
                backend.check(SandboxSpec(user=user))
        for user in ("nobody", str(os.geteuid() + 1)):
            with pytest.raises(InvalidRequest) as refusal:
                backend.check(SandboxSpec(user=user))
            assert "user" == refusal.value.field

    def test_what_takes_another_backend_is_refused(self, backend: LandlockBackend) -> None:
        for changes in ({"image": "debian"}, {"deny": ("/usr/bin/env",)}, {"profile": "own_root"}):
            with pytest.raises(RingfenceError):
                backend.check(SandboxSpec(**changes))
        with pytest.raises(RingfenceError, match="network"):
            backend.check(SandboxSpec(network=NetworkPolicy.unrestricted()))
        backend.check(SandboxSpec(network=RULES, secrets={"A": "x"}))

    @pytest.mark.parametrize(("abi", "says"), [(0, "no Landlock"), (2, "truncation"), (3, "")])
    def test_a_kernel_that_does_not_judge_truncation_is_not_enough(
        self, backend: LandlockBackend, monkeypatch: pytest.MonkeyPatch, abi: int, says: str
    ) -> None:
        monkeypatch.setattr(module, "abi", lambda: abi)
        if says:
            with pytest.raises(BackendUnavailable, match=says):
                backend.check(SandboxSpec())
        else:
            backend.check(SandboxSpec())

    def test_what_was_allowed_by_name_is_told_as_lacking(self, backend: LandlockBackend) -> None:
        assert NAMESPACES in backend.degraded(SandboxSpec(allow_degraded=(NAMESPACES,)))
        assert NAMESPACES not in backend.degraded(SandboxSpec(allow_degraded=("pids_limit",)))

    def test_the_innermost_mount_has_the_working_directory(self) -> None:
        outer, inner = Mount("/work"), Mount("/work/deep")
        mounts = (outer, inner, Mount("/work/deeper"), Mount("/wo"))
        for workdir, mount in (
            ("/work/deep/x", inner), ("/work/deep", inner), ("/work/x", outer), ("/works", None),
        ):  # fmt: skip
            assert mount == _mount_of_workdir(SandboxSpec(workdir=workdir, mounts=mounts))
        assert _mount_of_workdir(SandboxSpec(mounts=mounts)) is None


class TestTelling:
    """What the agent is told before anything runs."""

    def told(
        self, backend: LandlockBackend, spec: SandboxSpec, slot: int = 0, **shown: str
    ) -> tuple[Any, Place]:
        made = Place(slot or os.geteuid(), None, shown, spec.memory_dir, None)
        loopback = Loopback()
        try:
            return backend._settings(spec, slot, made, [(7, 1), (8, 2)], loopback), made
        finally:
            loopback.close()
            made.remove()

    def test_what_is_its_own_may_be_written_and_nothing_else(
        self, backend: LandlockBackend
    ) -> None:
        told, made = self.told(backend, SandboxSpec())
        own = dict(told["rules"])
        assert set(made.writable) == set(told["judged"]["roots"])
        assert [rules.own_rule(path, sockets=True) for path in made.writable] == [
            (path, own[path]) for path in made.writable
        ]
        assert [("", 1), ("", 2)] == told["rules"][-2:], "mounts go by their descriptors"
        assert set(made.writable) == set(told["network"]["unix"])
        assert made.mapped("/dev/shm") == told["shared"]["place"]
        assert (filters.segment_calls(), filters.scheduling_calls()) == (
            told["segments"], told["scheduling"],
        )  # fmt: skip

    def test_a_directory_of_the_hosts_takes_sockets_away(
        self, backend: LandlockBackend, tmp_path: Path
    ) -> None:
        told, made = self.told(backend, SandboxSpec(memory_dir=str(tmp_path)))
        own = dict(told["rules"])
        assert [*made.writable, str(tmp_path)] == told["judged"]["roots"]
        assert str(tmp_path) not in made.writable
        assert {rules.own_rule("", sockets=False)[1]} == {own[path] for path in made.writable}
        assert [] == told["network"]["unix"]

    def test_each_fork_is_asked_about_only_where_nobody_else_counts(
        self, backend: LandlockBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layout = backend.layout()
        some, none = SandboxSpec(limits=Limits(pids=20)), SandboxSpec()
        for version, slot, spec, asks in (
            (0, 0, some, True), (0, 0, none, False), (0, os.geteuid() or 70_000, some, False),
            (1, 0, some, False),
        ):  # fmt: skip
            monkeypatch.setattr(layout, "version", version)
            monkeypatch.setattr(Place, "_give", lambda *_: None)
            told, _made = self.told(backend, spec, slot)
            assert (filters.fork_calls() if asks else []) == told["forks"]
            assert bool(version) == ((0, 0) == (told["pids"], told["memory_bytes"]))
            assert slot or told["ids"] == (-1 if os.geteuid() == 0 else 0)
            assert not slot or slot == told["ids"] == told["uid"]

    def test_no_two_have_the_same_tags(self) -> None:
        found = {module._new_base() for _ in range(50)}
        assert 50 == len(found)
        assert all(1 << 61 < base < 1 << 62 for base in found)


class TestStarting:
    @pytest.mark.parametrize("step", ["start", "make", "answer", "check", "serve"])
    def test_nothing_stays_of_a_start_that_fails(
        self, backend: LandlockBackend, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        shown = (Mount("/usr/share", "/usr/share"),)
        backend.provision(SandboxSpec(mounts=shown)).terminate()
        before = held(backend)
        places = {
            "start": (backend._starter, "start"), "make": (limits, "make"),
            "answer": (module, "answer"), "check": (limits, "check"),
            "serve": (LandlockNetwork, "serve"),
        }  # fmt: skip
        if step != "check" or backend.layout().version:
            with monkeypatch.context() as patch:
                patch.setattr(*places[step], fail)
                with pytest.raises((OSError, RingfenceError), match="no room"):
                    backend.provision(SandboxSpec(id="mine", mounts=shown))
        assert before == held(backend)
        made = backend.provision(SandboxSpec(id="mine", mounts=shown))
        assert "/usr/share" in [each.target for each in made.mounts]
        made.terminate()
        assert before == held(backend)

    def test_a_link_that_has_come_to_be_in_a_source_leaves_nothing_open(
        self, backend: LandlockBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend.provision(SandboxSpec()).terminate()
        before = held(backend)

        def refuse(_mounts: Any) -> Any:
            raise InvalidRequest("it has a symlink in it now")

        monkeypatch.setattr(rules, "open_mounts", refuse)
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="symlink in it now"):
                backend.provision(SandboxSpec())
        assert before == held(backend)

    def test_what_cannot_be_put_back_ends_it(self, backend: LandlockBackend) -> None:
        with open(__file__, "rb") as no_snapshot:
            before = held(backend)
            with pytest.raises(IoError, match="not unpacked"):
                backend.provision_with(SandboxSpec(), SandboxSpec(), no_snapshot.fileno())
            assert before == held(backend)

    def test_one_beside_it_keeps_its_snapshots_elsewhere(self, tmp_path: Path) -> None:
        with closing(LandlockBackend().beside(str(tmp_path))) as other:
            assert str(tmp_path) == other._state_dir


class TestLiving:
    def test_its_variables_are_its_own_and_the_users_win(self, sandbox: LandlockSandbox) -> None:
        place_of = sandbox.place.mapped
        found = sandbox._environment
        assert ("1", "mine", "1") == (
            found["OWN"], found["RES_OPTIONS"], found["GIT_CONFIG_NOSYSTEM"],
        )  # fmt: skip
        assert (place_of("/home/sandbox"), place_of("/tmp"), place_of(MEMORY_DIR)) == (
            found["HOME"], found["TMPDIR"], found["RINGFENCE_MEMORY_DIR"],
        )  # fmt: skip
        before = dict(found)
        sandbox.begin(sandbox.spec)
        assert before == sandbox._environment
        assert sandbox.root == place_of("/home/sandbox") == sandbox.seen_at("/home/sandbox")

    def test_paths_of_its_own_are_where_they_are(self, sandbox: LandlockSandbox) -> None:
        argv, *_rest = sandbox.as_asked(request("x"), {})
        assert ["sh", "-c", "x"] == argv
        asked = ExecRequest(("/tmp/x", "tmp/x", "/usr/x"), cwd="/tmp/deep")
        (own, relative, other), _environment, cwd, *_rest = sandbox.as_asked(asked, {})
        assert sandbox.place.mapped("/tmp/deep") == cwd
        assert (sandbox.place.mapped("/tmp/x"), "tmp/x", "/usr/x") == (own, relative, other)
        assert sandbox.place.mapped("/tmp/deep") == sandbox.working_directory("/tmp/deep")
        assert f"{sandbox.root}/below" == sandbox.working_directory("below")
        with sandbox.files.open_write("/tmp/kept") as file:
            file.write(b"kept")
        assert "kept" == text_of(sandbox, "cat $TMPDIR/kept")

    def test_programs_are_of_its_one_user(self, sandbox: LandlockSandbox) -> None:
        for user in (None, "sandbox", str(sandbox.uid)):
            assert sandbox.uid == sandbox._account(user).uid
        for user in ("root", "0", "nobody", str(sandbox.uid + 1)):
            with pytest.raises(InvalidRequest) as refusal:
                sandbox._account(user)
            assert "user" == refusal.value.field

    def test_a_snapshot_stops_what_runs_and_lets_go_on_what_ran(
        self, backend: LandlockBackend, sandbox: LandlockSandbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = sandbox.start(request("echo kept > kept; echo up; exec sleep 600"))
        assert run.stdout is not None
        assert readable([run.stdout], 20)
        found = [pid for pid in members(sandbox._tag_base) if pid != sandbox.pid]
        assert found
        during: list[str] = []
        waited: list[int] = []
        save, stop = sandbox._save, stopping.stop

        def wait(base: int, agent: int) -> set[int]:
            waited.append(agent)
            return stop(base, agent)

        def look(pipe: int) -> None:
            assert waited.pop() == sandbox.pid, "nothing is read before all of them stand still"
            during.extend(stopping._state(f"/proc/{pid}")[0] for pid in found)
            save(pipe)

        with monkeypatch.context() as patch:
            patch.setattr(sandbox, "_save", fail)
            with pytest.raises(IoError, match="no room"):
                sandbox.snapshot({})
            patch.setattr(sandbox, "_save", look)
            patch.setattr(stopping, "stop", wait)
            kept = sandbox.snapshot({"a": "b"})
            sandbox.suspend()
            again = sandbox.snapshot({})
            assert State.SUSPENDED is sandbox.state
            sandbox.resume()
        assert ["T"] * 2 * len(found) == during
        assert "T" not in [stopping._state(f"/proc/{pid}")[0] for pid in found]
        run.kill()
        run.close()
        assert [{"a": "b"}, {}] == [dict(each.metadata) for each in (kept, again)]
        other = backend.restore(kept.id)
        assert "kept\n" == text_of(other, "cat kept")
        other.terminate()
        with pytest.raises(LifecycleError, match="snapshot"):
            other.snapshot({})

    def test_stopped_programs_go_on_where_no_cgroup_holds_them(
        self, sandbox: LandlockSandbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[Any] = []

        def stop(*what: Any) -> set[int]:
            asked.append(("stop", *what))
            return {1, 2}

        monkeypatch.setattr(type(sandbox.group), "can_freeze", False)
        monkeypatch.setattr(stopping, "stop", stop)
        monkeypatch.setattr(stopping, "go_on", lambda *what: asked.append(("on", *what)))
        assert sandbox.answers_frozen
        sandbox.suspend()
        sandbox.resume()
        assert [
            ("stop", sandbox._tag_base, sandbox.pid), ("on", sandbox._tag_base, {1, 2}),
        ] == asked  # fmt: skip

    def test_it_has_a_way_out_only_while_its_policy_leads_somewhere(
        self, sandbox: LandlockSandbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[Any] = []
        ask = sandbox.ask

        def look(what: str, *given: Any, **how: Any) -> Any:
            if what == "network":
                told.extend(given)
            return ask(what, *given, **how)

        monkeypatch.setattr(sandbox, "ask", look)
        network = sandbox.network
        assert isinstance(network, LandlockNetwork)
        with monkeypatch.context() as patch:
            patch.setattr(network, "_tell", fail)
            with pytest.raises(OSError, match="no room"):
                sandbox.apply_network_policy(RULES)
        assert sandbox.spec.network.is_none
        assert not is_listening(network), "nobody is there for what it was not told"
        tokens = []
        for policy in (
            RULES,
            NetworkPolicy(rules=(NetworkRule("10.1.2.3", "80"),)),
            NetworkPolicy(),
        ):
            sandbox.apply_network_policy(policy)
            assert len(tokens) + 1 == len(told), "each is told"
            tokens.append(told[-1] and told[-1]["token"])
            assert policy == sandbox.spec.network
            assert is_listening(network) != policy.is_none
            assert sandbox.place.mapped("/tmp") == sandbox._environment["TMPDIR"]
        assert tokens[0] == tokens[1] != tokens[2]
        assert tokens[2] is None, "the way is closed"
        sandbox.apply_network_policy(RULES)
        assert told[-1]["token"] not in tokens
        sandbox.apply_network_policy(NetworkPolicy())

    def test_its_addresses_are_free_when_it_has_ended(self, backend: LandlockBackend) -> None:
        made = backend.provision(SandboxSpec())
        claim = made._loopback._claim
        made.suspend()
        made.terminate()
        assert claim.fileno() < 0
        assert [] == members(made._tag_base)
        assert made.id not in backend._live
        assert not os.path.exists(made.place.path)


class TestStarters:
    def test_one_that_was_killed_is_replaced_and_closed_it_begins_again(self) -> None:
        require("landlock")
        starter = Starter()
        try:
            first = starter._running()
            assert first is starter._running()
            os.kill(first.pid, signal.SIGKILL)
            while first.alive:
                pass
            second = starter._running()
            assert second is not first
            starter.close()
            assert not second.alive
            assert starter._running().alive
        finally:
            starter.close()

    def test_a_guardian_is_waited_for_once_and_known_afterwards(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        process = subprocess.Popen(["sh", "-c", "read line; exit 3"], stdin=subprocess.PIPE)
        guardian = Guardian(process.pid)
        with pytest.raises(subprocess.TimeoutExpired):
            guardian.wait(0)
        assert guardian.returncode is None
        assert process.stdin is not None
        process.stdin.close()
        assert (3, 3) == (guardian.wait(20), guardian.wait(0))
        guardian.send_signal(signal.SIGKILL)  # to nobody
        process.wait()
        other = subprocess.Popen(["true"])
        waited_for = Guardian(other.pid)
        other.wait()
        waited_for.send_signal(signal.SIGKILL)
        assert waited_for.wait() is None, "somebody else has its status"
        assert before == len(os.listdir("/proc/self/fd"))


def test_of_an_address_that_cannot_be_claimed_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "urandom", lambda size: b"\1" * size)
    first = Loopback()
    monkeypatch.setattr("ringfence.backends.landlock.network._ATTEMPTS", 2)
    with pytest.raises(RingfenceError, match="no free loopback"):
        Loopback()
    first.close()
    assert before == len(os.listdir("/proc/self/fd"))
