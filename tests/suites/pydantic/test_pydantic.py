"""Pydantic AI's own suite for workspaces, on asyncio and trio, and what it leaves open."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import sniffio
from pydantic_ai import Agent, RunContext
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.workspaces import (
    SupportsFilesystem,
    SupportsRealpath,
    Workspace,
    WorkspaceOutputLimitError,
    WorkspaceRef,
    WorkspaceTimeoutError,
    WorkspaceUnavailableError,
)
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite

from ringfence.integrations.pydantic_ai import RingfenceWorkspace
from tests.suites import at_once, imports, left
from tests.suites.examples import output_of
from tests.suites.places import backend as backend_name
from tests.suites.places import options
from tests.suites.remote import serving

pytestmark = pytest.mark.anyio


LOOPS = 1 if backend_name() else 2  # no sandbox sees which it is, but connections to a server do


@pytest.fixture(params=["asyncio", "trio"][:LOOPS])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def made(anyio_backend: str) -> AsyncIterator[list[RingfenceWorkspace]]:
    """Whatever a test makes, ended after it."""
    workspaces: list[RingfenceWorkspace] = []
    yield workspaces
    for workspace in workspaces:
        await workspace.terminate()


@pytest.fixture
def maker(made: list[RingfenceWorkspace]) -> Callable[[], RingfenceWorkspace]:
    def make() -> RingfenceWorkspace:
        made.append(RingfenceWorkspace(**options()))
        return made[-1]

    return make


@pytest.fixture
def backend(maker: Callable[[], RingfenceWorkspace]) -> RingfenceWorkspace:
    return maker()


class TestSuite(WorkspaceBackendSuite):
    @pytest.fixture
    def backend(self, maker: Callable[[], RingfenceWorkspace]) -> RingfenceWorkspace:
        return maker()

    @pytest.fixture
    def fresh_backend(
        self, maker: Callable[[], RingfenceWorkspace]
    ) -> Callable[[], RingfenceWorkspace]:
        return maker

    @pytest.fixture
    def attach_backend(
        self, made: list[RingfenceWorkspace]
    ) -> Callable[[WorkspaceRef], RingfenceWorkspace]:
        def attach(ref: WorkspaceRef) -> RingfenceWorkspace:
            made.append(RingfenceWorkspace(ref, **options()))
            return made[-1]

        return attach

    @pytest.fixture
    def destroy_environment(self) -> Callable[[RingfenceWorkspace], Awaitable[None]]:
        return RingfenceWorkspace.terminate


def test_it_is_the_whole_suite(request: pytest.FixtureRequest) -> None:
    items = request.session.items
    assert 40 * LOOPS == sum(getattr(item, "cls", None) is TestSuite for item in items)


async def test_files_are_native(backend: RingfenceWorkspace) -> None:
    assert isinstance(backend, SupportsFilesystem)
    assert isinstance(backend, SupportsRealpath)


async def test_a_timeout_leaves_no_process(backend: RingfenceWorkspace) -> None:
    for timeout in left.TIMEOUTS_S:
        with pytest.raises(WorkspaceTimeoutError) as caught:
            await backend.run("echo began; setsid sleep 4331 & wait", shell=True, timeout=timeout)
        if caught.value.stdout:
            break
    assert "began\n" == caught.value.stdout
    assert "none\n" == (await backend.run(left.look(4331), shell=True)).stdout


async def test_cancelled_it_leaves_no_process(backend: RingfenceWorkspace) -> None:
    began = f"{await backend.working_dir()}/began"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(backend.run, ["sh", "-c", "echo > began; setsid sleep 4332 & wait"])
        while not await backend.exists(began):
            await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()
    while "none\n" != (await backend.run(left.look(4332), shell=True)).stdout:
        await anyio.sleep(0.01)


async def test_output_is_whole_or_an_error(backend: RingfenceWorkspace) -> None:
    whole = await backend.run("head -c 9000000 /dev/zero", shell=True)
    with pytest.raises(WorkspaceOutputLimitError):
        await backend.run("head -c 20000000 /dev/zero", shell=True)

    assert 9_000_000 == len(whole.stdout)


async def test_an_agents_loop(maker: Callable[[], RingfenceWorkspace]) -> None:
    """A command that takes too long, one that is cancelled, and what they left: nothing."""
    if sniffio.current_async_library() == "trio":
        return  # the framework's own agents need asyncio
    workspace = maker()
    agent, asked = Agent(FunctionModel(_script), deps_type=Workspace), Workspace(workspace)

    @agent.tool
    async def shell(ctx: RunContext[Workspace], command: str) -> str:
        try:
            return (await ctx.deps.run(command, shell=True, timeout=4)).stdout
        except WorkspaceTimeoutError as exc:
            return str(exc)

    late = await agent.run("setsid sleep 4333 & wait", deps=asked)
    began = f"{await workspace.working_dir()}/began"
    async with anyio.create_task_group() as tasks:
        ends = "echo > began; setsid sleep 4334 & wait"
        tasks.start_soon(partial(agent.run, ends, deps=asked))
        while not await workspace.exists(began):
            await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()

    assert "timed out after 4s" in late.output
    for seconds in (4333, 4334):
        while "none\n" != (await agent.run(left.look(seconds), deps=asked)).output:
            await anyio.sleep(0.01)


def _script(messages: list[Any], _info: Any) -> ModelResponse:
    """The command that it is asked for, then its answer as text."""
    last = messages[-1].parts[-1]
    if last.part_kind == "tool-return":
        return ModelResponse([TextPart(str(last.content))])
    return ModelResponse([ToolCallPart("shell", {"command": last.content})])


@pytest.mark.once
async def test_fifty_at_once(tmp_path: Path, made: list[RingfenceWorkspace]) -> None:
    codes: list[int] = []

    async def one(number: int) -> None:
        workspace = RingfenceWorkspace(**options(mounts=[at_once.mount(tmp_path)]))
        made.append(workspace)
        codes.append((await workspace.run(at_once.script(number), shell=True)).exit_code)

    async with anyio.create_task_group() as tasks:
        for number in range(at_once.CROWD):
            tasks.start_soon(one, number)
    assert [0] * at_once.CROWD == codes


@pytest.mark.once
def test_the_example(tmp_path: Path) -> None:
    assert "sandbox\n42\n" == output_of("pydantic_ai_agent", tmp_path)


@pytest.mark.once
async def test_over_a_server(tmp_path: Path) -> None:
    with serving() as server:
        workspace = RingfenceWorkspace(server=server)
        path = f"{await workspace.working_dir()}/a/b"
        await workspace.write_bytes(path, b"there")
        again = RingfenceWorkspace(workspace.ref, server=server)

        assert "there" == (await again.run(["cat", path])).stdout
        assert b"there" == await again.read_bytes(path)
        await again.terminate()
        with pytest.raises(WorkspaceUnavailableError):
            await workspace.run(["true"])
        await workspace.terminate()


@pytest.mark.once
def test_importing_it_is_cheap() -> None:
    imports.assert_cheap("pydantic_ai")
