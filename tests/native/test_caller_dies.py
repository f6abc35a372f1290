"""Whoever made a sandbox may die in any way: nothing of the sandbox outlives it for long."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.native.callers import Caller
from tests.native.conftest import am_root
from tests.native.outside import (
    cgroups_of,
    descendants_of,
    namespaces_of,
    new_length,
    open_fds,
    pids_before,
    pids_with,
    pin,
    survivors,
    until,
)

GONE_WITHIN_S = 2.0

_MAKE = """
def make(kind, length, source):
    sandbox = Sandbox.create(mounts=[source + ":/work:rw"] if kind == "mounted" else [])
    process = sandbox.start(["sh", "-c", f"setsid sleep {length} & echo; sleep {length}"])
    process.stdout.read(20)
    return sandbox, process

def tell(*sandboxes):
    inner = [sandbox._inner for sandbox in sandboxes]
    say({"ids": [each.id for each in inner], "zygote": inner[0].zygote.pid})

"""
_WAIT = """
kind, length, source = sys.argv[1:]
kept = make(kind, length, source)
tell(kept[0])
listen()
if kind == "suspended":
    kept[0].suspend()
say()
listen()
"""
KINDS = ["running", "suspended", "mounted"]


class Scene:
    """A caller with one sandbox, and everything that there is of it on the host."""

    def __init__(self, caller: Caller, length: str, source: Path, empty: set[str]) -> None:
        self.caller, self.length, self.source, self.empty = caller, length, source, empty
        told: dict[str, Any] = caller.hear()
        (self.id,) = told["ids"]
        self.zygote: int = told["zygote"]
        family = [*descendants_of(caller.pid)]
        assert self.zygote in family
        assert until(lambda: 2 == len(pids_with(length)))
        self.moment_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.cgroups = cgroups_of(self.id)
        self.processes = pin(family)
        self.namespaces = namespaces_of(family) - namespaces_of([os.getpid()])
        assert self.namespaces, "nothing of its own: this proves nothing"
        assert self.cgroups or not am_root()

    def processes_left(self) -> list[int]:
        return survivors(self.processes, GONE_WITHIN_S)

    def traces(self) -> list[object]:
        """What can be found of it now."""
        found: list[object] = [*pids_with(self.length), *cgroups_of(self.id)]
        found += [name for name in os.listdir(self.source) if name not in self.empty]
        held = namespaces_of(pids_before(self.moment_s))
        if self.caller.process.poll() is None:
            held.update(open_fds(self.caller.pid).values())
        return [*found, *notes_of(self.id), *(held & self.namespaces)]

    def is_gone(self) -> bool:
        return until(lambda: not self.traces(), GONE_WITHIN_S)


def notes_of(sandbox_id: str) -> list[str]:
    """Files that name the sandbox where the library keeps such notes."""
    places = ["/run/ringfence", f"/tmp/ringfence-{os.geteuid()}"]
    places.append(os.path.join(os.environ.get("XDG_RUNTIME_DIR", "/run"), "ringfence"))
    return [
        os.path.join(place, name)
        for place in places
        if os.path.isdir(place)
        for name in os.listdir(place)
        if sandbox_id in name
    ]


@pytest.fixture(params=KINDS)
def scene(request: pytest.FixtureRequest, private_dir: Path) -> Iterator[Scene]:
    (private_dir / "project.txt").write_text("the user's own")
    length, empty = new_length(), set(os.listdir(private_dir))
    with Caller(_MAKE + _WAIT, request.param, length, private_dir) as caller:
        found = Scene(caller, length, private_dir, empty)
        caller.tell()
        assert caller.hear() is None
        if "mounted" == request.param:
            assert {".envrc", ".git", ".vscode"} <= set(os.listdir(private_dir))
        yield found
        # Whatever the test found: the next one starts from nothing.
        for pid in pids_with(length):
            os.kill(pid, signal.SIGKILL)


def start_another() -> None:
    """Another process that uses the library: it clears up what dead ones left behind."""
    with Caller("say(Sandbox.create().exec(['true']).exit_code)") as caller:
        assert 0 == caller.hear()


def test_the_caller_is_killed(scene: Scene) -> None:
    scene.caller.kill(signal.SIGKILL)

    assert [] == scene.processes_left()
    assert scene.is_gone(), scene.traces()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_caller_is_asked_to_end(private_dir: Path, signum: int) -> None:
    with Caller(_MAKE + _WAIT, "mounted", length := new_length(), private_dir) as caller:
        scene = Scene(caller, length, private_dir, set())

        caller.kill(signum)

        assert [] == scene.processes_left()
        assert scene.is_gone(), scene.traces()


def test_the_zygote_is_killed(scene: Scene) -> None:
    """The caller lives, and clears up."""
    os.kill(scene.zygote, signal.SIGKILL)

    assert [] == scene.processes_left()
    assert scene.is_gone(), scene.traces()


@pytest.mark.full
def test_caller_and_zygote_are_killed(scene: Scene) -> None:
    """Nobody is left to clear up: processes end with the zygote, the next start does the rest."""
    os.kill(scene.caller.pid, signal.SIGSTOP)  # so that it cannot react to the other's death
    os.kill(scene.zygote, signal.SIGKILL)
    scene.caller.kill(signal.SIGKILL)

    if not scene.is_gone():
        start_another()
    assert [] == scene.processes_left()
    assert scene.is_gone(), scene.traces()


_TOLD_OF_LOSS = """
sandbox, process = make("running", sys.argv[1], "")
tell(sandbox)
outcomes = []
for attempt in (lambda: process.wait(20), lambda: sandbox.exec(["true"])):
    try:
        outcomes.append(repr(attempt()))
    except Exception as exc:
        outcomes.append(type(exc).__name__)
