"""What the next process finds of a sandbox that it takes over: each value, each change, each descriptor."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence import Mount, NetworkPolicy, NetworkRule, SandboxSpec
from ringfence.backends.local.fd_store import Item
from ringfence.backends.native.backend import NativeBackend
from ringfence.backends.native.network import NativeNetwork
from ringfence.backends.native.profiles import Profile
from ringfence.egress.host.client import Egress
from ringfence.errors import IsolationError, RingfenceError, ServerUnreachable
from ringfence.model.execs.exec import ExecRequest
from ringfence.model.mount import READ_ONLY, READ_WRITE
from ringfence.model.state import State
from tests.native.outside import open_count
from tests.strangers import let_others_in
from tests.waiting import readable

Next = Callable[..., NativeBackend]


@pytest.fixture
def next_backend(tmp_path: Path) -> Iterator[Next]:
    """Backends that follow each other on one fd store, each with an egress process of its own."""
    directory = tmp_path / "restart"
    directory.mkdir(mode=0o700)
    with ExitStack() as stack:

        def make(**options: Any) -> NativeBackend:
            egress = Egress()
            stack.callback(egress.close)
            backend = NativeBackend(
                restart_dir=str(directory), outlive_s=60.0, egress=lambda: egress, **options
            )
            stack.callback(backend.close)
            return backend

        yield make


def policy(host: str) -> NetworkPolicy:
    return NetworkPolicy(rules=(NetworkRule(host, "443"),))


def request(script: str) -> ExecRequest:
    return ExecRequest(("sh", "-c", script))


def text_of(sandbox: Any, script: str) -> str:
    run = sandbox.start(request(script))
    data = b""
    while readable([run.stdout], 20) and (more := os.read(run.stdout, 1 << 16)):
        data += more
    assert readable([run.done], 20)
    assert run.status().exit_code == 0
    run.close()
    return data.decode()


def facts(sandbox: Any) -> dict[str, Any]:
    """All that a later process cannot find out by itself."""
    group, trusted = sandbox.group, sandbox.network.trusted
    return {
        "spec": sandbox.spec.to_json(),
        "secrets": dict(sandbox.spec.secrets),
        "ids": (sandbox.uid, sandbox.first_host_id),
        "mounts": [(each.target, each.access, each.host_path) for each in sandbox.mounts],
        "writable": sandbox.landlock_writable,
        "host directory": sandbox.host_directory,
        "unix sockets": sandbox.unix_sockets,
        "placeholders": sorted(each for part in sandbox.protected for each in part.placeholders),
        "locks": sorted(os.fstat(fd).st_ino for part in sandbox.protected for fd in part.locks),
        "note": sandbox.note,
        "profile": sandbox.profile.name,
        "group": (group.version, group.paths, group.quota),
        "lockdown": sandbox.lockdown,
        "pid": sandbox.pid,
        "created": sandbox.created,
        "trusted": trusted and trusted.parts,
        "stand-ins of secrets": sandbox.network.placeholders,
        "sockets": sandbox.network.inodes,
        "count": sandbox.count,
        "execs": {run.label: (run.number, run.uid, run.is_terminal, run.facts)
                  for run in sandbox.runs.values()},
        "environment": sandbox._environment,
    }  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    (path / "file").write_text("shown")
    let_others_in(path)
    return path


def spec(source: Path) -> SandboxSpec:
    return SandboxSpec(
        network=policy("a.example"),
        env={"OWN": "variable"},
        secrets={"TOKEN": "value"},
        mounts=(Mount("/data", str(source), READ_WRITE, protect=("absent",)),),
    )


def test_each_value_of_a_sandbox_is_the_same_for_the_next(next_backend: Next, source: Path) -> None:
    """Also what changed since it was made: its policy, its mounts, its execs."""
    first = next_backend()
    made = first.provision(spec(source))
    other = source.parent / "other"
    other.mkdir()
    (other / "kept").write_text("kept")
    let_others_in(other)
    assert "shown" == text_of(made, "cat /data/file")
    made.apply_network_policy(policy("b.example"))
    made.attach(Mount("/attached", str(other), READ_ONLY))
    waiting = made.start(request("read line; echo heard $line"), "waits")
    del waiting
    before = facts(made)
    sandbox_id = made.id
    first.leave()
    assert State.TERMINATED is made.state

    second = next_backend()
    found = second.adopt(sandbox_id)
    assert found is not None
    assert before == facts(found)
    assert policy("b.example") == found.spec.network
    assert "/attached" in [each.target for each in found.mounts]
    assert State.RUNNING is found.state
    assert {"waits"} == set(found.adopted_execs())
    assert "variable kept" == text_of(found, "echo -n $OWN $(cat /attached/kept)")
    assert before["count"] + 1 == found.count
    assert ["absent", "file"] == sorted(os.listdir(source))
    found.terminate()
    assert ["file"] == os.listdir(source)


def test_another_fd_store_gets_what_the_first_was_given(
    next_backend: Next, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was added, changed and taken out again one by one."""
    backend, kept = next_backend(), dict[tuple[str, str], Any]()
    store = backend.handover._fd_store  # type: ignore[attr-defined]
    change = store.change

    def of(item: Item) -> Any:
        return item.note, [os.fstat(fd).st_ino for fd in item.fds]

    def look(items: list[Item], ended: Sequence[tuple[str, str]] | None = None) -> bool:
        kept.update({(item.whose, item.name): of(item) for item in items})
        gone = ended or ()
        for key in [key for key in kept if key in gone or (key[0], "") in gone]:
            del kept[key]
        return bool(change(items, ended))

    def again() -> dict[tuple[str, str], Any]:
        items = backend.handover._everything()  # type: ignore[attr-defined]
        return {(item.whose, item.name): of(item) for item in items}

    monkeypatch.setattr(store, "change", look)
    sandbox, other = backend.provision(spec(source)), backend.provision(SandboxSpec())
    run = sandbox.start(request("read line"), "waits")
    assert kept == again()
    sandbox.apply_network_policy(policy("b.example"))
    sandbox.attach(Mount("/attached", str(source), READ_ONLY))
    if other.first_host_id:
        other.start(replace(request("true"), user="nobody")).close()
    other.suspend()
    assert kept == again()
    assert (other.id, "paused") in kept
    run.close()
    other.resume()
    sandbox.apply_network_policy(NetworkPolicy())
    assert kept == again()
    assert not [name for _whose, name in kept if name in ("paused", "network")]
    for each in (sandbox, other):
        each.terminate()
    assert kept == again()
    assert {""} == {whose for whose, _name in kept}


