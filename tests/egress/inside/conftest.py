"""Sandboxes in the world, and what code inside them tries."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from ringfence import Sandbox
from tests.egress.inside import attempts
from tests.egress.inside.asked import Asked
from tests.egress.world import World

Found = dict[str, Any]
MakeSandbox = Callable[..., Sandbox]
_SCRIPT = "/tmp/attempts.py"


@pytest.fixture
def make(world: World) -> Iterator[MakeSandbox]:
    """`make(**options of Sandbox.create)`: gone when the test is over, whatever its state."""
    with ExitStack() as stack:

        def create(**options: Any) -> Sandbox:
            return stack.enter_context(new_sandbox(world, **options))

        yield create


@pytest.fixture(scope="module")
def limited(request: pytest.FixtureRequest, world: World) -> Iterator[Sandbox]:
    """One sandbox for all tests of a module, under the module's own `POLICY`."""
    with new_sandbox(world, network=request.module.POLICY) as sandbox:
        yield sandbox


@pytest.fixture(scope="session")
def unrestricted(world: World) -> Iterator[Sandbox]:
    """The control: on the host's own network, with the host's own names."""
    with new_sandbox(world, network="unrestricted", env={"RES_OPTIONS": "attempts:1"}) as sandbox:
        yield sandbox


def new_sandbox(world: World, *, trust: bool = True, **options: Any) -> Sandbox:
    """A sandbox in which `attempt` works.

    Args:
        trust: Make programs that bring certificates of their own use the system's, by environment.
    """
    if trust:
        options["env"] = {**world.program_environment(), **options.get("env", {})}
    sandbox = Sandbox.create(**options)
    try:
        sandbox.files.write(_SCRIPT, Path(attempts.__file__).read_bytes())
    except BaseException:
        sandbox.terminate()
        raise
    return sandbox


_idle: WeakKeyDictionary[Sandbox, list[Asked]] = WeakKeyDictionary()


def attempt(sandbox: Sandbox, function: str, **arguments: Any) -> Found:
    """Call a function of `attempts.py` inside, and return what it found."""
    idle = _idle.setdefault(sandbox, [])
    asked = idle.pop() if idle else Asked(sandbox, "python3", _SCRIPT)
    try:
        found: Found | None = asked.do(function, **arguments)
    except queue.Empty:
        found = None
    if found is None:
        raise AssertionError(asked.end() or f"{function} has not answered")
    idle.append(asked)
    return found
