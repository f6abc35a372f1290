"""Bursts of forks: limits hold in each, and random numbers differ in all generations."""

from __future__ import annotations

import ast
from contextlib import ExitStack
from typing import Any

import pytest

from ringfence import Sandbox
from ringfence.client import Client
from ringfence.fork.branches import copied_processes
from ringfence.linux import libc
from tests.api.conftest import Daemon

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(libc.MACHINE != "x86_64", reason="processes are copied on x86-64 only"),
]
_BEGIN = """
import os, random, secrets, ssl, tempfile, uuid
try:
    import numpy
except ImportError:
    numpy = None
random.seed(7); random.random(); ssl.RAND_bytes(8); tempfile.mktemp()
if numpy: numpy.random.seed(7); numpy.random.rand()
"""
_DRAW = (
    "(random.random(), numpy.random.rand() if numpy else os.urandom(8).hex(), secrets.token_hex(),"
    " str(uuid.uuid4()), ssl.RAND_bytes(8).hex(), tempfile.mktemp(), os.urandom(8).hex())"
)


def _drawn(sandbox: Any) -> tuple[Any, ...]:
    found = sandbox.run_code(_DRAW)
    assert found.error is None, found.error
    row: tuple[Any, ...] = ast.literal_eval(found.text)
    return row


def _differ(rows: list[tuple[Any, ...]]) -> None:
    """Nothing was drawn twice, by whatever drew it."""
    assert [len(rows)] * 7 == [len(set(column)) for column in zip(*rows, strict=True)]


def _generations(sandbox: Any, stack: ExitStack) -> list[Any]:
    """It, two forks, two forks of one of these, and two of one of those."""
    found = [sandbox]
    for _ in range(3):
        forks = found[-1].fork(2, processes="required")
        found += [stack.enter_context(each) for each in forks]
    return found


def test_forks_of_forks_of_forks_draw_others() -> None:
    with Sandbox.create() as sandbox, ExitStack() as stack:
        sandbox.run_code(_BEGIN)
        _differ([_drawn(each) for each in _generations(sandbox, stack)])


def test_each_rewind_and_each_fork_of_a_mark_draws_others() -> None:
    with Sandbox.create() as sandbox:
        sandbox.run_code(_BEGIN)
        with sandbox.mark(processes="required") as mark:
            rows = [_drawn(sandbox)]
            for _ in range(3):
                sandbox.rewind(mark)
                rows.append(_drawn(sandbox))
            for each in sandbox.fork(2, at=mark):
                with each:
                    rows.append(_drawn(each))
            _differ(rows)


_PROGRAM = """
import mmap, os, random, ssl, sys
page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
page.madvise(18)  # MADV_WIPEONFORK
page[0] = 1
def draw():
    if not page[0] and sys.argv[1:] == ["watches"]:
        page[0] = 1
        random.seed()
        ssl.RAND_add(os.urandom(64), 64.0)
    return ssl.RAND_bytes(8).hex(), random.random()
for line in sys.stdin:
    print(draw(), flush=True)
"""


def _ask(process: Any) -> tuple[Any, ...]:
    process.stdin.write(b"\n")
    row: tuple[Any, ...] = ast.literal_eval(next(iter(process.stdout)).decode())
    return row


def test_a_program_notices_by_wiped_memory_that_it_is_a_copy() -> None:
    """In forks of forks too, whose memory has to be marked again, after a rewind, and in a child."""
    script = 'python3 -c "$0" watches; true'
    with Sandbox.create() as sandbox, ExitStack() as stack:
        program = sandbox.start(["sh", "-c", script, _PROGRAM], stream_stdin=True)
        rows = [_ask(program)]
        with sandbox.mark(processes="required") as mark:
            rows.append(_ask(program))
            for _ in range(2):
                sandbox.rewind(mark)
                rows.append(_ask(sandbox.process(program.id)))
        last = sandbox
        for _ in range(3):
            forks = [stack.enter_context(each) for each in last.fork(2, processes="required")]
            rows += [_ask(each.process(program.id)) for each in forks]
            last = forks[1]
    assert [10] * 2 == [len(set(column)) for column in zip(*rows, strict=True)]


