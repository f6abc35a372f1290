"""OpenAI Agents' own tests of sandboxed runs with our client, and whole runs with a scripted model."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from agents import RunConfig, Runner
from agents.sandbox import Manifest, SandboxAgent, SandboxRunConfig
from agents.sandbox.capabilities import Shell
from agents.sandbox.entries import File
from agents.sandbox.errors import ExecTimeoutError, WorkspaceArchiveWriteError
from agents.sandbox.snapshot import LocalSnapshotSpec
from agents.sandbox.workspace_paths import SandboxPathGrant
from agents.testing import ScriptedModel, assistant_message, function_call

from ringfence.errors import InvalidRequest
from ringfence.integrations.openai_agents import (
    RingfenceSandboxClient,
    RingfenceSandboxClientOptions,
)
from ringfence.integrations.openai_agents.session import OUTPUT_BYTES
from tests.suites import at_once, imports, left
from tests.suites.examples import output_of
from tests.suites.places import options
from tests.suites.remote import serving
from tests.suites.sources import module_of

theirs: Any = module_of("openai-agents", "tests/sandbox/test_run_cwd.py")
# Their Python must be inside: a test runs `sys.executable` there.
theirs.UnixLocalSandboxClient = partial(RingfenceSandboxClient, **options(python_env=True))


class TestSuite:
    """The functions of their module; a parametrised one counts twice."""


for _name, _test in list(vars(theirs).items()):
    if _name.startswith("test_"):
        setattr(TestSuite, _name, staticmethod(_test))


def test_it_is_the_whole_suite(request: pytest.FixtureRequest) -> None:
    assert 5 == sum(getattr(item, "cls", None) is TestSuite for item in request.session.items)


@pytest.fixture
async def session() -> AsyncIterator[Any]:
    client = RingfenceSandboxClient(**options())
    made = await client.create(options=RingfenceSandboxClientOptions(exposed_ports=(8123,)))
    async with made:
        yield made
    await client.delete(made)


async def _run(client: Any, *commands: str, manifest: Manifest | None = None) -> list[str]:
    """A whole run whose model asks for these commands; what it was answered."""
    steps: list[Any] = [
        [function_call("exec_command", {"cmd": command, "login": False}, call_id=f"c{i}")]
        for i, command in enumerate(commands)
    ]
    model = ScriptedModel([*steps, [assistant_message("done")]])
    agent = SandboxAgent(
        name="worker", model=model, capabilities=[Shell()], default_manifest=manifest
    )
    result = await Runner.run(
        agent, "work", run_config=RunConfig(sandbox=SandboxRunConfig(client=client))
    )
    model.assert_complete()
    return [str(item.output) for item in result.new_items if hasattr(item, "output")]


async def test_a_whole_run() -> None:
    manifest = Manifest(entries={"given.txt": File(content=b"from the manifest\n")})
    client = RingfenceSandboxClient(**options())
    answers = await _run(
        client, "cat given.txt", "id -un; grep CapEff /proc/self/status", manifest=manifest
    )

    assert "from the manifest" in answers[0]
    assert "sandbox\n" in answers[1]
    assert "CapEff:\t0000000000000000" in answers[1]


async def test_an_agents_loop_that_is_cancelled(session: Any) -> None:
    """In the middle of a command, in a session that goes on."""
    command = "echo > began; setsid sleep 4373 & wait"
    model = ScriptedModel([[function_call("exec_command", {"cmd": command}, call_id="c")]])
    agent = SandboxAgent(name="worker", model=model, capabilities=[Shell()])
    run = RunConfig(sandbox=SandboxRunConfig(session=session))
    task = asyncio.create_task(Runner.run(agent, "work", run_config=run))
    while not (await session.exec("test -e began")).ok():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await session.pty_terminate_all()
    while b"none\n" != (await session.exec(left.look(4373))).stdout:
        await asyncio.sleep(0.01)


async def test_a_terminal(session: Any) -> None:
    first = await session.pty_exec_start("python3 -q", shell=True, tty=True, yield_time_s=2)
    assert first.process_id is not None
    second = await session.pty_write_stdin(session_id=first.process_id, chars="6 * 7\n")
    while b"42" not in second.output:
        second = await session.pty_write_stdin(session_id=first.process_id, chars="")
    last = await session.pty_write_stdin(
        session_id=first.process_id, chars="exit(3)\n", yield_time_s=9
    )
    while last.exit_code is None:
        last = await session.pty_write_stdin(session_id=first.process_id, chars="")
    assert (None, 3) == (last.process_id, last.exit_code)


async def _ask(host: str, port: int) -> bytes:
    """What it answers; nothing where it does not listen yet, which may be said before we are connected."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(b"GET /index.html HTTP/1.0\r\n\r\n")
            return await reader.read()
        finally:
            writer.close()
    except ConnectionError:
        await asyncio.sleep(0.05)
        return b""


