"""A merge by the differences of layers finds what one of whole trees finds."""

from __future__ import annotations

import os
import random
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from ringfence import Sandbox
from ringfence.backends.native import sides
from ringfence.backends.optional import Layered
from ringfence.errors import ResourceExhausted
from ringfence.fork import merging, trees
from tests.images.conftest import image, store

if TYPE_CHECKING:
    from pathlib import Path

    from ringfence.fork.trees import Compared, Entry

    Found = dict[str, tuple[Entry | None, Entry | None]]

__all__ = ["image", "store"]

# With this a snapshot is large enough to be unpacked, and to lie below its forks.
LARGE = "import os; open('large', 'wb').write(os.urandom(5 << 20)); os.makedirs('d')"
EDITS = """
import contextlib, os, random, shutil, sys
chosen = random.Random(int(sys.argv[1]))
NAMES = "a", "b", "c"

def place():
    here = "d"
    while chosen.random() < 0.6:
        below = [each for each in sorted(os.listdir(here))
                 if os.path.isdir(f"{here}/{each}") and not os.path.islink(f"{here}/{each}")]
        if not below:
            break
        here = f"{here}/{chosen.choice(below)}"
    return f"{here}/{chosen.choice(NAMES)}"

def clear(path):
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)

def write(path):
    if os.path.isdir(path) and not os.path.islink(path):
        path += "/f"
    if os.path.islink(path):
        os.unlink(path)
    with open(path, chosen.choice("aw")) as file:
        file.write(chosen.choice(["one\\n", "two\\n", "three\\n" * 100]))

def directory(path):
    clear(path)
    os.makedirs(path + chosen.choice(["", "/x", "/x/y"]))

def link(path):
    clear(path)
    os.symlink(chosen.choice(["/etc/passwd", "a", "../b"]), path)

def name(path):
    found = [f"{here}/{each}" for here, _, files in os.walk("d") for each in sorted(files)]
    if found:
        source = chosen.choice(sorted(found))
        if source != path and not path.startswith(source + "/"):
            clear(path)
            if os.path.lexists(source):
                os.link(source, path, follow_symlinks=False)

def move(path):
    other = place()
    apart = not f"{other}/".startswith(f"{path}/") and not f"{path}/".startswith(f"{other}/")
    if os.path.lexists(path) and apart:
        clear(other)
        os.rename(path, other)

def mode(path):
    if os.path.lexists(path) and not os.path.islink(path):
        os.chmod(path, chosen.choice([0o755, 0o700] if os.path.isdir(path) else [0o644, 0o600]))

def touch(path):
    if os.path.exists(path):
        os.utime(path)

KINDS = write, write, write, directory, clear, clear, link, name, move, mode, touch
for _ in range(int(sys.argv[2])):
    with contextlib.suppress(OSError):
        chosen.choice(KINDS)(place())
"""


def edit(sandbox: Sandbox, seed: int, count: int = 12) -> None:
    done = sandbox.exec(["python3", "-c", EDITS, str(seed), str(count)])
    assert done.exit_code == 0, done.stderr


def lower_of(sandbox: Any) -> tuple[str, ...]:
    lower: tuple[str, ...] = sandbox._inner.lower
    return lower


def by_layers(branch: Any, base: str, directory: str) -> Found:
    inner = branch._inner
    assert isinstance(inner, Layered)
    with ExitStack() as stack:
        both = inner.sides(base, directory, stack)
        assert both is not None, "layers tell"
        return found(*both)


def by_whole_trees(branch: Any, base: str, directory: str) -> Found:
    inner = branch._inner
    before = merging.before(inner.backend.restore, inner.spec, base, directory)
    with ExitStack() as stack:
        theirs = partial(trees.pack, inner.files, directory)
        return found(*merging.whole(before, theirs, stack))


def found(base: Compared, theirs: Compared) -> Found:
    """What differs, with the content that each side says it has."""
    differing = {}
    for path in (base.entries.keys() | theirs.entries.keys()) - {"/"}:
        both = base.entries.get(path), theirs.entries.get(path)
        if both[0] != both[1]:
            differing[path] = both
            for side, entry in zip((base, theirs), both, strict=True):
                if entry is not None and entry[0] == "file":
                    assert sum(map(len, side.pieces(path))) == entry[1], path
    return differing


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_layers_tell_what_whole_trees_tell(seed: int) -> None:
    chosen = random.Random(seed)
    bases: list[str] = []
    with ExitStack() as stack:
        source = stack.enter_context(Sandbox.create())
        try:
            source.exec(["python3", "-c", LARGE])
            edit(source, seed, 40)
            bases.append(source.snapshot().id)
            branch = stack.enter_context(Sandbox.restore(bases[0]))
            assert lower_of(branch) == (bases[0],), "it lies over the unpacked snapshot"
            for _ in range(3):
                edit(branch, chosen.randrange(1 << 30))
                bases.append(branch.snapshot().id)
                branch = stack.enter_context(branch.fork(processes="none")[0])
            edit(branch, chosen.randrange(1 << 30))
            edit(source, chosen.randrange(1 << 30))
            bases.append(source.snapshot().id)
            for base in bases:
                for directory in ("d", "."):
                    expected = by_whole_trees(branch, base, directory)
                    assert by_layers(branch, base, directory) == expected, (base, directory)
        finally:
            for base in bases:
                Sandbox.delete_snapshot(base)


