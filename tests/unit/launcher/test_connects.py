"""Callers whose connection is under way: how much is done for them before others are heard."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringfence.launcher.pid1 import connects
from ringfence.launcher.pid1.connects import Connects, _Waiting
from ringfence.linux import seccomp

pytestmark = pytest.mark.anyone


class Counting(Connects):
    """Knows how many callers it has looked at; none is connected."""

    def __init__(self, waiting: int) -> None:
        super().__init__(-1, 0)
        self.looks = 0
        asked = seccomp.Notification(0, 0, 0, ())
        self._waiting = [_Waiting(asked, time.monotonic() - 60, 0) for _ in range(waiting)]

    def _is_over(self, each: _Waiting, now: float) -> bool:
        self.looks += 1
        return False


@pytest.mark.parametrize(("is_asked", "looks"), [(True, 1), (False, 16)])
def test_who_has_just_asked_waits_for_one_look_at_the_others(is_asked: bool, looks: int) -> None:
    counting = Counting(1000)

    counting.look(is_asked=is_asked)

    assert looks == counting.looks


NO_SOCKETS: seccomp.Notification = seccomp.Notification(1, os.getpid(), 0, (0, 0, 0))
UNIX = b"\1\0"


@pytest.mark.parametrize(
    ("address", "has_one"),
    [
        (UNIX + b"x", True),
        (UNIX + b"x" * 108, True),
        (UNIX + b"x" * 109, False),  # longer than struct sockaddr_un
        (UNIX, False),
        (UNIX + b"\0x", False),  # abstract
        (b"\2\0x", False),
        (b"", False),
    ],
)
def test_a_path_is_what_the_kernel_would_look_for(address: bytes, has_one: bool) -> None:
    assert has_one is connects.has_path(address)


@pytest.mark.parametrize(("word", "number"), [(0, 0), (2**31 - 1, 2**31 - 1), (2**31, -(2**31))])
def test_only_the_lower_half_of_a_register_is_a_number(word: int, number: int) -> None:
    assert number == connects.signed(word) == connects.signed(word | 0xFFFF << 32)


def test_a_path_means_here_what_it_means_to_the_caller() -> None:
    paths = {
        b"/a": b"/a",
        b"a": b"/proc/7/cwd/a",
        b"/proc/self/fd/3": b"/proc/7/fd/3",
        b"/proc/thread-self/root": b"/proc/7/root",
        b"/proc/selfish": b"/proc/selfish",
        b"/proc/8/cwd": b"/proc/8/cwd",
    }
    assert paths == {each: connects.as_seen_here(7, each) for each in paths}


def test_so_much_of_an_address_is_read_and_no_more() -> None:
    content = bytes(range(1, 200))
    buffer = ctypes.create_string_buffer(content, 200)

    def read(length: int, at: int = ctypes.addressof(buffer)) -> bytes | int | None:
        asked = seccomp.Notification(0, os.getpid(), 0, (0, at, length & 0xFFFFFFFF))
        try:
            return connects.read_address(asked)
        except OSError as exc:
            return exc.errno

    assert [b"", content[:1], content[:128]] == [read(length) for length in (0, 1, 128)]
    assert [errno.EINVAL] * 2 == [read(length) for length in (129, -1)]
    assert errno.EFAULT == read(1, 8)
    assert b"" == read(0, 8)


@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.EPERM, errno.EACCES), (errno.ENOENT, errno.ENOENT), (None, errno.EIO)],
)
def test_what_a_process_hides_is_no_access(number: int | None, said: int) -> None:
    assert said == connects.number_of(OSError(number, "x") if number else OSError())


SIGNALS = """
import signal, sys, time
blocked, ignored = eval(sys.argv[1]), eval(sys.argv[2])
signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
for each in ignored: signal.signal(each, signal.SIG_IGN)
print(flush=True)
signal.pause()
"""


@pytest.mark.parametrize(
    ("sent", "blocked", "ignored", "interrupts"),
    [
        ([], [], [], False),
        ([signal.SIGUSR1], [], [], True),
        ([signal.SIGUSR1], [signal.SIGUSR1], [], False),
        ([signal.SIGUSR1, signal.SIGUSR2], [signal.SIGUSR1], [], True),
        ([signal.SIGUSR1], [], [signal.SIGUSR1], False),
        ([signal.SIGTSTP], [], [], False),
    ],
)
def test_a_signal_that_a_caller_would_be_interrupted_by(
    sent: list[int], blocked: list[int], ignored: list[int], interrupts: bool
) -> None:
    """Pending, as its caller stands still; neither blocked nor ignored, and no stop."""
    masks = [repr([int(each) for each in some]) for some in (blocked, ignored)]
    arguments = [sys.executable, "-c", SIGNALS, *masks]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        for each in sent:
            child.send_signal(each)
        found = connects.has_signal(child.pid)
        child.kill()

    assert interrupts is found
    assert not connects.has_signal(child.pid), "it has ended"


class UnderWay(Connects):
    """Each of its connections is under way, for so long; what is answered is kept."""

    def __init__(self, listener_fd: int, patience_s: float) -> None:
        super().__init__(listener_fd, 0)
        self.patience_s = patience_s

    def _attempt(self, asked: seccomp.Notification) -> int:
        raise connects.UnderWayError(errno.ETIMEDOUT, self.patience_s)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    numbers: list[int] = []
    monkeypatch.setattr(seccomp, "answer", lambda _fd, _asked, number: numbers.append(number))
    monkeypatch.setattr(seccomp, "is_waiting", lambda _fd, asked: asked.id != 99)
    return numbers


def test_so_many_callers_wait_and_the_next_is_told_to_try_again(answered: list[int]) -> None:
    waits = UnderWay(-1, 0)
    assert waits.wait_s() is None
    for _ in range(connects.MOST_WAITING):
        waits.answer(NO_SOCKETS)
    assert [] == answered
    waits.answer(NO_SOCKETS)

    assert [errno.EAGAIN] == answered
    wait_s = waits.wait_s()
    assert wait_s is not None
    assert 0 <= wait_s <= 0.0005


def test_a_caller_waits_as_long_as_its_socket_says(answered: list[int]) -> None:
    """Without a limit it waits for ever; one that is gone is forgotten without an answer."""
    now = time.monotonic()
    late, patient, gone = (
        _Waiting(seccomp.Notification(number, os.getpid(), 0, ()), began, patience_s)
        for number, began, patience_s in ((1, now - 60, 59.0), (2, now - 60, 0), (99, now - 60, 0))
    )
    waits = UnderWay(-1, 0)
    waits._waiting = [late, patient, gone]
    waits.look()

    assert [errno.ETIMEDOUT] == answered
    assert [patient] == waits._waiting
    assert now + 0.001 <= patient.again_at <= time.monotonic() + 0.001
    waits.look()
    assert [patient] == waits._waiting, "not before it is due"


def test_the_pause_doubles_up_to_a_bound_that_grows_with_those_who_wait(
    answered: list[int],
) -> None:
    waits = UnderWay(-1, 0)
    one = _Waiting(NO_SOCKETS, 0, 0)
    for others, longest in ((1, 0.05), (100, 0.1)):
        waits._waiting = [one] * others
        pauses = [one.pause_s for _ in range(12) if not waits._is_over(one, 0)]
        assert longest == pauses[-1]
        assert pauses == sorted(pauses)
    assert [] == answered


def test_a_caller_with_a_signal_is_interrupted_before_its_time(answered: list[int]) -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        waits = UnderWay(-1, 60.0)
        waits._waiting = [_Waiting(seccomp.Notification(1, child.pid, 0, ()), 0, 0)]
        waits.look()
        assert [] == answered
        child.send_signal(signal.SIGUSR1)
        waits._waiting[0].again_at = 0
        waits.look()
        child.kill()

    assert [errno.EINTR] == answered
    assert waits.wait_s() is None


@pytest.mark.parametrize("is_own", [True, False])
def test_a_refused_socket_of_the_host_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    """The control: one on the sandbox's own file system is given to who asked."""
    monkeypatch.setattr(connects, "_is_on_root", lambda _fd: is_own)
    asking = Connects(-1, 0)
    asking._root_device = -1
    path = bytes(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
        before = os.listdir("/proc/self/fd")
        if is_own:
            os.close(asking._open(os.getpid(), path))
        else:
            for _ in range(3):
                with pytest.raises(PermissionError):
                    asking._open(os.getpid(), path)
        assert before == os.listdir("/proc/self/fd")


def test_what_was_opened_for_a_connection_is_closed_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever came of it: connected, refused, or nobody waits for it any more."""
    answers = iter([True, True, False])
    monkeypatch.setattr(seccomp, "is_waiting", lambda *_: next(answers))
    monkeypatch.setattr(connects, "start_guard", lambda: None)
    monkeypatch.setattr(connects, "end_guard", lambda: None)
    asking = Connects(-1, 0)
    asking._root_device = tmp_path.stat().st_dev
    found = []
    with socket.socket(socket.AF_UNIX) as listening:
        path = bytes(tmp_path / "s")
        listening.bind(path)
        address = ctypes.create_string_buffer(UNIX + path + b"\0")
        for is_listening in (False, True, True):
            if is_listening:
                listening.listen(3)
            with socket.socket(socket.AF_UNIX) as sock:
                before = os.listdir("/proc/self/fd")
                arguments = (sock.fileno(), ctypes.addressof(address), len(address.raw) - 1)
                found.append(asking._attempt(seccomp.Notification(1, os.getpid(), 0, arguments)))
                assert before == os.listdir("/proc/self/fd")
    assert [errno.ECONNREFUSED, 0, errno.EINTR] == found
