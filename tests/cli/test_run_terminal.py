"""On a terminal the command has one too, and ours is put back as it was."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ringfence.cli.tty import RawTerminal
from tests.cli.command import PATIENCE_S, RINGFENCE, environment, is_readable

pytestmark = pytest.mark.anyone


class Terminal:
    """A terminal with `ringfence run ARGS` as its foreground job."""

    def __init__(self, *args: str, rows: int = 33, columns: int = 99) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(rows, columns)
        self.before = termios.tcgetattr(self.slave)
        self.seen = b""
        self.process = subprocess.Popen(
            [*RINGFENCE, "run", *args],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env=environment(TERM="vt100"),
            preexec_fn=self._take,  # noqa: PLW1509  nothing of ours runs beside it
        )

    def _take(self) -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def read_until(self, wanted: bytes) -> bytes:
        deadline = time.monotonic() + PATIENCE_S
        while wanted not in self.seen:
            assert time.monotonic() < deadline, self.seen
            ready = is_readable(self.master, 0.1)
            if ready:
                self.seen += os.read(self.master, 4096)
        return self.seen

    def wait(self) -> int:
        """Its exit code; what it still prints is read, for it waits until it is."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.seen
            ready = is_readable(self.master, 0.05)
            if ready:
                self.seen += os.read(self.master, 4096)
        while is_readable(self.master, 0):  # what came after the last look, before the end
            self.seen += os.read(self.master, 4096)
        return self.process.returncode

    @property
    def mode(self) -> list[Any]:
        return termios.tcgetattr(self.slave)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def made() -> Iterator[list[Terminal]]:
    terminals: list[Terminal] = []
    yield terminals
    for each in terminals:
        each.close()


@pytest.fixture
def on_terminal(made: list[Terminal]) -> Any:
    def start(*args: str, **kwargs: Any) -> Terminal:
        made.append(Terminal(*args, **kwargs))
        return made[-1]

    return start


def test_the_command_has_a_terminal_of_our_size(on_terminal: Any) -> None:
    script = "test -t 0 && test -t 1 && test -t 2 && stty size && echo $TERM; exit 5"
    terminal = on_terminal("--", "sh", "-c", script)

    assert 5 == terminal.wait()
    assert b"33 99\r\nvt100\r\n" in terminal.seen


def test_it_is_a_terminal_of_the_sandbox(on_terminal: Any) -> None:
    """Not ours: TIOCSTI and its like could type into that."""
    terminal = on_terminal("--", "sh", "-c", "tty")
    terminal.wait()

    assert b"/dev/pts/0\r\n" in terminal.seen


def test_the_terminal_is_put_back(on_terminal: Any) -> None:
    terminal = on_terminal("--", "sh", "-c", "echo ready; read x")
    terminal.read_until(b"ready")
    during = terminal.mode
    terminal.type(b"go\r")

    assert 0 == terminal.wait()
    assert terminal.before != during
    assert terminal.before == terminal.mode


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_the_terminal_is_put_back_after_a_signal(on_terminal: Any, signum: int) -> None:
    terminal = on_terminal("--", "sh", "-c", "echo ready; exec sleep 60")
    terminal.read_until(b"ready")
    terminal.process.send_signal(signum)

    assert 128 + signum == terminal.wait()
    assert terminal.before == terminal.mode


def test_the_terminal_is_put_back_after_a_timeout(on_terminal: Any) -> None:
    terminal = on_terminal("--timeout", "300ms", "--", "sleep", "60")

    assert 124 == terminal.wait()
    assert terminal.before == terminal.mode


def test_ctrl_c_interrupts_inside(on_terminal: Any) -> None:
    terminal = on_terminal(
        "--", "sh", "-c", "trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.05; done"
    )
    terminal.read_until(b"ready")
    terminal.type(b"\x03")

    assert 9 == terminal.wait()
    assert b"caught" in terminal.seen


