"""The process that keeps descriptors between two daemons: what it keeps, closes, hands over, and for whom."""

from __future__ import annotations

import os
import resource
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from ringfence.launcher import fd_store, spawn, wire
from ringfence.launcher.fd_store import FdStore


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    before, umask = how_many(), os.umask(0o022)
    yield
    os.umask(umask)
    assert before == how_many()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.fixture
def store(directory: int) -> Iterator[FdStore]:
    made = FdStore(fd_store.listen(directory), "stamp", 60.0)
    yield made
    for whose in list(made.items):
        made._change([], [(whose, "")], [])
    for peer in list(made.daemons.values()):
        made._leave(peer)
    made.listener.close()


@pytest.fixture
def daemon(store: FdStore) -> Iterator[wire.Socket]:
    """One that the store has greeted."""
    ours, theirs = wire.socketpair()
    ours.settimeout(20)
    store.greet(theirs)
    assert ("fd_store", "stamp", os.getpid()) == wire.receive(ours)[0]
    yield ours
    ours.close()


def some(count: int) -> list[int]:
    return [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]


def how_many() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.anyone
def test_what_is_replaced_dropped_or_not_whole_is_closed(store: FdStore) -> None:
    before = how_many()
    store._change(some(3), [], [("a", "one", b"1", 1), ("a", "two", b"2", 2)])
    assert before + 3 == how_many()
    store._change(some(1), [], [("a", "two", b"3", 1)])
    assert before + 2 == how_many()
    assert {"one": b"1", "two": b"3"} == {
        name: note for name, (note, _) in store.items["a"].items()
    }
    store._change([], [("a", "one"), ("a", "absent"), ("b", "one"), ("b", "")], [])
    assert (before + 1, ["two"]) == (how_many(), list(store.items["a"]))
    store._change(some(2), [("a", "")], [("b", "one", b"4", 1), ("b", "two", b"5", 1)])
    assert (before + 2, ["b"]) == (how_many(), list(store.items))
    store._change([], [("b", "one"), ("b", "two")], [])
    assert (before, {}) == (how_many(), store.items)


@pytest.mark.anyone
def test_an_item_that_lost_descriptors_on_its_way_is_not_kept(store: FdStore) -> None:
    """Nor is the one that it was to replace, which it tells nothing true of any more."""
    store._change(some(1), [], [("a", "one", b"old", 1)])
    store._change([], [], [("a", "one", b"new", 1), ("a", "two", b"", 0)])

    assert ["two"] == list(store.items["a"])


@pytest.mark.anyone
@pytest.mark.parametrize(
    ("items", "each"), [(3, 1), (2, 40), (2, 60), (70, 1), (fd_store._MOST_ITEMS + 1, 0)]
)
def test_everything_is_handed_over_in_messages_that_can_be_sent(
    store: FdStore, daemon: wire.Socket, items: int, each: int
) -> None:
    """And stays, as the daemon may die before it has read it."""
    for i in range(items):
        store._change(some(each), [], [(f"{i}", "name", b"%d" % i, each)])
    before = how_many()
    store._hand_over(next(iter(store.daemons.values())))
    found: list[Any] = []
    passed = 0
    while True:
        message, fds = wire.receive(daemon)
        verb, some_items = message
        passed += len(fds)
        for fd in fds:
            os.close(fd)
        if verb == "all":
            break
        assert verb == "held"
        assert len(some_items) <= fd_store._MOST_ITEMS
        assert len(fds) == sum(item[3] for item in some_items) <= fd_store.MOST_FDS
        found += some_items

    assert [(f"{i}", "name", b"%d" % i, each) for i in range(items)] == found
    assert items * each == passed
    assert before == how_many()


@pytest.mark.anyone
def test_it_ends_when_it_was_alone_for_so_long_or_is_told_to(
    store: FdStore, daemon: wire.Socket
) -> None:
    assert store._timeout_ms() is None
    wire.send(daemon, ("end",))
    store.run()
    assert store.over
    store.over, store.alone_since = False, time.monotonic() - 1000
    daemon.shutdown(socket.SHUT_RDWR)
    store._serve(next(iter(store.daemons.values())))
    assert {} == store.daemons
    left = store._timeout_ms()
    assert left is not None
    assert 50_000 < left <= 60_000, "counted from when the last one left"
    store.alone_since -= 60
    assert store._timeout_ms() == 0
    store.run()
    assert not store.over


@pytest.mark.anyone
def test_a_daemon_that_reads_no_more_is_forgotten(store: FdStore, daemon: wire.Socket) -> None:
    peer = next(iter(store.daemons.values()))
    before = how_many()
    daemon.shutdown(socket.SHUT_RDWR)
    assert not store._send(peer, ("held", []))

    assert ({}, before - 1) == (store.daemons, how_many())
    store._leave(peer)


