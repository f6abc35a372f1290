"""Steps of a copy that nothing but a race or another sandbox's file would show: flags, locks and ids."""

from __future__ import annotations

import fcntl
import os
import resource
import struct
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.launcher import wire
from ringfence.launcher.live import steps, template
from ringfence.launcher.live.copying import _Copy, _unused
from ringfence.launcher.live.descriptors import Lock
from ringfence.launcher.live.opening import OpenFiles
from ringfence.launcher.live.sockets import CannotCopy
from ringfence.launcher.live.template import Template

pytestmark = pytest.mark.anyone
_OPEN, _FCNTL, _FLOCK = 2, 72, 73


def opening(**objects: Any) -> tuple[steps.Steps, OpenFiles]:
    program = steps.Steps(0)
    program.begin("only")
    tree: Any = SimpleNamespace(objects=SimpleNamespace(**objects), shared=[])
    return program, OpenFiles(program, tree, [], 1 << 20, 64)


@pytest.mark.parametrize(
    ("kind", "access", "step"),
    [
        ("FLOCK", "WRITE", (_FLOCK, 5, fcntl.LOCK_EX | fcntl.LOCK_NB)),
        ("FLOCK", "READ", (_FLOCK, 5, fcntl.LOCK_SH | fcntl.LOCK_NB)),
        ("POSIX", "WRITE", (_FCNTL, 5, fcntl.F_SETLK)),
        ("POSIX", "READ", (_FCNTL, 5, fcntl.F_SETLK)),
    ],
)
def test_no_lock_is_waited_for(kind: str, access: str, step: tuple[int, ...]) -> None:
    """In a directory of the host the source has it for as long as it runs."""
    program, files = opening()
    files._lock(5, Lock(f"lock: 1: {kind} ADVISORY {access} 4217 00:2d:1234 0 EOF".split()))

    assert [step] == [each[:3] for each in program._now]


def test_a_file_that_is_mapped_is_opened_through_no_link_and_made_in_volatile_memory_alone() -> (
    None
):
    volatile, kept = (1, 2), (1, 3)
    program, files = opening(
        paths={volatile: "/dev/shm/one", kept: "/tmp/two"},
        places={volatile: (0, 9), kept: (4096, 0)},
    )
    files.open_shared()

    opened = [each[2:4] for each in program._now if _OPEN == each[0]]
    flags = os.O_RDWR | os.O_NOFOLLOW
    assert [(flags | os.O_CREAT, 0o600), (flags, 0o600)] == opened
    assert {volatile: 64, kept: 65} == files.objects


@pytest.mark.parametrize(
    ("taken", "number"), [([], 2), ([1], 2), ([1, 3], 2), ([2], 3), ([1, 4, 3, 2, 6], 5)]
)
def test_who_makes_a_copy_inside_has_an_id_of_none_of_its_threads(
    taken: list[int], number: int
) -> None:
    assert number == _unused(taken)


def test_a_copy_has_the_limits_of_its_plan_as_far_as_ours_and_the_tag_of_its_exec() -> None:
    made: Any = _Copy.__new__(_Copy)
    made.steps, made.place = steps.Steps(0), SimpleNamespace(tag=77)
    made.steps.begin("only")
    core, stack, of_tag = resource.RLIMIT_CORE, resource.RLIMIT_STACK, 15
    infinite = (1 << 64) - 1
    made._limit(
        [(core, 5, 10), (stack, -1, 1 << 20), (core, 10, 5), (of_tag, 1, 2), (stack, 0, -1)]
    )

    found = []
    for _call, _pid, which, at, *_rest in made.steps._now:
        found.append((which, *struct.unpack_from("=QQ", made.steps._data, at)))
    most = {each: resource.getrlimit(each)[1] & infinite for each in (core, stack)}
    assert [
        (core, min(5, most[core]), min(10, most[core])),
        (stack, min(1 << 20, most[stack]), min(1 << 20, most[stack])),
        (core, min(5, most[core]), min(5, most[core])),
        (stack, 0, most[stack]),
        (of_tag, 77, 77),
    ] == found


@pytest.mark.parametrize(("more_secrets", "more_steps"), [(0, 0), (1, 0), (0, 1)])
def test_a_message_is_as_long_as_the_template_has_room_and_leaves_nothing(
    more_secrets: int, more_steps: int
) -> None:
    made: Any = Template.__new__(Template)
    made.message, (made.socket, theirs) = 0, wire.socketpair()
    room = template.MESSAGE_BYTES - template._HEADER_BYTES - template.SECRET_BYTES
    parts = bytes(template.SECRET_BYTES + more_secrets), bytes(room + more_steps)
    before = len(os.listdir("/proc/self/fd"))
    with closing(made.socket), closing(theirs):
        if more_secrets or more_steps:
            with pytest.raises(CannotCopy, match="too many files, threads or mappings"):
                made.send(*parts, [])
        else:
            made.send(*parts, [])
            said, (sent,) = wire.receive_raw(theirs)
            assert (b"C", template.MESSAGE_BYTES) == (said, os.fstat(sent).st_size)
            os.close(sent)
        assert before == len(os.listdir("/proc/self/fd"))


def test_a_filter_that_asks_lets_callers_be_killed_and_a_program_is_opened_through_no_link() -> (
    None
):
    made: Any = _Copy.__new__(_Copy)
    made.steps, made.secrets, made.listener = steps.Steps(0), bytearray(), 70
    made.steps.begin("only")
    made.template, made.plan = SimpleNamespace(secrets=1 << 12), {"connects": False}
    source: Any = SimpleNamespace(
        parent=None, exe="/bin/true", auxv=b"", memory_map=list(range(10)), brk=5
    )
    made.tree = SimpleNamespace(root=source)
    made._ask_of_pid_1()
    made._describe_memory(source)

    seccomp, openat2, set_filter, new_listener, killable = 317, 437, 1, 8, 32
    calls = {each[0]: each for each in made.steps._now}
    assert (set_filter, new_listener | killable) == calls[seccomp][1:3]
    how = struct.unpack_from("=QQQ", made.steps._data, calls[openat2][3])
    assert (os.O_RDONLY | os.O_CLOEXEC, 0, 0x04 | 0x02) == how