@pytest.mark.parametrize("what", ["policy", "mount"])
def test_each_change_is_handed_over_when_it_is_made(
    next_backend: Next, source: Path, what: str
) -> None:
    """Nothing else that happens later would: the process may be killed at once."""
    first = next_backend()
    made = first.provision(SandboxSpec(network=policy("a.example")))
    if what == "policy":
        made.apply_network_policy(policy("b.example"))
    else:
        made.attach(Mount("/data", str(source), READ_WRITE, protect=("absent",)))
    before = facts(made)
    first.leave()

    found = next_backend().adopt(made.id)
    assert found is not None
    assert before == facts(found)
    assert ("b" if what == "policy" else "a") in str(found.spec.network.rules)
    assert bool(before["locks"]) is (what == "mount")
    found.terminate()
    assert ["file"] == os.listdir(source)


def test_a_sandbox_that_was_left_has_given_back_its_descriptors(
    next_backend: Next, source: Path
) -> None:
    """Its execs' too; the placeholder stays locked, as the fd store has a copy."""
    first = next_backend()
    control = first.provision(SandboxSpec(network=policy("c.example")))
    assert "here" == text_of(control, "echo -n here")
    before = open_count()
    made = first.provision(spec(source))
    made.apply_network_policy(NetworkPolicy())
    made.start(request("sleep 600"), "sleeps")
    made.leave()
    made.leave()  # nothing more to leave

    assert before == open_count()
    fd = os.open(source / "absent", os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)


