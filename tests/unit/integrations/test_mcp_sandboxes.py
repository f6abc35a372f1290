"""Which sandbox serves a call of an MCP client, for how long it lives, and who may come in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from tests.frameworks import adapter

from ringfence.errors import RingfenceError

pytestmark = pytest.mark.anyone
MODERN, OLD = "2026-07-28", "2025-06-18"


class ToolError(Exception):
    """The SDK's."""


FRAMEWORKS: dict[str, dict[str, Any]] = {
    "mcp": {},
    "mcp.server": {},
    "mcp.server.mcpserver": {},
    "mcp.server.mcpserver.exceptions": {"ToolError": ToolError},
    "mcp.server.mcpserver.tools": {},
    "mcp.server.mcpserver.tools.base": {},
    "mcp_types": {},
    "mcp_types.version": {"MODERN_PROTOCOL_VERSIONS": (MODERN,)},
}


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    with adapter("mcp.sandboxes", FRAMEWORKS) as found:
        yield found


class Sandbox:
    def __init__(self) -> None:
        self.state = "running"

    async def terminate(self) -> None:
        self.state = "terminated"


class Origin:
    """Where sandboxes come from, one after the other."""

    def __init__(self) -> None:
        self.made: list[Sandbox] = []
        self.problem: Exception | None = None

    async def async_sandbox(self) -> Sandbox:
        await asyncio.sleep(0)
        if self.problem is not None:
            raise self.problem
        self.made.append(Sandbox())
        return self.made[-1]


class Client:
    """A connection, as the SDK shows it."""

    def __init__(self, version: str = MODERN) -> None:
        self.protocol_version = version
        self.stack = AsyncExitStack()
        connection = SimpleNamespace(state={}, exit_stack=self.stack)
        self.session = SimpleNamespace(_connection=connection)


