"""A remote sandbox does what a local one does."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import signal
import ssl
import threading
from pathlib import Path

import pytest

from ringfence import AsyncSandbox, Limits, Sandbox
from ringfence.client import AsyncClient, Client, RemoteSandbox
from ringfence.client.address import Address
from ringfence.errors import (
    InvalidRequest,
    LifecycleError,
    RingfenceError,
    SandboxNotFound,
    ServerUnreachable,
    Unauthenticated,
)
from ringfence.model.state import State
from tests.api.conftest import Daemon, StartDaemon

pytestmark = pytest.mark.anyone


def test_exec_has_everything(sandbox: RemoteSandbox) -> None:
    pieces: list[bytes] = []
    result = sandbox.exec(
        ["sh", "-c", 'echo "$W $PWD"; cat; echo e >&2; exit 3'],
        cwd="/tmp",
        env={"W": "w"},
        stdin=b"\xff\n",
        timeout_s=20,
        max_output_bytes=1000,
        on_stdout=pieces.append,
    )

    assert (3, b"w /tmp\n\xff\n", b"e\n") == (result.exit_code, result.stdout, result.stderr)
    assert b"w /tmp\n\xff\n" == b"".join(pieces)
    assert "root" not in sandbox.shell("id -un").stdout_text
    assert sandbox.shell("sleep 60", timeout_s=0.2).timed_out


def test_what_has_ended_still_tells_what_it_was(client: Client) -> None:
    """As a local one does: how many were started is known, and not zero."""
    sandbox = client.create()
    sandbox.exec([Path("/bin/true")], cwd=Path("/tmp"))
    sandbox.shell("exit 3")
    sandbox.terminate()

    stats = sandbox.stats()
    assert (State.TERMINATED, 2) == (stats.state, stats.execs)


def test_errors_are_the_same_classes(client: Client, sandbox: RemoteSandbox) -> None:
    with pytest.raises(InvalidRequest) as refused:
        sandbox.exec(["true"], user="nobody-of-that-name")
    assert "user" == refused.value.field
    with pytest.raises(InvalidRequest):
        client.create(mounts=["/no/such/place:/data:ro"])
    with pytest.raises(SandboxNotFound):
        client.get("sbx-nothing")
    sandbox.terminate()
    with pytest.raises(LifecycleError):
        sandbox.exec(["true"])
    assert "terminated" == sandbox.state


def test_stats_of_what_has_ended_are_answered_alike(sandbox: RemoteSandbox) -> None:
    with Sandbox.create() as local:
        pass
    sandbox.terminate()

    for over in (local, sandbox):
        assert ("terminated", 0) == (over.stats().state, over.stats().pids)


def test_a_background_process_outlives_its_client(daemon: Daemon, sandbox: RemoteSandbox) -> None:
    started = sandbox.start(["sh", "-c", "echo one; read x; echo got $x"], stream_stdin=True)
    with Client(f"unix:{daemon.socket}") as other:
        process = other.get(sandbox.id).process(started.id)
        assert b"one\n" == process.stdout.read(timeout_s=20)
        assert process.running
        with pytest.raises(TimeoutError):
            process.stdout.read(timeout_s=0.05)
        with pytest.raises(TimeoutError):
            process.wait(0.05)
        assert started.stdin is not None
        started.stdin.write(b"two\n")
        started.stdin.close()
        assert ["got two"] == list(process.stdout.lines())
        assert b"one\ngot two\n" == process.wait(20).stdout
    assert not started.running
    assert b"one\ngot two\n" == started.stdout.getvalue()


def test_signals_kills_terminals_and_callbacks(sandbox: RemoteSandbox) -> None:
    trap = sandbox.start(["sh", "-c", "trap 'exit 7' TERM; echo up; while :; do sleep 0.01; done"])
    assert b"up\n" == trap.stdout.read(20)
    trap.terminate()
    assert 7 == trap.wait(20).exit_code
    sleeper = sandbox.start(["sleep", "60"])
    sleeper.kill()
    assert signal.SIGKILL == sleeper.wait(20).signal

    came = threading.Event()
    shown: list[bytes] = []

    def see(data: bytes) -> None:
        shown.append(data)
        if b"30 100" in b"".join(shown):
            came.set()

    terminal = sandbox.start(["sh", "-c", "tty; read x; stty size"], pty=(24, 80), on_stdout=see)
    terminal.resize(30, 100)
    assert terminal.stdin is not None
    terminal.stdin.write(b"\n")
    assert came.wait(20), shown
    assert b"/dev/pts/" in b"".join(shown)
    assert 0 == terminal.wait(20).exit_code


def test_describing_and_changing(client: Client, tmp_path: Path) -> None:
    with client.create(name="mine", labels={"team": "a"}, ttl_s=600) as sandbox:
        assert ("mine", "a") == (sandbox.view.name, sandbox.session.metadata["team"])
        assert [sandbox.id] == [each.id for each in client.list(labels={"team": "a"})]
        assert [] == client.list(labels={"team": "b"})
        assert sandbox.mount(":/scratch:rw").target == "/scratch"
        assert sandbox.shell("touch /scratch/x").ok
        sandbox.suspend()
        assert "suspended" == sandbox.state
        sandbox.resume()
        assert sandbox.stats().execs >= 1
        assert "no_new_privs" in {each.name for each in sandbox.protections()}
        assert sandbox.capabilities().syscall_filter_active
        assert (sandbox.extend(1000).expires_in_s or 0) > 900
        changed = sandbox.update(name="other", labels={"a": "b", "team": None})
        assert ("other", {"a": "b"}) == (changed.name, changed.labels)
        assert ("other", {}) == (sandbox.update(labels={"a": None}).name, sandbox.view.labels)
        assert [] == sandbox.network_log()
        assert sandbox.learned_policy().is_none
        sandbox.shell("echo kept > ~/file")
        taken = sandbox.snapshot({"of": "mine"})
    assert taken.id in [each.id for each in client.snapshots()]
    with client.restore(taken.id) as again:
        assert "kept\n" == again.shell("cat ~/file").stdout_text
    client.delete_snapshot(taken.id)


def test_one_key_makes_one_sandbox(client: Client) -> None:
    first = client.create(idempotency_key="one")
    with client.create(idempotency_key="one") as second:
        assert first.id == second.id


def test_a_local_call_with_one_argument_more(daemon: Daemon) -> None:
    with Sandbox.create(labels={"a": "b"}, server=f"unix:{daemon.socket}") as sandbox:
        assert isinstance(sandbox, RemoteSandbox)
        assert "hello\n" == sandbox.exec(["echo", "hello"]).stdout_text


async def test_the_asynchronous_half(async_client: AsyncClient, daemon: Daemon) -> None:
    async with await async_client.create() as sandbox:
        many = await asyncio.gather(*(sandbox.exec(["echo", str(i)]) for i in range(8)))
        assert [f"{i}\n" for i in range(8)] == [each.stdout_text for each in many]
        process = await sandbox.start(["sh", "-c", "echo a; echo b"])
        assert ["a", "b"] == [line async for line in process.stdout.lines()]
        assert (await process.wait()).ok
        assert sandbox.state == "running"
    async with await AsyncSandbox.create(server=f"unix:{daemon.socket}") as other:
        assert (await other.shell("true")).ok


async def test_a_cancelled_exec_is_killed(async_client: AsyncClient) -> None:
    async with await async_client.create() as sandbox:
        task = asyncio.create_task(sandbox.exec(["sleep", "61"]))
        while not await sandbox.execs():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (told,) = await sandbox.execs()
        assert not told.running or not (await (await sandbox.process(told.id)).wait(20)).ok
        assert "" == (await sandbox.shell("pgrep -x sleep || true")).stdout_text


async def test_a_cancelled_exec_leaves_its_place_to_the_next(async_client: AsyncClient) -> None:
    limits = Limits(pids=1)
    async with await async_client.create(limits=limits, allow_degraded=("*",)) as sandbox:
        for turn in range(20):
            task = asyncio.create_task(sandbox.exec(["sleep", "1000"]))
            for _ in range(turn % 4 + 1):  # what is cancelled again is seen through all the same
                await asyncio.sleep(turn / 1000)
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await sandbox.exec(["true"])).ok


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.005, 0.02])
async def test_what_a_cancelled_call_made_is_ended(
    async_client: AsyncClient, delay_s: float
) -> None:
    task = asyncio.create_task(async_client.create(name="cut"))
    await asyncio.sleep(delay_s)
    task.cancel()
    try:
        await (await task).terminate()  # it was quicker
    except asyncio.CancelledError:
        pass
    assert [] == await async_client.list(name="cut")


def test_the_same_under_trio(daemon: Daemon) -> None:
    import trio

    async def main() -> list[object]:
        async with AsyncClient(f"unix:{daemon.socket}") as client:
            for delay_s in (0.0, 0.001, 0.005, 0.02):
                with trio.move_on_after(delay_s):
                    await client.create(name="cut under trio")
                    break
            found = await client.list(name="cut under trio")
            for each in found:
                await (await client.get(each.id)).terminate()
            return list(found[1:])  # the one that was quicker is not to be ended by us

    assert [] == trio.run(main)


def test_it_is_the_same_under_trio(daemon: Daemon) -> None:
    import trio

    async def main() -> str:
        async with AsyncClient(f"unix:{daemon.socket}") as client, await client.create() as sandbox:
            return (await sandbox.exec(["echo", "trio"])).stdout_text

    assert "trio\n" == trio.run(main)


# httpcore2 leaves a unix socket that did not connect to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_nobody_there_is_said(tmp_path: Path) -> None:
    client = Client(f"unix:{tmp_path}/none.sock", retries=0)
    with client, pytest.raises(ServerUnreachable, match="start it with `ringfence serve`"):
        client.health()
    gc.collect()
    for text in ("ftp://x", "unix:relative", "localhost:80"):
        with pytest.raises(InvalidRequest):
            Client(text)


def test_keys_over_tcp(start_daemon: StartDaemon) -> None:
    daemon = start_daemon("--listen", "127.0.0.1:0")
    with Client(f"unix:{daemon.socket}") as admin:
        made = admin.make_key("team", name="ci")
        assert ["ci"] == [each["name"] for each in admin.keys()]  # noqa: SIM118
        with Client(daemon.tcp, key=made["key"]) as user:
            assert ("team", False) == (user.info()["client"], user.info()["is_admin"])
            with user.create() as sandbox:
                assert "over tcp\n" == sandbox.exec(["echo", "over tcp"]).stdout_text
                assert [sandbox.id] == [each.id for each in user.list()]
            with pytest.raises(RingfenceError):
                user.make_key("other")
        again = admin.rotate_key(made["id"])
        assert (made["id"], True) == (again["id"], again["key"] != made["key"])
        admin.delete_key(made["id"])
    with Client(daemon.tcp, key=made["key"]) as late, pytest.raises(Unauthenticated):
        late.list()


def test_executions(client: Client) -> None:
    done = client.execute("sh", "-c", "cat; exit 4", stdin=b"in")
    assert ("failed", 4, b"in") == (done.status, done.exit_code, done.stdout)
    assert done == client.execution(done.id) == client.kill_execution(done.id)
    assert client.execution_info().tiers[0].supported
    assert 50 == client.configure_executions(max_processes=50).max_processes


def test_repeating_is_only_for_what_is_safe() -> None:
    """A server that hangs up: a GET is asked again, a command is not."""
    import socket

    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                with peer:
                    asked.append(peer.recv(65536).split(b" ", 1)[0])

        thread = threading.Thread(target=serve)
        thread.start()
        with Client(f"http://127.0.0.1:{listener.getsockname()[1]}", retries=2) as client:
            with pytest.raises(ServerUnreachable):
                client.health()
            with pytest.raises(ServerUnreachable):
                client.create()
            transport = client._transport
            with pytest.raises(ServerUnreachable):
                transport.json("POST", "/v1/sandboxes/x/execs", body={})
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert [b"GET"] * 3 + [b"POST"] * 3 + [b"POST"] == asked


LARGE = b"0123456789abcdef" * ((40 << 20) // 16)


@pytest.mark.full
def test_input_may_be_larger_than_a_request(sandbox: RemoteSandbox) -> None:
    """Written in pieces; who reads little of it, or nothing, ends as it does without a server."""
    pieces: list[bytes] = []
    whole = sandbox.exec(["sha256sum"], stdin=LARGE, on_stdout=pieces.append)
    part = sandbox.exec(["head", "-c", "3"], stdin=LARGE)
    none = sandbox.exec(["sh", "-c", "exit 3"], stdin=LARGE)
    late = sandbox.exec(["sleep", "60"], stdin=LARGE, timeout_s=0.3)
    process = sandbox.start(["wc", "-c"], stdin=LARGE)

    assert f"{hashlib.sha256(LARGE).hexdigest()}  -\n".encode() == whole.stdout == b"".join(pieces)
    assert (b"012", 3, True) == (part.stdout, none.exit_code, late.timed_out)
    assert (None, f"{len(LARGE)}\n") == (process.stdin, process.wait().stdout_text)


async def test_large_input_and_reading_what_is_there(async_client: AsyncClient) -> None:
    """`read(0)` waits for nothing, here as in `AsyncSandbox`."""
    async with await async_client.create() as remote, await AsyncSandbox.create() as local:
        assert f"{len(LARGE)}\n" == (await remote.exec(["wc", "-c"], stdin=LARGE)).stdout_text
        for sandbox in (remote, local):
            process = await sandbox.start(["sh", "-c", "echo said; read wait"], stream_stdin=True)
            with pytest.raises(TimeoutError):
                await process.stderr.read(0)
            said = b""
            while not said:
                with contextlib.suppress(TimeoutError):
                    said = await process.stdout.read(0)
                await asyncio.sleep(0)
            assert b"said\n" == said
            assert process.stdin is not None
            await process.stdin.close()
            await process.wait()
            assert b"" == await process.stdout.read(0)


def test_only_what_needs_certificates_reads_them(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the public authorities takes 50 ms: once for all clients that ask `https:`."""
    http, unix = Address.parse("http://localhost:1"), Address.parse(f"unix:{daemon.socket}")
    https = Address.parse("https://localhost:1")

    assert https.tls_context() is Address.parse("https://other").tls_context()
    assert https.tls_context().check_hostname
    for address in (http, unix):
        assert address.tls_context() is not https.tls_context()
        assert {"crl": 0, "x509": 0, "x509_ca": 0} == address.tls_context().cert_store_stats()
        assert ssl.CERT_REQUIRED == address.tls_context().verify_mode
    monkeypatch.setattr(ssl, "create_default_context", None)
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", None)
    with Client(f"unix:{daemon.socket}") as client:
        assert client.health().ok