@pytest.mark.parametrize("is_paused", [True, False])
def test_what_stood_still_is_made_to_agree(next_backend: Next, is_paused: bool) -> None:
    """A pause of the server's own is over; a suspended sandbox is suspended."""
    first = next_backend()
    made = first.provision(SandboxSpec())
    made._keep_paused(True)
    if not is_paused:
        made._keep_paused(False)
    sandbox_id = made.id
    first.leave()
    second = next_backend()
    found = second.adopt(sandbox_id)
    assert found is not None
    assert is_paused is found.was_paused
    found.align(suspended=False)
    assert "runs" == text_of(found, "echo -n runs")
    second.leave()
    third = next_backend().adopt(sandbox_id)
    assert third is not None
    assert not third.was_paused, "align has taken it back"
    third.align(suspended=True)
    assert State.SUSPENDED is third.state


def test_a_sandbox_that_has_ended_is_not_found_again(next_backend: Next) -> None:
    first = next_backend()
    ended, lives = first.provision(SandboxSpec()), first.provision(SandboxSpec())
    ended.terminate()
    first.leave()
    second = next_backend()

    assert second.adopt(ended.id) is None
    assert second.adopt(lives.id) is not None


def test_one_that_the_next_process_does_not_know_is_ended_with_all_that_it_had(
    next_backend: Next, source: Path
) -> None:
    """Its PID 1, its cgroups and its placeholders; the others go on."""
    first = next_backend()
    lost, kept = first.provision(spec(source)), first.provision(SandboxSpec())
    groups = list(lost.group.directories)
    control = os.dup(
        lost.control.fileno()
    )  # else its PID 1 would see by itself that nobody is there
    pids = [os.pidfd_open(each.pid) for each in (lost, kept)]
    first.handover._fd_store.change([], [(lost.id, "")])  # type: ignore[attr-defined]
    first.leave()
    assert ["absent", "file"] == sorted(os.listdir(source))
    second = next_backend()
    found = second.adopt(kept.id)

    assert second.adopt(lost.id) is None
    ended = readable(pids, 20)
    assert [pids[0]] == ended
    assert ["file"] == os.listdir(source)
    deadline = time.monotonic() + 20
    while any(os.path.exists(each) for each in groups) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(os.path.exists(each) for each in groups)
    assert found is not None
    assert "goes on" == text_of(found, "echo -n goes on")
    for fd in (control, *pids):
        os.close(fd)


@pytest.mark.root
def test_host_ids_of_those_that_go_on_are_given_to_nobody_else(next_backend: Next) -> None:
    """The control: those of one that has ended are given again."""
    first = next_backend()
    ended, kept = first.provision(SandboxSpec()), first.provision(SandboxSpec())
    free, taken = ended.first_host_id, kept.first_host_id
    ended.terminate()
    first.leave()
    second = next_backend()
    assert second.adopt(kept.id) is not None
    made = [second.provision(SandboxSpec()).first_host_id for _ in range(3)]

    assert free in made
    assert taken not in made
    assert 3 == len(set(made))


def test_the_zygote_keeps_no_descriptor_of_a_request(source: Path) -> None:
    """Of sandboxes with mounts and with a network, that ended or could not be started."""
    with closing(NativeBackend(prebuilt_s=0)) as backend:
        place = f"/proc/{backend.zygote().pid}/fd"

        def one_of_each() -> int:
            for each in (SandboxSpec(), spec(source)):
                made = backend.provision(each)
                made.apply_network_policy(policy("b.example") if each.mounts else NetworkPolicy())
                assert "x" == text_of(made, "echo -n x")
                made.terminate()
            with pytest.raises(RingfenceError):
                backend.provision(
                    SandboxSpec(mounts=(Mount("/a/b", str(source)), Mount("/a/b/c", "/usr")))
                )
            return len(os.listdir(place))

        one_of_each()
        before = one_of_each()
        for _ in range(3):
            one_of_each()
        deadline = time.monotonic() + 20
        while len(os.listdir(place)) > before and time.monotonic() < deadline:
            time.sleep(0.01)
        after = len(os.listdir(place))

    assert before >= after


