"""Contexts and processes of a server's sandbox that go on in its forks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence.client import Client
from ringfence.errors import Unsupported
from ringfence.linux import libc
from tests.api.conftest import Daemon, start

pytestmark = [
    pytest.mark.anyone,
    pytest.mark.skipif(libc.MACHINE != "x86_64", reason="processes are copied on x86-64 only"),
]
_COUNTER = "n=0; while read -r line; do n=$((n+1)); echo $line $n; done; echo end"


@pytest.fixture
def sandbox(daemon: Daemon) -> Iterator[Any]:
    with Client(f"unix:{daemon.socket}") as client, client.create() as made:
        yield made


@pytest.mark.full
def test_contexts_and_processes_go_on(sandbox: Any) -> None:
    sandbox.run_code("import random; random.seed(7); values = [1, 2]; numbers = iter('abc')")
    sandbox.run_code("next(numbers)")
    other = sandbox.context()
    other.run("which = 'other'")
    counter = sandbox.start(["sh", "-c", _COUNTER], stream_stdin=True)
    counter.stdin.write(b"a\n")
    assert b"a 1\n" == next(iter(counter.stdout))
    forks = sandbox.fork(2, processes="required")
    drawn = {sandbox.run_code("random.random()").text}
    with forks[0], forks[1]:
        for number, fork in enumerate(forks):
            report = fork.fork_report
            assert (True, 2, 1) == (
                report.has_processes,
                len(report.contexts),
                len(report.processes),
            )
            assert str([1, 2]) == fork.run_code(f"values.append({number}); values[:2]").text
            assert "'b'" == fork.run_code("next(numbers)").text
            drawn.add(fork.run_code("random.random()").text)
            contexts = [fork.context(id=id) for id in report.contexts]
            assert ["'other'"] == [each.run("which").text for each in contexts[1:]]
            copy = fork.process(*report.processes)
            for _ in range(number + 1):
                copy.stdin.write(b"b\n")
            copy.stdin.close()
            wanted = b"b 2\nb 3\nend\n" if number else b"b 2\nend\n"
            assert wanted == copy.wait(10).stdout
        assert 3 == len(drawn)
        assert "2" == sandbox.run_code("len(values)").text
        (again,) = forks[1].fork(processes="required")
        with again:
            assert "[1, 2, 1]" == again.run_code("values").text
    assert sandbox.fork_report is None
    (files,) = sandbox.fork(processes="none")
    with files:
        assert (False, "") == (files.fork_report.has_processes, files.fork_report.reason)


@pytest.mark.full
def test_what_cannot_be_copied_stays_or_is_refused(sandbox: Any) -> None:
    sandbox.run_code("kept = 1")
    code = "import ctypes; ctypes.CDLL(None).inotify_init(); print('ready', flush=True); input()"
    parent = sandbox.start(["sh", "-c", f'python3 -c "{code}"; :'], stream_stdin=True)
    assert b"ready\n" == next(iter(parent.stdout))
    with pytest.raises(Unsupported, match=r"its child process python3 cannot: .*inotify"):
        sandbox.fork(processes="required")
    (fork,) = sandbox.fork()
    with fork:
        report = fork.fork_report
        assert (1, (parent.id,)) == (len(report.contexts), report.left_out)
        assert "1" == fork.run_code("kept").text
    parent.kill()
    parent.wait()
    begun = threading.Event()
    context = sandbox.context()
    code = "print('begun', flush=True)\nwhile True: pass"
    cell = threading.Thread(
        target=context.run, args=[code], kwargs={"on_stdout": lambda _: begun.set()}
    )
    cell.start()
    try:
        assert begun.wait(30)
        with pytest.raises(Unsupported, match="runs a cell"):
            sandbox.fork(processes="required")
        (fork,) = sandbox.fork()
        with fork:
            assert "runs a cell" in fork.fork_report.reason
            assert not fork.fork_report.has_processes
    finally:
        context.interrupt()
        cell.join()
    sandbox.suspend()
    with pytest.raises(Unsupported, match="suspended"):
        sandbox.fork(processes="required")
    sandbox.resume()
    assert "1" == sandbox.run_code("kept").text


@pytest.mark.full
def test_asking_again_gives_the_same_forks(sandbox: Any, daemon: Daemon) -> None:
    sandbox.run_code("kept = 5")
    with daemon.client() as http:
        url, headers = f"/v1/sandboxes/{sandbox.id}/fork", {"idempotency-key": "k"}
        first = http.post(url, json={"n": 2}, headers=headers)
        second = http.post(url, json={"n": 2}, headers=headers)
        assert (201, 200) == (first.status_code, second.status_code)
        one, two = first.json(), second.json()
        for name in ("report", "execs"):
            assert one[name] == two[name]
        assert [each["id"] for each in one["items"]] == [each["id"] for each in two["items"]]
        for each, execs in zip(one["items"], one["execs"], strict=True):
            (context,) = execs.values()
            at = f"/v1/sandboxes/{each['id']}"
            assert context == http.get(f"{at}/contexts").json()["items"][0]["id"]
            assert 200 == http.delete(at).status_code


@pytest.mark.full
def test_a_copy_outlives_the_daemon(tmp_path: Path) -> None:
    first = start(tmp_path)
    try:
        with Client(f"unix:{first.socket}") as client:
            source = client.create()
            source.run_code("kept = [1]")
            (fork,) = source.fork(processes="required")
            assert "[1, 2]" == fork.run_code("kept.append(2); kept").text
            assert fork.fork_report is not None
            (context,) = fork.fork_report.contexts
            ids = source.id, fork.id
    finally:
        first.process.send_signal(signal.SIGKILL)
        first.stop()
    second = start(tmp_path)
    try:
        with Client(f"unix:{second.socket}") as client:
            source, fork = (client.get(id) for id in ids)
            assert "[1, 2]" == fork.context(id=context).run("kept").text
            (another,) = fork.fork(processes="required")
            assert another.fork_report is not None
            (copied,) = another.fork_report.contexts
            assert "[1, 2]" == another.context(id=copied).run("kept").text
            for each in (another, fork, source):
                each.terminate()
    finally:
        second.stop()
