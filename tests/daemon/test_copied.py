"""Daemons on a copied, a linked and a moved state directory: the original's sandboxes run on."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon.servers import SERVE, Server
from tests.native.outside import pids_with, until

pytestmark = [pytest.mark.full, pytest.mark.anyone]


def copy(server: Server, name: str, how: str = "-a") -> Server:
    place = server.state.parent / f"{server.state.name}.{name}"
    subprocess.run(["cp", how, server.state, place], check=True)
    return Server(place)


@pytest.fixture
def running(server: Server) -> tuple[Server, str, str]:
    """A daemon, a sandbox of it, and a number that a process in it sleeps for."""
    server.start(faulty=False)
    sandbox, marker = server.make(), f"72{os.getpid():07d}{server.state.name}"
    server.run(sandbox, f"exec sleep {marker}")
    assert until(lambda: 1 == len(pids_with(marker)))
    return server, sandbox, marker


def check_runs(server: Server, sandbox: str, marker: str) -> None:
    assert "running" == server.ask("GET", f"/sandboxes/{sandbox}")["state"]
    done = server.run(sandbox, "exit 3", wait=True)
    assert 3 == server.wait(sandbox, done)["status"]["exit_code"]
    assert 1 == len(pids_with(marker)), "what ran in it runs on"


def test_copies(running: tuple[Server, str, str]) -> None:
    """Two copies of a running daemon's directory, started at once, used and stopped."""
    original, sandbox, marker = running
    with contextlib.ExitStack() as stack:
        copies = [copy(original, name) for name in ("a", "b")]
        for each in copies:
            stack.callback(each.stop)
            each.begin(faulty=False)
        for each in copies:
            each.ready()
            assert "terminated" == each.ask("GET", f"/sandboxes/{sandbox}")["state"]
            check_runs(original, sandbox, marker)
            mine = each.make()
            each.ask("DELETE", f"/sandboxes/{mine}")
        check_runs(original, sandbox, marker)
    check_runs(original, sandbox, marker)
    original.kill()
    late = copy(original, "c")  # of a directory whose daemon was killed
    with contextlib.closing(late.http):
        late.start(faulty=False)
        late.stop()
    original.start(faulty=False)
    check_runs(original, sandbox, marker)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_restored_backup(running: tuple[Server, str, str], is_killed: bool) -> None:
    """A backup of a running daemon, served elsewhere beside it, or before it is started again."""
    original, sandbox, marker = running
    saved = original.state.with_name(f"{original.state.name}.saved")
    restored = Server(original.state.with_name(f"{original.state.name}.r"))
    ringfence("backup", "--state-dir", str(original.state), str(saved))
    if is_killed:
        original.kill()
    ringfence("restore", "--state-dir", str(restored.state), str(saved))
    restored.start(faulty=False)
    assert "terminated" == restored.ask("GET", f"/sandboxes/{sandbox}")["state"]
    restored.ask("DELETE", f"/sandboxes/{sandbox}")
    restored.stop()
    if is_killed:
        original.start(faulty=False)
    check_runs(original, sandbox, marker)


def ringfence(*command: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*SERVE, *command], env=env, check=True, capture_output=True, text=True)
    return done.stdout


def test_a_copys_lock_file_does_not_lead_to_the_original(running: tuple[Server, str, str]) -> None:
    """Neither --stop on a copy nor on one whose daemon has just locked it ends the original."""
    original, sandbox, marker = running
    place = copy(original, "s")
    place.http.close()
    with open(place.state / "lock", "rb+") as held:
        import fcntl

        fcntl.flock(held, fcntl.LOCK_EX)  # as a daemon does before it writes its own pid there
        stop = [*SERVE, "serve", "--stop", "--state-dir", str(place.state)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        said = subprocess.run(stop, env=env, check=True, capture_output=True, text=True)

    assert said.stdout.startswith("nothing serves")
    check_runs(original, sandbox, marker)


def test_links_are_refused(running: tuple[Server, str, str]) -> None:
    """`cp -al`: the same files under another name, the fd store's socket among them."""
    original, sandbox, marker = running
    linked = copy(original, "l", "-al")
    linked.http.close()
    original.kill()
    command = [*SERVE, "serve", "--state-dir", str(linked.state)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for more in ([], ["--stop"]):
        told = subprocess.run(
            [*command, *more], env=env, check=False, capture_output=True, text=True, timeout=60
        )
        assert ("hard link" in told.stderr) if not more else "nothing" in told.stdout
    original.start(faulty=False)
    check_runs(original, sandbox, marker)


def test_moved(running: tuple[Server, str, str]) -> None:
    """Its sandboxes go along. What an old daemon removes at its end is its own, not its successor's."""
    original, sandbox, marker = running
    original.kill()
    moved = Server(original.state.with_name(f"{original.state.name}.m"))
    original.state.rename(moved.state)
    moved.start(faulty=False)
    check_runs(moved, sandbox, marker)

    again = Server(original.state.with_name(f"{original.state.name}.n"))
    moved.state.rename(again.state)  # while it runs
    other = Server(moved.state)
    other.start(faulty=False)
    sockets = ("ringfence.sock", "fd-store.sock")
    other.make()
    assert not again.http.get("/v1/health").json()["ok"]
    with contextlib.closing(again.http), contextlib.closing(moved.http):
        moved.stop()
        assert not any((again.state / name).exists() for name in sockets)
        assert until(lambda: [] == pids_with(marker))
        assert all((other.state / name).exists() for name in sockets)
        other.stop()


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o770, 0o702])
def test_others_may_write(place: Path, mode: int) -> None:
    state = place / f"mode {mode:o}"
    state.mkdir()
    state.chmod(mode)
    from ringfence.errors import IoError
    from ringfence.store.directory import StateDirectory

    with pytest.raises(IoError, match="other users can write"):
        StateDirectory(str(state))


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701])
def test_others_may_enter(place: Path, mode: int) -> None:
    """As systemd's StateDirectory= makes it: narrowed, with what an earlier version left in it."""
    from ringfence.store.store import Store

    state = place / f"mode {mode:o}"
    state.mkdir()
    state.chmod(mode)
    (state / "audit.log").touch(0o644)
    (state / "spool").mkdir(0o755)
    before = os.umask(0)
    try:
        store = Store(str(state))
        store.set_setting("a", "b")
        found = {each.name: each.stat().st_mode & 0o777 for each in [state, *state.iterdir()]}
    finally:
        os.umask(before)
    store.close()
    assert {"state.sqlite3", "state.sqlite3-wal", "state.sqlite3-shm", "lock"} <= found.keys()
    assert {0o700, 0o600} == set(found.values()), found