def test_keys_are_echoed_inside_and_only_once(on_terminal: Any) -> None:
    terminal = on_terminal("--", "sh", "-c", "echo ready; read x; echo got:$x")
    terminal.read_until(b"ready")
    terminal.type(b"hello\r")

    assert 0 == terminal.wait()
    assert 2 == terminal.seen.count(b"hello")  # as echoed, and in `got:hello`


def test_a_new_size_is_passed_on(on_terminal: Any) -> None:
    script = "trap 'stty size; exit 0' WINCH; echo ready; while :; do sleep 0.05; done"
    terminal = on_terminal("--", "sh", "-c", script)
    terminal.read_until(b"ready")
    terminal.resize(44, 123)

    assert 0 == terminal.wait()
    assert b"44 123" in terminal.seen


def test_a_stream_that_is_no_terminal_keeps_its_own_way(on_terminal: Any) -> None:
    """`2>file`: then nothing runs on a terminal, or it would swallow stderr."""
    terminal = on_terminal("--", "true")
    terminal.wait()
    script = '"$@" 2>/dev/null; echo code $?'
    process = subprocess.run(
        ["sh", "-c", script, "sh", *RINGFENCE, "run", "--", "sh", "-c", "test -t 0; echo $?"],
        stdin=terminal.slave,
        stdout=subprocess.PIPE,
        env=environment(),
        timeout=PATIENCE_S,
        check=False,
    )

    assert b"1\ncode 0\n" == process.stdout


def test_in_the_background_it_is_not_stopped(on_terminal: Any) -> None:
    """As `job 2>log &` in a shell: a process that reads the terminal then would be."""
    terminal = on_terminal("--", "true")
    terminal.wait()
    script = 'set -m; "$@" 2>/dev/null & wait $!; echo code $?'
    shell = subprocess.Popen(
        ["bash", "-c", script, "sh", *RINGFENCE, "run", "--", "sh", "-c", "sleep 0.5; exit 6"],
        stdin=terminal.slave,
        stdout=subprocess.PIPE,
        env=environment(),
        preexec_fn=terminal._take,  # noqa: PLW1509  nothing of ours runs beside it
    )

    assert b"code 6\n" in shell.communicate(timeout=PATIENCE_S)[0]


def test_stopped_and_continued_the_terminal_is_ours_in_between(on_terminal: Any) -> None:
    terminal = on_terminal("--", "sh", "-c", "echo ready; read x; echo got:$x")
    terminal.read_until(b"ready")
    raw = terminal.mode
    terminal.process.send_signal(signal.SIGTSTP)
    os.waitid(os.P_PID, terminal.process.pid, os.WSTOPPED)
    stopped = terminal.mode
    terminal.process.send_signal(signal.SIGCONT)
    terminal.type(b"on\r")

    assert 0 == terminal.wait()
    assert terminal.before == stopped
    assert raw != stopped
    assert b"got:on" in terminal.seen


def test_a_terminal_can_be_asked_for_without_having_one() -> None:
    process = subprocess.run(
        [*RINGFENCE, "run", "--tty", "--", "sh", "-c", "test -t 0 && cat"],
        input=b"typed\n",
        stdout=subprocess.PIPE,
        env=environment(),
        timeout=PATIENCE_S,
        check=False,
    )

    assert 0 == process.returncode
    assert b"typed\r\n" in process.stdout


@pytest.mark.parametrize("given_back", [True, False], ids=["given back", "control"])
def test_what_the_terminal_answered_is_not_left_to_the_shell(given_back: bool) -> None:
    """A program has it answer with a command, and ends."""
    master, slave = pty.openpty()
    try:
        terminal = RawTerminal(slave)
        before = termios.tcgetattr(slave)
        terminal.enter()
        os.write(master, b"touch /tmp/answered\r")
        assert is_readable(slave, PATIENCE_S)
        if given_back:
            terminal.restore()
        else:
            termios.tcsetattr(slave, termios.TCSADRAIN, before)
        os.write(master, b"\n")  # what the shell reads next

        left = os.read(slave, 100) if is_readable(slave, PATIENCE_S) else b""
    finally:
        os.close(master)
        os.close(slave)

    assert given_back == (b"touch" not in left)
