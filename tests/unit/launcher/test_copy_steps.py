"""Steps of a copy that nothing but a race or another sandbox's file would show: flags, locks and ids."""

from __future__ import annotations

import fcntl
import os
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.launcher.live import steps
from ringfence.launcher.live.copying import _unused
from ringfence.launcher.live.descriptors import Lock
from ringfence.launcher.live.opening import OpenFiles

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
