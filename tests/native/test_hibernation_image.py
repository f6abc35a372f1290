"""When what PID 1s sleep in is made, and that nobody looks for ever where it never is."""

from __future__ import annotations

import os
import posix
import signal
from collections.abc import Iterator

import pytest

from ringfence.launcher.machine_code import hibernation_image
from ringfence.linux import libc

GONE = (1 << 22) + 1  # beyond the greatest pid there can be


@pytest.fixture
def image(monkeypatch: pytest.MonkeyPatch) -> Iterator[hibernation_image.HibernationImage]:
    """One that says that it is made, and costs nothing."""
    monkeypatch.setattr(libc, "MACHINE", "x86_64")
    monkeypatch.setattr(
        hibernation_image.HibernationImage, "make", lambda self: setattr(self, "is_made", True)
    )
    made = hibernation_image.HibernationImage()
    yield made
    os.close(made.fd)


@pytest.fixture
def idle() -> Iterator[int]:
    """A process without children."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(1)
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_it_is_made_once_somebody_has_been_idle_for_a_while(
    image: hibernation_image.HibernationImage, idle: int
) -> None:
    assert image.tend({idle: 100.0}, 100.1)
    assert not image.is_made
    assert image.tend({idle: 100.0}, 101.0) is None
    assert image.is_made
    assert image.tend({idle: 100.0}, 102.0) is None


def test_while_nobody_is_there_but_who_waits_nobody_looks(
    image: hibernation_image.HibernationImage,
) -> None:
    assert image.tend({}, 100.0) is None
    assert not image.is_made


def test_while_all_are_busy_it_is_looked_for_less_and_less_often(
    image: hibernation_image.HibernationImage, idle: int
) -> None:
    """We have a child: the other process that a fixture has made."""
    assert not hibernation_image.is_idle(os.getpid()), "the control"
    now, waits = 100.0, []
    for _ in range(6):
        wait_ms = image.tend({os.getpid(): 0.0}, now)
        assert wait_ms
        now += wait_ms / 1000
        waits.append(round(wait_ms / 1000, 1))

    assert [0.5, 1.0, 2.0, 3.0, 3.0, 3.0] == waits
    assert image.tend({os.getpid(): 0.0, idle: 0.0}, now) is None
    assert image.is_made


def test_on_a_kernel_that_does_not_tell_of_children_nobody_looks_again(
    image: hibernation_image.HibernationImage, idle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_children(path: str, flags: int) -> int:
        raise FileNotFoundError(2, "No such file or directory", path)

    assert hibernation_image.is_idle(idle), "the control: this one does"
    monkeypatch.setattr(posix, "open", without_children)

    assert image.tend({idle: 0.0}, 100.0) is None
    assert image.is_made
    monkeypatch.undo()


def test_who_has_ended_is_not_idle(image: hibernation_image.HibernationImage) -> None:
    assert not hibernation_image.is_idle(GONE)
    assert image.tend({GONE: 0.0}, 100.0)
    assert not image.is_made


def test_on_another_machine_none_is_looked_for(monkeypatch: pytest.MonkeyPatch, idle: int) -> None:
    monkeypatch.setattr(libc, "MACHINE", "aarch64")
    image = hibernation_image.HibernationImage()
    try:
        assert image.tend({idle: 0.0}, 100.0) is None
    finally:
        os.close(image.fd)
