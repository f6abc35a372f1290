"""stdin, stdout and stderr are the command's own."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.command import PATIENCE_S, RINGFENCE, environment, is_readable, run, start

pytestmark = pytest.mark.anyone

BLOB = bytes(range(256)) * 4096  # 1 MiB that no text codec would survive
MIB = 1 << 20


def test_streams_are_kept_apart() -> None:
    result = run("--", "sh", "-c", "echo out; echo err >&2")

    assert (b"out\n", b"err\n") == (result.stdout, result.stderr)


def test_bytes_come_back_as_they_went_in() -> None:
    assert BLOB == run("--", "cat", stdin=BLOB).stdout


def test_an_end_of_input_reaches_the_command() -> None:
    assert b"0\n" == run("--", "sh", "-c", "cat >/dev/null; echo $?", stdin=b"").stdout


def test_without_input_the_command_reads_nothing() -> None:
    assert b"" == run("--", "cat").stdout


def test_input_that_nobody_reads_does_not_hold_it_up() -> None:
    assert 0 == run("--", "true", stdin=BLOB).returncode


def test_output_after_the_first_process_is_whole() -> None:
    """What is still in the pipe when the command ends is passed on."""
    result = run("--", "head", "-c", str(len(BLOB)), "/dev/zero")

    assert bytes(len(BLOB)) == result.stdout


def test_a_slow_reader_gets_everything() -> None:
    with start("--", "seq", "1", "100000", stdout=subprocess.PIPE) as process:
        assert process.stdout
        time.sleep(0.5)
        lines = process.stdout.read().splitlines()

    assert 0 == process.returncode
    assert 100_000 == len(lines)


def test_a_reader_who_does_not_read_slows_only_the_command() -> None:
    """Backpressure: the command waits, and nothing is kept for it."""
    with start("--", "cat", "/dev/zero", stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.read(1)
        time.sleep(0.5)
        resident = _resident_bytes(process.pid)
        process.stdout.close()
        process.wait(PATIENCE_S)

    assert resident < 64 * MIB


def test_a_reader_that_is_gone_ends_it_as_a_shell_says() -> None:
    with start("--", "yes", stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.read(1)
        process.stdout.close()

        assert 141 == process.wait(PATIENCE_S)


def test_a_flood_costs_no_memory() -> None:
    with start("--", "head", "-c", str(1 << 29), "/dev/zero", stdout=subprocess.DEVNULL) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, _resident_bytes(process.pid))
            time.sleep(0.01)

    assert 0 == process.returncode
    assert peak < 32 * MIB


def test_a_file_opened_to_append_is_appended_to(tmp_path: Path) -> None:
    """splice(2) refuses such files."""
    log = tmp_path / "log"
    log.write_bytes(b"before\n")
    with log.open("ab") as file:
        assert 0 == start("--", "echo", "after", stdout=file).wait(PATIENCE_S)

    assert b"before\nafter\n" == log.read_bytes()


def test_a_non_blocking_output_loses_nothing() -> None:
    """Whoever shares our stdout may have made it non-blocking."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    process = start("--", "head", "-c", str(3 * MIB), "/dev/zero", stdout=writing)
    os.close(writing)
    time.sleep(0.3)
    with os.fdopen(reading, "rb") as file:
        count = len(file.read())

    assert (3 * MIB, 0) == (count, process.wait(PATIENCE_S))


def test_closed_descriptors_are_nothing_and_nowhere() -> None:
    argv = [*RINGFENCE, "run", "--", "sh", "-c", "cat; echo out; echo err >&2; exit 3"]

    for closing in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        result = subprocess.run(
            ["sh", "-c", f'"$@" {closing}', "sh", *argv],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            env=environment(),
            timeout=PATIENCE_S,
            check=False,
        )
        assert 3 == result.returncode, result


@pytest.mark.parametrize(
    "words", ["run -- echo x", "run --json -- echo x", "run --help", "--version", "completion bash"]
)
def test_a_full_device_is_our_failure_and_says_so(words: str) -> None:
    """And a closed one is nobody's."""
    command = [*RINGFENCE, *words.split()]
    result = subprocess.run(
        ["sh", "-c", '"$@" >/dev/full', "sh", *command],
        capture_output=True,
        env=environment(),
        timeout=PATIENCE_S,
        check=False,
    )
    closed = subprocess.run(
        ["sh", "-c", '"$@" >&- <&-', "sh", *command],
        capture_output=True,
        env=environment(),
        timeout=PATIENCE_S,
        check=False,
    )

    assert 125 == result.returncode
    assert b"ringfence: standard output: No space left on device\n" == result.stderr
    assert (0, b"") == (closed.returncode, closed.stderr)


def test_our_own_descriptors_stay_outside() -> None:
    """The command gets pipes of ours, never what we were given."""
    reading, writing = os.pipe()
    name = os.readlink(f"/proc/self/fd/{writing}")
    process = start("--", "sh", "-c", "ls -l /proc/self/fd", stdout=writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        listing = file.read().decode()

    assert 0 == process.wait(PATIENCE_S)
    assert name not in listing


def test_a_survivor_does_not_hold_us() -> None:
    """A background child that keeps the output open ends with the sandbox."""
    result = run("--", "sh", "-c", "sleep 600 & echo done")

    assert b"done\n" == result.stdout


def test_output_comes_as_it_is_written() -> None:
    with start("--", "sh", "-c", "echo one; sleep 60", stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert is_readable(process.stdout.fileno(), PATIENCE_S)
        assert b"one\n" == os.read(process.stdout.fileno(), 100)
        process.terminate()
        process.wait(PATIENCE_S)


def test_input_goes_in_as_it_is_written() -> None:
    with start(
        "--", "sh", "-c", "read a; echo got $a; read b; echo got $b",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin
        assert process.stdout
        for word in (b"one", b"two"):
            process.stdin.write(word + b"\n")
            process.stdin.flush()
            assert b"got " + word + b"\n" == process.stdout.readline()


def _resident_bytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_streams_that_share_a_file_lose_nothing(tmp_path: Path) -> None:
    """`> file 2>&1`, twice: nobody writes over what another has written."""
    script = "for i in 1 2 3 4 5 6 7 8; do echo out$i; echo err$i >&2; done"
    with open(tmp_path / "log", "wb") as log:
        for _ in range(2):
            log.write(b"before\n")
            log.flush()
            subprocess.run(
                [*RINGFENCE, "run", "--", "sh", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=PATIENCE_S,
                check=True,
                env=environment(),
            )

    lines = (tmp_path / "log").read_text().splitlines()
    assert 2 == lines.count("before")
    assert all(2 == lines.count(f"{name}{i}") for name in ("out", "err") for i in range(1, 9))
    assert 34 == len(lines)


def test_a_reader_of_the_help_may_leave() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        with start("--help", stdout=write, stderr=subprocess.PIPE) as process:
            _, said = process.communicate(timeout=PATIENCE_S)
    finally:
        os.close(write)

    assert (141, b"") == (process.returncode, said)


@pytest.mark.parametrize("locale", [{}, {"LC_ALL": "POSIX", "PYTHONUTF8": "0"}])
def test_names_in_messages_are_what_was_given_and_steer_no_terminal(locale: dict[str, str]) -> None:
    name = os.fsdecode("ü\x1b[31m".encode() + b"\xff")
    result = run("--mount", f"{name}:/x", "--", "true", env=locale)

    assert "ü\\x1b[31m\\xff: No such file or directory".encode() in result.stderr