STEPS = (
    "rm -r /srv/app; mkdir -p /srv/app/below; echo x > /srv/app/below/x; echo n > /srv/new",
    "head -c 5000000 /dev/urandom > /srv/large; mkdir /srv/two; echo 2 > /srv/two/f",
    "rm -r /srv/app; echo file > /srv/app; rm -r /srv/two; echo 2 > /srv/two",
    "rm /srv/app; mkdir /srv/app; echo y > /srv/app/new; rm /srv/two; mkdir /srv/two",
    "rm -r /srv/app /srv/large",
)
"""Of an image with the file /srv/app/new: what replaces a directory hides what the image has there."""


@pytest.mark.full
@pytest.mark.usefixtures("store")
def test_layers_over_an_image_tell_what_whole_trees_tell(image: str) -> None:
    bases: list[str] = []
    with ExitStack() as stack:
        branch = stack.enter_context(Sandbox.create(image=image))
        branches = [branch]
        try:
            bases.append(branch.snapshot().id)
            for step in STEPS:
                (branch,) = branch.fork(processes="none")
                stack.enter_context(branch)
                done = branch.shell(step)
                assert done.exit_code == 0, done.stderr
                branches.append(branch)
                bases.append(branch.snapshot().id)
            assert lower_of(branches[-1]), "it lies over unpacked snapshots"
            for base in bases:
                for each in branches:
                    expected = by_whole_trees(each, base, "/srv")
                    assert by_layers(each, base, "/srv") == expected, (base, each)
        finally:
            for base in bases:
                Sandbox.delete_snapshot(base)


def test_mounts_and_symlinks_on_the_way_are_left_to_whole_trees(tmp_path: Path) -> None:
    with Sandbox.create(mounts=[f"{tmp_path}:/srv/shown:ro"]) as sandbox, ExitStack() as stack:
        sandbox.shell("mkdir -p real/below; ln -s real link")
        base = sandbox.snapshot()
        try:
            assert isinstance(sandbox._inner, Layered)
            for directory in ("/srv", "link/below", "/srv/shown"):
                assert sandbox._inner.sides(base.id, directory, stack) is None, directory
            assert sandbox._inner.sides(base.id, "real/below", stack) is not None
        finally:
            Sandbox.delete_snapshot(base.id)


def test_too_many_entries_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sandbox.create() as sandbox:
        sandbox.exec(["python3", "-c", LARGE])
        base = sandbox.snapshot()
        try:
            with Sandbox.restore(base.id) as branch, ExitStack() as stack:
                assert isinstance(branch._inner, Layered)
                assert branch._inner.sides(base.id, ".", stack) is not None
                monkeypatch.setattr(sides, "MOST_BYTES", 100)
                with pytest.raises(ResourceExhausted, match="files to compare"):
                    branch._inner.sides(base.id, ".", stack)
        finally:
            Sandbox.delete_snapshot(base.id)


def test_a_fifo_that_the_branch_made_is_a_conflict(tmp_path: Path) -> None:
    with Sandbox.create() as sandbox:
        sandbox.shell("mkfifo old; echo 1 > file")
        base = sandbox.snapshot()
        try:
            sandbox.shell("echo 2 > file")
            assert sandbox.merge(tmp_path, base=base).is_applied is False, "the target has no file"
            (tmp_path / "file").write_text("1\n")
            assert sandbox.merge(tmp_path, base=base).is_applied
            sandbox.shell("mkfifo new")
            (conflict,) = sandbox.merge(tmp_path, base=base).conflicts
        finally:
            Sandbox.delete_snapshot(base.id)
    assert ("new", "it is not a file, directory or link") == (conflict.path, conflict.reason)
    assert ["file"] == os.listdir(tmp_path)


def test_what_ended_forks_lay_over_is_removed_with_the_last_of_them() -> None:
    with Sandbox.create() as sandbox:
        sandbox.exec(["python3", "-c", LARGE])
        first, second = sandbox.fork(2, processes="none")
        inner: Any = first._inner
        (below,) = lower_of(first)
        place = inner.backend.catalogue().place(below)
        try:
            first.terminate()
            assert os.path.isdir(place), "the other one lies over it"
        finally:
            second.terminate()
        assert not os.path.exists(place)
