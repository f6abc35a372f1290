"""Terminals and pipes over a WebSocket."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect, unix_connect

from tests.api.conftest import Daemon, StartDaemon
from tests.api.test_streams import CHATTER, Sandbox

pytestmark = pytest.mark.anyone

IN, OUT, ERR = b"\x00", b"\x01", b"\x02"
PATIENCE_S = 60.0


@pytest.fixture
def sandbox(client: httpx.Client, sandbox_id: str) -> Sandbox:
    return Sandbox(client, sandbox_id)


class Attached:
    """One WebSocket, and what has come through it."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.told: list[dict[str, Any]] = []
        self.out = self.err = b""

    def say(self, **order: Any) -> None:
        self.socket.send(json.dumps(order))

    def type(self, data: bytes) -> None:
        self.socket.send(IN + data)

    def step(self) -> None:
        message = self.socket.recv(PATIENCE_S)
        if isinstance(message, str):
            self.told.append(json.loads(message))
        elif message[:1] == OUT:
            self.out += message[1:]
        else:
            assert ERR == message[:1]
            self.err += message[1:]

    def until(self, text: bytes) -> None:
        while text not in self.out:
            self.step()

    def hear(self, kind: str) -> dict[str, Any]:
        """The next word of a kind, told already or not."""
        while True:
            for each in self.told:
                if each["type"] == kind:
                    self.told.remove(each)
                    return each
            self.step()


@contextmanager
def attached(
    daemon: Daemon, sandbox: Sandbox, exec_id: str, offset: str = "", close_timeout_s: float = 10
) -> Iterator[Attached]:
    uri = f"ws://localhost{sandbox.base}/{exec_id}/attach?offset={offset}"
    options: dict[str, Any] = {"compression": None, "max_size": None}
    with unix_connect(daemon.socket, uri, close_timeout=close_timeout_s, **options) as socket:
        yield Attached(socket)


def test_a_terminal_from_its_prompt_to_its_end(daemon: Daemon, sandbox: Sandbox) -> None:
    exec_id = sandbox.start("PS1='ready> ' sh -i", tty=True, rows=10, cols=40)
    with attached(daemon, sandbox, exec_id) as terminal:
        terminal.until(b"ready> ")
        terminal.type(b"stty size; tty\n")
        terminal.until(b"10 40\r\n/dev/pts/")
        terminal.say(type="resize", rows=33, cols=99)
        terminal.type(b"stty size\n")
        terminal.until(b"33 99\r\n")
        terminal.type(b"sh -c 'echo here; exec sleep 1000'\n")
        terminal.until(b"here\r\n")
        terminal.type(b"\x03")
        terminal.until(b"^C")
        terminal.type(b"exit 7\n")
        end = terminal.hear("end")

    assert ("ended", 7) == (end["exec"]["state"], end["exec"]["status"]["exit_code"])


def test_a_terminal_goes_on_without_its_client(daemon: Daemon, sandbox: Sandbox) -> None:
    exec_id = sandbox.start("PS1='ready> ' sh -i", tty=True)
    with attached(daemon, sandbox, exec_id) as first:
        first.until(b"ready> ")
        first.type(b"x=kept; echo a$x\n")
        first.until(b"akept\r\n")
        seen = len(first.out)
    with attached(daemon, sandbox, exec_id) as again:
        again.until(first.out)
        again.type(b"echo b$x\n")
        again.until(b"bkept\r\n")
    with attached(daemon, sandbox, exec_id, f"{seen}.0") as later:
        later.until(b"bkept\r\n")
        assert b"akept" not in later.out
    with (
        attached(daemon, sandbox, exec_id, "now") as now,
        attached(daemon, sandbox, exec_id, "now") as other,
    ):
        now.hear("attached")
        other.hear("attached")
        now.type(b"echo c$x; exit\n")
        other.until(b"ckept\r\n")
        assert b"akept" not in other.out
        assert 0 == now.hear("end")["exec"]["status"]["exit_code"]
    with attached(daemon, sandbox, exec_id) as late:
        late.hear("end")
    assert late.out == sandbox.output(exec_id, stream="stdout").content


def test_pipes_input_its_end_and_both_streams(daemon: Daemon, sandbox: Sandbox) -> None:
    exec_id = sandbox.start("cat; echo done >&2; exit 3", stream_stdin=True)
    with attached(daemon, sandbox, exec_id) as pipes:
        pipes.type(b"one ")
        assert 4 == pipes.hear("input")["offset"]
        pipes.type(bytes(200_000))
        assert 200_004 == pipes.hear("input")["offset"]
        pipes.say(type="eof")
        assert 3 == pipes.hear("end")["exec"]["status"]["exit_code"]
        with pytest.raises(ConnectionClosed):
            pipes.socket.recv(PATIENCE_S)

    assert (b"one " + bytes(200_000), b"done\n") == (pipes.out, pipes.err)


