"""The manager is killed and its sandboxes live on: the next one goes on with them, or ends them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence import Mount, Template
from ringfence.environments.apply import store_of
from ringfence.errors import LifecycleError
from ringfence.images.archive import load
from ringfence.images.store import ImageStore
from ringfence.model.acquire import AcquireOptions
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.manager import SessionManager
from ringfence.snapshots import layers
from ringfence.store.store import FILE
from tests.features import require
from tests.images.conftest import small
from tests.native.callers import Caller
from tests.native.outside import cgroups_of, descendants_of, pids_with, pin, survivors, until
from tests.sessions import test_restart
from tests.sessions.test_restart import STEPS, records

pytestmark = pytest.mark.full

OUTLIVE_S = 60.0
PRELUDE = (
    test_restart._PRELUDE.replace("background=False)", "background=False, outlive_s=OUTLIVE_S)")
    + f"OUTLIVE_S = {OUTLIVE_S}\n"
    + """
from ringfence.backends.local.fd_store import FdStore
from ringfence.backends.native.fd_store.handover import Handover
from ringfence.backends.local.agents.execs import LocalExec
from ringfence.model.acquire import AttachRequest
from ringfence.model.execs.exec import ExecRequest

def inner(manager, lease):
    return manager.index.find(lease.id).inner

def begin(manager, lease, label, script, **options):
    return inner(manager, lease).start(ExecRequest(["sh", "-c", script], **options), label)
"""
)


@pytest.fixture
def state(tmp_path: Path) -> str:
    return str(tmp_path / "state")


def manage(state: str, outlive_s: float = OUTLIVE_S) -> SessionManager:
    config = ManagerConfig(pool=PoolConfig(enabled=False))
    return SessionManager(config, state_dir=state, background=False, outlive_s=outlive_s)


@pytest.fixture
def kill(state: str) -> Iterator[Any]:
    """`kill(code)`: run it in a manager's process, kill that one when it halts; its family."""
    families = []

    def run(code: str, label: str = "", marker: str = "63") -> dict[int, int]:
        with Caller(PRELUDE + code, state, label, marker) as caller:
            assert ["halted", caller.pid] == caller.hear(60)
            families.append(pin(descendants_of(caller.pid)))
            caller.kill(signal.SIGKILL)
        return families[-1]

    yield run
    for family in families:
        left = survivors(family, 30.0)
        assert [] == left, f"the last manager has closed: {[command(pid) for pid in left]}"


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().partition(")")[0]


def all_end(family: dict[int, int], patience_s: float) -> bool:
    """As `survivors`, but asked as often as one likes."""
    return survivors({pid: os.dup(fd) for pid, fd in family.items()}, patience_s) == []


def collect(run: Any) -> tuple[bytes, Any]:
    """Everything it still writes, and how it ended."""
    output = b""
    poll = select.poll()
    poll.register(run.stdout, select.POLLIN)
    while poll.poll(20_000):
        try:
            data = os.read(run.stdout, 1 << 16)
        except OSError:
            break  # a terminal that is hung up
        if not data:
            break
        output += data
    done = select.poll()
    done.register(run.done, select.POLLIN)
    assert done.poll(20_000)
    status = run.status()
    run.close()
    return output, status


def sandbox_of(manager: SessionManager, any_id: str) -> Any:
    live = manager.index.find(any_id)
    assert live is not None
    return live.inner


def execs_of(manager: SessionManager, any_id: str) -> dict[str, Any]:
    execs: dict[str, Any] = sandbox_of(manager, any_id).adopted_execs()
    return execs


def session_id(state: str) -> str:
    return next(row[2] for row in records(state) if row[2])


# -- what lives on ---------------------------------------------------------------------------------

_RUNNING = """
m = open_manager()
l = m.acquire(client_id="ann")
l.sandbox.files.write("note", b"before")
l.sandbox.exec(["mkfifo", "go"])
begin(m, l, "out", "echo one; read x < go; echo two; head -c 300000 /dev/zero; exit 7")
begin(m, l, "in", "read x; echo got $x; exit 3", stream_stdin=True)
begin(m, l, "tty", "tty; read x; echo got $x; exit 4", pty=(24, 80))
begin(m, l, "over", "echo done; exit 9")
begin(m, l, "eof", "cat; exit 5", stream_stdin=True).close_stdin()
begin(m, l, "late", "sleep 1000", timeout_s=2)
halt()
"""


