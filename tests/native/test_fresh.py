"""Snapshots that have no more than every fresh sandbox has, and those that have a little more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence import Sandbox
from ringfence.backends.native import snapshots
from ringfence.backends.native.backend import NativeBackend

_TELL = "cd /; stat -c '%n %F %a %u %g %N' $(find / -xdev | sort); cat /tmp/* /var/tmp/* ~/.* ~/*"
_CHANGES = [
    "echo new > /tmp/new",
    "ln -s /nowhere ~/link",
    "chmod 700 ~",
    "mkdir /var/tmp/directory",
    "touch -d 2001-02-03 ~",
    "head -c 300000 /dev/zero > ~/large",
    "touch ~/" + 120 * "n",
]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the sandboxes into which a stream was unpacked."""
    found: list[str] = []
    load = snapshots.load

    def counted(sandbox: object, content: int, *, is_whole: bool) -> None:
        found.append(sandbox.id)  # type: ignore[attr-defined]
        load(sandbox, content, is_whole=is_whole)  # type: ignore[arg-type]

    monkeypatch.setattr(snapshots, "load", counted)
    monkeypatch.setattr(snapshots, "_known", {})
    return found


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[NativeBackend]:
    made = NativeBackend(state_dir=str(tmp_path))
    yield made
    made.close()


def test_what_every_fresh_one_has_is_not_unpacked_again(
    backend: NativeBackend, loads: list[str]
) -> None:
    with Sandbox.create(backend=backend) as source:
        told = source.shell(_TELL).stdout_text
        saved = source.snapshot()
    for _ in range(3):
        with Sandbox.restore(saved.id, backend=backend) as again:
            assert told == again.shell(_TELL).stdout_text
    assert 1 == len(loads)  # a process that restores one sandbox reads nothing for comparison


@pytest.mark.full
@pytest.mark.parametrize("change", _CHANGES)
def test_any_change_is_unpacked_every_time(
    backend: NativeBackend, loads: list[str], change: str
) -> None:
    with Sandbox.create(backend=backend) as source:
        assert source.shell(change).ok
        told = source.shell(_TELL + "; stat -c %Y ~").stdout_text
        saved = source.snapshot()
    for _ in range(3):
        with Sandbox.restore(saved.id, backend=backend) as again:
            assert told == again.shell(_TELL + "; stat -c %Y ~").stdout_text
    assert 3 == len(loads)


def test_fresh_ones_of_another_kind_are_another_matter(
    backend: NativeBackend, loads: list[str]
) -> None:
    with Sandbox.create(backend=backend) as source:
        saved = source.snapshot()
    for _ in range(2):
        Sandbox.restore(saved.id, backend=backend).terminate()
    with Sandbox.create(backend=backend, user="root", workdir="/work") as other:
        mark = other.snapshot()
    for _ in range(2):
        with Sandbox.restore(mark.id, backend=backend) as again:
            assert again.shell("test -d /work && id -u").stdout_text == "0\n"
    assert 3 == len(loads)
