"""Parts of the daemon: its config, what it holds, its log, its lease, and the handover to another."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends.local.host.owner import start_time
from ringfence.daemon import logs, membership, succession
from ringfence.daemon.config import DaemonConfig
from ringfence.daemon.holding import held
from ringfence.daemon.logs import FACTS, Aside, JsonLines, Readable, Sparing
from ringfence.daemon.membership import (
    ADDRESSES,
    DRAIN,
    DRAINED,
    LEASE,
    SECRET,
    Membership,
    Scaling,
    hold_lease,
    lease,
    read_secret,
    write_addresses,
)
from ringfence.daemon.serve import _check_working, _stop, address, have_many_files, settings_of
from ringfence.daemon.sockets import check_certificate, listen_tcp
from ringfence.errors import BackendUnavailable, InvalidRequest, IoError, StateInUse
from ringfence.store.directory import LOCK, StateDirectory

pytestmark = pytest.mark.anyone


@pytest.fixture
def state(tmp_path: Path) -> str:
    return str(tmp_path / "state")


# -- the config ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"backends": ()}, "backends"),
        ({"host_roots": ("rel",)}, "host_roots[0]"),
        ({"host_roots": ("/a", "/a/../b")}, "host_roots[1]"),
        ({"host_networks": ("not a rule!",)}, "host_networks[0]"),
        ({"backends_file": 1}, "backends_file"),
        ({"snapshot_store": 1}, "snapshot_store"),
        ({"shards": -1}, "shards"),
        ({"shards": 33}, "shards"),
        ({"log_level": "loud"}, "log_level"),
        ({"allow_public": 1}, "allow_public"),
        ({"outlive_s": -0.1}, "outlive_s"),
        ({"outlive_s": 86_400.1}, "outlive_s"),
        ({"tls_certificate": "/c"}, "tls_key"),
        ({"tls_key": "/k"}, "tls_certificate"),
        ({"allowed_origins": ("app.example",)}, "allowed_origins[0]"),
        ({"allowed_origins": ("https://",)}, "allowed_origins[0]"),
        ({"allowed_origins": ("null", "https://a/b")}, "allowed_origins[1]"),
        ({"allowed_origins": ("://a",)}, "allowed_origins[0]"),
        *(
            ({"allowed_hosts": ("ok.example", wrong)}, "allowed_hosts[1]")
            for wrong in ("", "a/b", "*", "a@b", "a b", "a\tb", "a\n", "ä.example")
        ),
        ({"listen": "0.0.0.0:1"}, "listen"),
        ({"listen": "127.0.0.1"}, "listen"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        DaemonConfig(**fields)
    assert field == refused.value.field


@pytest.mark.parametrize(
    "fields",
    [
        {"shards": 0},
        {"shards": 32},
        {"outlive_s": 0.0},
        {"outlive_s": 86_400.0},
        {"allowed_origins": ("null", "https://a.example:1/", "http://b")},
        {"allowed_hosts": ("a.example", "[::1]")},
        {"listen": "0.0.0.0:1", "allow_public": True},
        {"listen": "0.0.0.0:1", "tls_certificate": "/c", "tls_key": "/k"},
        {"listen": "[::1]:1"},
    ],
)
def test_a_config_that_makes_sense_is_taken_and_written_down(fields: dict[str, Any]) -> None:
    config = DaemonConfig(**fields)
    assert fields.items() <= {name: getattr(config, name) for name in fields}.items()
    assert os.path.isabs(config.state_dir)
    again = DaemonConfig.from_json(config.to_json())
    assert config.to_json() == again.to_json()


def test_names_and_origins_of_a_config_are_compared_in_lower_case(state: str) -> None:
    config = DaemonConfig(
        state_dir=state,
        listen="[::1]:80",
        allowed_hosts=("Api.Example",),
        allowed_origins=("HTTPS://App.Example/",),
        host_roots=("/srv",),
    )
    policy = settings_of(config).origin_policy
    assert ["::1", "api.example"] == sorted(policy.hosts)
    assert ["https://app.example"] == sorted(policy.origins)


@pytest.mark.parametrize(
    ("kind", "fields", "field"),
    [
        (Membership, {"node": ""}, "node"),
        (Membership, {"node": "a", "lease_s": 0.9}, "lease_s"),
        (Membership, {"node": "a", "lease_s": 1.0}, ""),
        (Scaling, {"max_nodes": 0}, "max_nodes"),
        (Scaling, {"max_nodes": 10_001}, "max_nodes"),
        (Scaling, {"max_nodes": 1}, ""),
        (Scaling, {"max_nodes": 2, "min_nodes": 3}, "min_nodes"),
        (Scaling, {"max_nodes": 2, "min_nodes": 0}, "min_nodes"),
        (Scaling, {"max_nodes": 2, "min_nodes": 2}, ""),
        (Scaling, {"max_nodes": 2, "resources": {}}, "resources"),
        (Scaling, {"max_nodes": 2, "resources": [1]}, "resources"),
        (Scaling, {"max_nodes": 2, "resources": {"": 1.0}}, "resources"),
        (Scaling, {"max_nodes": 2, "resources": {"CPU": 0.0}}, "resources['CPU']"),
        (Scaling, {"max_nodes": 2, "spare": -1}, "spare"),
        (Scaling, {"max_nodes": 2, "memory_mb": 0}, "memory_mb"),
        (Scaling, {"max_nodes": 2, "load": -0.1}, "load"),
        (Scaling, {"max_nodes": 2, "idle_s": 0.9}, "idle_s"),
        (Scaling, {"max_nodes": 2, "wait_s": 3600.1}, "wait_s"),
        (Scaling, {"max_nodes": 2, "wait_s": 0.0, "load": 0.0, "spare": 0}, ""),
    ],
)
def test_a_place_in_a_cluster_is_looked_at(kind: Any, fields: dict[str, Any], field: str) -> None:
    if field:
        with pytest.raises(InvalidRequest) as refused:
            kind(**fields)
        assert field == refused.value.field
    else:
        kind(**fields)


# -- what it holds ---------------------------------------------------------------------------------


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return 0 == probe.connect_ex(("127.0.0.1", port))


def test_all_that_is_held_is_given_back(state: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with held(DaemonConfig(state_dir=state, listen="127.0.0.1:0")) as mine:
        (unix, is_tls), (tcp, is_tls_too) = mine.listeners
        assert (False, False) == (is_tls, is_tls_too)
        port = tcp.getsockname()[1]
        assert listening(port)
        assert unix.getsockname() == f"{state}/ringfence.sock"
        assert 0o600 == stat.S_IMODE(os.stat(unix.getsockname()).st_mode)
        assert 0o700 == stat.S_IMODE(os.stat(state).st_mode)
        with pytest.raises(StateInUse), held(DaemonConfig(state_dir=state)):
            pass
        assert os.path.exists(f"{state}/ringfence.sock"), "the first one's is left alone"
        mine.hide()
        assert not os.path.exists(f"{state}/ringfence.sock")
    assert not listening(port)
    assert before == len(os.listdir("/proc/self/fd"))


def test_a_port_that_is_taken_gives_back_what_was_held_before(state: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        with (
            pytest.raises(InvalidRequest) as refused,
            held(DaemonConfig(state_dir=state, listen=taken)),
        ):
            pass
        assert "listen" == refused.value.field
    assert before == len(os.listdir("/proc/self/fd"))
    assert not os.path.exists(f"{state}/ringfence.sock")
    with held(DaemonConfig(state_dir=state)):
        pass


def test_a_certificate_that_is_none_gives_back_what_was_held_before(
    state: str, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("no certificate")
    before = len(os.listdir("/proc/self/fd"))
    for certificate, key, field in (
        ("none", "text", "tls_certificate"),
        ("text", "none", "tls_key"),
        ("text", "text", "tls_certificate"),
    ):
        files = {"tls_certificate": f"{tmp_path}/{certificate}", "tls_key": f"{tmp_path}/{key}"}
        config = DaemonConfig(state_dir=state, listen="127.0.0.1:0", **files)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest) as refused, held(config):
            pass
        assert field == refused.value.field
        with pytest.raises(InvalidRequest):
            check_certificate(files["tls_certificate"], files["tls_key"])
    assert before == len(os.listdir("/proc/self/fd"))
    assert not os.path.exists(f"{state}/ringfence.sock")


def test_what_was_named_wrongly_is_said_before_anything_is_held(state: str) -> None:
    with pytest.raises(InvalidRequest), held(DaemonConfig(state_dir=state, backends=("none",))):
        pass
    assert not os.path.exists(state)


def test_addresses_are_written_as_clients_read_them(tmp_path: Path) -> None:
    found = []
    for where in ("127.0.0.1:0", "[::1]:0"):
        with listen_tcp(where, public=False) as listener:
            port = listener.getsockname()[1]
            found += [address(listener, tls).replace(str(port), "P") for tls in (False, True)]
    assert [
        "http://127.0.0.1:P",
        "https://127.0.0.1:P",
        "http://[::1]:P",
        "https://[::1]:P",
    ] == found
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        assert f"unix:{tmp_path}/s" == address(listener, tls=False)


def test_the_bound_on_descriptors_is_raised_to_what_this_user_may_have() -> None:
    code = (
        "import resource\nfrom ringfence.daemon.serve import have_many_files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))\nhave_many_files()\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert "200 200\n" == done.stdout
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        have_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= before[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_second_signal_ends_it_without_patience() -> None:
    server: Any = SimpleNamespace(force_exit=False, should_exit=False)
    told: list[int] = []
    _stop([server], told, signal.SIGTERM)
    assert (False, True) == (server.force_exit, server.should_exit)
    _stop([server], told, signal.SIGINT)
    assert (True, True, [15, 2]) == (server.force_exit, server.should_exit, told)


def test_a_server_without_a_backend_that_works_does_not_begin(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[str] = []

    def report(name: str) -> Any:
        asked.append(name)
        return SimpleNamespace(available=name == "works", reason=f"{name} is broken")

    manager: Any = SimpleNamespace(maker=SimpleNamespace(report=report))
    _check_working(manager, ("native",), ())
    assert [] == asked, "the default alone is not tried"
    with pytest.raises(BackendUnavailable, match="native is broken"):
        _check_working(manager, ("native",), ("native",))
    with pytest.raises(BackendUnavailable, match=r"a is broken.*b is broken"):
        _check_working(manager, ("a", "b"), ())
    with caplog.at_level(logging.WARNING):
        _check_working(manager, ("works", "b"), ())
    assert ["backend b cannot make a sandbox: b is broken"] == [
        each.getMessage() for each in caplog.records
    ]


# -- a node ----------------------------------------------------------------------------------------


def test_a_node_without_the_secret_of_its_cluster_trusts_nobody(tmp_path: Path) -> None:
    for text in (None, b""):
        if text is not None:
            (tmp_path / SECRET).write_bytes(text)
        with pytest.raises(IoError) as refused:
            read_secret(str(tmp_path))
        assert "membership" == refused.value.field
        with pytest.raises(IoError):
            settings_of(DaemonConfig(state_dir=str(tmp_path), membership=Membership("0123abcd")))
    (tmp_path / SECRET).write_bytes(b"secret")
    assert b"secret" == read_secret(str(tmp_path))
    config = DaemonConfig(state_dir=str(tmp_path))
    assert b"" == settings_of(config).gateway_secret
    member = DaemonConfig(state_dir=str(tmp_path), membership=Membership("0123abcd"))
    assert b"secret" == settings_of(member).gateway_secret


def test_its_addresses_are_seen_whole(tmp_path: Path) -> None:
    write_addresses(str(tmp_path), ["a", "b"])
    assert ["a", "b"] == json.loads((tmp_path / ADDRESSES).read_text())
    assert [ADDRESSES] == os.listdir(tmp_path)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Signals that a lease sends, which end nobody."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, signum: sent.append((pid, signum)))
    monkeypatch.setattr(membership, "_LOOK_S", 0.001)
    return sent


def held_for(place: Path, lease_s: float, looks: int, ended: list[Any], **parts: Any) -> list[bool]:
    """Hold a lease for some looks of its actor; what was drained."""
    drained: list[bool] = []

    async def main() -> None:
        def drain(draining: bool) -> bool:
            drained.append(draining)
            return bool(parts.get("is_empty"))

        member = SimpleNamespace(lease_s=lease_s)
        holding = asyncio.ensure_future(hold_lease(member, str(place), drain))  # type: ignore[arg-type]
        for number in range(looks):
            if parts.get("write"):
                (place / LEASE).write_bytes(parts["write"](number))
            await asyncio.sleep(0.005)
            if ended:
                break
        holding.cancel()
        await asyncio.wait([holding])

    asyncio.run(main())
    return drained


MINE = (os.getpid(), start_time(os.getpid()))


def test_a_lease_that_is_renewed_holds_and_one_that_is_not_ends_the_daemon(
    tmp_path: Path, ended: list[tuple[int, int]]
) -> None:
    held_for(tmp_path, 0.05, 40, ended, write=lambda turn: lease((0, 0), str(turn), drains=False))
    assert [] == ended
    held_for(tmp_path, 0.05, 10_000, ended, write=lambda _: lease((0, 0), "same", drains=False))
    assert [(os.getpid(), signal.SIGTERM)] == ended


@pytest.mark.parametrize(
    ("restarter", "ends"),
    [(MINE, False), ((MINE[0], MINE[1] + 1), True), ((0, 0), True), ((2**22 + 1, 5), True)],
)
def test_a_lease_is_longer_while_its_renewer_is_started_again(
    tmp_path: Path,
    ended: list[tuple[int, int]],
    restarter: tuple[int, int],
    ends: bool,
) -> None:
    (tmp_path / LEASE).write_bytes(lease(restarter, "x", drains=False))
    held_for(tmp_path, 0.01, 10_000 if ends else 40, ended)
    assert ends == bool(ended)


def test_not_even_a_renewer_that_lives_makes_a_lease_endless(
    tmp_path: Path, ended: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_RESTART_S", 0.02)
    (tmp_path / LEASE).write_bytes(lease(MINE, "x", drains=False))
    held_for(tmp_path, 0.01, 10_000, ended)
    assert ended


@pytest.mark.parametrize("content", [b"", b"1", b"x.y z", b"1.x", b".5", b"5."])
def test_a_lease_that_names_nobody_has_no_renewer(content: bytes) -> None:
    assert not membership._is_restarted(content)
    assert membership._is_restarted(lease(MINE, "x", drains=True))


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_daemon_drains_as_long_as_its_lease_says_so(
    tmp_path: Path, ended: list[tuple[int, int]], is_empty: bool
) -> None:
    def write(number: int) -> bytes:
        return lease(MINE, str(number), drains=5 <= number < 20)

    marks: list[bool] = []

    def look(number: int) -> bytes:
        marks.append((tmp_path / DRAINED).exists())
        return write(number)

    drained = held_for(tmp_path, 600.0, 40, ended, is_empty=is_empty, write=look)
    assert {True, False} == {*drained}
    assert [False] == drained[-1:]
    assert 1 == drained.count(False), "its end is told once"
    assert is_empty == any(marks[:25])
    assert not any(marks[:5])
    assert write(6).endswith(DRAIN)


# -- the handover ----------------------------------------------------------------------------------


def test_no_process_is_told_to_leave_that_does_not_hold_the_directory(
    state: str, tmp_path: Path
) -> None:
    assert not succession.is_held(state)
    assert not succession.take_over(state)
    assert not succession.stop(state)
    before = len(os.listdir("/proc/self/fd"))
    mine = StateDirectory(state)
    assert succession.is_held(state)
    copied = tmp_path / "copied"
    copied.mkdir()
    (copied / LOCK).write_bytes(Path(state, LOCK).read_bytes())
    with (copied / LOCK).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not succession.is_held(str(copied)), "that daemon holds another directory"
    mine.close()
    assert not succession.is_held(state), "its number is there, and nobody holds it"
    (Path(state) / LOCK).write_text("no number")
    assert not succession.is_held(state)
    assert before == len(os.listdir("/proc/self/fd"))


HOLDS = """
import signal, sys, time
from ringfence.store.directory import StateDirectory
heard = []
for each in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(each, lambda number, _: heard.append(number))
held = StateDirectory(sys.argv[1])
print("held", flush=True)
while not heard or sys.argv[2] == "stays":
    time.sleep(0.001)
