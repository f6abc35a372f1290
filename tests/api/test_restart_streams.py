"""Execs whose daemon is killed: another one goes on with them, and no byte of theirs is lost or twice."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import StartDaemon
from tests.api.test_attach import attached
from tests.api.test_streams import Sandbox, data_of, until_cut

pytestmark = pytest.mark.anyone

LINES = "i=0; while [ $i -lt 200000 ]; do echo line $i; i=$((i+1)); done"


@pytest.mark.full
def test_execs_go_on_under_the_next_daemon(start_daemon: StartDaemon, tmp_path: Path) -> None:
    first = start_daemon(state_dir=tmp_path / "s")
    with first.client() as client:
        sandbox = Sandbox(client, client.post("/v1/sandboxes", json={}).json()["id"])
        before = sandbox.start("echo early; exit 4")
        sandbox.wait(before)
        writes = sandbox.start(f"{LINES}; exit 5")
        meanwhile = sandbox.start("read x; echo $x >&2; exit 6", stream_stdin=True)
        reads = sandbox.start("cat; exit 7", stream_stdin=True)
        terminal = sandbox.start("PS1='> ' sh", tty=True)
        sandbox.give(reads, b"one ")
        with attached(first, sandbox, terminal) as shell:
            shell.type(b"echo x$((6*7))\n")
            shell.until(b"x42\r\n> ")
        url, got, cursor = f"{sandbox.base}/{writes}/output?follow=true", b"", ""
        for event in until_cut(first, url, {}, 120_000):
            got, cursor = got + data_of(event), event["cursor"]
        assert got
        sandbox.give(meanwhile, b"last words\n")
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(30)

    second = start_daemon(state_dir=tmp_path / "s")
    with second.client() as client:
        sandbox = Sandbox(client, sandbox.id)
        gap = sandbox.give(reads, b"two", offset=9)
        again = sandbox.give(reads, b"one two", offset=0, eof=True)
        ends: dict[str, Any] = {
            each: sandbox.wait(each) for each in (before, writes, meanwhile, reads)
        }
        rest = list(until_cut(second, url, {"last-event-id": cursor}, 10**9))
        with attached(second, sandbox, terminal, "now") as shell:
            shell.say(type="resize", rows=11, cols=22)
            shell.type(b"stty size; exit 8\n")
            shell.until(b"11 22\r\n")
            assert 8 == shell.hear("end")["exec"]["status"]["exit_code"]
        client.delete(f"/v1/sandboxes/{sandbox.id}")

    assert [4, 5, 6, 7] == [each["status"]["exit_code"] for each in ends.values()]
    assert "early\n" == ends[before]["result"]["stdout"]
    assert "last words\n" == ends[meanwhile]["result"]["stderr"]
    assert (409, 200) == (gap.status_code, again.status_code)
    assert "one two" == ends[reads]["result"]["stdout"]
    got += b"".join(data_of(each) for each in rest if each["type"] == "output")
    assert b"".join(b"line %d\n" % i for i in range(200_000)) == got


@pytest.mark.full
def test_what_did_not_outlive_its_daemon_is_lost(start_daemon: StartDaemon, tmp_path: Path) -> None:
    first = start_daemon("--outlive", "0", state_dir=tmp_path / "s")
    with first.client() as client:
        sandbox = Sandbox(client, client.post("/v1/sandboxes", json={}).json()["id"])
        exec_id = sandbox.start("echo heard; sleep 1000")
        while not sandbox.output(exec_id, stream="stdout").content:
            pass
    first.process.send_signal(signal.SIGKILL)
    first.process.wait(30)
    with start_daemon("--outlive", "0", state_dir=tmp_path / "s").client() as client:
        sandbox = Sandbox(client, sandbox.id)
        view = sandbox.wait(exec_id)
        output = sandbox.output(exec_id, stream="stdout")

    assert ("lost", "sandbox_lost", None) == (
        view["state"],
        view["problem"]["code"],
        view["status"],
    )
    assert (b"heard\n", "true") == (output.content, output.headers["x-ringfence-end"])


@pytest.mark.full
def test_of_a_terminal_no_byte_is_lost_or_twice(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """Killed while it writes, again and again: what was on its way arrives under the next daemon."""
    script = "stty -opost; i=0; while [ $i -lt 60000 ]; do echo line $i; i=$((i+1)); done; read x"
    daemon = start_daemon(state_dir=tmp_path / "s")
    with daemon.client() as client:
        sandbox = Sandbox(client, client.post("/v1/sandboxes", json={}).json()["id"])
        terminal = sandbox.start(script, tty=True)
    url = f"{sandbox.base}/{terminal}/output?stream=stdout"
    for part in (1_000, 200_000):
        with daemon.client() as client, client.stream("GET", f"{url}&follow=true") as response:
            count = 0
            for chunk in response.iter_raw():
                count += len(chunk)
                if count > part:
                    break
            daemon.process.send_signal(signal.SIGKILL)
        daemon.process.wait(30)
        daemon = start_daemon(state_dir=tmp_path / "s")

    wanted = b"".join(b"line %d\n" % i for i in range(60_000))
    with daemon.client() as client:
        got = b""
        with client.stream("GET", f"{url}&follow=true") as response:
            for chunk in response.iter_raw():
                got += chunk
                if len(got) >= len(wanted):
                    break
        client.delete(f"/v1/sandboxes/{sandbox.id}")
    assert wanted == got
