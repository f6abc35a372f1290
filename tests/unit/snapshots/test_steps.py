"""Snapshots, unpacked ones and their removal: killed, or out of disk, at each change of the file system."""

from __future__ import annotations

import errno
import io
import os
import random
import signal
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringfence.backends.local.mounts import layered
from ringfence.errors import RingfenceError, StorageFull
from ringfence.model.spec import SandboxSpec
from ringfence.snapshots import layers
from ringfence.snapshots.catalogue import Catalogue

STEPS = ("rename", "mkdir", "fsync", "unlink", "rmdir", "open", "link")
MOST_STEPS = 80
NAMES = ("lower", "upper")
CONTENT = {"lower": b"below", "upper": b"above"}
Work = Callable[[Catalogue], None]


def stream(name: str) -> int:
    """A descriptor of a tar stream with two files."""
    buffer, content = io.BytesIO(), CONTENT.get(name, name.encode())
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in ("common", name):
            member = tarfile.TarInfo(f"./{path}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    fd = os.memfd_create(name)
    os.write(fd, buffer.getvalue())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def save(catalogue: Catalogue, name: str, lower: tuple[str, ...] = ()) -> None:
    fd = stream(name)
    try:
        lower = ("lower",) if name == "upper" else lower
        catalogue.save(
            fd, name, SandboxSpec(), 1 << 20, lower=lower, session_id="s", created_at=1.0
        )
    finally:
        os.close(fd)


def unpack(catalogue: Catalogue) -> None:
    held, above = layered.hold(catalogue, ("upper", "lower"), None)
    if held is not None:
        held.close()
    assert held is not None or above


WORK: dict[str, tuple[tuple[str, ...], Work]] = {
    "snapshot": ((), lambda catalogue: save(catalogue, "lower")),
    "snapshot of a restored one": (("lower",), lambda catalogue: save(catalogue, "upper")),
    "restore": (NAMES, unpack),
    "removal of what another lies over": (NAMES, lambda catalogue: catalogue.delete("lower")),
    "removal of the uppermost": (NAMES, lambda catalogue: catalogue.delete("upper")),
}
"""By operation: what there is before it."""


@pytest.fixture(autouse=True)
def _any_size_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "LEAST_BYTES", 1)


def interrupt(at: int, how: Callable[[], None]) -> Callable[[], int]:
    """Have step `at` of this process fail; returns how many steps there were so far."""
    count = 0

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            nonlocal count
            writes = function.__name__ != "open" or (len(args) > 1 and args[1] & os.O_CREAT)
            if writes:
                count += 1
                if count == at:
                    how()
            return function(*args, **options)

        return step

    for name in STEPS:
        setattr(os, name, wrapped(getattr(os, name)))
    return lambda: count


def in_child(work: Callable[[], None]) -> int:
    """The exit status of a process that does `work`; minus a signal."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except RingfenceError as exc:
            os._exit(2 if isinstance(exc, StorageFull) else 3)
        except OSError:
            os._exit(4)
        except BaseException:  # noqa: BLE001 - a child of fork() must not return into pytest
            os._exit(5)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def is_right(catalogue: Catalogue, before: tuple[str, ...], *, may_fail: bool) -> None:
    """What is listed is whole, can be unpacked, and nothing else is in the directory or in a snapshot's."""
    catalogue.tidy()
    listed = {each.id for each in catalogue.list()}
    for name in listed:
        os.close(catalogue.content(name))
        chain = ("upper", "lower") if name == "upper" else ("lower",)
        held, above = layered.hold(catalogue, chain, None)
        if held is None:  # for this boot the stream is copied: the disk was full
            assert may_fail
            assert any(layers.has_failed(catalogue.place(each)) for each in chain)
            continue
        assert may_fail or () == above
        for each in held.ids:
            tree = Path(layers.tree_of(catalogue.place(each)))
            assert {"common": CONTENT[each], each: CONTENT[each]} == {
                path.name: path.read_bytes() for path in tree.iterdir()
            }
        held.close()
    for place in Path(catalogue.directory).iterdir():
        assert place.name in before or place.name in listed
        known = {
            "content.tar",
            "snapshot.json",
            "deleted.json",
            "tree",
            "unpacked",
            "names",
            "entries",
        }
        assert {each.name for each in place.iterdir()} <= known
    if listed == {"upper"} or "upper" not in listed:
        wanted = {"upper", "lower"} if "upper" in listed else listed
        assert wanted == set(os.listdir(catalogue.directory))