print(heard[0], flush=True)
"""


@pytest.fixture
def holder(state: str) -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def start(how: str = "") -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", HOLDS, state, how]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert "held\n" == process.stdout.readline()
        return process

    yield start
    for each in started:
        each.kill()
        each.wait()
        assert each.stdout is not None
        each.stdout.close()


@pytest.mark.parametrize(
    ("ask", "signum"), [(succession.stop, signal.SIGTERM), (succession.take_over, signal.SIGUSR1)]
)
def test_the_holder_of_a_directory_is_told_and_waited_for(
    state: str, holder: Any, ask: Any, signum: int
) -> None:
    process = holder()
    assert ask(state)
    assert not succession.is_held(state)
    assert 0 == process.wait()
    assert f"{int(signum)}\n" == process.stdout.read()
    assert not ask(state)


def test_a_link_to_the_lock_of_another_directory_leads_to_no_daemon(
    state: str, holder: Any, tmp_path: Path
) -> None:
    process = holder()
    (linked := tmp_path / "linked").mkdir()
    (linked / LOCK).symlink_to(Path(state, LOCK))
    for ask in (succession.is_held, succession.take_over, succession.stop):
        with pytest.raises(OSError, match="symbolic links"):
            ask(str(linked))
    assert succession.is_held(state)
    assert process.poll() is None


def test_a_holder_that_does_not_end_is_said_to_hold(
    state: str, holder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(succession, "_PATIENCE_S", 0.01)
    holder("stays")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StateInUse) as refused:
        succession.take_over(state)
    assert "state_dir" == refused.value.field
    assert before == len(os.listdir("/proc/self/fd"))


# -- the log ---------------------------------------------------------------------------------------


def record(
    text: str, level: int = logging.WARNING, name: str = "ringfence.api", **facts: Any
) -> Any:
    made = logging.LogRecord(name, level, "file", 1, text, (), None)
    made.created = 1000.0
    if facts:
        setattr(made, FACTS, facts)
    return made


def test_a_line_is_one_whatever_a_guest_put_in_it() -> None:
    evil = record("a\nb\x1b[31m\u202e", key="c\r\nd\x00")
    readable = Readable().format(evil)
    assert readable.isprintable()
    assert "a\\nb\\x1b[31m\\u202e" in readable
    form = JsonLines().format(evil)
    assert "\n" not in form
    assert ("a\nb\x1b[31m\u202e", "c\r\nd\x00") == (
        (told := json.loads(form))["message"],
        told["key"],
    )
    assert ("warning", 1000.0) == (told["level"], told["time"])


def test_few_warnings_of_a_kind_pass_and_the_others_are_counted() -> None:
    sparing = Sparing()
    passed = [sparing.filter(record("x")) for _ in range(25)]
    assert [True] * 20 + [False] * 5 == passed
    assert sparing.filter(record("y")), "another kind"
    assert sparing.filter(record("x", name="ringfence.daemon")), "of ours"
    assert sparing.filter(record("x", logging.INFO))
    later = record("x")
    later.created = 1001.0
    assert sparing.filter(later)
    assert {"left_out": 5} == getattr(later, FACTS)
    again = record("x", key=1)
    again.created = 1002.0
    assert sparing.filter(again)
    assert {"key": 1} == getattr(again, FACTS), "they are told once"
    back = record("x")
    back.created = 0.0
    assert not sparing.filter(back), "a clock that was set back gives none"
    other = record("y")
    other.created = 0.0
    assert sparing.filter(other), "and takes none"


def test_a_log_that_nobody_reads_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_MOST_LINES", 3)
    monkeypatch.setattr(logs, "_MOMENT_S", 0.01)
    written: list[bytes] = []
    reading, writing = os.pipe()

    def write(fd: int, data: bytes) -> int:
        assert 2 == fd
        os.read(reading, 1)  # until the test lets it
        written.append(data)
        return len(data)

    monkeypatch.setattr(logs, "os", SimpleNamespace(write=write))
    handler = Aside()
    handler.setFormatter(JsonLines())
    handler.emit(record("first"))
    while handler._lines.qsize():
        pass
    for number in range(6):
        handler.emit(record(f"line {number}"))
    assert 3 == handler._dropped
    handler.flush()  # in vain, and it does not wait for ever
    os.write(writing, b"x" * 4)
    while 4 > len(written):
        pass
    handler.emit(record("last"))
    os.write(writing, b"x" * 9)
    while 5 > len(written):
        pass
    assert 3 == json.loads(written[-1])["dropped"]
    assert 0 == handler._dropped
    handler.flush()
    handler.close()
    os.close(writing)
    handler._lines.put(None)
    handler._thread.join(10)
    os.close(reading)