_ASKED = """
m = open_manager()
m.acquire(client_id="ann")
m.maker.report("native")
halt()
"""


def test_a_report_is_kept_as_long_as_the_process_that_made_it(state: str, kill: Any) -> None:
    """To find it again sandboxes are made, which wait for those of all clients after a restart."""
    kill(_ASKED)
    with contextlib.closing(sqlite3.connect(f"{state}/{FILE}")) as database, database:
        changed = "UPDATE settings SET value = json_set(value, '$.report.reason', 'kept')"
        assert 1 == database.execute(f"{changed} WHERE name = 'report native'").rowcount

    with manage(state) as manager:
        assert "kept" == manager.maker.report("native").reason
        assert "kept" != manager.maker.report("native", afresh=True).reason
        with contextlib.closing(sqlite3.connect(f"{state}/{FILE}")) as database, database:
            database.execute(f"{changed} WHERE name = 'report native'")
    with manage(state) as manager:  # whose zygote is another one
        assert "kept" != manager.maker.report("native").reason


def test_execs_go_on_with_their_results_and_their_output(state: str, kill: Any) -> None:
    kill(_RUNNING)
    with manage(state) as manager:
        session = manager.get(session_id(state))
        assert ("active", "ann") == (session.state, session.client_id)
        sandbox = manager.sandbox(session.session_id)
        assert b"before" == sandbox.files.read("note")
        assert b"new\n" == sandbox.exec(["echo", "new"]).stdout

        runs = execs_of(manager, session.session_id)
        assert {"out", "in", "tty", "over", "eof", "late"} == runs.keys()
        output, status = collect(runs["over"])
        assert (b"done\n", 9) == (output, status.exit_code)
        output, status = collect(runs["eof"])
        assert (b"", 5) == (output, status.exit_code)
        sandbox.exec(["sh", "-c", "echo > go"])
        output, status = collect(runs["out"])
        assert (b"one\ntwo\n" + bytes(300_000), 7) == (output, status.exit_code)
        os.write(runs["in"].stdin, b"hi\n")
        output, status = collect(runs["in"])
        assert (b"got hi\n", 3) == (output, status.exit_code)
        os.write(runs["tty"].stdin, b"hi\n")
        output, status = collect(runs["tty"])
        assert output.startswith(b"/dev/pts/")
        assert output.endswith(b"got hi\r\n")
        assert 4 == status.exit_code
        _output, status = collect(runs["late"])
        assert (True, "timeout") == (status.timed_out, status.killed_by)
        assert {} == execs_of(manager, session.session_id)


def freed_by(store: ImageStore) -> int:
    """Collect until nothing is in use: a namespace's mounts go after its last process. Return the bytes."""
    freed = 0

    def is_done() -> bool:
        nonlocal freed
        found, in_use = store.collect()
        freed += found
        return not in_use

    assert until(is_done)
    return freed


