"""forks: copy a live Python context into new sandboxes, beside os.fork() of a bare process of that size.

Also one node of a search, beside the same by a snapshot, and the merge of a branch.
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial

from ...launcher import wire
from ...sandbox import Sandbox
from ...sandbox.live_fork import LiveFork
from ..rows import VALUE, Row, Target
from ..turns import OURS, Samples, take_turns
from .files import timed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from ...model.session import Snapshot
    from ...sandbox.marks import Mark
    from ..settings import Settings

_MIB = 118
_STATE = f"import os; state = bytearray(os.urandom(1 << 20) * {_MIB})"
_MANY = 100
_PEER = "os.fork() without isolation"
# Answers one byte for each request, from a child of its own each time.
_BARE = f"""
import os, sys
state = bytearray(os.urandom(1 << 20) * {_MIB})
os.write(1, b"r")
while os.read(0, 1):
    pid = os.fork()
    if not pid:
        os.write(1, b"%d" % (len(state) % 7))
        os._exit(0)
    os.waitpid(pid, 0)
"""


_BY_SNAPSHOT = "a sandbox restored from a snapshot"
# Of an agent's: loading takes far longer than one edit and its tests.
_LOAD = "import asyncio, json, unittest; table = {n: str(n) for n in range(100_000)}"
_TRY = "open('code.py', 'a').write('1\\n'); exec(open('code.py').read())"
_FILES, _CHANGED, _IN_DIRECTORY = 100_000, 1000, 1000


def measure(settings: Settings) -> Iterator[Row]:
    """Copies of a context, nodes of a search, and a merge."""
    yield from _measure_copies(settings)
    yield _measure_node(settings.slow_rounds)
    yield _measure_merge()


def _measure_node(rounds: int) -> Row:
    with Sandbox.create() as source:
        source.run_code(_LOAD)
        saved = source.snapshot()
        try:
            with source.mark(processes="required") as mark:

                def rewind() -> float:
                    def node() -> None:
                        source.rewind(mark)
                        source.run_code(_TRY)

                    return timed(node, _nothing)

                def restore() -> float:
                    made: list[Sandbox] = []

                    def node() -> None:
                        made.append(Sandbox.restore(saved.id))
                        made[0].run_code(_LOAD)
                        made[0].run_code(_TRY)

                    return timed(node, partial(_end, made))

                samples = take_turns({OURS: rewind, _BY_SNAPSHOT: restore}, rounds)
        finally:
            Sandbox.delete_snapshot(saved.id)
    count, ours = len(samples.seconds[OURS]), samples.median_ms(OURS)
    theirs = samples.median_ms(_BY_SNAPSHOT)
    what = "node of a search: go back, edit a file, try it"
    return Row("forks", what, "ms", ours, _BY_SNAPSHOT, theirs, samples=count)


def _measure_merge() -> Row:
    """Into a directory of the host that has the same files."""
    fill = (
        f"import os\nfor d in range({_FILES // _IN_DIRECTORY}):\n os.makedirs(f'tree/{{d}}')\n"
        f" for n in range({_IN_DIRECTORY}): open(f'tree/{{d}}/{{n}}', 'w').write(f'{{d}} {{n}}\\n')"
    )
    change = (
        f"for n in range({_CHANGED}): open(f'tree/{{n % {_FILES // _IN_DIRECTORY}}}/{{n}}', 'a')"
        ".write('more\\n')"
    )
    with tempfile.TemporaryDirectory() as place, Sandbox.create() as source:
        source.exec(["python3", "-c", fill])
        source.files.download("tree", f"{place}/tree")
        base = source.snapshot()
        try:
            with source.fork(processes="none")[0] as branch:
                branch.exec(["python3", "-c", change])
                took = timed(
                    lambda: branch.merge(f"{place}/tree", base=base, path="tree"), _nothing
                )
        finally:
            Sandbox.delete_snapshot(base.id)
    what = f"merge of {_CHANGED} changed files of {_FILES}"
    return Row("forks", what, "s", took, target=Target(VALUE, must=1.0, aim=0.2))


def _measure_copies(settings: Settings) -> Iterator[Row]:
    """Milliseconds from the call to the first reply of the last fork; what is made is ended outside."""
    rounds = settings.slow_rounds
    with Sandbox.create() as source:
        source.run_code(_STATE)
        bare, ours = _start_bare()
        try:

            def fork_bare() -> float:
                return timed(lambda: _ask(ours), _nothing)

            with source.mark(processes="required") as mark:

                def fork() -> float:
                    made: list[Sandbox] = []

                    def begin() -> None:
                        made.extend(source.fork(at=mark))
                        made[0].run_code("len(state)")

                    return timed(begin, partial(_end, made))

                def rewind() -> float:
                    def back() -> None:
                        source.rewind(mark)
                        source.run_code("len(state)")

                    return timed(back, _nothing)

                what = f"fork of a context with {_MIB} MiB, to its first reply"
                samples = take_turns({OURS: fork, _PEER: fork_bare}, rounds)
                yield _row(what, samples, Target(VALUE, must=8.0, aim=4.0), peer=True)
                yield _memory(source, mark)
                what = "rewind of it, to its first reply"
                target = Target(VALUE, must=5.0, aim=1.9)
                yield _row(what, take_turns({OURS: rewind}, rounds), target)

                def fork_many() -> float:
                    made: list[Sandbox] = []
                    return timed(
                        lambda: made.extend(source.fork(_MANY, at=mark)), partial(_end, made)
                    )

                what = f"{_MANY} forks of it"
                target = Target(VALUE, must=500.0, aim=250.0)
                yield _row(what, take_turns({OURS: fork_many}, min(rounds, 3)), target)

            def keep() -> float:
                made: list[Mark] = []
                return timed(lambda: made.append(source.mark()), partial(_close, made))

            what = "mark of it"
            target = Target(VALUE, must=50.0, aim=10.0)
            yield _row(what, take_turns({OURS: keep}, rounds), target)

            def pause() -> float:
                live = LiveFork(source)

                def stand_still() -> None:
                    live.stop("required")
                    saved.append(source.snapshot())
                    live.release()

                try:
                    return timed(stand_still, _nothing)
                finally:
                    live.close()
                    Sandbox.delete_snapshot(saved.pop().id)

            saved: list[Snapshot] = []
            target = Target(VALUE, must=20.0, aim=5.0)
            yield _row("pause of it meanwhile", take_turns({OURS: pause}, rounds), target)
        finally:
            ours.close()
            os.waitpid(bare, 0)


def _memory(source: Sandbox, mark: Mark) -> Row:
    """Private memory of a fork that has answered: of its PID 1 and its context."""
    forks = source.fork(10, at=mark)
    try:
        for each in forks:
            each.run_code("len(state)")
        found = sorted(sum(map(_private_kib, _processes_of(each))) for each in forks)
        target = Target(VALUE, must=1.0, aim=0.4)
        ours = found[len(found) // 2] / 1024
        return Row("forks", "private memory of a fork", "MiB", ours, target=target, samples=10)
    finally:
        _end(forks)


def _processes_of(sandbox: Any) -> list[int]:
    """PID 1 and its children, as the host numbers them."""
    first = sandbox._inner.pid
    with open(f"/proc/{first}/task/{first}/children", encoding="ascii") as file:
        return [first, *map(int, file.read().split())]


def _private_kib(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Private_"))


def _row(what: str, samples: Samples, target: Target, *, peer: bool = False) -> Row:
    count, ours = len(samples.seconds[OURS]), samples.median_ms(OURS)
    if not peer:
        return Row("forks", what, "ms", ours, target=target, samples=count)
    return Row("forks", what, "ms", ours, _PEER, samples.median_ms(_PEER), target, count)


def _end(made: list[Sandbox]) -> None:
    for each in made:
        each.terminate()


def _close(made: list[Mark]) -> None:
    for each in made:
        each.wait()  # as one that is kept: its memory is copied before the next one is made
        each.close()


def _nothing() -> None:
    pass


def _start_bare() -> tuple[int, wire.Socket]:
    ours, theirs = wire.socketpair()
    actions = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), fd) for fd in (0, 1)]
    argv = [sys.executable, "-I", "-c", _BARE]
    pid = os.posix_spawn(sys.executable, argv, {}, file_actions=actions)
    theirs.close()
    assert ours.recv(1) == b"r"
    return pid, ours


def _ask(bare: wire.Socket) -> None:
    bare.send(b"g")
    bare.recv(1)