async def test_a_port(session: Any) -> None:
    await session.write(Path("index.html"), io.BytesIO(b"served from inside"))
    await session.pty_exec_start("python3 -m http.server 8123", yield_time_s=0.3)
    endpoint = await session.resolve_exposed_port(8123)
    while b"served from inside" not in await _ask(endpoint.host, endpoint.port):
        pass


async def test_resumed_after_its_end(tmp_path: Path) -> None:
    client = RingfenceSandboxClient(**options())
    snapshot = LocalSnapshotSpec(base_path=tmp_path)
    first = await client.create(snapshot=snapshot, manifest=Manifest())
    async with first:
        await first.write(Path("a/kept.txt"), io.BytesIO(b"kept"))
        await first.write(Path("large"), io.BytesIO(b"x" * (20 << 20)))
        before = first.state.sandbox_id
    state = client.deserialize_session_state(first.state.model_dump(mode="json"))
    again = await client.resume(state)
    async with again:
        kept = (await again.read(Path("a/kept.txt"))).read()
        large = (await again.read(Path("large"))).read()
    await client.delete(again)

    assert (b"kept", 20 << 20) == (kept, len(large))
    assert before != again.state.sandbox_id


async def test_resumed_while_it_lives(session: Any) -> None:
    await session.exec("echo mine > /tmp/outside-the-workspace")
    client = RingfenceSandboxClient(**options())
    again = await client.resume(
        client.deserialize_session_state(session.state.model_dump(mode="json"))
    )

    assert b"mine\n" == (await again.exec("cat /tmp/outside-the-workspace")).stdout
    await client.delete(again)


async def test_a_hostile_archive_is_refused(session: Any) -> None:
    import tarfile

    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo("../../escaped")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(WorkspaceArchiveWriteError):
        await session.hydrate_workspace(io.BytesIO(archive.getvalue()))


async def test_a_resumed_workspace_has_its_hard_links(tmp_path: Path) -> None:
    """As copies: the framework takes no archive with a link in it."""
    client = RingfenceSandboxClient(**options())
    first = await client.create(snapshot=LocalSnapshotSpec(base_path=tmp_path))
    async with first:
        await first.exec("echo same > a; ln a b")
    again = await client.resume(first.state)
    async with again:
        answer = await again.exec("cat a b; stat -c %h a b")
    await client.delete(again)

    assert b"same\nsame\n1\n1\n" == answer.stdout


async def test_what_is_mounted_is_neither_packed_nor_cleared(tmp_path: Path) -> None:
    """A project of the host below the workspace, with paths that are protected in it."""
    project = tmp_path / "project"
    project.mkdir()
    project.chmod(0o777)
    client = RingfenceSandboxClient(**options(mounts=[f"{project}:/workspace/project:rw"]))
    first = await client.create(snapshot=LocalSnapshotSpec(base_path=tmp_path))
    async with first:
        await first.exec("echo 1 > project/theirs; echo 2 > own")
    (project / "theirs").write_text("changed since\n")
    again = await client.resume(first.state)
    async with again:
        answer = await again.exec("cat project/theirs own")
    await client.delete(again)

    assert b"changed since\n2\n" == answer.stdout


async def test_a_mounted_workspace_stays_as_the_host_has_it(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    project.chmod(0o777)
    client = RingfenceSandboxClient(**options(mounts=[f"{project}:/workspace:rw"]))
    first = await client.create(snapshot=LocalSnapshotSpec(base_path=tmp_path))
    async with first:
        await first.exec("echo 1 > kept")
    (project / "new").write_text("2\n")
    again = await client.resume(first.state)
    async with again:
        answer = await again.exec("cat kept new")
    await client.delete(again)

    assert b"1\n2\n" == answer.stdout


@pytest.mark.here  # a server refuses it, as below
@pytest.mark.parametrize("read_only", [True, False])
async def test_what_a_manifest_grants_of_the_host(tmp_path: Path, read_only: bool) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / "given").write_text("of the host\n")
    grant = SandboxPathGrant(path="/data", host_path=str(tmp_path), read_only=read_only)
    client = RingfenceSandboxClient(**options())
    session = await client.create(manifest=Manifest(extra_path_grants=(grant,)))
    async with session:
        answer = await session.exec("cat /data/given; echo 1 > /data/made")
        other = grant.model_copy(update={"host_path": "/usr"})
        state = session.state.model_copy(update={"manifest": Manifest(extra_path_grants=(other,))})
        with pytest.raises(ValueError, match="make a new session"):
            await client.resume(state)
    await client.delete(session)

    assert (b"of the host\n", not read_only) == (answer.stdout, answer.ok())
    assert read_only is not (tmp_path / "made").exists()


