"""What is asked of an `AsyncSessionManager` is asked of its manager: each argument, under its own name."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ringfence.model.spec import SandboxSpec
from ringfence.sandbox.aio import AsyncSandbox
from ringfence.sandbox.sync import Sandbox
from ringfence.sessions import aio
from ringfence.sessions.aio import AsyncLease, AsyncSandboxBash, AsyncSessionManager
from ringfence.sessions.lease import Lease
from ringfence.sessions.manager import SessionManager
from ringfence.sessions.shells.bash import SandboxBash

pytestmark = pytest.mark.anyone

METHODS = [
    name
    for name, value in vars(AsyncSessionManager).items()
    if name[0] != "_" and inspect.iscoroutinefunction(value)
]
NOTHING = ("set_default_sandbox", "change_pool", "delete_snapshot", "fill_pool", "close")


class Recorder:
    """A manager whose methods note their arguments, by parameter, and return `result`."""

    def __init__(self, result: Any) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self._result = result

    def __getattr__(self, name: str) -> Any:
        signature = inspect.signature(getattr(SessionManager, name))

        def method(*args: Any, **options: Any) -> Any:
            arguments = dict(signature.bind(self, *args, **options).arguments)
            del arguments["self"]
            self.asked.append((name, arguments))
            return self._result

        return method


def given_to(method: Any) -> dict[str, Any]:
    """A value of its own for each parameter, by name."""
    names = [each for each in inspect.signature(method).parameters if each != "self"]
    return {name: f"{name} of the caller" for name in names}


def plain_sandbox() -> Sandbox:
    sandbox: Sandbox = object.__new__(Sandbox)
    vars(sandbox).update(spec=SandboxSpec(), files=None, _maker=0)
    return sandbox


def lease_on(sandbox: Sandbox) -> Lease:
    live = SimpleNamespace(sandbox=sandbox, id="sess-1")
    return Lease(cast(Any, None), cast(Any, live), newly_created=False)


@pytest.mark.parametrize("name", METHODS)
async def test_every_argument_and_the_result_are_passed_on(name: str) -> None:
    sandbox = plain_sandbox()
    lease = lease_on(sandbox)
    results = {"acquire": lease, "attach": lease, "fork": [lease, lease], "sandbox": sandbox}
    recorder = Recorder(results.get(name, f"result of {name}"))
    given = given_to(getattr(AsyncSessionManager, name))

    found = await getattr(AsyncSessionManager(cast(Any, recorder)), name)(**given)

    assert [(name, given)] == recorder.asked
    if name in ("acquire", "attach", "fork"):
        leases = found if name == "fork" else [found]
        assert [lease] * len(leases) == [each._lease for each in leases]
        assert (2 if name == "fork" else 1) == len(leases)
        assert {(AsyncLease, False)} == {(type(each), each.newly_created) for each in leases}
        assert sandbox is leases[0].sandbox._sandbox
    elif name == "sandbox":
        assert (AsyncSandbox, sandbox) == (type(found), found._sandbox)
    else:
        assert (None if name in NOTHING else f"result of {name}") == found


async def test_a_manager_is_made_as_it_was_asked_for_and_closed_where_it_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    recorder = Recorder(None)

    class Made:
        close = SessionManager.close

        def __new__(cls, *args: Any, **options: Any) -> Any:
            made.append((args, options))
            return recorder

    monkeypatch.setattr(aio, "SessionManager", Made)
    given = given_to(AsyncSessionManager.open)
    async with await AsyncSessionManager.open(**given) as manager:
        assert recorder is cast(Any, manager.manager)
        assert [] == recorder.asked
    config = given.pop("config")
    assert [((config,), given)] == made
    assert [("close", {"keep": False})] == recorder.asked


async def test_a_lease_is_released_as_it_was_asked_for_and_where_it_is_left() -> None:
    recorder = Recorder("what it can do")
    live = SimpleNamespace(sandbox=plain_sandbox(), id="sess-1", state="active")
    async with AsyncLease(Lease(cast(Any, recorder), cast(Any, live))) as lease:
        assert "what it can do" == await lease.capabilities()
        for keep_alive in (True, False):
            await lease.release(keep_alive=keep_alive)
    said = [{"session": "sess-1", "keep_alive": each} for each in (True, False, False)]
    assert [("capabilities", {"session": "sess-1"})] == recorder.asked[:1]
    assert [("release", each) for each in said] == recorder.asked[1:]


def test_a_bash_tool_is_made_as_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    signature = inspect.signature(SandboxBash)

    def made(*args: Any, **options: Any) -> Any:
        asked.append(dict(signature.bind(*args, **options).arguments))
        return SimpleNamespace(config="its own", sandbox=None)

    monkeypatch.setattr(aio, "SandboxBash", made)
    given = given_to(AsyncSandboxBash)
    bash = AsyncSandboxBash(**given)
    assert ("its own", None) == (cast(Any, bash.config), bash.sandbox)
    recorder = Recorder(None)
    AsyncSandboxBash(**{**given, "manager": AsyncSessionManager(cast(Any, recorder))})
    assert [given, {**given, "manager": recorder}] == asked
