"""`AsyncSessionManager` and `AsyncSandboxBash`, under asyncio and trio, in real sandboxes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import trio

import ringfence
from ringfence import (
    AsyncBashTool,
    AsyncSandboxBash,
    AsyncSessionManager,
    BashConfig,
    BashOutput,
    ManagerConfig,
    SandboxBash,
    SessionManager,
)
from ringfence.backends.native.backend import NativeBackend
from ringfence.errors import LifecycleError
from tests.native.outside import until
from tests.sessions.conftest import ALLOWED, NO_POOL
from tests.unconfined import Unconfined

pytestmark = pytest.mark.anyone

Main = Callable[[], Coroutine[Any, Any, None]]
Run = Callable[[Main], None]


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "trio":
        return trio.run
    return lambda main: asyncio.run(main())


async def cancelled(
    call: Callable[[], Coroutine[Any, Any, Any]], began: Callable[[], bool]
) -> None:
    """Begin a call, and cancel it once it has begun."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await trio.to_thread.run_sync(until, began)
            nursery.cancel_scope.cancel()
        return
    task = asyncio.ensure_future(call())
    await asyncio.to_thread(until, began)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("plain", "other", "without"),
    [
        (SessionManager, AsyncSessionManager, {"activate", "check_open", "end"}),
        (SandboxBash, AsyncSandboxBash, {"begin"}),
    ],
)
def test_the_surfaces_are_the_same(plain: Any, other: Any, without: set[str]) -> None:
    names = {n for n, each in vars(plain).items() if n[0] != "_" and inspect.isfunction(each)}

    for name in names - without:
        method = getattr(other, name)
        assert inspect.iscoroutinefunction(method), name
        hers = [*inspect.signature(getattr(plain, name)).parameters]
        assert [each for each in hers if each not in ("most", "carry")] == [
            *inspect.signature(method).parameters
        ]


def test_a_manager_without_a_thread_of_the_callers(run: Run, native: NativeBackend) -> None:
    async def main() -> None:
        config = ManagerConfig(pool=NO_POOL)
        async with await AsyncSessionManager.open(config, backends=(native,)) as manager:
            async with await manager.acquire({"labels": {"a": "b"}}, client_id="ann") as lease:
                assert "hello\n" == (await lease.sandbox.exec(["echo", "hello"])).text
                await manager.detach(lease)
                again = await manager.attach(
                    {"sandbox_id": lease.session.sandbox_id, "client_id": "ann"}
                )
                assert (again.id, again.newly_created) == (lease.id, False)
                await manager.set_default_sandbox("ann", lease)
                found = await manager.default_sandbox("ann")
                assert found is not None
                assert found.session_id == lease.id
                assert [lease.id] == [each.session_id for each in await manager.list("ann")]
                assert "suspended" == (await manager.suspend(lease)).state
                assert "active" == (await manager.resume(lease)).state
                assert (await manager.touch(lease)).session_id == lease.id
                assert (await manager.extend(lease, 60)).expires_in_s
                assert (await (await manager.sandbox(lease)).exec(["true"])).ok
                assert (await manager.capabilities(lease)).can_write_filesystem
                assert 1 == (await manager.stats()).active_sessions
                assert (await manager.health()).ok
            assert ("terminated", "released") == (lease.session.state, lease.session.reason)
        with pytest.raises(LifecycleError):
            await manager.list()

    run(main)


def test_who_is_cancelled_while_it_acquires_keeps_nothing(run: Run) -> None:
    async def main() -> None:
        config = ManagerConfig(max_sandboxes=1, max_waiting=1, wait_s=30, pool=NO_POOL)
        async with await AsyncSessionManager.open(config, backends=(Unconfined(),)) as manager:
            first = await manager.acquire(client_id="ann")
            inner = manager.manager
            await cancelled(
                lambda: manager.acquire(client_id="ann"), lambda: inner.slots.waiting == 1
            )
            await first.release()
            assert until(lambda: inner.stats().created == 2 and not inner.list())

    run(main)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_bash_tool(run: Run, native: NativeBackend, persistent: bool) -> None:
    async def main() -> None:
        config = BashConfig(image="default", allow_degraded=ALLOWED, persistent=persistent)
        async with AsyncSandboxBash(config=config, backend=native) as bash:
            tool: AsyncBashTool = bash
            assert bash.sandbox is None
            said: BashOutput = await tool.exec_command(
                "cd /tmp; A=1; echo hello; exit_code() { :; }"
            )
            assert ("hello\n", 0) == (said.stdout, said.exit_code)
            assert 127 == (await bash.exec_command("no-such-command")).exit_code
            where = (await bash.exec_command("pwd; echo $A")).stdout
            assert ("/tmp\n1\n" if persistent else "/workspace\n\n") == where
            assert (await bash.exec_command("sleep 100", timeout_s=0.2)).timed_out

            sandbox = bash.sandbox
            assert sandbox is not None
            files = sandbox._sandbox.files
            await cancelled(
                lambda: bash.exec_command("touch /tmp/begun; sleep 1234"),
                lambda: files.exists("/tmp/begun"),
            )
            left = await bash.exec_command("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
            assert "1234" not in left.stdout
            await bash.shutdown()
            assert "terminated" == sandbox.state
            assert "again\n" == (await bash.exec_command("echo again")).stdout
        await bash.shutdown()

    run(main)


def test_the_models_that_users_know_are_at_the_top() -> None:
    names = "ExecutionService ExecutionRequest ExecutionResult ExecutionConfig ExecutionStatus"
    for name in (*names.split(), "BashOutput", "Lease", "AsyncLease", "AsyncBashTool"):
        assert name in dir(ringfence)
        assert getattr(ringfence, name).__name__ == name