@pytest.mark.anyone
def test_a_daemon_that_reads_nothing_keeps_the_others_waiting_for_a_while_only(
    store: FdStore, daemon: wire.Socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = next(iter(store.daemons.values()))
    assert 30 == peer.gettimeout()
    ours, theirs = wire.socketpair()
    with closing(ours):
        monkeypatch.setattr(fd_store, "_SEND_S", 0.05)
        store.greet(theirs)
        sent: list[bool] = []

        def send_until_full() -> None:
            while store._send(theirs, ("held", [bytes(1000)])):
                pass
            sent.append(store._send(peer, ("held", [])))

        sending = threading.Thread(target=send_until_full)
        sending.start()
        sending.join(20)
        is_stuck = sending.is_alive()
        ours.shutdown(socket.SHUT_RDWR)
        sending.join()

    assert not is_stuck
    assert [peer] == list(store.daemons.values())
    assert [True] == sent
    assert ("held", []) == wire.receive(daemon)[0]


@pytest.mark.anyone
def test_a_daemon_that_cannot_be_heard_is_forgotten_and_the_store_goes_on(
    store: FdStore, daemon: wire.Socket
) -> None:
    peer = next(iter(store.daemons.values()))
    peer.settimeout(0.01)  # nothing is there to be read: the kernel may say that there was
    store._serve(peer)

    assert {} == store.daemons
    assert (None, []) == wire.receive(daemon)


class TestProcess:
    """The process itself, as a daemon starts it."""

    @pytest.fixture
    def started(self, tmp_path: Path) -> Iterator[spawn.Started]:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        inherited = os.open("/dev/zero", os.O_RDONLY)
        os.set_inheritable(inherited, True)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        try:
            made = spawn.spawn(spawn.FD_STORE, str(tmp_path), "stamp", "60", outlives=True)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            os.close(inherited)
        with ExitStack() as stack:
            stack.callback(made.control.close)
            stack.callback(os.waitpid, made.pid, 0)
            stack.callback(os.kill, made.pid, signal.SIGKILL)
            made.control.settimeout(60)
            assert ("fd_store", "stamp", made.pid) == wire.receive(made.control)[0]
            yield made

    @pytest.mark.anyone
    def test_it_may_open_as_much_as_anybody_may_and_has_nothing_of_the_daemons(
        self, started: spawn.Started
    ) -> None:
        limits = Path(f"/proc/{started.pid}/limits").read_text().splitlines()
        (files,) = (line.split()[3:5] for line in limits if line.startswith("Max open files"))
        opened = Path(f"/proc/{started.pid}/fd").iterdir()
        targets = {os.readlink(each) for each in opened}

        assert files[0] == files[1]
        assert "/dev/zero" not in targets
        assert "/dev/null" in targets, "the control"

    @pytest.mark.anyone
    @pytest.mark.parametrize("is_replaced", [False, True])
    def test_it_removes_its_own_socket_at_the_end_and_no_other(
        self, started: spawn.Started, tmp_path: Path, is_replaced: bool
    ) -> None:
        place = tmp_path / fd_store.NAME
        assert stat.S_ISSOCK(place.stat().st_mode)
        if is_replaced:
            (tmp_path / "new").touch()
            (tmp_path / "new").rename(place)
        wire.send(started.control, ("end",))
        os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOWAIT)

        assert is_replaced == place.exists()


@pytest.mark.anyone
def test_its_socket_is_its_users_alone_and_replaces_that_of_a_killed_one(
    store: FdStore, directory: int, tmp_path: Path
) -> None:
    first = os.stat(tmp_path / fd_store.NAME)
    again = fd_store.listen(directory)
    again.close()
    info = os.stat(tmp_path / fd_store.NAME)

    assert first.st_ino != info.st_ino or first.st_mtime_ns != info.st_mtime_ns
    assert (True, 0o600) == (stat.S_ISSOCK(info.st_mode), stat.S_IMODE(info.st_mode))
    assert store.listener.fileno() >= 0


@pytest.mark.root
@pytest.mark.parametrize(("euid", "uid", "is_heard"), [(0, 0, True), (4711, 4711, True), (4711, 0, True),
                                                       (4711, 4712, False), (0, 4711, False)])  # fmt: skip
def test_only_its_own_user_and_root_are_heard(
    store: FdStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    euid: int,
    uid: int,
    is_heard: bool,
) -> None:
    """Whoever could open the socket: its mode is not all that keeps others out."""
    os.chmod(tmp_path, 0o755)
    monkeypatch.chdir(tmp_path)
    client = wire.Socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    os.chmod(tmp_path / fd_store.NAME, 0o666)
    try:
        os.seteuid(uid)
        # The kernel takes the ids of who connects.
        client.connect(fd_store.NAME)
    finally:
        os.seteuid(0)
    before = how_many()
    os.seteuid(euid)
    try:
        store._accept()
    finally:
        os.seteuid(0)

    assert (is_heard, before + is_heard) == (bool(store.daemons), how_many())
    client.close()
