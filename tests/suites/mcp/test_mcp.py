"""The conformance suite of the protocol over our own app, and what our tools do over both transports."""

from __future__ import annotations

import base64
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import uvicorn
from mcp.client.client import Client
from mcp.client.session import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from ringfence.images.archive import load
from ringfence.images.store import ImageStore
from ringfence.integrations.mcp import server as serving
from ringfence.integrations.origin import Origin
from ringfence.model.mount import OUTPUTS_DIR
from tests.contexts import ten, test_driven
from tests.docs.blocks import blocks_of
from tests.images.conftest import small
from tests.suites import at_once, imports, left, remote
from tests.suites.examples import output_of
from tests.suites.mcp import asking, plain
from tests.suites.places import backend, options

pytestmark = pytest.mark.anyio

FIXTURES = (
    plain.add_content,
    plain.add_logging,
    plain.add_resources,
    plain.add_prompts,
    asking.add_requests,
    asking.add_input_required,
)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


def origin(**more: Any) -> Origin:
    """Where the sandboxes of this run come from."""
    wanted = options(**more)
    return Origin(wanted, wanted.pop("server", None))


class Serving(threading.Thread):
    """uvicorn on a port of its own."""

    def __init__(self, app: Any) -> None:
        super().__init__()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/mcp"
        self.uvicorn = uvicorn.Server(uvicorn.Config(app, log_level="error"))

    def run(self) -> None:
        self.uvicorn.run(sockets=[self.listener])

    def __enter__(self) -> str:
        self.start()
        return self.url

    def __exit__(self, *_exc: object) -> None:
        self.uvicorn.should_exit = True
        self.join()
        self.listener.close()


@pytest.fixture
def with_fixtures() -> Iterator[str]:
    server = serving.make_server(origin(), shared=False)
    for add in FIXTURES:
        add(server)
    with Serving(serving.http_app(server, host="127.0.0.1", token="")) as url:
        yield url