@pytest.mark.full
@pytest.mark.anyone
@pytest.mark.parametrize("operation", WORK)
@pytest.mark.parametrize("how", [kill, fill])
def test_each_step(how: Callable[[], None], operation: str, tmp_path: Path) -> None:
    before, work = WORK[operation]
    for at in range(1, MOST_STEPS):
        catalogue = Catalogue(str(tmp_path / str(at)), "native")
        os.mkdir(catalogue.directory, 0o700)
        for name in before:
            save(catalogue, name)
        if "removal" in operation:
            unpack(catalogue)

        def interrupted(at: int = at, catalogue: Catalogue = catalogue) -> None:
            counted = interrupt(at, how)
            work(catalogue)
            if counted() < at:
                os._exit(9)  # there are no more steps

        status = in_child(interrupted)
        assert status in (-signal.SIGKILL if how is kill else 0, 0, 2, 3, 4, 9), (at, status)
        is_right(catalogue, before, may_fail=how is fill)
        if status == 9:
            assert at > 1
            return
    pytest.fail("more steps than there can be")


GENERATIONS = tuple(f"s{number:02}" for number in range(20))


@pytest.mark.full
@pytest.mark.anyone
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("how", [kill, fill])
def test_twenty_generations_removed_in_any_order(
    how: Callable[[], None], seed: int, tmp_path: Path
) -> None:
    """Each removal is interrupted at another of its steps: the rest is whole, and nothing is left."""
    dice = random.Random(seed)
    catalogue = Catalogue(str(tmp_path / "here"), "native")
    os.mkdir(catalogue.directory, 0o700)
    for at, name in enumerate(GENERATIONS):
        save(catalogue, name, GENERATIONS[:at][::-1])
    held, above = layered.hold(catalogue, GENERATIONS[::-1], None)
    assert held is not None
    assert () == above
    held.close()
    there, most = set(GENERATIONS), 1
    while there:
        name, at = dice.choice(sorted(there)), dice.randint(1, most + 1)

        def interrupted(name: str = name, at: int = at) -> None:
            counted = interrupt(at, how)
            catalogue.delete(name)
            if counted() < at:
                os._exit(9)

        status = in_child(interrupted)
        assert status in (-signal.SIGKILL if how is kill else 0, 0, 2, 3, 4, 9), (at, status)
        # As many steps as a removal had so far; the more are removed at once, the more it has.
        most = max(most, at + (status != 9))
        catalogue.tidy()
        listed = {each.id for each in catalogue.list()}
        assert there - {name} <= listed <= there
        there = listed
        for each in there:
            os.close(catalogue.content(each))
        if there:
            assert_is_whole(catalogue, dice.choice(sorted(there)))
    assert [] == os.listdir(catalogue.directory)


def assert_is_whole(catalogue: Catalogue, name: str) -> None:
    """A snapshot has its files, and those of all below it."""
    chain = GENERATIONS[: GENERATIONS.index(name) + 1][::-1]
    held, above = layered.hold(catalogue, chain, None)
    assert held is not None
    assert (chain, ()) == (held.ids, above)
    for each in chain:
        tree = Path(layers.tree_of(catalogue.place(each)))
        expected = {"common": each.encode(), each: each.encode()}
        assert expected == {path.name: path.read_bytes() for path in tree.iterdir()}
    held.close()
