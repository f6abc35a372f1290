"""Contexts of a server: the same surface, found again by id, alive after kill -9 of the daemon."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from ringfence.client import AsyncClient, Client, RemoteSandbox
from ringfence.errors import ExecNotFound
from tests.api.conftest import Daemon, _user_namespaces, common_daemon, daemon, start_daemon
from tests.daemon.servers import Server

pytestmark = pytest.mark.anyone

__all__ = ["_user_namespaces", "common_daemon", "daemon", "start_daemon"]


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(f"unix:{daemon.socket}") as found:
        yield found


@pytest.fixture
def sandbox(client: Client) -> Iterator[RemoteSandbox]:
    with client.create() as found:
        yield found


@pytest.mark.full
def test_cells_of_a_server(sandbox: RemoteSandbox) -> None:
    seen: list[str] = []
    with sandbox.context() as context:
        context.run("x = 41")
        found = context.run("print('o')\nx + 1", on_stdout=seen.append)

        assert ("42", ["o\n"]) == (found.text, seen)
        assert "'a'" == context.run("input()", stdin="a").text
        assert context.run("while True: pass", timeout_s=0.5).timed_out
        assert 5_000_001 == len(context.run("print('x' * 5_000_000)").stdout)
        assert "x" in [each["name"] for each in context.variables()]
    assert "2" == sandbox.run_code("1 + 1").text


@pytest.mark.full
def test_node_of_a_server(sandbox: RemoteSandbox) -> None:
    if not shutil.which("node"):
        pytest.skip("node is not installed")
    with sandbox.context("node") as context:
        assert "42" == context.run("const x = await Promise.resolve(41); x + 1").text
        assert context.run("for (;;);", timeout_s=0.5).timed_out
        assert ["x"] == [each["name"] for each in context.variables()]


def test_another_client_goes_on_with_it(daemon: Daemon, sandbox: RemoteSandbox) -> None:
    context = sandbox.context()
    context.run("x = 41")
    with Client(f"unix:{daemon.socket}") as other:
        again = other.get(sandbox.id)
        assert [context.id] == again.contexts()
        assert "42" == again.context(id=context.id).run("x + 1").text
        process = again.start(["sleep", "1000"])
        with pytest.raises(ExecNotFound, match="no context"):
            again.context(id=process.id)
    context.close()
    assert [] == sandbox.contexts()


# httpcore leaves a Unix socket that refused it to the garbage collector.
@pytest.mark.full
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_killed_daemon_interrupts_no_cell(tmp_path: Path) -> None:
    """Kill -9 in the middle of a cell: it ends by itself, and the next client has its variables."""
    server = Server(tmp_path / "state")
    server.start()
    try:
        begun = threading.Event()
        with Client(f"unix:{server.state}/ringfence.sock") as client:
            sandbox = client.create()
            context = sandbox.context()
            waits = "import os, time\nprint(1)\nwhile not os.path.exists('on'): time.sleep(0.01)\nx = 41"
            run = partial(context.run, waits, on_stdout=lambda _: begun.set())
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            assert begun.wait(60)
            server.kill()
            server.start()
            with Client(f"unix:{server.state}/ringfence.sock") as other:
                again = other.get(sandbox.id)
                assert [context.id] == again.contexts()
                again.files.write("on", "")
                assert "42" == again.context(id=context.id).run("x + 1", timeout_s=60).text
            thread.join(60)
            assert not thread.is_alive(), "who ran the cell hears of its end too"
            sandbox.terminate()
    finally:
        server.stop()


async def test_without_blocking(daemon: Daemon) -> None:
    async with AsyncClient(f"unix:{daemon.socket}") as client, await client.create() as sandbox:
        async with await sandbox.context() as context:
            await context.run("x = 1")
            assert "1" == (await context.run("x")).text
            assert [context.id] == await sandbox.contexts()
        assert "2" == (await sandbox.run_code("1 + 1")).text
