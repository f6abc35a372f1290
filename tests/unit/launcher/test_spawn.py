"""The processes that are started first: with which Python, and with what of who starts them."""

from __future__ import annotations

import _socket
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.linux.child import result_of

from ringfence.launcher import spawn

_TELLS = """
import json, os, signal, sys
told = {
    "argv": sys.argv[1:], "environment": dict(os.environ), "session": os.getsid(0) == os.getpid(),
    "streams": [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)], "path": sys.path,
    "open": sorted(map(int, os.listdir("/proc/self/fd"))),
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "ignored": [row.split()[1] for row in open("/proc/self/status") if row[:6] == "SigIgn"],
}
os.write(3, json.dumps(told).encode())
"""


def told_by(*arguments: str, outlives: bool = False) -> dict[str, Any]:
    before = len(os.listdir("/proc/self/fd"))
    started = spawn.spawn(_TELLS, *arguments, outlives=outlives)
    assert before + 1 == len(os.listdir("/proc/self/fd"))
    control = started.control
    assert not os.get_inheritable(control.fileno())
    found: dict[str, Any] = json.loads(control.recv(1 << 16))
    assert b"" == control.recv(1)
    control.close()
    assert 0 == os.waitpid(started.pid, 0)[1]
    return found


@pytest.mark.anyone
@pytest.mark.parametrize("outlives", [False, True])
def test_it_has_its_socket_and_nothing_else_of_who_starts_it(
    monkeypatch: pytest.MonkeyPatch, outlives: bool
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/none")
    own = os.open("/dev/zero", os.O_RDONLY)
    opened = [int(fd) for fd in os.listdir("/proc/self/fd")]
    inheritable = {
        fd for fd in opened if os.path.exists(f"/proc/self/fd/{fd}") and os.get_inheritable(fd)
    }
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    ignored = [
        (each, signal.signal(each, signal.SIG_IGN)) for each in (signal.SIGUSR2, signal.SIGHUP)
    ]
    try:
        found = told_by("one", "two", outlives=outlives)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        for each, handler in ignored:
            signal.signal(each, handler)
        os.close(own)

    assert str(Path(spawn.__file__).parents[2]) == found["argv"][0]
    assert ["one", "two"] == found["argv"][1:]
    assert {"LC_CTYPE"} >= {*found["environment"]}
    assert found["session"]
    assert ["/dev/null", "/dev/null"] == found["streams"][:2]
    assert outlives == ("/dev/null" == found["streams"][2])
    assert {0, 1, 2, 3} <= {*found["open"]}
    assert 1 == len({*found["open"]} - {0, 1, 2, 3} - inheritable), "the one by which it looks"
    assert not {"", "/none"} & {*found["path"]}
    assert [] == found["mask"]
    pythons = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1
    own_of_libc = 3 << 31  # signals 32 and 33
    assert pythons == int(found["ignored"][0], 16) & ~own_of_libc


@pytest.mark.anyone
def test_a_socket_of_the_number_that_it_is_to_have_stays_open_in_it() -> None:
    """A duplicate onto itself would close with the execution."""

    def start() -> Any:
        told = os.dup2(3, 200) if os.path.exists("/proc/self/fd/3") else -1
        made = _socket.socketpair

        def third(*kinds: Any) -> tuple[Any, Any]:
            ours, theirs = made(*kinds)
            os.dup2(theirs.fileno(), 3, inheritable=False)
            theirs.close()
            return ours, _socket.socket(fileno=3)

        _socket.socketpair = third
        started = spawn.spawn("import os; os.write(3, b'here')")
        said = started.control.recv(10).decode()
        os.waitpid(started.pid, 0)
        if told >= 0:
            os.dup2(told, 3)
        return said

    assert "here" == result_of(start)


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of Python where root would have made one."""
    base, copy = tmp_path / "base", tmp_path / "place/python"
    copy.parent.mkdir(mode=0o755)
    base.write_bytes(b"an interpreter")
    shutil.copy2(base, copy)
    for path, mode in ((copy.parent, 0o755), (copy, 0o755)):
        path.chmod(mode)
    monkeypatch.setattr(spawn, "COPY", str(copy))
    monkeypatch.setattr(sys, "_base_executable", str(base))
    return copy


def _link(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to("other")


@pytest.mark.root
@pytest.mark.parametrize(
    "change",
    [
        lambda copy: copy.unlink(),
        lambda copy: copy.chmod(0o775),
        lambda copy: copy.chmod(0o757),
        lambda copy: copy.parent.chmod(0o775),
        lambda copy: copy.parent.chmod(0o757),
        lambda copy: os.chown(copy, 1000, 0),
        lambda copy: os.chown(copy.parent, 1000, 0),
        lambda copy: os.utime(copy, ns=(1, 1)),
        lambda copy: os.truncate(copy, 5),
        lambda copy: (copy.parent.parent / "base").unlink(),
        _link,
    ],
    ids=range(11),
)
def test_only_a_copy_that_nobody_else_can_change_is_started(
    copy: Path, change: Callable[[Path], object]
) -> None:
    """And only of the interpreter as it is now."""
    assert str(copy) == spawn.interpreter(), "the control"

    change(copy)

    assert str(copy.parent.parent / "base") == spawn.interpreter()
