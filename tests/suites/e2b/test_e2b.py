"""E2B's own SDKs, unmodified, with nothing but environment variables."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2b import (
    AsyncSandbox,
    AuthenticationException,
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    Sandbox,
    SandboxQuery,
    TimeoutException,
)
from tests.suites.remote import serving_e2b

# The SDKs leave the connections of threads to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SUITE = os.environ.get("RINGFENCE_SUITE", "")
NEXT = SUITE.startswith(("e2b-middle", "e2b-next"))


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    """A server, and the variables that a user sets."""
    with serving_e2b():
        yield
        gc.collect()


@pytest.fixture
def box() -> Iterator[Sandbox]:
    """A sandbox of the SDK."""
    with Sandbox.create(timeout=120, metadata={"a": "b"}, envs={"GREETING": "hi"}) as made:
        yield made


def test_five_minutes_are_the_default_of_each_version() -> None:
    with Sandbox.create() as box:
        info = box.get_info()
        assert 299 <= (info.end_at - info.started_at).total_seconds() <= 301
        box.pause()
        assert 299 <= _left_s(box.connect()) <= 301


def _left_s(box: Sandbox) -> float:
    end = box.get_info().end_at
    return float((end - datetime.now(end.tzinfo)).total_seconds())


def test_life(box: Sandbox) -> None:
    info = box.get_info()
    assert {"a": "b"} == info.metadata
    box.set_timeout(30)
    assert box.get_info().end_at < info.end_at
    found = Sandbox.list(query=SandboxQuery(metadata={"a": "b"})).next_items()
    assert box.sandbox_id in [each.sandbox_id for each in found]
    assert box.is_running()
    assert [True, False] == [box.kill(), box.kill()]
    assert not box.is_running()
    with pytest.raises(NotFoundException):
        box.get_info()
    with pytest.raises(TimeoutException):
        box.commands.run("true")


def test_a_wrong_key_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", "e2b_" + "00" * 20)
    with pytest.raises(AuthenticationException):
        Sandbox.create()


def test_commands(box: Sandbox) -> None:
    result = box.commands.run("echo $GREETING; pwd; echo no >&2")
    assert ("hi\n/home/user\n", "no\n") == (result.stdout, result.stderr)
    with pytest.raises(CommandExitException) as failed:
        box.commands.run("exit 3")
    assert 3 == failed.value.exit_code
    with pytest.raises(TimeoutException):
        box.commands.run("sleep 60", timeout=1)
    with pytest.raises(InvalidArgumentException):
        box.commands.run("true", cwd="/nowhere")
    assert "é\n" * 20_000 == box.commands.run("yes é | head -n 20000").stdout


def test_background_commands(box: Sandbox) -> None:
    handle = box.commands.run("cat; echo over", background=True, stdin=True)
    assert handle.pid in [each.pid for each in box.commands.list()]
    box.commands.send_stdin(handle.pid, "line\n")
    again = box.commands.connect(handle.pid)
    seen: list[str] = []
    follower = threading.Thread(target=lambda: again.wait(on_stdout=seen.append))
    follower.start()
    box.commands.send_stdin(handle.pid, "two\n")
    assert not box.commands.kill(1)
    if NEXT:
        box.commands.close_stdin(handle.pid)
        assert "line\ntwo\nover\n" == handle.wait().stdout
    else:
        assert box.commands.kill(handle.pid)
        with pytest.raises(CommandExitException):
            handle.wait()
    follower.join(20)


def test_terminals(box: Sandbox) -> None:
    pty, seen = box.pty.create(PtySize(rows=24, cols=80)), bytearray()
    box.pty.resize(pty.pid, PtySize(rows=50, cols=100))
    box.pty.send_stdin(pty.pid, b"stty size; exit 0\n")
    pty.wait(on_pty=seen.extend)
    assert b"50 100" in seen


def test_files(box: Sandbox) -> None:
    files = box.files
    assert "/home/user/a/b.txt" == files.write("a/b.txt", "text").path
    assert "text" == files.read("a/b.txt")
    assert b"text" == files.read("a/b.txt", format="bytes")
    files.write_files([{"path": f"many/{i}", "data": str(i)} for i in range(20)])
    assert 20 == len(files.list("many"))
    assert [True, False] == [files.make_dir("new"), files.make_dir("new")]
    assert "/home/user/new/c" == files.rename("a/b.txt", "new/c").path
    assert not files.exists("a/b.txt")
    box.commands.run("ln -s new/c link")
    assert "/home/user/new/c" == files.get_info("link").symlink_target
    files.remove("many")
    with pytest.raises(NotFoundException):
        files.read("many/1")
    box.commands.run("head -c 3000000 /dev/zero > zeros")
    pieces = files.read("zeros", format="stream")
    assert 3_000_000 == sum(len(each) for each in pieces)
    if NEXT:
        files.write("zip", "z" * 99_999, gzip=True)
        assert "z" * 99_999 == files.read("zip", gzip=True)


def test_watches(box: Sandbox) -> None:
    box.files.make_dir("seen/in")
    watch = box.files.watch_dir("seen", recursive=True)
    box.files.write("seen/in/file", "1")
    events: list[tuple[str, str]] = []
    until = time.monotonic() + 20
    while ("in/file", "write") not in events and time.monotonic() < until:
        events += [(each.name, each.type.value) for each in watch.get_new_events()]
    watch.stop()
    assert ("in/file", "create") == events[0]
    assert ("in/file", "write") in events


def test_signed_urls(box: Sandbox) -> None:
    box.files.write("a", "first")
    url = box.download_url("a", use_signature_expiration=60)
    assert "first" == httpx.get(url).text
    assert 401 == httpx.get(url.replace("path=a", "path=b")).status_code
    sent = httpx.post(box.upload_url("b"), files={"file": b"second"})
    assert (200, "second") == (sent.status_code, box.files.read("b"))


def test_pause_and_snapshots(box: Sandbox) -> None:
    handle = box.commands.run("sleep 30", background=True)
    box.files.write("kept", "yes")
    (box.pause if NEXT else box.beta_pause)()
    assert not box.is_running()
    again = Sandbox.connect(box.sandbox_id, timeout=60)
    assert handle.pid in [each.pid for each in again.commands.list()]
    if not hasattr(box, "create_snapshot"):
        return
    saved = box.create_snapshot()
    with Sandbox.create(saved.snapshot_id) as restored:
        assert "yes" == restored.files.read("kept")
    assert Sandbox.delete_snapshot(saved.snapshot_id)


def test_metrics_and_metadata(box: Sandbox) -> None:
    """Without a cgroup only programs count: an idle sandbox uses no memory."""
    box.commands.run("sleep 60", background=True)
    until = time.monotonic() + 30
    while box.get_metrics()[-1].mem_used == 0:
        assert time.monotonic() < until
        time.sleep(0.1)  # a sample younger than a second is not taken anew
    if NEXT:
        box.files.write("m", "1", metadata={"Kind": "a b"})
        assert {"kind": "a b"} == box.files.get_info("m").metadata
        box.files.write("m", "2")
        assert not box.files.get_info("m").metadata


def test_git(box: Sandbox) -> None:
    script = "git init -q r && cd r && git -c user.name=a -c user.email=b commit -q --allow-empty"
    box.commands.run(f"{script} -m first")
    assert "first\n" == box.commands.run("git log --format=%s", cwd="r").stdout


def test_the_asynchronous_sdk() -> None:
    asyncio.run(_work())


async def _work() -> None:
    box = await AsyncSandbox.create(timeout=60)
    seen: list[str] = []
    result = await box.commands.run("echo one; echo two", on_stdout=seen.append)
    assert "one\ntwo\n" == result.stdout == "".join(seen)
    events: list[Any] = []
    await box.files.make_dir("w")
    watch = await box.files.watch_dir("w", on_event=events.append)
    await box.files.write("w/f", "1")
    until = time.monotonic() + 20
    while not events and time.monotonic() < until:
        await box.commands.run("true")
    await watch.stop()
    assert "f" == events[0].name
    assert await box.kill()


def test_fifty_clients_at_once() -> None:
    def work(i: int) -> str:
        with Sandbox.create(timeout=60) as made:
            made.files.write("n", str(i))
            return str(made.commands.run("cat n").stdout)

    with ThreadPoolExecutor(50) as pool:
        assert [str(i) for i in range(50)] == [*pool.map(work, range(50))]


def test_the_code_interpreter() -> None:
    if not NEXT:
        return
    from e2b_code_interpreter import Sandbox as Interpreter

    with Interpreter.create(timeout=60) as box:
        execution = box.run_code("x = 20\nprint('out')\nx + 1")
        assert ("21", ["out\n"]) == (execution.text, execution.logs.stdout)
        assert "ZeroDivisionError" == box.run_code("1/0").error.name
        context = box.create_code_context(cwd="/tmp")
        assert "/tmp" == box.run_code("import os; os.getcwd()", context=context).text
        with pytest.raises(TimeoutException):
            box.run_code("import time; time.sleep(60)", timeout=1)
        assert "20" == box.run_code("x").text


def test_the_javascript_sdk() -> None:
    if not SUITE.startswith("e2b-next"):
        return
    modules = Path(os.environ["RINGFENCE_SUITE_NPM"]) / "node_modules"
    sdk = modules / "@e2b/code-interpreter/dist/index.mjs"
    command = [os.environ["RINGFENCE_SUITE_NODE"], str(Path(__file__).with_name("sdk.mjs"))]
    done = subprocess.run(
        command,
        check=False,
        env={**os.environ, "SUITE_SDK": str(sdk)},
        capture_output=True,
        text=True,
    )
    assert "" == done.stderr
    seen = json.loads(done.stdout)
    lines = str(len(Path(command[1]).read_text().splitlines()))
    assert [lines, lines, ""] == seen.pop("built")
    assert {
        "running": True,
        "state": "running",
        "command": ["out\n", "err\n", 0],
        "failed": ["CommandExitError", 4],
        "stdin": "line\n",
        "names": ["one", "two"],
        "gzip": 9999,
        "events": ["create", True],
        "pty": True,
        "code": "21",
        "contexts": 3,  # of Python and JavaScript from the start, and its own
        "download": "1",
        "upload": 200,
        "uploaded": "up",
        "paused": True,
        "back": "back\n",
        "listed": 1,
        "killed": True,
        "after": False,
        "exists": [True, False],
    } == seen