async def test_a_server_has_none_of_this_host_to_grant() -> None:
    grant = SandboxPathGrant(path="/data", host_path="/usr")
    client = RingfenceSandboxClient(server="unix:/nowhere")
    with pytest.raises(InvalidRequest, match="granted from this host"):
        await client.create(manifest=Manifest(extra_path_grants=(grant,)))


async def test_a_snapshot_that_is_refused_leaves_the_files(tmp_path: Path) -> None:
    client = RingfenceSandboxClient(**options())
    first = await client.create(snapshot=LocalSnapshotSpec(base_path=tmp_path))
    await first.start()
    await first.write(Path("kept"), io.BytesIO(b"kept"))
    await first.state.snapshot.persist(io.BytesIO(b"not an archive"))
    again = await client.resume(first.state)
    with pytest.raises(WorkspaceArchiveWriteError):
        await again.start()

    assert b"kept" == (await first.read(Path("kept"))).read()
    await client.delete(first)


async def test_too_much_output_is_cut_and_says_so(session: Any) -> None:
    whole = await session.exec(f"head -c {OUTPUT_BYTES // 2} /dev/zero")
    cut = await session.exec(f"head -c {OUTPUT_BYTES + 1} /dev/zero")

    assert (OUTPUT_BYTES // 2, b"") == (len(whole.stdout), whole.stderr)
    assert len(cut.stdout) < OUTPUT_BYTES + 99
    assert cut.stdout.endswith(b"bytes dropped]")


async def test_a_timeout_leaves_no_process(session: Any) -> None:
    with pytest.raises(ExecTimeoutError):
        await session.exec("setsid sleep 4371 & wait", timeout=1)
    assert b"none\n" == (await session.exec(left.look(4371))).stdout


async def test_cancelled_it_leaves_no_process(session: Any) -> None:
    task = asyncio.create_task(session.exec("echo > began; setsid sleep 4372 & wait"))
    while not (await session.exec("test -e began")).ok():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while b"none\n" != (await session.exec(left.look(4372))).stdout:
        await asyncio.sleep(0.01)


@pytest.mark.once
async def test_files_of_a_workspace_without_namespaces() -> None:
    """There neither /workspace nor /tmp, where the framework keeps a helper, is at its name."""
    client = RingfenceSandboxClient(backend="landlock")
    session = await client.create(options=RingfenceSandboxClientOptions())
    async with session:
        await session.write(Path("d/given.txt"), io.BytesIO(b"given"))
        told = await session.exec("cat d/given.txt; echo made > made.txt")
        given = (await session.read(Path("d/given.txt"))).read()
        made = (await session.read(Path("/workspace/made.txt"))).read()
    await client.delete(session)

    assert (b"given", b"given", b"made\n") == (told.stdout, given, made)


@pytest.mark.once
async def test_fifty_at_once(tmp_path: Path) -> None:
    client = RingfenceSandboxClient(**options(mounts=[at_once.mount(tmp_path)]))

    async def one(number: int) -> int:
        session = await client.create()
        async with session:
            answer = await session.exec(at_once.script(number))
        await client.delete(session)
        return answer.exit_code

    crowd = range(at_once.CROWD)
    assert [0 for _ in crowd] == await asyncio.gather(*(one(number) for number in crowd))


@pytest.mark.once
async def test_over_a_server(tmp_path: Path) -> None:
    with serving() as server:
        answers = await _run(RingfenceSandboxClient(server=server), "echo there > a", "cat a")
    assert "there" in answers[1]


@pytest.mark.once
def test_the_example(tmp_path: Path) -> None:
    assert "sandbox" in output_of("openai_agent", tmp_path)


@pytest.mark.once
def test_importing_it_is_cheap() -> None:
    imports.assert_cheap("openai_agents")
