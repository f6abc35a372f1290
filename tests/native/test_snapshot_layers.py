"""Snapshots that are mounted below restored sandboxes in place of being copied into them."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence import Sandbox
from ringfence.backends.native.backend import NativeBackend
from ringfence.model.session import Snapshot
from ringfence.snapshots import layers

pytestmark = pytest.mark.full

_TREE = """
mkdir -p d/e/f gone kind; echo old > d/file; echo same > d/same; ln d/same d/link; ln -s /tmp d/symlink
mkfifo d/pipe; chmod 640 d/file; chmod 700 d/e; echo x > gone/x; echo y > kind/y; echo z > other; mkdir shut
touch -d 2001-02-03 d/e/f; echo in > shut/in
"""
_CHANGE = """
echo new > d/file; rm -r gone; rm -r kind; echo file > kind; rm other; mkdir other; echo in > other/in
mv d/e d/moved; rm d/symlink; rm -r shut; mkdir shut; echo fresh > shut/fresh; echo 'a b' > 'with space'
"""
_TELL = """
find . -type d -printf '%p %m\\n' | sort
find . ! -type d -printf '%p %y %m %l %s\\n' | sort
cat $(find . -type f | tr ' ' '?' | sort)
"""


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def backend(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NativeBackend]:
    """Every snapshot is large enough to be mounted."""
    monkeypatch.setattr(layers, "LEAST_BYTES", 1)
    made = NativeBackend(state_dir=str(state_dir))
    yield made
    made.close()


def saved(backend: NativeBackend, script: str, before: Snapshot | None = None) -> Snapshot:
    """The snapshot of a sandbox after `script`."""
    with restored(backend, before) if before else Sandbox.create(backend=backend) as sandbox:
        run = sandbox.shell(script)
        assert run.ok, run.stderr_text
        return sandbox.snapshot()


def restored(backend: NativeBackend, snapshot: Snapshot) -> Sandbox:
    return Sandbox.restore(snapshot.id, backend=backend)


def tell(sandbox: Sandbox) -> str:
    """Names, kinds, modes, targets, sizes and contents of all files at home."""
    run = sandbox.shell(_TELL)
    assert run.ok, run.stderr_text
    return run.stdout_text


def layers_below(sandbox: Sandbox) -> int:
    found = sandbox.shell("grep -o 'layer[0-9]*' /proc/self/mountinfo | sort -u | wc -l")
    return int(found.stdout_text)


def left(state_dir: Path) -> list[str]:
    return sorted(os.listdir(state_dir))


def test_it_is_what_was_saved(backend: NativeBackend) -> None:
    with Sandbox.create(backend=backend) as source:
        assert source.shell(_TREE).ok
        first = source.snapshot()
        assert 0 == layers_below(source)
        with restored(backend, first) as again:
            assert 1 == layers_below(again)
            assert tell(source) == tell(again)
            stamps = "stat -c '%n %u %g %Y' d/file d/e/f d/pipe /tmp /etc/passwd /home"
            assert source.shell(stamps).stdout_text == again.shell(stamps).stdout_text
            # As in any other: it may write to all of it, and there is nothing that it may not have.
            assert again.shell("stat -c %h d/same; echo more >> d/link; rm -r d/e; touch d").ok
            assert again.shell("! touch /etc/x && ! touch /usr/x && touch /tmp/x && ps").ok


def test_only_changes_are_saved_above_it(backend: NativeBackend) -> None:
    first = saved(backend, _TREE + "head -c 3000000 /dev/urandom > large")
    second = saved(backend, _CHANGE, first)
    third = saved(backend, "mkdir gone kind2; echo again > gone/again; rm kind; mkdir kind", second)

    assert first.size_bytes > 3_000_000
    assert second.size_bytes < 200_000
    with Sandbox.create(backend=backend) as plain:
        plain.shell(_TREE + "touch large\n" + _CHANGE)
        plain.shell("mkdir gone kind2; echo again > gone/again; rm kind; mkdir kind")
        with restored(backend, third) as again:
            assert 3 == layers_below(again)
            again.shell(
                ": > large; rm d/link; ln d/same d/link"
            )  # a link is broken by the first write
            assert tell(plain) == tell(again)


def test_copied_and_mounted_they_are_the_same(
    backend: NativeBackend, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = saved(backend, _CHANGE, saved(backend, _TREE))
    with restored(backend, second) as mounted:
        expected = tell(mounted)
    for each in state_dir.glob("*/unpacked"):
        each.write_text("[]")
    monkeypatch.setattr(layers, "LEAST_BYTES", 1 << 40)
    with restored(backend, second) as copied:
        assert 0 == layers_below(copied)
        assert expected == tell(copied)


def test_a_small_one_is_loaded_over_a_large_one(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = saved(backend, _TREE)
    monkeypatch.setattr(layers, "LEAST_BYTES", 1 << 20)
    second = saved(backend, _CHANGE, first)
    with restored(backend, second) as again:
        assert 1 == layers_below(again)
        expected = tell(again)
        assert "new" in expected
        third = again.snapshot()  # over the first, with what the second has
    with restored(backend, third) as last:
        assert expected == tell(last)


def test_those_who_share_it_see_nothing_of_one_another(
    backend: NativeBackend, state_dir: Path
) -> None:
    first = saved(backend, _TREE)
    tree = state_dir / first.id / "tree"
    before = sorted((path, path.lstat().st_ctime_ns) for path in tree.rglob("*"))
    with restored(backend, first) as one, restored(backend, first) as other:
        assert one.shell(_CHANGE + "chmod 777 d; find . -type f -exec touch {} +").ok
        assert "old\n" == other.shell("cat d/file").stdout_text
        assert other.shell("test -d gone && test -f other && ! test -e d/moved").ok
    assert before == sorted((path, path.lstat().st_ctime_ns) for path in tree.rglob("*"))


@pytest.mark.full
def test_twenty_generations_removed_in_any_order(backend: NativeBackend, state_dir: Path) -> None:
    chain: list[Snapshot] = []
    for number in range(20):
        script = f"echo {number} > last; echo {number} > f{number}; rm -f f{number - 3}"
        chain.append(saved(backend, script, chain[-1] if chain else None))
    last = chain[-1]
    with restored(backend, last) as sandbox:
        doomed = list(chain)
        random.Random(1).shuffle(doomed)
        for each in doomed:
            backend.delete_snapshot(each.id)
        assert not backend.snapshots()
        expected = "f17 f18 f19 last"
        assert expected.split() == sandbox.shell("ls; sync").stdout_text.split()
        assert "19\n" == sandbox.shell("cat last").stdout_text
        after = sandbox.snapshot()  # over what was deleted
    with restored(backend, after) as again:
        assert expected.split() == again.shell("ls").stdout_text.split()
    backend.delete_snapshot(after.id)

    assert [] == left(state_dir)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_each_is_whole_while_others_are_removed(
    backend: NativeBackend, state_dir: Path, seed: int
) -> None:
    chain: list[Snapshot] = []
    for number in range(6):
        chain.append(saved(backend, f"echo {number} > f{number}", chain[-1] if chain else None))
    dice = random.Random(seed)
    there = dict(enumerate(chain))
    while there:
        number = dice.choice(sorted(there))
        with restored(backend, there[number]) as sandbox:
            names = sandbox.shell("ls").stdout_text.split()
            assert [f"f{each}" for each in range(number + 1)] == names
        backend.delete_snapshot(there.pop(dice.choice(sorted(there))).id)

    assert [] == left(state_dir)


@pytest.mark.full
def test_a_tall_pile_begins_anew(backend: NativeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "MOST", 2)
    chain: list[Snapshot] = []
    heights = []
    for number in range(5):
        script = f"echo {number} > f{number}; rm -f f{number - 2}"
        chain.append(saved(backend, script, chain[-1] if chain else None))
        with restored(backend, chain[-1]) as sandbox:
            heights.append(layers_below(sandbox))
            names = [f"f{each}" for each in range(max(0, number - 1), number + 1)]
            assert names == sandbox.shell("ls").stdout_text.split()
            found = sandbox.changes(since=chain[0].id)
            assert ("f0" in names) == (
                "/home/sandbox/f0" not in {each.path for each in found.items}
            )

    assert [1, 2, 1, 2, 1] == heights


def test_changes_are_told_across_generations(backend: NativeBackend) -> None:
    first = saved(backend, _TREE)
    second = saved(backend, _CHANGE, first)
    with restored(backend, second) as sandbox:
        sandbox.shell("rm -r d; echo 3 > third")
        told = {
            each.path.removeprefix("/home/sandbox/"): each.change
            for each in sandbox.changes(first.id).items
        }
        since = {
            each.path.removeprefix("/home/sandbox/"): each.change
            for each in sandbox.changes(second.id).items
        }

    assert "removed" == told["d/file"] == told["gone/x"] == told["d"]
    assert "added" == told["third"] == told["other/in"] == told["with space"]
    assert "changed" == told["kind"] == told["other"]
    assert {"third": "added"} == {
        path: how for path, how in since.items() if not path.startswith("d")
    }
    assert "removed" == since["d/moved"]


def test_a_name_that_looks_like_a_whiteout_is_a_name(backend: NativeBackend) -> None:
    first = saved(
        backend, "echo 1 > .wh.a; echo 2 > a; mkdir .wh.d; echo 3 > .wh.d/.wh..wh..opq; echo 4 > d"
    )
    with restored(backend, first) as again:
        assert 1 == layers_below(again)
        assert "1\n2\n3\n4\n" == again.shell("cat .wh.a a .wh.d/.wh..wh..opq d").stdout_text
        second = again.snapshot()
    with restored(backend, second) as last:
        assert "1\n2\n3\n4\n" == last.shell("cat .wh.a a .wh.d/.wh..wh..opq d").stdout_text


def test_root_with_capabilities_gets_a_copy(backend: NativeBackend) -> None:
    if os.geteuid() != 0:
        pytest.skip("own_root needs a range of ids")
    with Sandbox.create(backend=backend, profile="own_root") as source:
        assert source.shell("echo 1 > /etc/own; chown 5:6 /etc/own", user="root").ok
        first = source.snapshot()
    with restored(backend, first) as again:
        assert 0 == layers_below(again)
        assert "5 6\n" == again.shell("stat -c '%u %g' /etc/own").stdout_text


def test_a_full_disk_leaves_a_snapshot_that_is_copied(
    backend: NativeBackend, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[str] = []

    def run(target: str, _content: int, *, is_layer: bool) -> bytes:
        assert not is_layer
        (Path(target) / "half").write_text("written")
        attempts.append(target)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(layers, "_run", run)
    first = saved(backend, _TREE)
    assert {"content.tar", "snapshot.json", "unpacked"} == set(os.listdir(state_dir / first.id))
    for _ in range(2):
        with restored(backend, first) as again:
            assert 0 == layers_below(again)
            assert "old\n" == again.shell("cat d/file").stdout_text
    assert 1 == len(attempts), "not at each restore"
    backend.delete_snapshot(first.id)

    assert [] == left(state_dir)


def test_one_that_cannot_be_unpacked_is_copied(backend: NativeBackend) -> None:
    deep = "p=.; for i in $(seq 300); do p=$p/d; done; mkdir -p $p; echo deep > $p/file"
    first = saved(backend, deep)
    with restored(backend, first) as again:
        assert 0 == layers_below(again)
        assert "deep\n" == again.shell("cat $(find . -name file)").stdout_text


@pytest.mark.full
def test_a_copied_state_directory_is_unpacked_again(
    backend: NativeBackend, state_dir: Path, tmp_path: Path
) -> None:
    second = saved(backend, _CHANGE, saved(backend, _TREE))
    with restored(backend, second) as sandbox:
        expected = tell(sandbox)
    shutil.copytree(
        state_dir, tmp_path / "copy", symlinks=True, ignore=shutil.ignore_patterns("tree")
    )
    elsewhere = NativeBackend(state_dir=str(tmp_path / "copy"))
    try:
        with Sandbox.restore(second.id, backend=elsewhere) as again:
            assert 2 == layers_below(again)
            assert expected == tell(again)
    finally:
        elsewhere.close()


def test_half_an_unpacked_one_is_not_used(backend: NativeBackend, state_dir: Path) -> None:
    first = saved(backend, _TREE)
    place = state_dir / first.id
    os.unlink(place / "unpacked")  # as after a kill before the last step
    os.mkdir(place / ".tree-1")
    shutil.rmtree(place / "tree" / "home")
    with restored(backend, first) as again:
        assert "old\n" == again.shell("cat d/file").stdout_text
    backend.delete_snapshot(first.id)

    assert [] == left(state_dir)


def test_what_is_below_the_host_is_never_reached(backend: NativeBackend) -> None:
    """Links of a guest in a layer lead about within its sandbox, as they did when they were made."""
    first = saved(
        backend,
        "ln -s /proc/1/root out; ln -s ../../../../../.. up; rm -rf /var/tmp/*; ln -s / /tmp/root",
    )
    with restored(backend, first) as again:
        assert again.shell(
            "test -d up/home/sandbox && ! test -e up/root/.ssh && ls /tmp/root/usr"
        ).ok


_WRITE_BY_MAP = "import mmap; f = open('a/b/c/file', 'r+b'); mmap.mmap(f.fileno(), 2)[:1] = b'9'"


@pytest.mark.full
def test_every_kind_of_change_deep_below_is_saved(backend: NativeBackend) -> None:
    """Directories that are as they were are passed over: a change must show in all those above it."""
    changes = {
        "content": "echo 2 > a/b/c/file",
        "mode": "chmod 600 a/b/c/file",
        "a time": "touch -d 2002-01-01 a/b/c/file",
        "a directory's mode": "chmod 700 a/b/c",
        "a new file": "touch a/b/c/new",
        "a file less": "rm a/b/c/file",
        "a directory less": "rm -r a/b/c",
        "another name": "mv a/b/c/file a/b/c/other",
        "a link": "ln a/b/c/file a/b/c/link",
        "by descriptor": "exec 3>>a/b/c/file; mv a elsewhere 2>/dev/null; echo 3 >&3",
        "by a map": f'python3 -c "{_WRITE_BY_MAP}"',
    }
    first = saved(backend, "mkdir -p a/b/c; echo 1 > a/b/c/file; touch -d 2001-01-01 a/b/c/file")
    look = (
        "find a* e* -printf '%p %y %m %Ts\\n' 2>/dev/null | sort; cat [ae]*/b/c/* 2>/dev/null; true"
    )
    for how, change in changes.items():
        with restored(backend, first) as sandbox:
            before = sandbox.shell(look).stdout_text
            sandbox.shell(change)
            after = sandbox.shell(look).stdout_text
            assert before != after, how
            second = sandbox.snapshot()
        with restored(backend, second) as again:
            assert after == again.shell(look).stdout_text, how


def test_the_next_restore_of_it_is_prebuilt(backend: NativeBackend, state_dir: Path) -> None:
    first = saved(backend, _TREE)
    second = saved(backend, _CHANGE, first)
    with restored(backend, second) as one:
        expected = tell(one)
        assert one.shell("rm -r d; echo mine > own").ok
        prebuilt = backend.prebuilder._prebuilt
        assert prebuilt is not None
    with restored(backend, second) as again:
        assert prebuilt.id == again.session.id
        assert expected == tell(again)
        after = backend.prebuilder._prebuilt
        assert after is not None
        with restored(backend, first) as other:
            assert after.id != other.session.id, "of another snapshot"
            assert "old\n" == other.shell("cat d/file").stdout_text
        with Sandbox.create(backend=backend) as plain:
            assert "" == plain.shell("ls").stdout_text
    for each in (first, second):
        backend.delete_snapshot(each.id)

    assert [] == left(state_dir), "no prebuilt sandbox keeps them"


@pytest.mark.full
def test_a_snapshot_that_goes_before_the_next_is_prebuilt(backend: NativeBackend) -> None:
    """The zygote finds its files gone, and serves on."""
    zygote = backend.zygote()
    for number in range(10):
        first = saved(backend, f"echo {number} > file")
        with restored(backend, first) as sandbox:
            backend.catalogue().delete(
                first.id
            )  # as another process would, which knows of no prebuilt one
            assert f"{number}\n" == sandbox.shell("cat file").stdout_text
    assert zygote.alive
    assert zygote is backend.zygote()