def test_a_client_that_drops_fifty_times(daemon: Daemon, sandbox: Sandbox) -> None:
    dice = random.Random(9)
    exec_id = sandbox.start(CHATTER)
    out = err = b""
    for drops in range(1000):
        most = dice.randint(1, 3) if drops < 50 else 10**9
        # A client that does not read what waits for it does not see the answer to its close either.
        patience_s = 0.05 if drops < 50 else 10
        cursor = f"{len(out)}.{len(err)}"
        with attached(daemon, sandbox, exec_id, cursor, close_timeout_s=patience_s) as pipes:
            while most and not any(each["type"] == "end" for each in pipes.told):
                pipes.step()
                most -= 1
        out, err = out + pipes.out, err + pipes.err
        if drops >= 50 and any(each["type"] == "end" for each in pipes.told):
            break

    assert b"".join(b"%d\n" % n for i in range(1, 31) for n in range(i, 4001)) == out
    assert sandbox.output(exec_id, stream="stderr").content == err


def test_a_process_that_does_not_read_can_be_signalled(daemon: Daemon, sandbox: Sandbox) -> None:
    script = "trap 'echo caught; exit 5' USR1; echo set; while :; do sleep 0.01; done"
    exec_id = sandbox.start(script, stream_stdin=True)
    with attached(daemon, sandbox, exec_id) as pipes:
        pipes.until(b"set\n")
        pipes.type(bytes(200_000))
        pipes.say(type="signal", signal="USR1")
        assert 5 == pipes.hear("end")["exec"]["status"]["exit_code"]

    assert b"set\ncaught\n" == pipes.out


def test_what_makes_no_sense_is_told_and_ends_nothing(daemon: Daemon, sandbox: Sandbox) -> None:
    exec_id = sandbox.start("cat", stream_stdin=True)
    with attached(daemon, sandbox, exec_id) as pipes:
        for wrong in (
            '{"type": "dance"}',
            "not json",
            "[]",
            '{"type": "resize", "rows": 0}',
            b"\x07x",
            b"",
        ):
            pipes.socket.send(wrong)
            assert pipes.hear("error")["code"] in ("invalid_request", "bad_json"), wrong
        pipes.say(type="resize", rows=3, cols=4)
        assert "pty" == pipes.hear("error")["field"]
        pipes.type(b"fine")
        pipes.until(b"fine")
        pipes.say(type="kill")
        assert "caller" == pipes.hear("end")["exec"]["status"]["killed_by"]


def test_who_may_not_attach_is_told_why(daemon: Daemon, sandbox: Sandbox) -> None:
    exec_id = sandbox.start("true")
    sandbox.wait(exec_id)
    for wrong, offset, status in (
        ("exec-none", "", 404),
        (exec_id, "9.9", 422),
        (exec_id, "x", 422),
    ):
        with pytest.raises(InvalidStatus) as refused, attached(daemon, sandbox, wrong, offset):
            pass
        assert status == refused.value.response.status_code
        assert status == json.loads(refused.value.response.body or b"{}")["status"]


@pytest.mark.full
def test_over_tcp_a_terminal_asks_for_a_key(start_daemon: StartDaemon) -> None:
    daemon = start_daemon("--listen", "127.0.0.1:0")
    with daemon.client() as client:
        sandbox = Sandbox(client, client.post("/v1/sandboxes", json={}).json()["id"])
        other = client.post("/v1/sandboxes", json={}).json()["id"]
        exec_id = sandbox.start("echo hello")
        sandbox.wait(exec_id)
        mine, theirs = (
            client.post(f"/v1/sandboxes/{each}/tokens").json()["key"]
            for each in (sandbox.id, other)
        )
        uri = f"{daemon.tcp.replace('http', 'ws', 1)}{sandbox.base}/{exec_id}/attach"
        for key, more, status in (
            ("", {}, 401),
            (f"{mine}x", {}, 401),
            (theirs, {}, 403),
            (mine, {"origin": "http://elsewhere.example"}, 403),
        ):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            with (
                pytest.raises(InvalidStatus) as refused,
                connect(uri, additional_headers={**headers, **more}),
            ):
                pass
            assert status == refused.value.response.status_code, (key, more)
            assert status == json.loads(refused.value.response.body or b"{}")["status"]
        with connect(uri, additional_headers={"authorization": f"Bearer {mine}"}) as socket:
            found = Attached(socket)
            found.hear("end")
        assert b"hello\n" == found.out
        for each in (sandbox.id, other):
            client.delete(f"/v1/sandboxes/{each}")
