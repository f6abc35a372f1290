"""A launcher's directories on the host, while somebody else sweeps."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from ringfence.backends.command import place
from ringfence.backends.local.host import own_places


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(place, "base", lambda: str(tmp_path))
    return tmp_path


def test_a_sweep_while_one_is_made_takes_nothing_away(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that begin at once: each sweeps, and the other's directory is not locked yet."""
    flock, swept = fcntl.flock, []

    def sweep_first(lock: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        place.sweep()
        swept.append(os.listdir(base))
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    made = _made()

    assert [[]] == swept  # the control: it does look like one that was left
    assert [os.path.basename(made.path)] == os.listdir(base)
    place.sweep()
    assert Path(made.path, "agent").is_dir()  # locked by now
    made.remove()
    assert not os.listdir(base)


def _made(*more: tuple[Any, ...]) -> place.Place:
    uid = os.geteuid()
    return place.Place(uid, uid, (), more)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _mode(path: str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_what_is_in_it_is_for_its_user_alone_and_the_agent_for_nobody_to_write(base: Path) -> None:
    mask, before = os.umask(0), _descriptors()
    try:
        made = _made()
    finally:
        os.umask(mask)
    assert 0o700 == _mode(made.path)
    assert 0o711 == _mode(made.words["own"])
    assert [0o755] * 3 == [_mode(made.words[name]) for name in ("root", "etc", "agent")]
    (agent,) = os.listdir(made.words["agent"])
    assert 0o444 == _mode(f"{made.words['agent']}/{agent}")
    assert 0o600 == _mode(f"{made.path}/lock")
    assert before + 1 == _descriptors()
    made.remove()
    assert before == _descriptors()
    assert not os.listdir(base)


@pytest.mark.root
def test_the_user_owns_what_it_may_write_and_nothing_of_etc(base: Path) -> None:
    made = place.Place(1000, 54321, ())
    try:
        assert "54321" == made.words["host_id"]
        root = made.words["root"]
        for path in (made.path, root, *(f"{root}/{name}" for name in os.listdir(root))):
            info = os.lstat(path)
            assert stat.S_ISLNK(info.st_mode) or (54321, 54321) == (info.st_uid, info.st_gid), path
        assert 0 == os.stat(made.words["own"]).st_uid, "the launcher's own"
        below = [f"{made.words['etc']}/{name}" for name in os.listdir(made.words["etc"])]
        assert below
        assert {0} == {os.lstat(path).st_uid for path in below}
    finally:
        made.remove()


def test_one_that_cannot_be_made_leaves_nothing(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _descriptors()
    with pytest.raises(FileNotFoundError):
        _made(("file", "/none/at/all", b"", 0o644))
    assert ([], before) == (os.listdir(base), _descriptors())

    def interrupted(*_args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _made()
    assert ([], before) == (os.listdir(base), _descriptors())
    real = os.open

    def too_many(path: Any, *args: Any, **options: Any) -> int:
        if str(path).endswith("/lock"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", too_many)
        with pytest.raises(OSError, match="Too many"):
            _made()
    assert ([], before) == (os.listdir(base), _descriptors())
    _made(("file", "/file", b"", 0o644)).remove()


def test_a_sweep_takes_what_was_left_and_neither_what_is_in_use_nor_what_is_anothers(
    base: Path,
) -> None:
    before = _descriptors()
    used, left = _made(), _made()
    os.close(left._lock)  # as the kernel does for a process that was killed
    (base / "other").mkdir()
    (base / "other" / "lock").touch()
    (base / "ringfence-command-half").mkdir()  # its lock is gone: a removal was killed after that
    (base / "ringfence-command-full" / "root").mkdir(parents=True)
    place.sweep()
    kept = {os.path.basename(used.path), "other", "ringfence-command-full"}
    assert kept == {*os.listdir(base)}
    assert Path(used.path, "agent").is_dir()
    assert before + 1 == _descriptors()
    used.remove()
    assert before == _descriptors()


def test_one_that_is_swept_before_it_has_a_lock_is_made_anew(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, swept, real = _descriptors(), list[str](), os.open

    def sweep_first(path: Any, *args: Any, **options: Any) -> int:
        if str(path).endswith("/lock") and not swept:
            swept.append(str(path))
            place.sweep()
            assert [] == os.listdir(base), "the control"
        return real(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", sweep_first)
        made = _made()
    assert [os.path.basename(made.path)] == os.listdir(base)
    assert swept[0] != f"{made.path}/lock"
    made.remove()
    assert ([], before) == (os.listdir(base), _descriptors())


def test_of_half_a_removal_a_sweep_does_the_rest(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is removed first: the lock, by which a sweep knows it, goes last."""
    made, steps = _made(), 0
    real = os.unlink

    def killed(name: Any, *args: Any, **options: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == at:
            raise KeyboardInterrupt
        real(name, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", killed)
        for at in range(1, 1000):
            steps, lock = 0, os.dup(made._lock)
            try:
                place.remove_locked(made.path, lock)
            except KeyboardInterrupt:
                os.close(lock)
            assert not os.path.exists(made.path) or "lock" in os.listdir(made.path), at
            if steps < at:
                break
    assert at > 5, "the control: it was broken off before"
    assert [] == os.listdir(base)
    os.close(made._lock)
    again = _made()
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", killed)
        at, steps = 3, 0
        with pytest.raises(KeyboardInterrupt):
            again.remove()
    os.close(again._lock)
    assert "lock" in os.listdir(again.path)
    place.sweep()
    assert [] == os.listdir(base)


def test_the_place_of_all_can_be_passed_through_and_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def place_in(shared: str, name: str, mode: int) -> str:
        asked.append(shared)
        return own_places.place_in(str(tmp_path), name, mode)

    monkeypatch.setattr(place, "place_in", place_in)
    info = os.stat(place.base())
    assert (0o711, os.geteuid()) == (stat.S_IMODE(info.st_mode), info.st_uid)
    assert ["/var/tmp"] == asked, "on disk"


@pytest.mark.full
def test_a_tree_of_any_depth_is_removed(base: Path) -> None:
    """A guest's: deeper than Python may recurse, with directories that nobody may enter, and links out."""
    made = _made()
    outside = base / "outside"
    outside.mkdir()
    here = os.open(made.path, os.O_RDONLY)
    os.symlink(outside, "out", dir_fd=here)
    os.mkdir(".0", dir_fd=here)
    for depth in range(1500):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=below))
        if depth % 100 == 1:
            os.fchmod(here, 0o500)
        os.close(here)
        here = below
    os.close(here)

    made.remove()

    assert ["outside"] == os.listdir(base)
