"""Answers that never arrive: what is asked again has happened once, however often the line breaks."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from ringfence.client import AsyncClient, Client, RemoteSandbox, _async, _sync
from ringfence.client._sync.files import RemoteFiles
from ringfence.client._sync.process import RemoteProcess, RemoteStdin
from ringfence.client._sync.sessions import RemoteSessions
from ringfence.client._sync.stream import RemoteStream
from ringfence.errors import FileExists, ServerUnreachable
from tests.api.conftest import Daemon
from tests.daemon.servers import Server

pytestmark = pytest.mark.anyone

PATIENCE_S = 60.0
_REQUEST = re.compile(rb"[A-Z]+ /[^ ]* HTTP/1.1\r\n")


class Line:
    """A server's socket through which answers do not come back, or not whole.

    Attributes:
        lost: How many answers from now on break off.
        after: Bytes of an answer that arrive before it breaks off.
        cuts: The beginning of requests whose answers may.
        asked: How many requests have passed.
    """

    def __init__(self, path: Path, server: str) -> None:
        self._server, self.lost, self.after, self.asked = server, 0, 0, 0
        self.cuts = b""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server, cut = socket.socket(socket.AF_UNIX), threading.Event()
        server.connect(self._server)

        def requests() -> None:
            with suppress(OSError):
                while data := client.recv(1 << 16):
                    if _REQUEST.match(data):
                        self.asked += 1
                        # A stream asked for before may go on: it is not what is lost.
                        is_cut = self.lost > 0 and data.startswith(self.cuts)
                        cut.set() if is_cut else cut.clear()
                    server.sendall(data)
                server.shutdown(socket.SHUT_WR)

        threading.Thread(target=requests, daemon=True).start()
        came = 0
        with client, server, suppress(OSError):
            while answer := server.recv(1 << 16):
                came += len(answer)
                if cut.is_set() and self.lost > 0 and came >= self.after:
                    self.lost -= 1
                    client.sendall(answer[: len(answer) // 2] if self.after else b"")
                    client.shutdown(socket.SHUT_RDWR)
                    return  # the server has done it, and nobody hears of it
                client.sendall(answer)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def bad_line(daemon: Daemon, tmp_path: Path) -> Iterator[Line]:
    line = Line(tmp_path / "line", daemon.socket)
    yield line
    line.close()


def test_a_lost_answer_makes_no_second_sandbox_and_no_second_run(
    client: Client, bad_line: Line, tmp_path: Path
) -> None:
    before = len(client.list())
    bad_line.cuts = b"POST"
    with Client(f"unix:{tmp_path}/line") as through:
        bad_line.lost = 2
        sandbox = through.create()
        assert (before + 1, 0) == (len(client.list()), bad_line.lost)
        for run in (1, 2):
            bad_line.lost = 2
            said = sandbox.exec(["sh", "-c", "echo x >> runs; wc -l < runs"]).text
            assert (f"{run}\n", 0) == (said, bad_line.lost)
        bad_line.lost = 1
        process = sandbox.start(["sh", "-c", "echo x >> runs"])
        assert process.wait(30).ok
        assert "x\nx\nx\n" == sandbox.files.read_text("runs")
        assert 3 == len(sandbox.execs())
        sandbox.terminate()


class Place:
    """What methods are tried on: a sandbox through a bad line, and what is in it."""

    def __init__(self, client: Client, tmp_path: Path) -> None:
        self.client, self.local = client, tmp_path / "local"
        self.local.mkdir()
        (self.local / "file").write_bytes(b"here")
        self.box = client.create()
        self.files = self.box.files
        self.kept = client.create()
        self.box.shell(
            "mkdir tree gone; echo one > tree/a; ln tree/a tree/b; echo x > moves; echo x > f"
        )
        self.process = self.box.start(["cat"], stream_stdin=True)
        self.over = self.box.start(["sh", "-c", "echo said"])
        self.over.wait(PATIENCE_S)

    def on_sessions(self, verb: str) -> None:
        """A verb of the server's session manager, on a session of its own."""
        getattr(self.client.sessions, verb)(self.kept)

    @property
    def stdin(self) -> RemoteStdin:
        assert self.process.stdin is not None
        return self.process.stdin


