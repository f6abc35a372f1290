"""Turns of a machine's first process: waking, being saved, waking again, and mounts that come later."""

from __future__ import annotations

import errno
import marshal
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence.guest import machine
from ringfence.guest.channels import RESTED
from ringfence.launcher import wire
from ringfence.launcher.link.line import CONTROL, DATA, MESSAGE, frame
from ringfence.launcher.newroot import BuildError
from ringfence.linux import machine as host_machine

pytestmark = pytest.mark.anyone


def message(data: bytes) -> bytes:
    """A request without descriptors."""
    return frame(MESSAGE, CONTROL, b"\0\0" + data)


def children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


@pytest.fixture
def line() -> Iterator[tuple[int, int]]:
    """The host's end of a serial line, and the guest's."""
    host, guest = socket.socketpair()
    host.settimeout(60)
    with host, guest:
        yield host.fileno(), guest.fileno()


def test_the_first_message_is_found_behind_what_is_nobodys(line: tuple[int, int]) -> None:
    """Of a machine that was saved: answers to whoever was there before."""
    host, guest = line
    first = message(b"wake up")
    os.write(host, frame(DATA, CONTROL, b"old") + first[:3])
    os.write(host, first[3:] + b"what follows")

    assert (b"wake up", b"what follows") == machine._first_message(guest)


def test_a_machine_is_itself_again_each_time_that_it_wakes(
    line: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, guest = line
    done: list[Any] = []
    forms = [{"entropy": b"%d" % n, "now_ns": n} for n in range(3)]
    wakes = [message(marshal.dumps(form)) for form in forms]
    carried = iter([(True, wakes[1]), (True, wakes[2] + b"rest"), (False, b"")])

    def carry(_line: int, _control: Any, rest: bytes, _agent: int, _relays: Any) -> bool:
        done.append(("carry", rest))
        again, form = next(carried)
        os.write(host, form)
        return again

    monkeypatch.setattr(machine, "_carry", carry)
    monkeypatch.setattr(machine, "_settle_files", lambda: done.append("files"))
    monkeypatch.setattr(host_machine, "add_entropy", lambda data: done.append(("seed", data)))
    monkeypatch.setattr(machine, "_set_clock", lambda now: done.append(("clock", now)))
    monkeypatch.setattr(wire, "send", lambda _control, told: done.append(("agent", told)))
    os.write(host, wakes[0])
    control: Any = None

    machine._serve(guest, control, 1, control)

    turns = [[("seed", b"%d" % n), ("clock", n)] for n in range(3)]
    assert [
        *(*turns[0], ("agent", forms[0]), ("carry", b""), "files"),
        *(*turns[1], ("carry", b""), "files"),
        *(*turns[2], ("carry", b"rest")),
    ] == done
    told = b""
    wanted = (frame(DATA, CONTROL, RESTED) + frame(DATA, CONTROL, machine.READY)) * 2
    while len(told) < len(wanted):
        told += os.read(host, 1 << 16)
    assert wanted == told


@pytest.mark.parametrize("how", ["mounted", "refused", "fails", "killed"])
def test_what_becomes_of_a_later_mount_is_answered_and_its_child_is_gone(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def among(agent: int, told: Any) -> None:
        assert (5, 7) == (agent, told["number"])
        if how == "refused":
            raise BuildError("bind /x", OSError(errno.EROFS, "read-only"))
        if how == "fails":
            raise ValueError("no tree")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(machine, "_mount_among", among)
    before = len(os.listdir("/proc/self/fd")), children()

    answer = machine._mount_more(5, marshal.dumps({"number": 7}))

    number, _, rest = answer.partition(b" ")
    assert b"7" == number
    starts = {
        "mounted": b"O",
        "refused": b"E%d " % errno.EROFS,
        "fails": b"E%d ValueError" % errno.EIO,
        "killed": b"",
    }
    assert rest.startswith(starts[how])
    assert before == (len(os.listdir("/proc/self/fd")), children())