@pytest.mark.once  # it is about the protocol: no sandbox is made
@pytest.mark.parametrize(("revision", "scenarios"), [("2025-11-25", 30), ("2026-07-28", 37)])
def test_conformance(with_fixtures: str, tmp_path: Path, revision: str, scenarios: int) -> None:
    script = Path(os.environ["RINGFENCE_SUITE_NPM"]) / "node_modules/@modelcontextprotocol"
    run = subprocess.run(
        [
            os.environ["RINGFENCE_SUITE_NODE"],
            str(script / "conformance/dist/index.js"),
            *("server", "--url", with_fixtures, "--requirements", revision),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    summary, _, unscored = run.stdout.partition("=== SUMMARY ===")[2].partition("Not scored")
    passed = set(re.findall(r"^✓ (\S+):", summary, re.MULTILINE))
    others = set(re.findall(r"^ +[✓✗] (\S+)", unscored, re.MULTILINE))

    assert 0 == run.returncode, run.stdout[-6000:]
    assert scenarios == len(passed - others)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Serving(serving.http_app(origin(), host="127.0.0.1", token="")) as url:
        yield url


@asynccontextmanager
async def over_http(url: str) -> AsyncIterator[ClientSession]:
    """A session that the server knows, as of 2025-11-25."""
    async with (
        streamable_http_client(url) as streams,
        ClientSession(streams[0], streams[1]) as session,
    ):
        await session.initialize()
        yield session


@asynccontextmanager
async def over_stdio(*arguments: str) -> AsyncIterator[ClientSession]:
    """The command, as a client starts it."""
    chosen = [word for name, value in options().items() for word in (f"--{name}", value)]
    parameters = StdioServerParameters(
        command="ringfence", args=["mcp", *chosen, *arguments], env=dict(os.environ)
    )
    async with stdio_client(parameters) as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        yield session


async def call(session: ClientSession, tool: str, **arguments: Any) -> dict[str, Any]:
    result = await session.call_tool(tool, arguments)
    assert not result.is_error, result.content
    return dict(result.structured_content or {})


async def run(session: ClientSession, command: str, **arguments: Any) -> str:
    return str((await call(session, "run_command", command=command, **arguments))["stdout"])


DRAWING = """
class Drawing:
    def _repr_png_(self): return b"\\x89PNG\\r\\n\\x1a\\n"
Drawing()
"""


async def test_the_command_over_stdio(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    async with over_stdio("--mount", f"{tmp_path}:/work:rw", "--workdir", "/work") as session:
        tools = {tool.name: tool for tool in (await session.list_tools()).tools}
        await call(session, "write_file", path="step.py", content="print(6 * 7)")
        await call(session, "edit_file", path="step.py", old="7", new="8")
        answer = await call(session, "run_command", command="python step.py; pwd >&2; exit 3")
        await call(session, "run_code", code="x = 1")
        code = await call(session, "run_code", code="print(1 + 1)\nx + 41")
        failed = await call(session, "run_code", code="1/0")
        shell = await call(session, "run_code", code="echo $((6 * 7))", language="bash")
        late = await call(session, "run_code", code="while True: pass", timeout_s=0.5)
        drawn = await session.call_tool("run_code", {"code": DRAWING})
        read = await call(session, "read_file", path="/work/step.py")
        listed = await call(session, "list_files")

    assert ("48\n", "/work\n", 3) == (answer["stdout"], answer["stderr"], answer["exit_code"])
    assert ("2\n", "42", "print(6 * 8)") == (code["stdout"], code["result"], read["content"])
    assert (1, 124, "42\n") == (failed["exit_code"], late["exit_code"], shell["stdout"])
    assert "ZeroDivisionError" in failed["stderr"]
    assert ["text", "image"] == [each.type for each in drawn.content]
    assert "step.py" in [entry["name"] for entry in listed["entries"]]
    assert b"print(6 * 8)" == (tmp_path / "step.py").read_bytes()
    assert all(tool.annotations for tool in tools.values())
    assert ["fetch_outputs"] == [name for name, tool in tools.items() if not tool.output_schema]


async def test_ten_cells() -> None:
    """As of `tests.contexts`, but for `input`, which no tool can answer."""
    async with over_stdio() as session:

        async def run(code: str) -> Any:
            return await call(session, "run_code", code=code, timeout_s=120)

        await run(ten.SETUP)
        drawn = await session.call_tool("run_code", {"code": "draw()", "timeout_s": 120})
        assert "image" in [each.type for each in drawn.content]
        assert "42" == (await run("6 * 7"))["result"]
        assert (await run("DataFrame({'a': [1]})"))["result"]
        assert "ZeroDivisionError" in (await run("1 / 0"))["stderr"]
        assert "StdinNotAvailable" in (await run("input()"))["stderr"]
        assert "5" == (await run("import asyncio\nawait asyncio.sleep(0, 5)"))["result"]
        await run(ten.PIP)
        assert "10" == (await run("import tenth; tenth.value"))["result"]
        assert "characters are left out" in (await run("print('x' * 5_000_000)"))["stdout"]
        assert "sub\n" == (await run("subprocess.run(['echo', 'sub']);"))["stdout"]
        script = await call(session, "run_code", code="const x = 41; x + 1", language="javascript")
        assert "42" == script["result"]
        for language, each in test_driven.CODE.items():
            there = f"command -v {each.program}"
            if (await call(session, "run_command", command=there))["stdout"]:
                await call(session, "run_code", code=each.keep, language=language, timeout_s=120)
                code = next(iter(each.values))
                found = await call(session, "run_code", code=code, language=language)
                assert each.values[code] == found["result"]


@pytest.mark.here
async def test_the_command_with_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFENCE_IMAGES", str(tmp_path / "images"))
    made = small().as_layout(tmp_path / "layout")
    load(made, "small:1", store=ImageStore())

    async with over_stdio("--image", "small:1", "--pull", "never") as session:
        assert "ID=small\n" == await run(session, "cat /etc/os-release")


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--image", "nowhere:1", "--pull", "never"), "nowhere:1"),
        (("--image", "small:1", "--pull", "often"), "'often' does not say when"),
        (("--pull", "always"), "needs --image"),
        (
            ("--server", "unix:/nowhere", "--image", "small:1", "--pull", "always"),
            "does not fetch images",
        ),
    ],
)
def test_images_that_cannot_be_had(tmp_path: Path, arguments: tuple[str, ...], why: str) -> None:
    answer = subprocess.run(
        ["ringfence", "mcp", *arguments],
        env={**os.environ, "RINGFENCE_IMAGES": str(tmp_path / "images")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (125, "") == (answer.returncode, answer.stdout)
    assert why in answer.stderr


async def test_the_sandbox_goes_on_as_the_copy_of_the_command_that_won(url: str) -> None:
    async with over_http(url) as session:
        await run(session, "echo old > a")
        await call(session, "run_code", code="kept = 5")
        none = await call(session, "race_commands", commands=["echo 1 > a; exit 3", "exit 4"])
        unchanged = await run(session, "cat a")
        commands = ["echo lost > a; exit 1", "echo won > a; cat a", "echo late > a; sleep 4352"]
        found = await call(session, "race_commands", commands=commands)
        kept = await run(session, "cat a")
        gone = await run(session, left.look(4352))
        value = await call(session, "run_code", code="print(kept)")
        await call(session, "reset")

    # A fork of gVisor has the files alone: the context begins anew.
    assert ("gvisor" == backend()) is ("5" not in value["stdout"])
    assert ["[exit code 3]", "[exit code 4]"] == none["outputs"]
    assert ("old\n", "won\n", "none\n") == (unchanged, kept, gone)
    assert 1 == found["winner"]
    assert "won" == found["outputs"][1]


async def test_processes_outputs_and_reset(url: str) -> None:
    async with over_http(url) as session:
        name = (await call(session, "start_process", command="echo up; sleep 4351"))["process"]
        seen = await call(session, "watch_process", process=name, wait_s=30)
        stopped = await call(session, "stop_process", process=name)
        gone = await run(session, left.look(4351))
        await run(session, "echo made > $RINGFENCE_OUTPUTS_DIR/a.txt")
        outputs = await session.call_tool("fetch_outputs", {})
        await call(session, "reset")
        fresh = await run(session, "ls $RINGFENCE_OUTPUTS_DIR")

    assert ("up\n", True) == (seen["stdout"], seen["running"])
    assert (False, 137) == (stopped["running"], stopped["exit_code"])
    assert ("none\n", "") == (gone, fresh)
    assert "made\n" == outputs.content[1].resource.text


async def test_errors_are_for_the_model(url: str) -> None:
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("read_file", {"path": "/nothing"}, "No such file"),
        ("edit_file", {"path": "twice", "old": "a", "new": "b"}, "2 times"),
        ("run_command", {"command": "pwd", "cwd": "/nope"}, "/nope: No such file"),
        ("run_command", {"command": "a\0b"}, "NUL"),
        # gVisor has no bound of one argument: there the shell says that the name is too long.
        *([] if "gvisor" == backend() else [("run_command", {"command": "x" * 200_000}, "131")]),
        ("start_process", {"command": "pwd", "cwd": "/nope"}, "/nope: No such file"),
        ("run_command", {"command": "pwd", "workdir": "/"}, "no argument 'workdir'"),
        ("run_command", {"command": "pwd", "timeout_s": 0}, "timeout_s: Input should be"),
        ("run_command", {"command": "pwd", "sandbox": "other"}, "leave `sandbox` empty"),
        ("watch_process", {"process": "p9"}, "there are none"),
    ]
    async with over_http(url) as session:
        await call(session, "write_file", path="twice", content="a a")
        for tool, arguments, why in wrong:
            answer = await session.call_tool(tool, arguments)
            text = answer.content[0].text
            assert answer.is_error, tool
            assert why in text
            assert (1, True) == (len(text.splitlines()), len(text) < 300), text


async def test_answers_are_short(url: str) -> None:
    async with over_http(url) as session:
        plain = await session.call_tool("run_command", {"command": "echo 5050"})
        failed = await session.call_tool("run_command", {"command": "echo no >&2; exit 3"})
        await run(session, "mkdir d d/sub; echo 12345 > d/f; ln -s f d/l")
        listed = await session.call_tool("list_files", {"path": "d"})
        ended = await session.call_tool("start_process", {"command": "echo up; exit 4"})
        said = ended.content[0].text
        while (more := await call(session, "watch_process", process="p1"))["running"]:
            said += str(more)
        said += str(more)
        tools = (await session.list_tools()).tools

    assert ("5050", {"stdout": "5050\n", "exit_code": 0}) == (
        plain.content[0].text,
        plain.structured_content,
    )
    assert "no\n[exit code 3]" == failed.content[0].text
    assert ["f 6", "l -> f", "sub/"] == sorted(listed.content[0].text.splitlines())
    assert "up" in said
    assert 12_500 > sum(len(tool.model_dump_json(exclude_none=True)) for tool in tools)
    assert all(tool.input_schema["additionalProperties"] is False for tool in tools)


async def test_a_large_file_is_read_in_parts_that_cut_no_character(url: str) -> None:
    whole, parts = "\u20ac" * 50_000, []
    offset: int | None = 0
    async with over_http(url) as session:
        await call(session, "write_file", path="large", content=whole)
        while offset is not None:
            part = await call(session, "read_file", path="large", offset=offset)
            assert "utf-8" == part.get("encoding", "utf-8")
            parts.append(part["content"])
            offset = part.get("next_offset")
        few = await session.call_tool("read_file", {"path": "large", "limit": 6})

    assert whole == "".join(parts)
    assert 3 == len(parts)
    assert "\u20ac\u20ac\n[150000 bytes in all; the rest from offset 6]" == few.content[0].text


PIXEL = (
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\b\6\0\0\0\x1f\x15\xc4\x89\0\0\0\rIDATx\x9cc"
    b"\xf8\xcf\xc0\0\0\3\1\1\0\xc9\xfe\x92\xef\0\0\0\0IEND\xaeB`\x82"
)


async def test_an_image_comes_as_one(url: str) -> None:
    content = base64.b64encode(PIXEL + b"\0" * 100_000).decode()
    async with over_http(url) as session:
        for path in ("a.png", f"{OUTPUTS_DIR}/a.png"):
            await call(session, "write_file", path=path, content=content, encoding="base64")
        read = await session.call_tool("read_file", {"path": "a.png"})
        outputs = await session.call_tool("fetch_outputs", {})
        binary = await call(session, "read_file", path="a.png", offset=1, limit=200)

    for answer in (read, outputs):
        image = answer.content[-1]
        assert ("image", "image/png", content) == (image.type, image.mime_type, image.data)
    assert 200 > len(str(read.structured_content))
    assert ("base64", 201) == (binary["encoding"], binary["next_offset"])


async def test_sessions_do_not_meet(url: str) -> None:
    async with over_http(url) as one, over_http(url) as other:
        await run(one, "echo secret > /tmp/mine; sleep 4352 >/dev/null 2>&1 &")
        assert "secret\n" == await run(one, "cat /tmp/mine")
        assert "none\n" == await run(other, f"cat /tmp/mine; {left.look(4352)}")


async def test_without_sessions_the_sandbox_has_a_name(url: str) -> None:
    """Protocol 2026-07-28."""
    async with Client(url, mode="2026-07-28") as client:
        first = await client.call_tool("run_command", {"command": "echo mine > a; cat a"})
        name = first.structured_content["sandbox"]
        again = await client.call_tool("read_file", {"path": "a", "sandbox": name})
        other = await client.call_tool("read_file", {"path": "a"})
        guessed = await client.call_tool("read_file", {"path": "a", "sandbox": "x" * len(name)})
        await client.call_tool("reset", {"sandbox": name})
        after = await client.call_tool("read_file", {"path": "a", "sandbox": name})

    assert "mine\n" == again.structured_content["content"]
    assert [True] * 3 == [answer.is_error for answer in (other, guessed, after)]
    assert "it has ended" in after.content[0].text


async def test_long_work_tells_how_far_it_is(url: str) -> None:
    told: list[str | None] = []

    async def tell(_progress: float, _total: float | None, message: str | None) -> None:
        told.append(message)

    async with over_http(url) as session:
        # Ends itself once the first notification is on its way.
        command = {"command": "echo step one; sleep 2.5"}
        await session.call_tool("run_command", command, progress_callback=tell)
    assert told == ["running: step one"]


async def test_an_agents_loop(url: str) -> None:
    """A command that takes too long, one that is cancelled, and what they left: nothing."""
    async with over_http(url) as session:
        with anyio.move_on_after(120) as scope:
            late = await call(
                session, "run_command", command="setsid sleep 4352 & wait", timeout_s=2
            )
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run, session, "echo > /tmp/began; setsid sleep 4353 & wait")
                while "began" not in await run(session, "ls /tmp"):
                    await anyio.sleep(0.05)
                tasks.cancel_scope.cancel()
            for seconds in (4352, 4353):
                while "none\n" != await run(session, left.look(seconds)):
                    await anyio.sleep(0.05)
    assert late["timed_out"]
    assert not scope.cancelled_caught


@pytest.mark.once  # the host does not see what runs in gVisor
async def test_a_session_that_ends_takes_its_sandbox_along(url: str, tmp_path: Path) -> None:
    marker = "sleep 4354"
    async with over_http(url) as session:
        await call(session, "start_process", command=marker)
        while not _runs(marker):
            await anyio.sleep(0.05)
    while _runs(marker):
        await anyio.sleep(0.05)


def _runs(marker: str) -> bool:
    wanted = marker.replace(" ", "\0").encode()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if entry.read_bytes().rstrip(b"\0") == wanted:
                return True
        except OSError:
            continue
    return False


@pytest.mark.once
async def test_without_the_token_nobody_comes_in() -> None:
    import httpx2

    with Serving(serving.http_app(origin(), host="127.0.0.1", token="t0p")) as url:
        async with httpx2.AsyncClient() as client:
            refused = [
                (await client.post(url, json={}, headers=headers)).status_code
                for headers in ({}, {"authorization": "Bearer t0q"})
            ]
            let_in = await client.post(url, json={}, headers={"authorization": "Bearer t0p"})
    assert [401, 401] == refused
    assert 401 != let_in.status_code


# What any user of the machine can try: the port is open to all, the token is not.
STRANGER = """
import os, sys, urllib.request, urllib.error
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
url, *token = sys.argv[1:]
body = b'{"jsonrpc":"2.0","id":1,"method":"tools/list"}'
headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
headers |= {"authorization": f"Bearer {each}" for each in token}
try:
    print(urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60).status)
except urllib.error.HTTPError as exc:
    print(exc.code)
"""


@pytest.mark.once
@pytest.mark.parametrize("given", ["", "a token of the user's own"])
def test_another_user_of_the_machine_is_refused(given: str, tmp_path: Path) -> None:
    """Without a token one is made, and told to whoever started the server alone."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen(
        ["ringfence", "mcp", "--http", f"127.0.0.1:{port}"],
        env={**os.environ, "RINGFENCE_MCP_TOKEN": given},
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stderr is not None
            token = given or server.stderr.readline().rpartition("Bearer ")[2].strip()
            assert len(token) > 20
            deadline_s = time.monotonic() + 60
            while time.monotonic() < deadline_s:
                with socket.socket() as trial:
                    if trial.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            answers = [
                subprocess.run(
                    ["/usr/bin/python3", "-c", STRANGER, f"http://127.0.0.1:{port}/mcp", *bearer],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout.strip()
                for bearer in ([], ["guess"], [""], [token])
            ]
        finally:
            server.terminate()
    assert ["401"] * 3 == answers[:3]
    assert "401" != answers[3], "the control"


@pytest.mark.once
async def test_fifty_at_once(tmp_path: Path) -> None:
    app = serving.http_app(origin(mounts=[at_once.mount(tmp_path)]), host="127.0.0.1", token="")
    codes: list[int] = []

    async def one(url: str, number: int) -> None:
        async with over_http(url) as session:
            answer = await call(session, "run_command", command=at_once.script(number))
            codes.append(answer["exit_code"])

    with Serving(app) as url:
        async with anyio.create_task_group() as tasks:
            for number in range(at_once.CROWD):
                tasks.start_soon(one, url, number)
    assert [0] * at_once.CROWD == codes


@pytest.mark.once
def test_only_loopback_is_served() -> None:
    run = subprocess.run(
        ["ringfence", "mcp", "--http", "0.0.0.0:8765"], capture_output=True, text=True, check=False
    )
    assert 125 == run.returncode
    assert "http:" in run.stderr


@pytest.mark.once
async def test_the_page_adds_a_tool_of_its_own() -> None:
    """What docs/how-to/mcp.md says under "From Python"."""
    page = Path(__file__).parents[3] / "docs/how-to/mcp.md"
    (code,) = (block.text for block in blocks_of(page.read_text()) if "python" == block.language)
    made: dict[str, Any] = {}
    exec(code, made)
    with Serving(serving.http_app(made["server"], host="127.0.0.1", token="")) as url:
        async with over_http(url) as session:
            added = await session.call_tool("add", {"a": 40, "b": 2})
            assert "there\n" == await run(session, "echo there")
    assert "42" == added.content[0].text


@pytest.mark.once
def test_the_example(tmp_path: Path) -> None:
    assert "[2, 3, 5, 7, 11, 13, 17, 19, 23, 29]\n" == output_of("mcp_client", tmp_path)


@pytest.mark.once
async def test_over_a_server(tmp_path: Path) -> None:
    with remote.serving() as server:
        async with over_stdio("--server", server) as session:
            await call(session, "write_file", path="a", content="there")
            name = (await call(session, "start_process", command="cat a; sleep 60"))["process"]
            seen = await call(session, "watch_process", process=name, wait_s=30)
            stopped = await call(session, "stop_process", process=name)

            assert "there" == await run(session, "cat a")
            assert ("there", True) == (seen["stdout"], seen["running"])
            assert not stopped["running"]


@pytest.mark.once
def test_importing_it_is_cheap() -> None:
    imports.assert_cheap("mcp.server")