with Sandbox.create() as other:
    outcomes += [sandbox.state, other.exec(["echo", "again"]).stdout_text]
say(outcomes)
"""


def test_a_caller_without_its_zygote_goes_on() -> None:
    """It is told of the loss, never of a success, and may make the next sandbox."""
    with Caller(_MAKE + _TOLD_OF_LOSS, new_length()) as caller:
        os.kill(caller.hear()["zygote"], signal.SIGKILL)

        lost, refused, state, again = caller.hear()

    assert "SandboxLost" == lost
    assert refused in ("SandboxLost", "LifecycleError")
    assert ("terminated", "again\n") == (state, again)


_FORK = """
sandbox, process = make("running", sys.argv[1], "")
tell(sandbox)
child = os.fork()
if child == 0:
    with Sandbox.create() as own:
        tell(own)
        say(own.exec(["echo", "of the child"]).stdout_text)
    sys.exit(0)  # through every clean-up there is
os.waitpid(child, 0)
say([sandbox.state, process.running, sandbox.exec(["echo", "of the parent"]).stdout_text])
listen()
"""


@pytest.mark.filterwarnings("ignore")
def test_a_forked_child_gets_its_own_zygote_and_harms_nothing() -> None:
    length = new_length()
    with Caller(_MAKE + _FORK, length, env={"PYTHONWARNINGS": "ignore"}) as caller:
        of_parent, of_child = caller.hear(), caller.hear()

        assert "of the child\n" == caller.hear()
        assert of_child["zygote"] != of_parent["zygote"]
        assert ["running", True, "of the parent\n"] == caller.hear()
        assert until(lambda: 2 == len(pids_with(length)))


_LEFT_BY_CHILDREN = """
def drop(box):
    box.clear()

def leave(box):
    with box[0]:
        pass

with Sandbox.create() as sandbox:
    for end in (drop, leave):
        box = [sandbox] if end is leave else [Sandbox.create()]
        child = os.fork()
        if child == 0:
            try:
                end(box)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        say(box[0].exec(["echo", "still here"]).stdout_text)
        box[0].terminate()
"""


def test_what_a_forked_child_drops_or_leaves_is_the_parents() -> None:
    with Caller(_LEFT_BY_CHILDREN) as caller:
        assert ["still here\n"] * 2 == [caller.hear(), caller.hear()]


_IGNORES = """
with Sandbox.create() as sandbox:
    say([sandbox.exec(["sh", "-c", script]).exit_code for script in ("exit 3", "kill $$; exit 4")])
"""


def test_signals_that_the_caller_ignores_are_not_ignored_inside() -> None:
    """What waits for children would never hear of them, and `kill` would do nothing."""
    with Caller(
        _IGNORES, under=("sh", "-c", "trap '' CHLD TERM HUP INT; exec \"$@\"", "sh")
    ) as caller:
        assert [3, None] == caller.hear()
        assert (0, "") == caller.finish()


_UMASK = """
os.umask(0o777)
with Sandbox.create(mounts=[sys.argv[1] + ":/work:rw"]) as sandbox:
    say(sandbox.exec(["sh", "-c", "umask; umask 077; echo x > /work/made"]).stdout_text)
"""


def test_the_callers_umask_shuts_nobody_out(private_dir: Path) -> None:
    """Not even itself, from what it keeps for later."""
    for _ in range(2):
        with Caller(
            _UMASK, private_dir, env={"XDG_RUNTIME_DIR": str(private_dir / "run")}
        ) as caller:
            assert "0022\n" == caller.hear()
            assert (0, "") == caller.finish()
    assert {"made", "run"} >= set(os.listdir(private_dir))


_FEW_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2)
try:
    with Sandbox.create() as sandbox:
        say(sandbox.exec(["echo", "enough"]).stdout_text)
except Exception as exc:
    say([type(exc).__name__, str(exc)])
"""


def test_too_few_files_are_said_to_be_too_few() -> None:
    with Caller(_FEW_FILES, 64) as caller:
        kind, text = caller.hear()
    with Caller(_FEW_FILES, 128) as caller:
        assert "enough\n" == caller.hear()

    assert "ResourceExhausted" == kind
    assert "ulimit -n" in text


_EXEC = """
sandbox, process = make("mounted", sys.argv[1], sys.argv[2])
tell(sandbox)
listen()
os.execv(sys.executable, [sys.executable, "-c", "print(1, flush=True); input()"])
"""


def test_a_caller_that_becomes_another_program(private_dir: Path) -> None:
    """Its process lives on, its sandboxes do not: the new program knows nothing of them."""
    with Caller(_MAKE + _EXEC, length := new_length(), private_dir) as caller:
        scene = Scene(caller, length, private_dir, set())
        caller.tell()

        assert 1 == caller.hear()
        assert [] == scene.processes_left()
        assert scene.is_gone(), scene.traces()
        assert {0, 1, 2} == set(open_fds(caller.pid))
