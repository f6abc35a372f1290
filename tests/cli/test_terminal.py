"""Messages, colours and the progress line."""

from __future__ import annotations

import errno
import os
import pty
from collections.abc import Iterator

import pytest

from ringfence.cli import terminal
from ringfence.cli.terminal import Colours, Progress, describe, size
from ringfence.errors import InvalidRequest


@pytest.fixture
def screen() -> Iterator[tuple[int, int]]:
    """(what we read, the terminal)."""
    reading, writing = pty.openpty()
    yield reading, writing
    os.close(reading)
    os.close(writing)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_EVERY_S", 0.0)


@pytest.mark.usefixtures("at_once")
def test_progress_is_drawn_and_wiped(screen: tuple[int, int]) -> None:
    reading, writing = screen
    with Progress("uploading", 200 << 20, fd=writing) as progress:
        progress(50 << 20, "some/file")
        drawn = os.read(reading, 4096).decode()
    wiped = os.read(reading, 4096)

    assert "uploading  25 % 50.0 MiB" in drawn
    assert "some/file" in drawn
    assert b"\r\x1b[K" == wiped


@pytest.mark.usefixtures("at_once")
def test_a_name_cannot_steer_the_terminal(screen: tuple[int, int]) -> None:
    reading, writing = screen
    with Progress("copying", fd=writing) as progress:
        progress(1, "a\x1b]0;title\x07\n")
        drawn = os.read(reading, 4096)

    assert b"\x07" not in drawn
    assert 1 == drawn.count(b"\x1b")  # our own, which clears the line


def test_progress_is_silent_in_a_pipe() -> None:
    reading, writing = os.pipe()
    with Progress("uploading", fd=writing) as progress:
        progress(1, "x")
    os.close(writing)

    assert b"" == os.read(reading, 100)
    os.close(reading)


def test_progress_does_not_draw_for_every_chunk(screen: tuple[int, int]) -> None:
    reading, writing = screen
    os.set_blocking(reading, False)
    with Progress("uploading", fd=writing) as progress:
        for count in range(1000):
            progress(count, "x")
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)


def test_colours_where_a_person_looks(
    screen: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    _, writing = screen

    assert "\x1b[31mx\x1b[0m" == Colours(writing).paint("red", "x")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "x" == Colours(writing).paint("red", "x")


SIZES = [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 << 20, "1.5 GiB")]


@pytest.mark.parametrize(("count", "text"), SIZES)
def test_sizes(count: int, text: str) -> None:
    assert text == size(count)


def test_a_message_is_one_line() -> None:
    error = InvalidRequest("two\nlines", field="memory", hint="a fix")

    assert "memory: two\nlines (a fix)" == terminal.describe(error)
    assert "internal error" in terminal.describe(ZeroDivisionError("x"))


def test_say_is_one_line_whatever_it_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    terminal.say("two\nlines \ud800")

    assert "ringfence: two lines \\ud800\n" == capfd.readouterr().err
    terminal.say("a\x1b]0;title\x07 \x9b2J \u202e é \udcff")
    said = "a\\x1b]0;title\\x07 \\x9b2J \\u202e é \\xff"
    assert f"ringfence: {said}\n" == capfd.readouterr().err


def test_nobody_who_listens_is_no_error() -> None:
    kept = os.dup(2)
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 2)
    os.close(writing)
    try:
        terminal.say("to nobody")
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@pytest.mark.usefixtures("at_once")
def test_progress_ends_with_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    def write(fd: int, _data: bytes) -> int:
        written.append(fd)
        raise OSError(errno.EIO, "gone")

    progress = Progress("uploading", fd=7)
    progress._on = True
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        for count in range(3):
            progress(count, "x")
    assert [7] == written


def test_only_what_has_no_name_is_standard_output() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    assert "standard output: No space left on device" == describe(full)
    named = OSError(errno.ENOSPC, "No space left on device", "/srv/file")
    assert "/srv/file" in describe(named)
    assert "standard output" not in describe(named)


def test_progress_is_one_line_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress("uploading")
    monkeypatch.setattr(progress, "_columns", lambda: 20)
    assert 19 == len(progress._line(1000, "a/long/path/of/a/file", 1.0))


def test_an_empty_no_color_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    for value, on in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", value)
        assert on == Colours(slave).on
    os.close(master)
    os.close(slave)
