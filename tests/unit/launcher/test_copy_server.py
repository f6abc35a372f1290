"""The helper that makes copies of processes: what it lets go of first, its answers, and what it gives back."""

from __future__ import annotations

import ctypes
import errno
import json
import marshal
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ringfence.launcher import wire
from ringfence.launcher.live import server
from ringfence.launcher.live.sockets import CannotCopy
from ringfence.linux import libc

pytestmark = pytest.mark.skipif(
    libc.MACHINE != "x86_64", reason="processes are copied on x86-64 only"
)


def test_it_has_nothing_of_the_zygotes_before_it_serves() -> None:
    """Whose handler reaps every child, and whose descriptors are those of other sandboxes."""
    ours, theirs = wire.socketpair()

    def tell(_server: Any) -> None:
        death = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(death), 0, 0, 0)
        opened = [int(each.name) for each in Path("/proc/self/fd").iterdir() if each.exists()]
        told = {
            "groups": os.getgroups() if os.geteuid() == 0 else [],
            "blocked": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            "handler": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
            "death": death.value,
            "opened": [fd for fd in opened if fd > 2],
            "name": Path("/proc/self/comm").read_bytes().decode().strip(),
            "score": Path("/proc/self/oom_score_adj").read_text().strip(),
        }
        os.write(3, json.dumps(told).encode())

    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            if os.geteuid() == 0:
                os.setgroups([4711])
            signal.signal(signal.SIGCHLD, lambda *_: None)
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGCHLD])
            os.open("/dev/zero", os.O_RDONLY)
            helper: Any = server._Server
            helper.run = tell
            server.serve(theirs.fileno())
        finally:
            os._exit(0)
    theirs.close()
    with closing(ours):
        found = json.loads(ours.recv(9999))
    os.waitpid(pid, 0)

    assert {
        "groups": [],
        "blocked": [],
        "handler": True,
        "death": signal.SIGKILL,
        "opened": [3],
        "name": server.NAME.decode(),
        "score": "500",
    } == found


class Serving(server._Server):
    """Does what its argument says."""

    def _do_say(self, argument: Any, fds: list[int]) -> Any:
        if isinstance(argument, Exception):
            raise argument
        return [argument, len(fds)]


@pytest.fixture
def sockets() -> Iterator[tuple[wire.Socket, wire.Socket]]:
    before = set(os.listdir("/proc/self/fd"))
    ours, theirs = wire.socketpair()
    yield ours, theirs
    for each in (ours, theirs):
        each.close()
    assert before == set(os.listdir("/proc/self/fd"))


@pytest.mark.anyone
@pytest.mark.parametrize(
    ("problem", "answer"),
    [
        (None, [None, 2]),
        (CannotCopy("a reason"), b"E%d [Errno %d] a reason" % ((errno.EOPNOTSUPP,) * 2)),
        (OSError(errno.ESRCH, "gone"), b"E%d [Errno %d] gone" % ((errno.ESRCH,) * 2)),
        (ValueError("wrong"), b"E%d [Errno %d] ValueError('wrong')" % ((errno.EPROTO,) * 2)),
    ],
)
def test_each_answer_says_what_is_wrong_and_leaves_no_descriptor(
    sockets: tuple[wire.Socket, wire.Socket],
    problem: Exception | None,
    answer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = sockets
    monkeypatch.setattr(wire, "receive", _received([("say", problem)]))
    before = len(os.listdir("/proc/self/fd"))
    Serving(theirs).run()

    assert before == len(os.listdir("/proc/self/fd"))
    said = ours.recv(9999)
    assert answer == (marshal.loads(said[1:]) if said.startswith(b"O") else said)


def _received(messages: list[Any]) -> Any:
    """Messages with two descriptors each; exceptions do not travel."""

    def receive(_sock: wire.Socket) -> tuple[Any, list[int]]:
        if not messages:
            return None, []
        return messages.pop(0), [os.open("/dev/null", os.O_RDONLY) for _ in range(2)]

    return receive


@pytest.mark.anyone
def test_at_its_end_all_go_on_and_nothing_is_left(
    sockets: tuple[wire.Socket, wire.Socket],
) -> None:
    done: list[str] = []

    class Thing:
        def __init__(self, name: str) -> None:
            for verb in ("release", "drop", "close"):
                setattr(self, verb, lambda verb=verb: done.append(f"{name} {verb}"))

    ours, theirs = sockets
    made: Any = server._Server(theirs)
    made.tree, made.template = Thing("tree"), Thing("template")
    ours.close()
    made.run()

    assert ["tree release", "tree drop", "template close"] == done


@pytest.mark.anyone
def test_a_template_that_cannot_be_made_leaves_no_copy_of_the_kernels(
    sockets: tuple[wire.Socket, wire.Socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    class Dropped:
        def drop(self) -> None:
            done.append("dropped")

    def refuse(_tree: Any) -> None:
        raise CannotCopy("it has no room")

    made: Any = server._Server(sockets[1])
    made.tree = Dropped()
    monkeypatch.setattr(server, "Template", refuse)
    with pytest.raises(CannotCopy):
        made._do_load(None, [])
    assert (["dropped"], None) == (done, made.template)
    monkeypatch.setattr(server, "Template", lambda tree: tree)
    made._do_load(None, [])
    assert ["dropped"] * 2 == done