# Whether a lost answer is asked for again: yes for what reads, what has a key or an offset, and what is the
# same done twice. The rest raises ServerUnreachable, and was asked once.
TABLE: dict[str, tuple[Callable[[Place], Any], bool]] = {
    "RemoteSandbox.exec": (lambda p: p.box.exec(["true"]), True),
    "RemoteSandbox.shell": (lambda p: p.box.shell("true"), True),
    "RemoteSandbox.start": (lambda p: p.box.start(["true"]), True),
    "RemoteSandbox.execs": (lambda p: p.box.execs(), True),
    "RemoteSandbox.process": (lambda p: p.box.process(p.over.id), True),
    "RemoteSandbox.view": (lambda p: p.box.view, True),
    "RemoteSandbox.session": (lambda p: p.box.session, True),
    "RemoteSandbox.state": (lambda p: p.box.state, True),
    "RemoteSandbox.mount": (lambda p: p.box.mount(":/scratch:rw"), False),
    "RemoteSandbox.apply_network_policy": (lambda p: p.box.apply_network_policy("none"), True),
    "RemoteSandbox.network_log": (lambda p: p.box.network_log(), True),
    "RemoteSandbox.learned_policy": (lambda p: p.box.learned_policy(), True),
    "RemoteSandbox.connect": (lambda p: p.box.connect(1), False),
    "RemoteSandbox.expose": (lambda p: p.box.expose(1).close(), True),
    "RemoteSandbox.suspend": (lambda p: p.box.suspend(), True),
    "RemoteSandbox.resume": (lambda p: p.box.resume(), True),
    "RemoteSandbox.update": (lambda p: p.box.update(name="x"), True),
    "RemoteSandbox.extend": (lambda p: p.box.extend(1000), True),
    "RemoteSandbox.snapshot": (lambda p: p.box.snapshot(), False),
    "RemoteSandbox.fork": (lambda p: p.box.fork(), True),
    "RemoteSandbox.merge": (lambda p: p.box.merge(p.kept, base="none"), False),
    "RemoteSandbox.changes": (lambda p: p.box.changes(), True),
    "RemoteSandbox.checkpoint": (lambda p: p.box.checkpoint(), False),
    "RemoteSandbox.stats": (lambda p: p.box.stats(), True),
    "RemoteSandbox.capabilities": (lambda p: p.box.capabilities(), True),
    "RemoteSandbox.protections": (lambda p: p.box.protections(), True),
    "RemoteFiles.read": (lambda p: p.files.read("f"), True),
    "RemoteFiles.read_text": (lambda p: p.files.read_text("f"), True),
    "RemoteFiles.open_read": (lambda p: p.files.open_read("f").close(), True),
    "RemoteFiles.open_write": (lambda p: p.files.open_write("f2").close(), True),
    "RemoteFiles.write": (lambda p: p.files.write("f", b"y"), True),
    "RemoteFiles.write appends": (lambda p: p.files.write("f", b"y", append=True), False),
    "RemoteFiles.list": (lambda p: p.files.list(), True),
    "RemoteFiles.stat": (lambda p: p.files.stat("f"), True),
    "RemoteFiles.exists": (lambda p: p.files.exists("f"), True),
    "RemoteFiles.make_dir": (lambda p: p.files.make_dir("made"), True),
    "RemoteFiles.make_dir alone": (lambda p: p.files.make_dir("alone", parents=False), False),
    "RemoteFiles.remove": (lambda p: p.files.remove("gone"), False),
    "RemoteFiles.move": (lambda p: p.files.move("moves", "moved"), False),
    "RemoteFiles.upload": (lambda p: p.files.upload(str(p.local / "file"), "up"), True),
    "RemoteFiles.upload tree": (lambda p: p.files.upload(str(p.local), "up-tree"), False),
    "RemoteFiles.download": (lambda p: p.files.download("f", str(p.local / "down")), True),
    "RemoteFiles.glob": (lambda p: p.files.glob("*"), True),
    "RemoteFiles.search": (lambda p: p.files.search("x"), True),
    "RemoteFiles.replace": (lambda p: p.files.replace(["f"], "a", "b"), False),
    "RemoteFiles.watch": (lambda p: p.files.watch().__enter__(), True),
    "RemoteProcess.view": (lambda p: p.process.view, True),
    "RemoteProcess.running": (lambda p: p.process.running, True),
    "RemoteProcess.send_signal": (lambda p: p.process.send_signal(18), False),
    "RemoteProcess.signal_group": (lambda p: p.process.signal_group(18), False),
    "RemoteProcess.events": (lambda p: list(p.over.events()), True),
    "RemoteStream.read": (lambda p: p.over.stdout.read(PATIENCE_S), True),
    "RemoteStream.getvalue": (lambda p: p.over.stdout.getvalue(), True),
    "RemoteStream.lines": (lambda p: list(p.over.stderr.lines()), True),
    "RemoteStdin.write": (lambda p: p.stdin.write(b"in"), True),
    "RemoteStdin.close": (lambda p: p.stdin.close(), True),
    "RemoteProcess.terminate": (lambda p: p.process.terminate(), False),
    "RemoteProcess.kill": (lambda p: p.process.kill(), True),
    "RemoteProcess.wait": (lambda p: p.process.wait(PATIENCE_S), True),
    "RemoteProcess.resize": (
        lambda p: p.box.process(p.box.start(["cat"], pty=(2, 2)).id).resize(3, 3),
        True,
    ),
    "RemoteSandbox.terminate": (lambda p: p.box.terminate(), True),
    "Client.create": (lambda p: p.client.create().terminate(), True),
    "Client.get": (lambda p: p.client.get(p.box.id), True),
    "Client.list": (lambda p: p.client.list(), True),
    "Client.snapshots": (lambda p: p.client.snapshots(), True),
    "Client.execute": (lambda p: p.client.execute("true"), True),
    "Client.execution_info": (lambda p: p.client.execution_info(), True),
    "Client.configure_executions": (
        lambda p: p.client.configure_executions(max_processes=50),
        True,
    ),
    "RemoteSessions.acquire": (lambda p: p.client.sessions.acquire().release(), True),
    "RemoteSessions.attach": (lambda p: p.client.sessions.attach({"sandbox_id": p.kept.id}), True),
    **{
        f"RemoteSessions.{verb}": (partial(Place.on_sessions, verb=verb), True)
        for verb in ("detach", "suspend", "resume", "touch", "get", "sandbox", "capabilities")
    },
    "RemoteSessions.extend": (lambda p: p.client.sessions.extend(p.kept, 60), True),
    "RemoteSessions.list": (lambda p: p.client.sessions.list(), True),
    "RemoteSessions.set_default_sandbox": (lambda p: p.on_sessions("set_default_sandbox"), True),
    "RemoteSessions.default_sandbox": (lambda p: p.client.sessions.default_sandbox(), True),
    "RemoteSessions.release": (lambda p: p.on_sessions("release"), True),
    "RemoteSessions.terminate": (lambda p: p.on_sessions("terminate"), True),
    "Client.health": (lambda p: p.client.health(), True),
    "Client.stats": (lambda p: p.client.stats(), True),
    "Client.info": (lambda p: p.client.info(), True),
    "Client.events": (lambda p: p.client.events(), True),
    "Client.follow_events": (lambda p: next(p.client.follow_events()), True),
    "Client.make_key": (lambda p: p.client.make_key("someone"), False),
    "Client.rotate_key": (lambda p: p.client.rotate_key("key-x"), False),
    "Client.keys": (lambda p: p.client.keys(), True),
    "Client.delete_key": (lambda p: p.client.delete_key("none"), False),
    "Client.delete_snapshot": (lambda p: p.client.delete_snapshot("none"), False),
    "Client.pool": (lambda p: p.client.pool(), True),
    "Client.change_pool": (lambda p: p.client.change_pool(), True),
}
# As those above: `restore` is `create`, the other two are `execute`, contexts are execs. The rest asks for
# nothing itself.
ELSEWHERE = {
    *("RemoteSandbox.lineage", "RemoteSandbox.parent", "RemoteSandbox.fork_report"),  # ask nothing
    *("RemoteSandbox.mark", "RemoteSandbox.rewind"),  # refused without asking
    *("RemoteSandbox.context", "RemoteSandbox.contexts", "RemoteSandbox.run_code"),
    *("Client.restore", "Client.execution", "Client.kill_execution"),
    *("Client.close", "Client.server", "RemoteSandbox.id", "RemoteStream.dropped_bytes"),
    *("RemoteStream.missed_bytes", "RemoteProcess.call_back", "RemoteProcess.run_through"),
    *("RemoteProcess.end", "RemoteSandbox.mark", "RemoteSandbox.rewind"),  # refused here
}


