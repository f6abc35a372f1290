"""A sandbox that has ended answers alike, here and on a server: one table for both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ringfence import AsyncSandbox, Sandbox
from ringfence.client import Client
from ringfence.errors import ExecError, LifecycleError
from tests.api.conftest import Daemon

pytestmark = pytest.mark.anyone

PATIENCE_S = 60.0
ENDED = LifecycleError
AFTER: dict[str, tuple[Callable[[Any, Any], Any], Any]] = {
    "state": (lambda s, _: s.state, "terminated"),
    "session": (lambda s, _: s.session.state, "terminated"),
    "terminate": (lambda s, _: s.terminate(), None),
    "exec": (lambda s, _: s.exec(["true"]), ENDED),
    "shell": (lambda s, _: s.shell("true"), ENDED),
    "start": (lambda s, _: s.start(["true"]), ENDED),
    "mount": (lambda s, _: s.mount(":/scratch:rw"), ENDED),
    "network": (lambda s, _: s.apply_network_policy("none"), ENDED),
    "network_log": (lambda s, _: s.network_log(), []),
    "learned_policy": (lambda s, _: s.learned_policy().is_none, True),
    "connect": (lambda s, _: s.connect(80), ENDED),
    "expose": (lambda s, _: s.expose(80), ENDED),
    "suspend": (lambda s, _: s.suspend(), ENDED),
    "resume": (lambda s, _: s.resume(), ENDED),
    "snapshot": (lambda s, _: s.snapshot(), ENDED),
    "stats": (lambda s, _: (s.stats().state, s.stats().pids), ("terminated", 0)),
    "capabilities": (lambda s, _: s.capabilities(), ENDED),
    "protections": (lambda s, _: bool(s.protections()), True),
    "files.read": (lambda s, _: s.files.read("x"), ENDED),
    "files.read_text": (lambda s, _: s.files.read_text("x"), ENDED),
    "files.open_read": (lambda s, _: s.files.open_read("x"), ENDED),
    "files.open_write": (lambda s, _: s.files.open_write("x"), ENDED),
    "files.write": (lambda s, _: s.files.write("x", b"y"), ENDED),
    "files.list": (lambda s, _: s.files.list(), ENDED),
    "files.stat": (lambda s, _: s.files.stat("x"), ENDED),
    "files.exists": (lambda s, _: s.files.exists("x"), ENDED),
    "files.make_dir": (lambda s, _: s.files.make_dir("x"), ENDED),
    "files.remove": (lambda s, _: s.files.remove("x"), ENDED),
    "files.move": (lambda s, _: s.files.move("x", "y"), ENDED),
    "files.glob": (lambda s, _: s.files.glob("*"), ENDED),
    "files.search": (lambda s, _: s.files.search("x"), ENDED),
    "files.replace": (lambda s, _: s.files.replace(["x"], "x", "y"), ENDED),
    "files.watch": (lambda s, _: s.files.watch().__enter__(), ENDED),
    "files.upload": (lambda s, _: s.files.upload(__file__, "x"), ENDED),
    "files.upload tree": (lambda s, _: s.files.upload(str(Path(__file__).parent), "x"), ENDED),
    "files.download": (lambda s, _: s.files.download("x", "/nowhere"), ENDED),
    "wait": (lambda _, p: (p.wait(PATIENCE_S).signal, p.wait().killed_by), (9, "terminate")),
    "output": (lambda _, p: p.wait(PATIENCE_S).stdout, b"said\n"),
    "stdout": (lambda _, p: p.stdout.read(PATIENCE_S), b""),
    "running": (lambda _, p: p.running, False),
    "send_signal": (lambda _, p: p.send_signal(15), None),
    "signal_group": (lambda _, p: p.signal_group(15), None),
    "kill": (lambda _, p: p.kill(), None),
    "resize": (lambda _, p: p.resize(1, 1), None),
    "stdin.write": (lambda _, p: p.stdin.write(b"x"), ExecError),
    "stdin.close": (lambda _, p: p.stdin.close(), None),
}


@pytest.fixture(params=["here", "on a server", "of a closed client"])
def sandbox(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Any]:
    server = f"unix:{daemon.socket}"
    if request.param == "here":
        made: Any = Sandbox.create()
    elif request.param == "on a server":
        made = Sandbox.create(server=server)
    else:
        with Client(server) as client:
            made = client.create()
    yield made
    made.terminate()


def test_what_has_ended_answers_alike(sandbox: Any) -> None:
    with sandbox:
        process = sandbox.start(["sh", "-c", "echo said; cat"], stream_stdin=True)
        assert b"said\n" == process.stdout.read(PATIENCE_S)

    for name, (call, wanted) in AFTER.items():
        if isinstance(wanted, type):
            with pytest.raises(wanted):
                call(sandbox, process)
        else:
            assert wanted == call(sandbox, process), name


def test_who_waits_while_another_ends_it_is_told(sandbox: Any) -> None:
    process = sandbox.start(["sh", "-c", "echo said; sleep 1000"])
    assert b"said\n" == process.stdout.read(PATIENCE_S)
    with ThreadPoolExecutor(4) as pool:
        waits = pool.submit(process.wait)
        reads = pool.submit(process.stdout.read)
        runs = pool.submit(sandbox.exec, ["sh", "-c", "touch begun; sleep 1000"])
        while not sandbox.files.exists("begun"):
            continue
        sandbox.terminate()

        assert "terminate" == waits.result(PATIENCE_S).killed_by
        assert b"" == reads.result(PATIENCE_S)
        assert "terminate" == runs.result(PATIENCE_S).killed_by


def test_threads_share_one_sandbox(sandbox: Any) -> None:
    together = threading.Barrier(4)

    def work(number: int) -> tuple[bytes, bytes]:
        together.wait()
        sandbox.files.write(f"file-{number}", b"%d" % number)
        return sandbox.exec(["cat", f"file-{number}"]).stdout, sandbox.files.read(f"file-{number}")

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(4)))
    assert [(b"%d" % number,) * 2 for number in range(4)] == found


@pytest.mark.parametrize("where", ["here", "on a server"])
async def test_the_asynchronous_half_answers_alike(where: str, daemon: Daemon) -> None:
    server: dict[str, Any] = {} if where == "here" else {"server": f"unix:{daemon.socket}"}
    sandbox = await AsyncSandbox.create(**server)
    async with sandbox:
        process = await sandbox.start(["sh", "-c", "echo said; sleep 1000"])
        assert b"said\n" == await process.stdout.read(PATIENCE_S)
        running = asyncio.create_task(sandbox.exec(["sh", "-c", "touch begun; sleep 1000"]))
        while not await sandbox.files.exists("begun"):
            await asyncio.sleep(0.01)
        reading = asyncio.create_task(process.stdout.read())
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    await sandbox.terminate()
    assert "terminated" == sandbox.state
    ended = await process.wait(PATIENCE_S)
    assert (9, "terminate", b"said\n") == (ended.signal, ended.killed_by, ended.stdout)
    assert "terminate" == (await running).killed_by
    for call in (
        lambda: sandbox.exec(["true"]),
        lambda: sandbox.start(["true"]),
        lambda: sandbox.files.read("x"),
        sandbox.capabilities,
        sandbox.suspend,
    ):
        with pytest.raises(LifecycleError):
            await call()
    assert [] == await sandbox.network_log()
    assert await sandbox.protections()
