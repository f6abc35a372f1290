"""Calls that wait for PID 1: what is asked, which key passes, and how many sockets there may be."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ringfence
from ringfence.launcher.pid1 import netlink_sockets
from ringfence.linux import seccomp

KEY = 0x0123456789ABCDEF
SCRIPT = f"""
import ctypes, errno, json, os, select, socket, sys
from ringfence.launcher.pid1 import netlink_sockets, notifications
from ringfence.linux import libc, privileges

KEY = {KEY:#x}
libc_ = ctypes.CDLL(None, use_errno=True)
"""


def run(body: str) -> None:
    """Run it where the filter may stay for good; what it asserts fails here."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + body],
        env={**os.environ, "PYTHONPATH": str(Path(ringfence.__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr


# A child does each call, and says with which number it came back; we answer what is asked meanwhile.
SERVED = """
privileges.set_no_new_privs()
listener_fd = notifications.guard(serves=True, connect_key=ORDER_KEY)
assert listener_fd >= 0
listener = notifications.Listener(listener_fd, MOST)

def attempts(calls):
    said, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        kept = []
        for call in calls:
            try:
                kept.append(call())
                number = ctypes.get_errno() if kept[-1] == -1 else 0
            except OSError as exc:
                number = exc.errno
            os.write(say, b"%d\\n" % number)
        os._exit(0)
    os.close(say)
    poll = select.poll()
    poll.register(said, select.POLLIN)
    poll.register(listener_fd, select.POLLIN)
    data, asked = b"", 0
    while True:
        ready = dict(poll.poll())
        if ready.get(listener_fd, 0) & select.POLLIN:
            asked += 1
            listener.serve_one()
        elif said in ready:
            more = os.read(said, 4096)
            if not more:
                break
            data += more
    os.waitpid(pid, 0)
    os.close(said)
    return [int(word) for word in data.split()], asked

def netlink():
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)

def word(value):
    return ctypes.c_long(value)

def connect(key):
    return libc_.syscall(libc.number("connect"), -1, word(0), word(0), word(0), word(key))

def pidfd_getfd(key):
    return libc_.syscall(libc.number("pidfd_getfd"), -1, word(0), word(0), word(0), word(key))
"""


def test_so_many_netlink_sockets_and_no_more() -> None:
    """Beside those that there are already; and when some are closed, others may be opened."""
    body = (
        SERVED
        + """
there = netlink_sockets.count()
listener._netlink._most = there + 3
numbers, asked = attempts([netlink] * 5)
assert ([0, 0, 0, errno.ENOBUFS, errno.ENOBUFS], 5) == (numbers, asked), (numbers, asked)
for _ in range(3):
    assert ([0, 0], 2) == attempts([netlink] * 2)
listener._netlink._most = there
assert ([errno.ENOBUFS], 1) == attempts([netlink])
"""
    )
    body = body.replace("ORDER_KEY", "0").replace("MOST", "0")
    run("from ringfence.linux import namespaces\n" + _own_network() + body)


def _own_network() -> str:
    """Others' programs open netlink sockets in the network that they share with us."""
    flags = "namespaces.CLONE_NEWNET" + ("" if os.geteuid() == 0 else "|namespaces.CLONE_NEWUSER")
    return f"namespaces.unshare({flags})\n"


def test_nothing_else_is_asked_about() -> None:
    body = (
        SERVED
        + """
calls = [
    lambda: socket.socket(socket.AF_UNIX),
    lambda: socket.socket(socket.AF_INET),
    lambda: connect(0),
    lambda: pidfd_getfd(0),
]
assert ([0, 0, errno.EBADF, errno.EBADF], 0) == attempts(calls)
"""
    )
    run(body.replace("ORDER_KEY", "0").replace("MOST", "64"))


def test_with_a_key_connects_are_asked_about_and_only_the_whole_key_passes() -> None:
    """One that has half of it is asked; nobody without it takes descriptors of others."""
    body = (
        SERVED
        + """
class Refusing:
    def answer(self, asked):
        from ringfence.linux import seccomp
        seccomp.answer(listener_fd, asked, errno.EXDEV)

listener.connects = Refusing()
halves = [0, KEY & 0xFFFFFFFF, KEY >> 32 << 32, KEY ^ 1, KEY ^ 1 << 63]
numbers, asked = attempts([lambda key=key: connect(key) for key in halves])
assert ([errno.EXDEV] * 5, 5) == (numbers, asked), (numbers, asked)
assert ([errno.EPERM] * 5, 0) == attempts([lambda key=key: pidfd_getfd(key) for key in halves])
assert ([errno.EBADF] * 2, 0) == attempts([lambda: connect(KEY), lambda: pidfd_getfd(KEY)])
"""
    )
    run(body.replace("ORDER_KEY", "KEY").replace("MOST", "64"))


def test_a_question_whose_caller_has_ended_is_passed_over() -> None:
    body = (
        SERVED
        + """
pid = os.fork()
if pid == 0:
    netlink()
    os._exit(0)
select.select([listener_fd], [], [])
os.kill(pid, 9)
os.waitpid(pid, 0)
os.set_blocking(listener_fd, False)
listener.serve_one()
"""
    )
    run(body.replace("ORDER_KEY", "0").replace("MOST", "64"))


def test_a_second_listener_there_cannot_be_and_then_all_is_refused() -> None:
    body = """
privileges.set_no_new_privs()
assert notifications.guard(serves=True, connect_key=KEY) >= 0
assert -1 == notifications.guard(serves=True, connect_key=KEY)
for family in (socket.AF_NETLINK, socket.AF_UNIX):
    try:
        socket.socket(family, socket.SOCK_RAW if family == socket.AF_NETLINK else socket.SOCK_STREAM)
    except OSError as exc:
        assert errno.EAFNOSUPPORT == exc.errno
    else:
        raise AssertionError(family)
socket.socket(socket.AF_INET).close()
"""
    run(body)


@pytest.fixture
def stopped() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Begins processes that have given up their processor for good."""
    begun = []

    def begin() -> subprocess.Popen[bytes]:
        child = subprocess.Popen(["sleep", "1000"])
        begun.append(child)
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        return child

    yield begin
    for child in begun:
        child.kill()
        child.wait()


def test_a_socket_on_its_way_counts_until_its_caller_has_run(
    stopped: Callable[[], subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts it only then: who asked was let go on, and has not been there yet."""
    answers: list[int] = []
    monkeypatch.setattr(seccomp, "go_on", lambda *_: answers.append(0))
    monkeypatch.setattr(seccomp, "answer", lambda _fd, _asked, number: answers.append(number))
    monkeypatch.setattr(netlink_sockets, "count", lambda: 10)
    sockets = netlink_sockets.NetlinkSockets(-1, 12)

    def ask(child: subprocess.Popen[bytes]) -> int:
        sockets.answer(seccomp.Notification(1, child.pid, 0, ()))
        return answers.pop()

    one, two, three = stopped(), stopped(), stopped()
    assert [0, 0, errno.ENOBUFS] == [ask(one), ask(two), ask(three)]
    assert [0, 0] == [ask(two), ask(one)], "its last call is over when it asks again"
    assert errno.ENOBUFS == ask(three)
    two.kill()
    two.wait()
    assert 0 == ask(three)
    sockets = netlink_sockets.NetlinkSockets(-1, 12)
    assert [0, 0, 0] == [ask(two), ask(one), ask(three)], "who is gone opens none"
    assert errno.ENOBUFS == ask(stopped())