@pytest.mark.full
def test_every_method_is_repeated_or_not_as_the_table_says(bad_line: Line, tmp_path: Path) -> None:
    classes = (
        *(Client, RemoteSessions, RemoteSandbox),
        *(RemoteFiles, RemoteProcess, RemoteStdin, RemoteStream),
    )
    public = {
        f"{each.__name__}.{name}" for each in classes for name in vars(each) if name[0] != "_"
    }
    assert public == {name.split(" ")[0] for name in TABLE} | ELSEWHERE

    with Client(f"unix:{tmp_path}/line") as client:
        place = Place(client, tmp_path)
        for name, (call, is_repeated) in TABLE.items():
            bad_line.lost, bad_line.asked = 1, 0
            if is_repeated:
                call(place)
                assert bad_line.asked >= 2, name
            else:
                with pytest.raises(ServerUnreachable):
                    call(place)
                assert 1 == bad_line.asked, name
            assert 0 == bad_line.lost, name


@pytest.mark.full
def test_what_breaks_off_goes_on_where_it_was(bad_line: Line, tmp_path: Path) -> None:
    data = os.urandom(1 << 21)
    tree = {f"{number:03d}": os.urandom(1 << 14) for number in range(60)}
    local = tmp_path / "tree"
    local.mkdir()
    for name, content in tree.items():
        (local / name).write_bytes(content)
    with Client(f"unix:{tmp_path}/line") as client, client.create() as sandbox:
        files = sandbox.files
        files.write("data", data)
        files.upload(str(local), "tree")
        process = sandbox.start(["cat", "data"])
        bad_line.after, bad_line.cuts = 1 << 18, b"GET"

        def broken(times: int, call: Callable[[], Any]) -> Any:
            bad_line.lost = times
            result = call()
            assert 0 == bad_line.lost
            return result

        assert data == broken(3, lambda: files.read("data"))
        assert data[5:] == broken(3, lambda: files.read("data", offset=5))
        with broken(3, lambda: files.open_read("data")) as file:
            assert data == file.read()
        broken(3, lambda: files.download("data", str(tmp_path / "data")))
        assert data == (tmp_path / "data").read_bytes()
        assert data == broken(3, process.stdout.getvalue)
        broken(2, lambda: files.download("tree", str(tmp_path / "again")))
        assert tree == {each.name: each.read_bytes() for each in (tmp_path / "again").iterdir()}
        # Attempts after the first replace what it has made, and nothing that was there before.
        last = tmp_path / "last" / "059"
        last.parent.mkdir()
        last.write_text("mine")
        with pytest.raises(FileExists, match="059"):
            broken(2, lambda: files.download("tree", str(last.parent)))
        assert "mine" == last.read_text()