def test_files_of_an_image_are_held_on(
    state: str, kill: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGFENCE_IMAGES", str(tmp_path / "images"))
    store = ImageStore()
    load(small().as_layout(tmp_path / "layout"), "small:1", store=store)
    kill(
        "from ringfence import SandboxSpec\n"
        "m = open_manager(); m.acquire(SandboxSpec(image='small:1'), client_id='ann'); halt()"
    )
    image = store.remove("small:1")
    with manage(state) as manager:
        sandbox = manager.sandbox(session_id(state))
        assert [image.id] == store.collect()[1]
        assert b"ID=small\n" == sandbox.exec(["cat", "/etc/os-release"]).stdout
        manager.terminate(session_id(state))

    assert freed_by(store) > 0, "the control: it was the sandbox that held them"


def test_files_of_a_deleted_snapshot_are_held_on(
    state: str, kill: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "LEAST_BYTES", 1)
    kill("""
from ringfence import SandboxSpec
from ringfence.snapshots import layers
layers.LEAST_BYTES = 1
m = open_manager()
first = m.acquire(SandboxSpec(), client_id='ann')
first.sandbox.shell('echo kept > file')
saved = m.snapshot(first.id, {})
again = m.acquire(SandboxSpec(), AcquireOptions(snapshot_id=saved.id), client_id='ann')
m.terminate(first.id)
m.delete_snapshot(saved.id)
halt()
""")
    place = Path(state) / "snapshots"
    assert 1 == len(list(place.iterdir()))
    with manage(state) as manager:
        (live,) = manager.list(client_id="ann")
        sandbox = manager.sandbox(live)
        assert b"kept\n" == sandbox.shell("cat file").stdout
        assert sandbox.shell("echo more > file").ok
        after = manager.snapshot(live, {})
        manager.terminate(live)
        assert 2 == len(list(place.iterdir())), "the later one lies over it"
        manager.delete_snapshot(after.id)

    assert [] == list(place.iterdir())


def test_files_of_a_template_are_held_on(
    state: str, kill: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGFENCE_IMAGES", str(tmp_path / "images"))
    (tmp_path / "data").write_text("content")
    image = Template.from_host().copy(str(tmp_path / "data"), "/srv/data").build("first")
    kill(
        "from ringfence import SandboxSpec\n"
        "m = open_manager(); m.acquire(SandboxSpec(template='first'), client_id='ann'); halt()"
    )
    store = store_of()
    store.remove("first")
    with manage(state) as manager:
        sandbox = manager.sandbox(session_id(state))
        assert [image.id] == store.collect()[1]
        assert b"content" == sandbox.exec(["cat", "/srv/data"]).stdout
        manager.terminate(session_id(state))

    assert freed_by(store) > 0, "the control: it was the sandbox that held them"


def test_killed_again_and_again(state: str, kill: Any) -> None:
    """Each one goes on where the last was; host ids and the numbers of execs are not used twice."""
    kill(_ONE + "begin(m, l, 'a', 'echo a; read x', stream_stdin=True); halt()")
    sid = session_id(state)
    for label in "bc":
        kill(
            "m = open_manager(); "
            f"l = m.attach(AttachRequest({records(state)[0][0]!r}, 'ann')); "
            "other = m.acquire(client_id='bob'); m.terminate(other.id); "
            f"begin(m, l, {label!r}, 'echo {label}; read x', stream_stdin=True); halt()"
        )
    with manage(state) as manager:
        runs = execs_of(manager, sid)
        assert {"a", "b", "c"} <= runs.keys()
        assert len(runs) == len({run.number for run in runs.values()})
        for label in "abc":
            runs[label].close_stdin()
            output, status = collect(runs[label])
            assert (label.encode() + b"\n", 1) == (output, status.exit_code)


def test_suspended_stays_suspended(state: str, kill: Any) -> None:
    marker = f"64{os.getpid():07d}"
    kill(_ONE + "m.suspend(l.id); halt()", marker=marker)
    with manage(state) as manager:
        sid = session_id(state)
        assert "suspended" == manager.get(sid).state
        with pytest.raises(LifecycleError):
            manager.sandbox(sid).exec(["true"])
        manager.resume(sid)
        assert manager.sandbox(sid).exec(["true"]).ok
        assert until(lambda: 2 == len(pids_with(marker)))


def test_who_is_killed_while_it_starts_one(state: str, kill: Any) -> None:
    """PID 1 was never told: nobody goes on with it, and the sandbox is none the worse for it."""
    kill(_ONE + halting("NativeSandbox.send", "before") + "begin(m, l, 'never', 'true')")
    with manage(state) as manager:
        assert "never" not in execs_of(manager, session_id(state))
        assert manager.sandbox(session_id(state)).exec(["true"]).ok


def test_who_is_killed_between_a_terminal_and_its_use(state: str, kill: Any) -> None:
    code = "begin(m, l, 'tty', 'read x; echo got $x', pty=(24, 80))"
    kill(_ONE + halting("LocalExec.take_terminal", "before") + code)
    with manage(state) as manager:
        run = execs_of(manager, session_id(state))["tty"]
        os.write(run.stdin, b"hi\n")
        output, status = collect(run)
        assert output.endswith(b"got hi\r\n")
        assert 0 == status.exit_code


def test_left_in_order(state: str) -> None:
    """Closed with `keep`, and gone on with in the same process."""
    first = manage(state)
    lease = first.acquire(client_id="ann")
    first.close(keep=True)
    with manage(state) as second:
        assert second.sandbox(lease.id).exec(["true"]).ok
        assert "active" == second.get(lease.id).state


def test_mounts_and_their_protection_live_on(state: str, kill: Any, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    kill(
        "from ringfence import Mount\n"
        "m = open_manager(); "
        f"mount = Mount('/work', {str(shared)!r}, 'read_write', protect=('kept',)); "
        "m.acquire(SandboxSpec(mounts=[mount]), client_id='a'); halt()"
    )
    assert (shared / "kept").exists(), "the control: it is protected by a placeholder"
    with manage(state) as manager:
        sandbox = manager.sandbox(session_id(state))
        assert sandbox.exec(["touch", "/work/new"]).ok
        assert not sandbox.exec(["touch", "/work/kept/x"]).ok
        assert (shared / "kept").exists()
    assert ["new"] == os.listdir(shared)


def test_everything_can_be_done_with_it(state: str, kill: Any, tmp_path: Path) -> None:
    """Also what needs a way into the sandbox, or what was known of how it was locked down."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    (shared / "file").write_text("hi")
    is_root = 0 == os.geteuid()
    kill(_ONE + ("l.sandbox.exec(['true'], user='nobody'); " if is_root else "") + "halt()")
    with manage(state) as manager:
        sid = session_id(state)
        sandbox = manager.sandbox(sid)
        for user, uid in (("nobody", b"65534"), ("root", b"0")) if is_root else ():
            assert uid == sandbox.exec(["id", "-u"], user=user).stdout.strip()
        sandbox.mount(Mount("/work", str(shared)))
        assert b"hi" == sandbox.exec(["cat", "/work/file"]).stdout
        sandbox.files.write("kept", b"content")
        assert all("missing" != each.status for each in sandbox.protections())
        assert manager.capabilities(sid).to_json()
        snapshot = manager.snapshot(sid, {}, "ann")
        again = manager.acquire(
            options=AcquireOptions(snapshot_id=snapshot.id), client_id="ann"
        ).sandbox
        assert b"content" == again.files.read("kept")
        assert sandbox.stats().execs >= 2


# -- what does not ---------------------------------------------------------------------------------


def test_nobody_comes(state: str, kill: Any) -> None:
    marker = f"65{os.getpid():07d}"
    family = kill("OUTLIVE_S = 3.0\n" + _ONE + "halt()", marker=marker)
    assert not all_end(family, 0.3), "the control: it lives on for three seconds"
    assert all_end(family, 30.0)
    assert [] == pids_with(marker)
    with manage(state) as manager:
        assert "restart" == manager.get(session_id(state)).reason
        assert [] == cgroups_of(records(state)[0][0])


def test_the_fd_store_is_killed_too(state: str, kill: Any) -> None:
    marker = f"66{os.getpid():07d}"
    family = kill(_ONE + "halt()", marker=marker)
    assert not all_end(family, 0.3)
    end_fd_store(family)
    assert all_end(family, 30.0)
    with manage(state) as manager:
        assert "restart" == manager.get(session_id(state)).reason


def test_the_fd_store_alone_is_killed(state: str, kill: Any) -> None:
    """Another one takes its place, and has all that it had."""
    kill(
        _ONE
        + """
begin(m, l, "out", "echo one; exit 7")
store = m.maker.backends["native"].handover._fd_store
old = store.pid
os.kill(old, 9)
while store.pid == old:
    pass
with store._lock:  # of whoever gives the new one everything
    halt()
"""
    )
    with manage(state) as manager:
        assert manager.sandbox(session_id(state)).exec(["true"]).ok
        output, status = collect(execs_of(manager, session_id(state))["out"])
        assert (b"one\n", 7) == (output, status.exit_code)


def test_a_manager_that_keeps_nothing_ends_them(state: str, kill: Any) -> None:
    family = kill(_ONE + "halt()")
    with SessionManager(
        ManagerConfig(pool=PoolConfig(enabled=False)), state_dir=state, background=False
    ) as manager:
        assert all_end(family, 30.0)
        assert "restart" == manager.get(session_id(state)).reason


def test_another_version_s_notes_are_not_read(
    state: str, kill: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = kill(_ONE + "halt()")
    monkeypatch.setattr("ringfence.__version__", "9.9.9")
    with manage(state) as manager:
        assert "restart" == manager.get(session_id(state)).reason
        assert all_end(family, 30.0)
        assert manager.acquire(client_id="ann").sandbox.exec(["true"]).ok


def end_fd_store(family: dict[int, int]) -> None:
    for pid, pidfd in family.items():
        name = Path(f"/proc/{pid}/comm")
        if name.exists() and "ringfence-hold" == name.read_text().strip():
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)


# -- at any moment ---------------------------------------------------------------------------------

halting = test_restart.halting
creating = test_restart.creating
_ONE, _WARM = test_restart._ONE, test_restart._WARM
MORE_STEPS = {
    "create: before it is kept": creating("Handover.begin", "before"),
    "create: kept": creating("Handover.begin", "after"),
    "exec: before it is kept": creating("Handover.begin_exec", "before"),
    "exec: kept": creating("Handover.begin_exec", "after"),
    "exec: closing": _ONE
    + halting("Handover._end_exec", "before")
    + "begin(m, l, 'x', 'exit 3').close()",
    "delete: no longer kept": _ONE + halting("Handover.end", "after") + "m.terminate(l.id)",
}
ALL_STEPS = {**STEPS, **MORE_STEPS}


@pytest.mark.anyone
@pytest.mark.parametrize("label", ALL_STEPS)
def test_killed_at(label: str, state: str, kill: Any) -> None:
    """Gone on with or ended, never half of either; and nothing is left once the next one closes."""
    marker = f"67{os.getpid():07d}{list(ALL_STEPS).index(label):04d}"
    kill(ALL_STEPS[label], label, marker)
    before = records(state)
    with manage(state) as manager:
        alive = {session.session_id: session for session in manager.list()}
        for sandbox_id, _phase, session, was in before:
            if session in alive:
                assert was == alive[session].state
                if was == "suspended":
                    manager.resume(session)
                assert manager.sandbox(session).exec(["true"]).ok
                assert sandbox_id == alive[session].sandbox_id
                continue
            assert until(lambda at=sandbox_id: [] == cgroups_of(at))  # type: ignore[misc]
            if session:
                assert "terminated" == manager.get(session).state
        assert len(alive) == manager.slots.taken == len(manager.store.unended_sandboxes())
        if not alive:
            assert until(lambda: [] == pids_with(marker))
        lease = manager.acquire(client_id="bob")
        assert lease.sandbox.exec(["true"]).ok
        assert lease.session.sandbox_id not in {row[0] for row in before}
    assert [] == pids_with(marker)
    for sandbox_id, *_ in records(state):
        assert [] == cgroups_of(sandbox_id)


def test_a_network_policy_holds_under_the_next_one(state: str, kill: Any) -> None:
    """Whoever decides is a new process; in between nothing is let through, and nothing stays shut."""
    require("user namespaces")
    kill(
        "from ringfence import NetworkPolicy, NetworkRule\n"
        "m = open_manager(); "
        "policy = NetworkPolicy(mode='limited', allowed_hosts=('allowed.example',)); "
        "m.acquire(SandboxSpec(network=policy), client_id='ann'); halt()"
    )
    look = "import socket, sys; socket.getaddrinfo(sys.argv[1], 80)"
    with manage(state) as manager:
        sandbox = manager.sandbox(session_id(state))
        assert sandbox.exec(["/usr/bin/python3", "-c", look, "allowed.example"]).ok
        assert not sandbox.exec(["/usr/bin/python3", "-c", look, "other.example"]).ok
        assert "other.example" in [event.host for event in sandbox.network_log()]
