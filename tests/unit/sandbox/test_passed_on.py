"""What is asked of an `AsyncSandbox` is asked of its `Sandbox`: each argument, under its own name."""

from __future__ import annotations

import inspect
import os
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.model.spec import SandboxSpec
from ringfence.sandbox import aio, remote, sync
from ringfence.sandbox.aio import AsyncSandbox
from ringfence.sandbox.aio_process import AsyncProcess
from ringfence.sandbox.process import Process
from ringfence.sandbox.sync import Sandbox

pytestmark = pytest.mark.anyone

CLASS_METHODS = ("create", "restore", "snapshots", "delete_snapshot")
OF_THEIR_OWN = ("exec", "shell", "start", "process", "context", "run_code", "lineage")
PLAIN = [
    name
    for name, value in vars(Sandbox).items()
    if name[0] != "_" and callable(value) and name not in (*CLASS_METHODS, *OF_THEIR_OWN)
]


def recorded(names: tuple[str, ...] = (), result: Any = None) -> tuple[Sandbox, list[Any]]:
    """A sandbox whose methods of these names note their arguments, by parameter, and return `result`."""
    sandbox: Sandbox = object.__new__(Sandbox)
    asked: list[Any] = []
    inner = SimpleNamespace(files=None)
    vars(sandbox).update(spec=SandboxSpec(), files=None, _maker=0, _inner=inner)

    def noted(name: str) -> Any:
        signature = inspect.signature(getattr(Sandbox, name))

        def method(*args: Any, **options: Any) -> Any:
            asked.append((name, dict(signature.bind(sandbox, *args, **options).arguments)))
            return result

        return method

    vars(sandbox).update({name: noted(name) for name in names})
    return sandbox, asked


def given_to(method: Any) -> dict[str, Any]:
    """A value of its own for each parameter, by name."""
    names = [each for each in inspect.signature(method).parameters if each not in ("self", "more")]
    return {name: f"{name} of the caller" for name in names}


def told(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name != "self"}


@pytest.mark.parametrize("name", PLAIN)
async def test_every_argument_and_the_result_are_passed_on(name: str) -> None:
    was_set: list[bool] = []
    closed = SimpleNamespace(setblocking=was_set.append)
    result = {"fork": [recorded()[0]], "connect": closed}.get(name, f"result of {name}")
    sandbox, asked = recorded((name,), result)
    given = given_to(getattr(AsyncSandbox, name))

    found = await getattr(AsyncSandbox(sandbox), name)(**given)

    assert [(name, given)] == [(called, told(arguments)) for called, arguments in asked]
    assert ([False] if name == "connect" else []) == was_set
    if name == "fork":
        assert [AsyncSandbox] == [type(each) for each in found]
        assert result == [each._sandbox for each in found]
    elif name in ("rewind", "apply_network_policy", "suspend", "resume", "terminate"):
        assert found is None
    else:
        assert result == found


async def test_a_merge_is_into_the_sandbox_behind_another_one() -> None:
    sandbox, asked = recorded(("merge",))
    other, _ = recorded()
    await AsyncSandbox(sandbox).merge(AsyncSandbox(other), base="snap-1")
    assert other is asked[0][1]["into"]