def test_half_of_each_of_two_files_is_none(bad_line: Line, tmp_path: Path) -> None:
    """A file that changes while the line is broken is read from its beginning."""
    with Client(f"unix:{tmp_path}/line") as client, client.create() as sandbox:
        sandbox.files.write("data", b"a" * (1 << 21))
        bad_line.after, bad_line.cuts, bad_line.lost = 1 << 18, b"GET", 1
        opened = sandbox.files._transport.stream

        def change_then_open(*args: Any, **options: Any) -> Any:
            if not bad_line.lost:
                sandbox.files.write("data", b"b" * (1 << 20))
            return opened(*args, **options)

        sandbox.files._transport.stream = change_then_open  # type: ignore[method-assign]
        assert b"b" * (1 << 20) == sandbox.files.read("data")


# httpcore2 leaves a unix socket that did not connect to the garbage collector.
@pytest.mark.full
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_killed_daemon_is_waited_for(tmp_path: Path) -> None:
    server = Server(tmp_path / "state")
    server.start(faulty=False)
    try:
        with Client(f"unix:{server.state}/ringfence.sock") as client, client.create() as sandbox:
            sandbox.files.write("data", b"kept")
            process = sandbox.start(["sh", "-c", "echo begun; read x; echo $x"], stream_stdin=True)
            assert process.stdin is not None
            with ThreadPoolExecutor(8) as pool:
                waits = pool.submit(process.wait, PATIENCE_S)
                output = pool.submit(process.stdout.getvalue)
                runs = pool.submit(sandbox.shell, "echo x >> ran; sleep 1; cat ran")
                server.kill()
                calls = (
                    lambda: sandbox.files.read("data"),
                    lambda: sandbox.files.read_text("data").encode(),
                    lambda: _all_of(sandbox.files.open_read("data")),
                    lambda: sandbox.exec(["cat", "data"]).stdout,
                )
                asked = [pool.submit(call) for call in calls]
                server.start(faulty=False)
                assert [b"kept"] * 4 == [each.result(PATIENCE_S) for each in asked]
                process.stdin.write(b"on\n")
                assert waits.result(PATIENCE_S).ok
                assert b"begun\non\n" == output.result(PATIENCE_S)
                assert b"x\n" == runs.result(PATIENCE_S).stdout
    finally:
        server.stop()


