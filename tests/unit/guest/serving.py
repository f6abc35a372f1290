"""A real agent in a process of its own, without a sandbox around it, and requests to it over its socket."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from ringfence.guest.settings import Settings
from ringfence.launcher import wire

PATIENCE_S = 60.0
GUEST_UID = 23456 if os.geteuid() == 0 else os.geteuid()
"""As root, the agent has another user than itself, as in a sandbox."""
# Imported first: as another user, it may not reach this tree.
_SERVE = """
import os
from ringfence.guest import boot, trees
from ringfence.launcher.machine_code import vforked
os.umask(0o077)
if {is_plain}:
    vforked.is_here = lambda: False
boot.main()
"""


def settings_of(**changes: Any) -> Settings:
    """Settings of an agent that locks nothing down."""
    settings: Settings = {
        "own_kernel": False,
        "uid": GUEST_UID,
        "id_map": "",
        "pids": 1000,
        "memory_bytes": 0,
        "counts_cpu": False,
        "rlimits": [],
        "seccomp": b"",
        "tag_key": 0,
        "covered": [],
        "room": None,
        "shm_bytes": 0,
        "anew": False,
        "place": "",
    }
    settings.update(changes)  # type: ignore[typeddict-item]
    return settings


class ServingAgent:
    """The process, and the host's end of its socket. Execs carry tags that no sandbox of this host has.

    Args:
        is_plain: It starts programs without machine code, as on a processor that has none.
        changes: Of its settings.
    """

    def __init__(self, *, is_plain: bool = False, **changes: Any) -> None:
        self.control, theirs = wire.socketpair()
        self.control.settimeout(PATIENCE_S)
        with closing(theirs):
            self.process = subprocess.Popen(
                [sys.executable, "-c", _SERVE.format(is_plain=is_plain)], stdin=theirs.fileno()
            )
        wire.send(self.control, settings_of(**changes))
        answer, _fds = wire.receive_raw(self.control)
        if answer != b"READY":
            self.close()
            raise AssertionError(answer)
        self.number = (1 << 30) + secrets.randbits(28)

    def ask_later(self, verb: str, *arguments: Any, fds: Sequence[int] = ()) -> wire.Socket:
        """Send a request with copies of descriptors, closing ours; return where its answer comes."""
        ours, theirs = wire.socketpair()
        ours.settimeout(PATIENCE_S)
        with closing(theirs):
            wire.send(self.control, [verb, *arguments], [theirs.fileno(), *fds])
        for fd in fds:
            os.close(fd)
        return ours

    def ask(self, verb: str, *arguments: Any, fds: Sequence[int] = ()) -> bytes:
        """Return the answer without its first letter.

        Raises:
            OSError: The agent refused, with its errno.
        """
        with closing(self.ask_later(verb, *arguments, fds=fds)) as reply:
            return answer_of(reply)

    def start(
        self,
        *argv: str,
        cwd: str = "/",
        timeout_s: float = 0.0,
        fds: Sequence[int] = (),
        env: dict[str, str] | None = None,
        leads: bool = True,
    ) -> tuple[int, wire.Socket]:
        """Start an exec; return its number and where its end is told."""
        self.number += 1
        streams = list(fds) or [os.open("/dev/null", os.O_RDWR) for _ in range(3)]
        environment = {"PATH": "/usr/bin:/bin"} if env is None else env
        rest = (timeout_s, None, leads, GUEST_UID)
        reply = self.ask_later(
            "exec", self.number, list(argv), environment, cwd, *rest, fds=streams
        )
        return self.number, reply

    def run(self, *argv: str, **how: Any) -> wire.ExecReport:
        """Run one to its end."""
        _number, reply = self.start(*argv, **how)
        return report_of(reply)

    def descriptors(self) -> int:
        """Count the descriptors of an agent that has nothing to do; 0 unless we are root."""
        with closing(self.ask_later("end_all")) as reply:
            answer_of(reply)
            assert wire.receive_raw(reply) == (b"", [])
        if os.geteuid() != 0:
            return 0
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def close(self) -> None:
        """Hang up, and wait for the agent to end."""
        self.control.close()
        self.process.wait(PATIENCE_S)


def answer_of(reply: wire.Socket) -> bytes:
    """Read one answer."""
    data, _fds = wire.receive_raw(reply)
    if data[:1] == b"E":
        number, _, text = data[1:].partition(b" ")
        raise OSError(int(number), text.decode())
    assert data[:1] == b"O", data
    return data[1:]


def report_of(reply: wire.Socket) -> wire.ExecReport:
    """Read how an exec ended; nothing else may follow."""
    with closing(reply):
        data, _fds = wire.receive_raw(reply)
        assert wire.receive_raw(reply) == (b"", []), "the socket of a reported exec stays open"
    return wire.ExecReport.unpack(data)


@contextmanager
def open_place() -> Iterator[Path]:
    """Make a directory that the guest's user owns, and can reach."""
    path = Path(tempfile.mkdtemp(prefix="guest-", dir="/tmp"))
    try:
        os.chown(path, GUEST_UID, GUEST_UID if os.geteuid() == 0 else os.getegid())
        yield path
    finally:
        shutil.rmtree(path)