def test_what_is_left_of_one_that_was_not_kept_whole_is_closed(next_backend: Next) -> None:
    """Its exec alone is with the fd store: nobody can go on with that, and nobody waits at its stream."""
    first = next_backend()
    lost, kept = (first.provision(SandboxSpec()) for _ in range(2))
    streams = []
    for each in (lost, kept):
        run = each.start(request("sleep 600"), "sleeps")
        assert run.stdout is not None
        streams.append(os.readlink(f"/proc/self/fd/{run.stdout}"))
    first.handover._fd_store.change([], [(lost.id, "sandbox")])  # type: ignore[attr-defined]
    first.leave()
    second = next_backend()

    assert second.adopt(lost.id) is None
    assert second.adopt(kept.id) is not None
    names = os.listdir("/proc/self/fd")
    opened = {
        os.readlink(f"/proc/self/fd/{fd}") for fd in names if os.path.lexists(f"/proc/self/fd/{fd}")
    }
    assert [False, True] == [each in opened for each in streams]


def test_one_whose_profile_the_next_process_does_not_have_is_ended(
    next_backend: Next, source: Path
) -> None:
    """The control is another, which goes on; what the lost one had is not found a third time."""
    first = next_backend(profiles={"own": Profile("own")})
    lost = first.provision(spec(source).altered(profile="own"))
    kept = first.provision(SandboxSpec())
    pids = [os.pidfd_open(each.pid) for each in (lost, kept)]
    first.leave()
    second = next_backend()

    assert second.adopt(kept.id) is not None
    assert second.adopt(lost.id) is None
    assert [pids[0]] == readable(pids, 20)
    assert {} == second.handover._sockets, "its network goes as well"  # type: ignore[attr-defined]
    second.leave()
    third = next_backend(profiles={"own": Profile("own")})
    assert third.adopt(lost.id) is None
    assert third.adopt(kept.id) is not None
    for fd in pids:
        os.close(fd)


def test_a_network_that_cannot_be_served_again_ends_its_sandbox(
    next_backend: Next, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless no process may be started now: the next one may be able to."""
    first = next_backend()
    lost = first.provision(SandboxSpec(network=policy("a.example")))
    pid = os.pidfd_open(lost.pid)
    first.leave()

    def fail(cause: Exception) -> None:
        def serve(_network: Any) -> None:
            raise IsolationError("no egress") from cause

        monkeypatch.setattr(NativeNetwork, "serve", serve)

    fail(OSError(11, "no process"))
    second = next_backend()
    with pytest.raises(IsolationError, match="no egress"):
        second.adopt(lost.id)
    assert [] == readable([pid], 0)
    second.leave()
    fail(ValueError("x"))
    third = next_backend()
    assert third.adopt(lost.id) is None or State.TERMINATED is lost.state
    assert [pid] == readable([pid], 20)
    os.close(pid)


def test_no_exec_begins_where_all_has_been_left_to_the_next(next_backend: Next) -> None:
    """Nobody would know of it: neither its number nor its streams stay with this process."""
    first = next_backend()
    made = first.provision(SandboxSpec())
    assert "x" == text_of(made, "echo -n x")
    before = open_count()
    first.handover._fd_store._left = True  # type: ignore[attr-defined]
    with pytest.raises(ServerUnreachable):
        made.start(request("true"), "late")
    assert {} == made.runs
    assert before == open_count()
    first.handover._fd_store._left = False  # type: ignore[attr-defined]
    assert "y" == text_of(made, "echo -n y")
