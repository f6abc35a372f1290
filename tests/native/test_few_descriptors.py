"""What a live sandbox takes of its caller's open files, and that the rest is found when it is needed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence import Sandbox
from ringfence.backends.local.host import host
from ringfence.backends.native.backend import NativeBackend
from ringfence.errors import SandboxLost
from tests.native.outside import init_pid, open_fds, until

MANY = 5
NAMESPACES = ("user", "mnt", "pid")


@pytest.fixture(params=[True, False], ids=["opens", "holds"])
def opens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a PID namespace may be opened later; for root without the right to, as for all others."""
    monkeypatch.setattr(host(), "opens_namespaces", request.param and host().opens_namespaces)
    return host().opens_namespaces


@pytest.fixture
def backend(tmp_path: Path, opens: bool) -> Iterator[NativeBackend]:
    """One that builds nothing ahead: that would hold a descriptor, too.

    What its first sandbox held is closed.
    """
    made = NativeBackend(state_dir=str(tmp_path / "snapshots"), ahead=False)
    first = Sandbox.create(backend=made)
    live = len(open_fds())
    first.terminate()
    assert until(lambda: len(open_fds()) <= live - (3 if opens else 4))  # closed after the end
    yield made
    made.close()


def test_each_takes_its_socket_a_pidfd_and_its_mounts(backend: NativeBackend, opens: bool) -> None:
    before = len(open_fds())
    live = [Sandbox.create(backend=backend) for _ in range(MANY)]
    assert MANY * (3 if opens else 4) == len(open_fds()) - before
    for sandbox in live:
        sandbox.terminate()
    assert until(lambda: before == len(open_fds()))


def test_what_needs_every_namespace_works(
    backend: NativeBackend, opens: bool, tmp_path: Path
) -> None:
    """They are those of its PID 1; trees go in and out through all three."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("content")
    with Sandbox.create(backend=backend) as sandbox:
        borrowed = sandbox._inner.borrow_namespaces()  # type: ignore[attr-defined]
        try:
            told = [os.readlink(f"/proc/self/fd/{fd}") for fd in borrowed]
        finally:
            for fd in borrowed:
                os.close(fd)
        assert list(NAMESPACES) == [text.partition(":")[0] for text in told]
        inside = sandbox.exec(["readlink", *(f"/proc/self/ns/{name}" for name in NAMESPACES)])
        assert told == inside.stdout.decode().split()
        sandbox.files.upload(str(source), "/tmp/there")
        assert b"content" == sandbox.files.read("/tmp/there/file")


def test_of_one_that_has_ended_nothing_is_borrowed(backend: NativeBackend, opens: bool) -> None:
    """Its number may be another process's by then."""
    del opens
    sandbox = Sandbox.create(backend=backend)
    inner = sandbox._inner
    before = len(open_fds())
    os.kill(init_pid(sandbox), signal.SIGKILL)
    assert until(inner._is_gone)  # type: ignore[attr-defined]
    if host().opens_namespaces:
        with pytest.raises(SandboxLost):
            inner.borrow_namespaces()  # type: ignore[attr-defined]
    assert before == len(open_fds())
    sandbox.terminate()
