"""PID 1 tells its numbers from those of a PID namespace above, which a borrowed /proc has."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ringfence.launcher.pid1 import processes


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    processes._depth = 0


@pytest.mark.parametrize(
    ("numbers", "depth"),
    [([b"1"], 0), ([b"4711", b"1"], 2), ([b"50", b"50"], 2), ([b"9", b"4711", b"1"], 3)],
)
def test_the_namespaces_count_and_no_number(
    monkeypatch: pytest.MonkeyPatch, numbers: list[bytes], depth: int
) -> None:
    """An agent may have one number in both namespaces, by chance."""
    monkeypatch.setattr(processes, "_numbers", lambda _name: numbers)
    monkeypatch.setattr(os, "getpid", lambda: int(numbers[-1]))

    processes.begin()

    assert depth == processes._depth


def test_processes_of_another_namespace_of_the_same_depth_are_not_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Numbers 10 and 11 are both 2 where they are, and our 2 is 10."""
    shown = {"self": [b"12", b"3"], "10": [b"10", b"2"], "11": [b"11", b"2"], "1": [b"1"]}
    monkeypatch.setattr(processes, "_numbers", lambda name: shown.get(name, []))
    monkeypatch.setattr(processes, "_shown", lambda pid: {2: 10, 3: 12}.get(pid, 0))

    processes.begin()

    assert [2, 0, 0, 0] == [processes.inner(number) for number in (10, 11, 1, 99)]


def test_groups_do_not_hide_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        b"Name:\tx\nGroups:\t"
        + b"65535 " * 65536
        + b"\nNStgid:\t9\t1\nNSpid:\t9\t1\nNSpgid:\t9\t1\n"
    )
    monkeypatch.setattr(processes, "read", lambda _path, most: text[:most])

    assert [b"9", b"1"] == processes._numbers("9")