async def test_a_command_has_each_option_in_either_surface(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {
        "cwd": "/tmp",
        "env": {"A": "1"},
        "user": "root",
        "stdin": b"in",
        "timeout_s": 3.0,
        "max_output_bytes": 7,
        "session_leader": False,
    }
    begun: list[Any] = []

    class BegunError(Exception):
        pass

    def begin(inner: Any, request: Any) -> None:
        begun.append((inner, request))
        raise BegunError

    for module in (aio, sync):
        monkeypatch.setattr(module, "begin", begin)
    sandbox, asked = recorded(("start",))
    for script in (False, True):
        with pytest.raises(BegunError):
            sandbox.shell("true", **options) if script else sandbox.exec(["true"], **options)
        both = AsyncSandbox(sandbox)
        with pytest.raises(BegunError):
            await (both.shell("true", **options) if script else both.exec(["true"], **options))
        (_, one), (inner, other) = begun
        assert (one.to_json(), sandbox._inner) == (other.to_json(), inner)
        assert ("/tmp", False, 7) == (other.cwd, other.session_leader, other.max_output_bytes)
        begun.clear()
    with pytest.raises(AttributeError):  # what is started there is None
        await AsyncSandbox(sandbox).start(["true"], pty=(2, 3), **options)
    given = {"argv": ["true"], "pty": (2, 3), **options}
    assert given == {name: told(asked[0][1])[name] for name in given}


async def test_an_interpreter_is_begun_as_it_was_asked_for() -> None:
    sandbox, asked = recorded(("context",), SimpleNamespace(id="ctx-1"))
    given = given_to(AsyncSandbox.context)
    assert "ctx-1" == (await AsyncSandbox(sandbox).context(**given)).id
    assert [("context", given)] == [(name, told(arguments)) for name, arguments in asked]


@pytest.mark.parametrize("name", ["create", "restore"])
async def test_what_makes_a_sandbox_is_asked_for_as_it_was(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here, and of a server: there as the synchronous call asks."""
    signature, made = inspect.signature(getattr(Sandbox, name)), recorded()[0]
    given = given_to(getattr(AsyncSandbox, name))
    asked: list[Any] = []
    with monkeypatch.context() as patch:

        def here(*args: Any, **options: Any) -> Sandbox:
            asked.append(dict(signature.bind(*args, **options).arguments))
            return made

        patch.setattr(Sandbox, name, staticmethod(here))
        found = await getattr(AsyncSandbox, name)(**{**given, "server": None})
    assert (made, [{k: v for k, v in given.items() if k != "server"}]) == (found._sandbox, asked)

    there: list[Any] = []

    async def make_async(*args: Any, **options: Any) -> str:
        there.append((args, options))
        return "far"

    monkeypatch.setattr(remote, "make", lambda *args, **options: there.append((args, options)))
    monkeypatch.setattr(remote, "make_async", make_async)
    getattr(Sandbox, name)(**given)
    assert "far" == await getattr(AsyncSandbox, name)(**given)
    assert there[0] == there[1]
    args, options = there[0]
    passed = {"server of the caller", name, *args[2:], *options.values()}
    unsent = {"backend of the caller"} if name == "restore" else set()
    assert {*given.values(), name} - unsent == passed


async def test_snapshots_are_those_of_the_backend_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    backend = SimpleNamespace(snapshots=lambda: ["snap-1"], delete_snapshot=asked.append)
    monkeypatch.setattr(sync, "backend_named", {"one": backend}.__getitem__)
    for given in ("one", backend):
        assert ["snap-1"] == await AsyncSandbox.snapshots(backend=given)
        await AsyncSandbox.delete_snapshot("snap-1", backend=given)
    assert ["snap-1", "snap-1"] == asked


async def test_leaving_a_sandbox_ends_it_in_the_process_that_made_it_alone() -> None:
    sandbox, asked = recorded(("terminate",))
    async with AsyncSandbox(sandbox):
        pass
    assert [] == asked, "the copy of a forked child"
    vars(sandbox)["_maker"] = os.getpid()
    async with AsyncSandbox(sandbox):
        pass
    assert ["terminate"] == [name for name, _ in asked]
    vars(sandbox)["_maker"] = 0


async def test_signals_and_sizes_are_for_a_process_that_runs() -> None:
    asked: list[Any] = []

    def signal(number: int, group: bool = False) -> None:
        asked.append((number, group))

    run = SimpleNamespace(signal=signal, kill=lambda: asked.append("kill"))
    process: Process = object.__new__(Process)
    pump = SimpleNamespace(run=run, resize=lambda *size: asked.append(size))
    future: Future[Any] = Future()
    streams = {"stdin": None, "stdout": None, "stderr": None}
    vars(process).update(_pump=pump, future=future, id="exec-1", **streams)
    both = AsyncProcess(process)

    async def ask_all() -> list[Any]:
        asked.clear()
        process.send_signal(10)
        process.signal_group(12)
        process.terminate()
        process.resize(24, 80)
        await both.send_signal(10)
        await both.signal_group(12)
        await both.terminate()
        await both.resize(24, 80)
        return asked

    assert [(10, False), (12, True), (15, False), (24, 80)] * 2 == await ask_all()
    future.set_result(None)
    assert [] == await ask_all()
    process.kill()
    await both.kill()
    assert ["kill"] * 2 == asked, "what it left in the background may still run"
