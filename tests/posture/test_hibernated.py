"""A PID 1 that sleeps is another program, and still who it was: identity, files, limits and mounts."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.native.hibernation import is_hibernated
from tests.native.outside import until
from tests.posture import expected, maker
from tests.posture.reading import Process, anonymous, mounts_of, processes_in, read_process
from tests.posture.test_posture import OTHER_GID, OTHER_UID, Made, made_by_other

pytestmark = [pytest.mark.full, pytest.mark.root]
__all__ = ["made_by_other"]


@pytest.fixture(scope="module")
def way() -> str:
    return "idle"


@pytest.fixture(scope="module")
def made_by_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    source = str(tmp_path_factory.mktemp("ro"))
    with maker.make(source, str(tmp_path_factory.mktemp("rw")), "idle") as sandbox:
        first = sandbox._inner.pid
        yield Made(first, os.getpid(), 0, 0, processes_in(first))


@pytest.fixture(scope="module", params=["made_by_root", "made_by_other"])
def made(request: pytest.FixtureRequest) -> Made:
    found: Made = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def mounts_before(made: Made) -> object:
    return mounts_of(made.first)


@pytest.fixture(scope="module")
def hibernated(made: Made, mounts_before: object) -> Process:
    assert until(lambda: is_hibernated(made.first))
    return read_process(made.first)


def test_nobody_else_is_there(made: Made, hibernated: Process) -> None:
    assert [hibernated.pid] == [process.pid for process in processes_in(made.first)]
    assert (1, 1) == (hibernated.inside, hibernated.threads)


def test_it_is_who_it_was(made: Made, hibernated: Process) -> None:
    (seen,) = hibernated.identities
    if made.uid:
        wanted = expected.identity_made_by(seen, OTHER_UID, OTHER_GID)
    else:
        wanted = expected.identity_made_by_root(seen)
    assert wanted == seen
    assert made.init.identities == hibernated.identities


def test_it_is_called_what_it_was_and_shows_nothing_of_the_host(hibernated: Process) -> None:
    assert ("ringfence-init", ("ringfence-init",)) == (hibernated.name, hibernated.command)
    assert b"" == Path(f"/proc/{hibernated.pid}/environ").read_bytes()


def test_it_cannot_be_traced(hibernated: Process) -> None:
    assert not hibernated.traceable


def test_it_holds_what_it_held_and_what_it_knew(made: Made, hibernated: Process) -> None:
    assert expected.hibernated(made.uid) == anonymous(hibernated.files)
    assert made.init.files[3].removesuffix(" cloexec") == hibernated.files[3]


def test_limits_and_control_groups_are_as_before(made: Made, hibernated: Process) -> None:
    assert made.init == replace(
        hibernated, name=made.init.name, command=made.init.command, files=made.init.files
    )


def test_it_sees_what_it_saw(hibernated: Process, mounts_before: object) -> None:
    assert mounts_before == mounts_of(hibernated.pid)


def test_nobody_can_write_to_what_all_of_them_become(hibernated: Process) -> None:
    """Not even root, by a descriptor that may be written to; in a memory without seals he can."""
    own = os.memfd_create("control", os.MFD_ALLOW_SEALING)
    refused = []
    for path in (f"/proc/{hibernated.pid}/fd/7", f"/proc/self/fd/{own}"):
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError as exc:
            refused.append(exc.errno)
            continue
        try:
            os.pwrite(fd, b"x", 0)
        except PermissionError as exc:
            refused.append(exc.errno)
        finally:
            os.close(fd)
    os.close(own)
    assert 1 == len(refused)
    assert refused[0] in (errno.EPERM, errno.ETXTBSY)
    fd = os.open(f"/proc/{hibernated.pid}/fd/7", os.O_RDONLY)
    assert 15 == fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    os.close(fd)
