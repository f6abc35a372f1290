"""Signals to `ringfence run` reach the command; the sandbox always ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.command import PATIENCE_S, start

pytestmark = pytest.mark.anyone

TRAP = "trap 'echo got {0}; exit 7' {0}; echo ready; while :; do sleep 0.05; done"


def _ready(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout
    assert b"ready\n" == process.stdout.readline()


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "QUIT", "USR1"])
def test_a_signal_is_passed_on(name: str) -> None:
    with start("--", "sh", "-c", TRAP.format(name), stdout=subprocess.PIPE) as process:
        _ready(process)
        process.send_signal(getattr(signal, f"SIG{name}"))
        assert process.stdout
        rest = process.stdout.read()

    assert 7 == process.returncode
    assert f"got {name}\n".encode() in rest


def test_an_unhandled_signal_ends_it_as_a_shell_says() -> None:
    with start("--", "sh", "-c", "echo ready; exec sleep 60", stdout=subprocess.PIPE) as process:
        _ready(process)
        process.terminate()

        assert 143 == process.wait(PATIENCE_S)


def test_an_interrupt_reaches_the_whole_job() -> None:
    """As Ctrl-C does: a shell that waits for its child would not see one meant for itself alone."""
    script = "echo ready; sleep 60; echo not reached"
    with start("--", "sh", "-c", script, stdout=subprocess.PIPE) as process:
        _ready(process)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)

        assert 130 == process.wait(PATIENCE_S)


def test_the_second_interrupt_kills() -> None:
    script = "trap 'echo no' INT; echo ready; while :; do sleep 0.05; done"
    with start("--", "sh", "-c", script, stdout=subprocess.PIPE) as process:
        _ready(process)
        process.send_signal(signal.SIGINT)
        assert process.stdout
        assert b"no\n" == process.stdout.readline()
        process.send_signal(signal.SIGINT)

        assert 137 == process.wait(PATIENCE_S)


def test_an_ignored_interrupt_stays_ignored() -> None:
    """As under nohup(1), or in the background of a script."""

    def ignore() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    script = "echo ready; sleep 0.5; echo whole"
    with start("--", "sh", "-c", script, stdout=subprocess.PIPE, preexec_fn=ignore) as process:
        _ready(process)
        process.send_signal(signal.SIGINT)
        assert process.stdout
        assert b"whole\n" == process.stdout.read()

    assert 0 == process.returncode


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.02, 0.03, 0.045, 0.06, 0.1])
def test_a_signal_at_any_moment_ends_it(after_s: float) -> None:
    """Before the interpreter is ours, while the sandbox is built, when it runs: never lost.

    Not SIGINT: while Python itself starts, it may lose a KeyboardInterrupt. The leak check of the
    whole run has the last word on what is left.
    """
    process = start("--", "sleep", "60", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(after_s)
    process.terminate()
    _, complaint = process.communicate(timeout=PATIENCE_S)

    assert process.returncode in (128 + signal.SIGTERM, -signal.SIGTERM)
    assert b"" == complaint


def test_asked_twice_it_goes_although_the_start_hangs() -> None:
    """A start that nothing answers: here the zygote is stopped as soon as it is there."""
    process = start("--", "sleep", "60")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (zygotes := children.read_text().split()):
        time.sleep(0.001)
    # Until it has begun its own program, our command waits for it where no signal is heard: vfork(2).
    begun = Path(f"/proc/{zygotes[0]}/cmdline")
    while b"\0-I\0" not in (words := begun.read_bytes()) and not words.startswith(b"ringfence"):
        time.sleep(0.001)
    os.kill(int(zygotes[0]), signal.SIGSTOP)
    try:
        time.sleep(0.5)
        deadline = time.monotonic() + PATIENCE_S / 2
        while process.poll() is None and time.monotonic() < deadline:
            process.terminate()  # two that come too close are one
            time.sleep(0.2)
        assert process.returncode in (143, -signal.SIGTERM)
    finally:
        os.kill(int(zygotes[0]), signal.SIGCONT)


def test_killed_outright_it_leaves_no_process() -> None:
    mine = f"61.{os.getpid()}"  # other runs of this very test may be under way on the machine
    script = f"echo ready; exec sleep {mine}"
    with start("--", "sh", "-c", script, stdout=subprocess.PIPE) as process:
        _ready(process)
        process.kill()
    deadline = time.monotonic() + PATIENCE_S / 2
    while _sleeping(mine) and time.monotonic() < deadline:
        time.sleep(0.05)

    assert [] == _sleeping(mine)


def test_a_stopped_caller_stops_the_command() -> None:
    """Ctrl-Z stops both, `fg` continues both."""
    script = "echo ready; i=0; while [ $i -lt 10 ]; do i=$((i+1)); sleep 0.1; done; echo end"
    with start("--", "sh", "-c", script, stdout=subprocess.PIPE) as process:
        _ready(process)
        process.send_signal(signal.SIGTSTP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        time.sleep(1.5)
        process.send_signal(signal.SIGCONT)
        assert process.stdout
        assert b"end\n" == process.stdout.read()

    assert 0 == process.returncode


def _sleeping(seconds: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if command == b"sleep\0" + seconds.encode() + b"\0":
                found.append(entry.name)
    return found


def test_a_signal_ends_what_has_stopped_itself() -> None:
    with start("--", "sh", "-c", "echo ready; kill -STOP $$", stdout=subprocess.PIPE) as process:
        _ready(process)
        _wait_until_stopped(process.pid)
        process.terminate()

        assert 143 == process.wait(PATIENCE_S)


def _wait_until_stopped(pid: int) -> None:
    """Until a process below `pid` is in state T."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        listed = ["ps", "-eo", "pid=,ppid=,stat="]
        tree = subprocess.run(listed, capture_output=True, text=True, check=True)
        rows = [line.split() for line in tree.stdout.splitlines()]
        below, more = {str(pid)}, True
        while more:
            found = {row[0] for row in rows if row[1] in below} - below
            below, more = below | found, bool(found)
        if any(row[0] in below and row[2].startswith("T") for row in rows):
            return
        time.sleep(0.02)
    raise AssertionError("nothing has stopped")