def run(what: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(what())


async def call(sandboxes: Any, client: Client, name: str = "") -> Any:
    async with sandboxes.serving(client, name) as held:
        return held


def idle(held: Any, seconds: float) -> None:
    held.used = time.monotonic() - seconds


class TestByName:
    def test_a_first_call_gets_a_name_that_later_ones_bring_along(self, module: Any) -> None:
        async def scene() -> None:
            origin = Origin()
            sandboxes = module.Sandboxes(origin, shared=False)
            assert not sandboxes.are_one
            first = await call(sandboxes, Client())
            assert 20 <= len(first.name), "nobody can guess it"
            assert await call(sandboxes, Client(), first.name) is first
            other = await call(sandboxes, Client())
            assert other.name != first.name
            assert 2 == len(origin.made)
            with pytest.raises(ToolError, match="has ended"):
                await call(sandboxes, Client(), "unknown")
            await sandboxes.reset(first)
            assert "terminated" == origin.made[0].state
            with pytest.raises(ToolError, match="has ended"):
                await call(sandboxes, Client(), first.name)
            await sandboxes.close()
            assert {"terminated"} == {each.state for each in origin.made}
            assert {} == sandboxes._named

        run(scene)

    def test_so_many_live_at_once_and_one_that_ended_makes_room(self, module: Any) -> None:
        async def scene() -> None:
            origin = Origin()
            sandboxes = module.Sandboxes(origin, shared=False, most=2)
            held = [await call(sandboxes, Client()) for _ in range(2)]
            with pytest.raises(ToolError, match="2 sandboxes live already"):
                await call(sandboxes, Client())
            assert await call(sandboxes, Client(), held[1].name) is held[1], "it has its own"
            await sandboxes.reset(held[0])
            await call(sandboxes, Client())
            assert 3 == len(origin.made)

        run(scene)

    def test_one_that_is_used_no_more_has_ended_and_its_name_with_it(self, module: Any) -> None:
        async def scene() -> None:
            origin = Origin()
            sandboxes = module.Sandboxes(origin, shared=False, idle_s=60.0, most=2)
            old, new = [await call(sandboxes, Client()) for _ in range(2)]
            idle(old, 61.0)
            idle(new, 59.0)
            await call(sandboxes, Client())
            assert ["terminated", "running", "running"] == [each.state for each in origin.made]
            assert old.name not in sandboxes._named
            assert new.name in sandboxes._named

        run(scene)

    def test_one_whose_call_runs_is_in_use_however_long_and_counts_from_its_end(
        self, module: Any
    ) -> None:
        async def scene() -> None:
            origin = Origin()
            sandboxes = module.Sandboxes(origin, shared=False, idle_s=60.0)
            held = await call(sandboxes, Client())
            async with sandboxes.serving(Client(), held.name):
                async with sandboxes.serving(Client(), held.name):
                    idle(held, 100.0)
                assert held.used > time.monotonic() - 60.0, "the call that ended has used it"
                idle(held, 100.0)
                await call(sandboxes, Client())
                assert "running" == origin.made[0].state, "the other call still runs"
            await call(sandboxes, Client())
            assert "running" == origin.made[0].state, "it was used until now"

            async def fails() -> None:
                async with sandboxes.serving(Client(), held.name):
                    idle(held, 100.0)
                    raise ValueError("inside")

            with pytest.raises(ValueError, match="inside"):
                await fails()
            assert 0 == held.calls
            await call(sandboxes, Client())
            assert "running" == origin.made[0].state, "also by a call that failed"
            idle(held, 100.0)
            await call(sandboxes, Client())
            assert "terminated" == origin.made[0].state

        run(scene)

    @pytest.mark.parametrize("fails", ["making", "inside", "cancelled"])
    def test_a_first_call_that_fails_leaves_none_that_nobody_could_name(
        self, module: Any, fails: str
    ) -> None:
        async def scene() -> None:
            origin = Origin()
            sandboxes = module.Sandboxes(origin, shared=False)
            if fails == "making":
                origin.problem = RingfenceError("no room", hint="wait")
                with pytest.raises(ToolError, match=r"no room.*wait"):
                    await call(sandboxes, Client())
                assert [] == origin.made
            elif fails == "inside":
                with pytest.raises(ValueError, match="inside"):
                    async with sandboxes.serving(Client(), ""):
                        raise ValueError("inside")
            else:
                entered = asyncio.Event()

                async def waits() -> None:
                    async with sandboxes.serving(Client(), ""):
                        entered.set()
                        await asyncio.Event().wait()

                task = asyncio.create_task(waits())
                await entered.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert {"terminated"} >= {each.state for each in origin.made}
            assert {} == sandboxes._named
            origin.problem = None
            held = await call(sandboxes, Client())
            with pytest.raises(ValueError, match="later"):
                async with sandboxes.serving(Client(), held.name):
                    raise ValueError("later")
            assert "running" == origin.made[-1].state, "its client knows its name"
            assert held.name in sandboxes._named

        run(scene)


class TestOthers:
    def test_over_stdio_all_calls_have_one_and_none_is_ended_for_being_idle(
        self, module: Any
    ) -> None:
        async def scene() -> None:
            origin = Origin()
            sandboxes = module.Sandboxes(origin, shared=True, idle_s=0.0)
            assert sandboxes.are_one
            held = [
                await call(sandboxes, Client(version), name)
                for version, name in ((MODERN, ""), (OLD, ""), (MODERN, "any"))
            ]
            assert ("", 1, 1) == (held[0].name, len({*map(id, held)}), len(origin.made))
            with pytest.raises(ValueError, match="inside"):
                async with sandboxes.serving(Client(), ""):
                    raise ValueError("inside")
            assert "running" == origin.made[0].state
            await sandboxes.close()
            assert "terminated" == origin.made[0].state

        run(scene)

    def test_a_session_has_its_own_which_ends_with_it(self, module: Any) -> None:
        async def scene() -> None:
            origin = Origin()
            sandboxes = module.Sandboxes(origin, shared=False)
            one, other = Client(OLD), Client(OLD)
            first = await call(sandboxes, one)
            assert await call(sandboxes, one) is first
            assert await call(sandboxes, other) is not first
            with pytest.raises(ToolError, match="leave `sandbox` empty"):
                await call(sandboxes, one, "name")
            await one.stack.aclose()
            assert ["terminated", "running"] == [each.state for each in origin.made]
            await sandboxes.close()
            assert "running" == origin.made[1].state, "its connection ends it"

        run(scene)

    def test_two_first_calls_at_once_make_one(self, module: Any) -> None:
        async def scene() -> None:
            origin = Origin()
            sandboxes = module.Sandboxes(origin, shared=True)
            await asyncio.gather(*(call(sandboxes, Client()) for _ in range(3)))
            assert 1 == len(origin.made)

        run(scene)

    def test_one_that_was_lost_is_made_anew_without_its_processes(self, module: Any) -> None:
        async def scene() -> None:
            origin = Origin()
            sandboxes = module.Sandboxes(origin, shared=True)
            held = await call(sandboxes, Client())
            held.processes["p1"] = "a process"
            assert await call(sandboxes, Client()) is held
            assert {"p1"} == {*held.processes}
            origin.made[0].state = "terminated"
            await call(sandboxes, Client())
            assert (2, {}) == (len(origin.made), held.processes)
            assert held.sandbox is origin.made[1]
            held.processes["p1"] = "a process"
            await held.end()
            assert held.sandbox is None
            assert {} == held.processes
            assert "terminated" == origin.made[1].state
            await held.end()

        run(scene)


class TestGuard:
    """Of the server over HTTP."""

    def asked(self, scope: dict[str, Any], token: str = "secret") -> tuple[list[Any], list[Any]]:
        reached: list[Any] = []
        sent: list[Any] = []

        async def app(scope: Any, _receive: Any, _send: Any) -> None:
            reached.append(scope)

        async def send(message: Any) -> None:
            sent.append(message)

        with adapter("mcp.server", FRAMEWORKS) as found:
            guarded = found._Guarded(app, token)
            asyncio.run(guarded(scope, None, send))
        return reached, sent

    @pytest.mark.parametrize(
        ("given", "comes_in"),
        [
            (b"Bearer secret", True), (b"Bearer secre", False), (b"Bearer secret1", False),
            (b"bearer secret", False), (b"secret", False), (b"", False), (None, False),
        ],
    )  # fmt: skip
    def test_only_who_brings_the_token_comes_in(self, given: bytes | None, comes_in: bool) -> None:
        headers = [] if given is None else [(b"authorization", given)]
        reached, sent = self.asked({"type": "http", "headers": headers})
        assert comes_in == bool(reached)
        if not comes_in:
            assert 401 == sent[0]["status"]
            assert (b"www-authenticate", b"Bearer") in sent[0]["headers"]
            assert ["http.response.start", "http.response.body"] == [each["type"] for each in sent]

    def test_what_is_no_request_is_not_answered(self) -> None:
        assert ([], []) == self.asked({"type": "websocket", "headers": []})
        reached, _sent = self.asked({"type": "lifespan"})
        assert reached