# httpcore2 leaves a unix socket that did not connect to the garbage collector.
@pytest.mark.full
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", [_sync.transport, _async.transport])
def test_a_restart_is_waited_for_by_a_client_that_was_never_answered(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed daemon leaves its socket: it was there. The control is a path where no daemon ever was."""
    pauses, late = itertools.count(1), threading.Event()
    waits = kind.pause

    def counted(seconds: float) -> Any:
        if next(pauses) > kind._UNHEARD:
            late.set()
        return waits(seconds)

    monkeypatch.setattr(kind, "pause", counted)

    def ask(path: Path) -> Any:
        if kind is _sync.transport:
            with Client(f"unix:{path}", retries=100) as client:
                return client.health()

        async def asked() -> Any:
            async with AsyncClient(f"unix:{path}", retries=100) as client:
                return await client.health()

        return asyncio.run(asked())

    with pytest.raises(ServerUnreachable):
        ask(tmp_path / "nowhere")
    assert (kind._UNHEARD + 1, False) == (next(pauses), late.is_set())

    pauses = itertools.count(1)
    server = Server(tmp_path / "state")
    server.start(faulty=False)
    server.kill()
    try:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, server.state / "ringfence.sock")
            asked.add_done_callback(lambda _: late.set())
            assert late.wait(PATIENCE_S)
            assert not asked.done(), asked.exception()
            server.start(faulty=False)
            assert asked.result(PATIENCE_S).ok
    finally:
        server.stop()


@pytest.mark.full
def test_an_answer_that_breaks_off_shows_a_server(bad_line: Line, tmp_path: Path) -> None:
    """The first request of a client is asked again as often as `retries` says, be no answer heard yet."""
    with Client(f"unix:{tmp_path}/line", retries=5) as through:
        bad_line.lost = 5
        assert through.list() is not None
        assert (0, 6) == (bad_line.lost, bad_line.asked)


def _all_of(file: BinaryIO) -> bytes:
    with file:
        return file.read()