def test_a_report_says_which_processes_draw_alike() -> None:
    with Sandbox.create() as sandbox, ExitStack() as stack:
        context = sandbox.context()
        context.run("import os, subprocess; child = subprocess.Popen(['sleep', '1000'])")
        bash = sandbox.context("bash")
        bash.run("x=1")
        program = sandbox.start(["python3", "-c", _PROGRAM], stream_stdin=True)
        _ask(program)
        forks = [stack.enter_context(each) for each in sandbox.fork(2, processes="required")]
        assert forks[0].fork_report is not None
        copies = forks[0].fork_report.copies
        found = [(each.exec_id, each.command, each.is_reseeded) for each in copies]
        assert [
            (context.id, "python3", True),
            (context.id, "sleep", False),
            (bash.id, "python3", True),
            (bash.id, "bash", True),
            (program.id, "python3", False),
        ] == found
        assert "" == copies[0].reason == copies[3].reason
        assert "only interpreters of contexts" in copies[1].reason
        assert copies[1].reason == copies[4].reason
        pids = [int(context.run(each).text or "") for each in ("os.getpid()", "child.pid")]
        assert pids == [each.pid for each in copies[:2]]
        # What it says is so: nobody told this program.
        rows = [_ask(each.process(program.id)) for each in forks]
        assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("language", "processes", "expected"),
    [
        ("", [], [False]),
        ("python", [], [True]),
        ("node", [], [False]),
        ("java", [], [False]),
        ("jupyter:ir", [], [False]),
        ("", [(2, "sh"), (3, "bash")], [False, False]),
        ("python", [(2, "python3"), (3, "python3")], [True, False]),
        ("node", [(2, "node")], [False]),
        ("bash", [(2, "python3"), (3, "bash"), (4, "bash")], [True, True, False]),
        ("bash", [(2, "python3"), (3, "sleep")], [True, False]),
        ("r", [(2, "python3"), (3, "R")], [True, True]),
        ("java", [(2, "python3"), (3, "java")], [True, False]),
    ],
)
def test_only_what_is_told_counts_as_seeded_anew(
    language: str, processes: list[tuple[int, str]], expected: list[bool]
) -> None:
    copies = copied_processes("exec-1", "program", language, processes)
    assert expected == [each.is_reseeded for each in copies]
    assert expected == [not each.reason for each in copies]
    named = [(each.pid, each.command) for each in copies]
    assert named == (processes if processes else [(None, "program")])


@pytest.mark.full
def test_a_report_over_http_says_which_processes_draw_alike(daemon: Daemon) -> None:
    with Client(f"unix:{daemon.socket}") as client, client.create() as sandbox:
        context = sandbox.context()
        context.run("x = 1")
        sandbox.start(["sleep", "1000"])
        (fork,) = sandbox.fork(processes="required")
        with fork:
            report = fork.fork_report
            assert report is not None
            found = {each.exec_id: each.is_reseeded for each in report.copies}
            assert {report.contexts[0]: True, report.processes[0]: False} == found


@pytest.mark.full
def test_forks_over_http_draw_others(daemon: Daemon) -> None:
    with Client(f"unix:{daemon.socket}") as client, client.create() as sandbox:
        sandbox.run_code(_BEGIN)
        with ExitStack() as stack:
            _differ([_drawn(each) for each in _generations(sandbox, stack)])


@pytest.mark.full
def test_limits_hold_in_each_of_a_burst() -> None:
    """Each copy has all of its own limits to use, and no more, while the others use theirs."""
    # Without a cgroup, memory is sampled, and what children share is counted for each.
    limits = {"memory_bytes": 1 << 30, "pids": 24}
    with Sandbox.create(limits=limits) as source, ExitStack() as stack:
        source.run_code("import os, time; kept = bytearray(b'x' * (16 << 20))")
        forks = [stack.enter_context(each) for each in source.fork(20, processes="required")]
        crowd = (
            "count = 0\nfor _ in range(40):\n try:\n  pid = os.fork()\n except OSError: break\n"
            " if not pid:\n  time.sleep(1000)\n count += 1\ncount"
        )
        counts = [int(each.run_code(crowd).text or 0) for each in forks]
        assert 0 < min(counts) <= max(counts) <= 24
        assert "True" == source.run_code("os.waitpid(os.fork() or os._exit(0), 0)[1] == 0").text
        for each in forks[:5]:
            error = each.run_code("more = bytearray(b'x' * (1 << 30))").error
            assert error is not None
            assert error.name in ("MemoryError", "ContextEnded")
        for each in forks[5:]:
            assert str(16 << 20) == each.run_code("len(kept)").text
        assert str(16 << 20) == source.run_code("len(kept)").text
