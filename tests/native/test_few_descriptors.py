"""What a live sandbox takes of its caller's open files, and that the rest is found when it is needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ringfence import Sandbox
from ringfence.backends.local.host.facts import host
from ringfence.backends.native.backend import NativeBackend
from ringfence.errors import RingfenceError, SandboxLost
from tests.native.outside import init_pid, open_fds, until

MANY = 5
NAMESPACES = ("user", "mnt", "pid")


@pytest.fixture(params=[True, False], ids=["opens", "holds"])
def opens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a PID namespace may be opened later; for root without the right to, as for all others."""
    monkeypatch.setattr(host(), "opens_namespaces", request.param and host().opens_namespaces)
    return host().opens_namespaces


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[NativeBackend]:
    made = NativeBackend(state_dir=str(tmp_path / "snapshots"))
    yield made
    made.close()


# In a process of its own, where nothing that is over still closes what it had; and it builds nothing ahead.
_COUNTED = """
import os, sys, time
from ringfence import Sandbox
from ringfence.backends.local.host.facts import host
from ringfence.backends.native.backend import NativeBackend

host().opens_namespaces = sys.argv[1] == "True"
backend = NativeBackend(state_dir=sys.argv[2], prebuilt_s=0)
count = lambda: len(os.listdir("/proc/self/fd"))
first = Sandbox.create(backend=backend)
with_one = count()
others = [Sandbox.create(backend=backend) for _ in range(int(sys.argv[3]))]
print(count() - with_one)
for each in others:
    each.terminate()
deadline_s = time.monotonic() + 30
while count() != with_one and time.monotonic() < deadline_s:
    time.sleep(0.01)
print(count() - with_one)
first.terminate()
backend.close()
"""


def test_each_takes_its_socket_a_pidfd_and_its_mounts(tmp_path: Path, opens: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COUNTED, str(opens), str(tmp_path / "snapshots"), str(MANY)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert "" == done.stderr
    assert [MANY * (3 if opens else 4), 0] == [int(line) for line in done.stdout.split()]


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
    before = _pid_namespaces()
    os.kill(init_pid(sandbox), signal.SIGKILL)
    assert until(inner._is_gone)  # type: ignore[attr-defined]
    if host().opens_namespaces:
        with pytest.raises(SandboxLost):
            inner.borrow_namespaces()  # type: ignore[attr-defined]
    assert _pid_namespaces() <= before
    sandbox.terminate()


def _pid_namespaces() -> set[str]:
    return {place for place in open_fds().values() if place.startswith("pid:[")}


REFUSED: dict[str, Callable[[Sandbox], object]] = {
    "a link into /proc": lambda sandbox: sandbox.files.read("/tmp/link"),
    "a pipe": lambda sandbox: sandbox.files.read("/tmp/pipe"),
    "a directory": lambda sandbox: sandbox.files.read("/tmp"),
    "what is not there": lambda sandbox: sandbox.files.read("/tmp/absent"),
    "a port without a server": lambda sandbox: sandbox.connect(9),
    "a program": lambda sandbox: sandbox.exec(["absent"]),
    "a program in a terminal": lambda sandbox: sandbox.start(["absent"], pty=(24, 80)).wait(),
    "a working directory": lambda sandbox: sandbox.exec(["true"], cwd="/absent"),
}


@pytest.mark.root
@pytest.mark.parametrize("what", REFUSED)
def test_what_pid_1_refuses_leaves_nothing_open_there(backend: NativeBackend, what: str) -> None:
    """Each is a program's to repeat, until PID 1 can open no more."""
    with Sandbox.create(backend=backend) as sandbox:
        sandbox.shell("ln -s /proc/self/status /tmp/link; mkfifo /tmp/pipe")
        before = len(open_fds(init_pid(sandbox)))
        for _ in range(5):
            with suppress(RingfenceError):
                REFUSED[what](sandbox)

        assert until(lambda: len(open_fds(init_pid(sandbox))) <= before, patience_s=5)
