"""The sides of a merge and what is written: each bound, each refusal, and what an error gives back."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from ringfence import SandboxSpec
from ringfence.errors import (
    DirectoryNotEmpty,
    FileError,
    FileNotFound,
    InvalidRequest,
    IoError,
    NotADirectory,
    ResourceExhausted,
    StorageFull,
)
from ringfence.fork import merging, text, trees
from ringfence.fork.targets import HostWriter, write_to_sandbox
from ringfence.fork.text import TextMerger
from ringfence.fork.three_way import Plan
from ringfence.fork.trees import Budget, HostTree, SandboxTree, StreamTree
from ringfence.launcher.helpers.tars import new_digest
from ringfence.model.files import DIRECTORY, FILE, OTHER, SYMLINK, FileInfo
from ringfence.model.mount import READ_WRITE, Mount
from ringfence.model.net.network import NetworkPolicy
from tests.fork.test_three_way import Whole, member, merge, pack, read, stream, write

pytestmark = pytest.mark.anyone


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def tar_of(*members: tarfile.TarInfo) -> Callable[[BinaryIO], None]:
    def packed(file: BinaryIO) -> None:
        with tarfile.open(fileobj=file, mode="w") as tar:
            tar.addfile(member(".", tarfile.DIRTYPE, 0o755))
            for each in members:
                tar.addfile(each, io.BytesIO(b"x" * each.size))

    return packed


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    made = member(name, kind, 0o777)
    made.linkname = target
    return made


# -- what is read -------------------------------------------------------------------------------


def test_a_budget_takes_so_much_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "MOST_ENTRIES", 3)
    monkeypatch.setattr(trees, "MOST_NAMES", 10)
    for entries, characters in ((3, 10), (0, 10), (3, 0)):
        Budget().take(entries, characters)
    for entries, characters in ((4, 0), (0, 11)):
        with pytest.raises(ResourceExhausted, match="files to compare"):
            Budget().take(entries, characters)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_names_and_targets_of_links_are_counted(
    monkeypatch: pytest.MonkeyPatch, kind: bytes
) -> None:
    """A guest chooses 4,096 bytes of each."""
    names = tar_of(member("./a", tarfile.REGTYPE, 0o644), link("./b", "./" + "t" * 48, kind))
    total = len(".") + len("./a") + len("./b") + 50
    monkeypatch.setattr(trees, "MOST_NAMES", total)
    Whole(names).close()
    monkeypatch.setattr(trees, "MOST_NAMES", total - 1)
    with pytest.raises(ResourceExhausted, match="characters in their paths"):
        Whole(names)


def test_so_many_entries_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for most in (3, 2):
        monkeypatch.setattr(trees, "MOST_ENTRIES", most)
        if 3 == most:
            Whole(partial(pack, {"a": "", "b": ""})).close()
            continue
        with pytest.raises(ResourceExhausted):
            Whole(partial(pack, {"a": "", "b": ""}))


def test_streams_of_one_tree_share_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "MOST_ENTRIES", 3)
    with closing(StreamTree()) as tree:
        tree.add(partial(pack, {"a": ""}))
        with pytest.raises(ResourceExhausted):
            tree.add(partial(pack, {"b": ""}))


def test_so_many_bytes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 10_240  # of the smallest stream
    monkeypatch.setattr(trees, "MOST_ENTRIES", 1)
    monkeypatch.setattr(trees, "MOST_BYTES", size - 2048)
    Whole(partial(pack, {})).close()
    monkeypatch.setattr(trees, "MOST_BYTES", size - 2049)
    with pytest.raises(ResourceExhausted, match="GiB of files to merge"):
        Whole(partial(pack, {}))


@pytest.mark.parametrize("name", ["a/../b", "..", "a/..", "a//b", "a/./b", "/a", "a/."])
def test_another_spelling_of_a_path_is_refused(name: str) -> None:
    with pytest.raises(IoError, match="no path in a tree"):
        Whole(tar_of(member(f"./{name}", tarfile.REGTYPE, 0o644)))
    for fine in ("./a/..b", "./a/b..", "./...", "./.a"):
        Whole(tar_of(member(fine, tarfile.REGTYPE, 0o644))).close()


def test_what_is_no_stream_is_refused() -> None:
    def garbage(file: BinaryIO) -> None:
        file.write(b"no tar stream" * 100)

    tree = StreamTree()
    with closing(tree), pytest.raises(InvalidRequest, match="could not be read") as caught:
        tree.add(garbage)
    assert "path" == caught.value.field
    with closing(StreamTree()) as empty:
        empty.add(lambda _file: None)
        assert empty.is_absent
        empty.add(partial(pack, {}))
        assert not empty.is_absent


def test_another_name_of_a_file_is_the_file_and_of_nothing_is_nothing() -> None:
    first = member("./a", tarfile.REGTYPE, 0o644)
    first.size = 5
    found = Whole(
        tar_of(
            first,
            link("./b", "./a", tarfile.LNKTYPE),
            link("./l", "a"),
            link("./m", "./l", tarfile.LNKTYPE),
            link("./none", "./gone", tarfile.LNKTYPE),
            member("./fifo", tarfile.FIFOTYPE, 0o600),
        )
    )
    with closing(found):
        assert found.get("/a") == found.get("/b")
        assert b"xxxxx" == b"".join(found.pieces("/b"))
        assert found.get("/l") == found.get("/m") == (SYMLINK, 0, 0, b"a")
        assert found.get("/none") is None
        assert (OTHER, 0, 0o600, b"-") == found.get("/fifo")
        assert trees.read(found, "/a", 4) is None
        assert b"xxxxx" == trees.read(found, "/a", 5)
        assert trees.read(found, "/l", 5) is None
        assert trees.read(found, "/gone", 5) is None


def test_a_file_that_has_grown_since_is_not_read_beyond_the_bound() -> None:
    class Grown:
        def get(self, path: str) -> tuple[str, int, int, bytes]:
            return FILE, 3, 0o644, b""

        def pieces(self, path: str) -> Iterator[bytes]:
            return iter((b"abc", b"d"))

    assert trees.read(Grown(), "/a", 3) is None
    assert b"abcd" == trees.read(Grown(), "/a", 4)


@pytest.mark.parametrize("size", [0, 1, trees._PIECE - 1, trees._PIECE, trees._PIECE + 1, 3 << 20])
def test_a_file_is_compared_to_its_last_byte(tmp_path: Path, size: int) -> None:
    content = os.urandom(1 << 10) * (3 << 10)
    (tmp_path / "file").write_bytes(content[:size])
    digest = new_digest()
    digest.update(content[:size])
    top = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    found = trees.entry_below(top, "/file")
    os.close(top)

    assert found is not None
    assert ("file", size, digest.digest()) == (found[0], found[1], found[3])


def test_content_that_was_cut_off_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abcdef")
    with path.open("rb") as file:
        assert [b"bcd"] == [*trees.pieces_at(file.fileno(), 1, 3)]
        assert [] == [*trees.pieces_at(file.fileno(), 1, 0)]
        with pytest.raises(ResourceExhausted, match="cut off"):
            list(trees.pieces_at(file.fileno(), 4, 3))


def test_paths_are_asked_for_in_messages_of_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "_BATCH", 40)
    paths = {f"/{'p' * 10}{number}" for number in range(7)} | {"/" + "q" * 100}
    batches = [json.loads(each) for each in trees._batches(paths)]
    assert sorted(each[1:] for each in paths) == [name for each in batches for name in each]
    assert all(len(each) == 1 or len(json.dumps(each)) <= 40 for each in batches)
    assert len(batches) < len(paths)
    assert [] == [*trees._batches(set())]


class Files:
    """The files of a sandbox: a directory here, and what its helpers were asked."""

    def __init__(self, **kinds: str) -> None:
        self.kinds = {f"/{path}": kind for path, kind in kinds.items()}
        self.asked: list[tuple[str, ...]] = []
        self.fails: dict[str, Exception] = {}
        self.sent = b""
        self.taken = bytearray()
        self.is_deaf = False
        self._fds: list[int] = []

    def stat(self, path: str) -> FileInfo:
        if path not in self.kinds:
            raise FileNotFound(path, path=path)
        return FileInfo(path, path.rpartition("/")[2], self.kinds[path], 0, 0o755, 0.0)

    def list(self, path: str) -> list[FileInfo]:
        if path in self.fails:
            raise self.fails[path]
        return [self.stat(each) for each in self.kinds if each.rpartition("/")[0] == path]

    def remove(self, path: str, *, recursive: bool = False) -> None:
        self.asked.append(("remove", path))
        assert not recursive
        if path in self.fails:
            raise self.fails[path]

    def start_helper(self, what: str, path: str, options: str = "") -> Helper:
        self.asked.append((what, path, options))
        return Helper(self, what)


class Helper:
    def __init__(self, files: Files, what: str) -> None:
        self._files, self._what = files, what
        read, write = os.pipe()
        if "out" == what:
            os.write(write, files.sent)
            os.close(write)
            self.stream = read
        else:
            self.stream, self._read = write, read
            if files.is_deaf:
                os.close(read)

    def finish(self, path: str) -> None:
        self._files.asked.append(("finish", path))
        if "in" == self._what:
            os.close(self.stream)
            if not self._files.is_deaf:
                with open(self._read, "rb") as file:
                    self._files.taken += file.read()
        else:
            os.close(self.stream)
        if "finish" in self._files.fails:
            raise self._files.fails["finish"]

    def abandon(self) -> None:
        self._files.asked.append(("abandon",))
        os.close(self.stream)


def test_a_directory_of_a_sandbox_is_packed_and_nothing_else(tmp_path: Path) -> None:
    before = descriptors()
    files = Files(d=DIRECTORY, f=FILE, l=SYMLINK)
    files.sent = b"the stream"
    out = io.BytesIO()
    trees.pack(files, "/d", out)
    assert b"the stream" == out.getvalue()
    assert [("out", "/d", "ours"), ("finish", "/d")] == files.asked
    files.asked.clear()
    trees.pack(files, "/none", out)
    for path in ("/f", "/l"):
        with pytest.raises(NotADirectory):
            trees.pack(files, path, out)
    assert [] == files.asked

    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        trees.pack(files, "/d", Full())  # type: ignore[arg-type]
    assert [("out", "/d", "ours"), ("abandon",)] == files.asked
    files.fails["finish"] = FileNotFound("gone", path="/d")
    with pytest.raises(FileNotFound):
        trees.pack(files, "/d", io.BytesIO())
    assert before == descriptors()


def test_names_of_what_is_no_directory_any_more_are_none() -> None:
    with closing(SandboxTree(Files(**{"d": DIRECTORY, "d/a": FILE}), "/d")) as tree:
        assert {"a"} == tree.names("")
        assert set() == tree.names("/gone")
    for error in (FileNotFound("x", path="x"), NotADirectory("x", path="x")):
        files = Files()
        files.fails["/d/x"] = error
        with closing(SandboxTree(files, "/d")) as tree:
            assert set() == tree.names("/x")


def test_a_directory_of_the_host_is_read_without_effects_and_through_no_link(
    tmp_path: Path,
) -> None:
    outside = write(tmp_path / "outside", {"secret": "s"})
    root = write(tmp_path / "root", {"a": "1\n", "d/b": "2\n"})
    (root / "l").symlink_to(outside)
    (root / "f").symlink_to(outside / "secret")
    (root / "in").symlink_to("d")
    os.mkfifo(root / "fifo", 0o600)
    before = descriptors()
    with closing(HostTree(str(root))) as tree:
        assert (FILE, 2, 0o644) == (tree.get("/a") or ())[:3]
        assert (DIRECTORY, 0) == (tree.get("/d") or ())[:2]
        assert (SYMLINK, 0, 0, os.fsencode(outside)) == tree.get("/l")
        assert (OTHER, 0, 0o600, b"-") == tree.get("/fifo")
        for path in ("/l/secret", "/none", "/a/x", "/../outside/secret", "/in/b"):
            assert tree.get(path) is None
        for path in ("/f", "/l/secret", "/none", "/in/b"):
            with pytest.raises(FileError):
                list(tree.pieces(path))
        assert {"b"} == tree.names("/d")
        assert {"a", "d", "l", "f", "in", "fifo"} == tree.names("/")
        for path in ("/l", "/none", "/a", "/../outside", "/in"):
            with pytest.raises(OSError, match=r"."):
                tree.names(path)
        assert b"2\n" == b"".join(tree.pieces("/d/b"))
        assert before + 1 == descriptors()
    assert before == descriptors()
    for path, error in (("none", FileNotFound), ("a", NotADirectory)):
        with pytest.raises(error):
            HostTree(str(root / path))


# -- what is written ----------------------------------------------------------------------------


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def planned(
    stack: ExitStack, root: Path, base: dict[str, str], theirs: dict[str, str]
) -> tuple[Plan, HostTree]:
    sides = [stack.enter_context(closing(stream(each))) for each in (base, theirs)]
    tree = stack.enter_context(closing(HostTree(str(root))))
    return Plan(sides[0], tree, sides[1]), tree


STEPS = ("mkdtemp", "fchmod", "rename", "unlink", "mkdir", "rmdir")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("number", "error"),
    [(errno.ENOSPC, StorageFull), (errno.EDQUOT, StorageFull), (errno.EACCES, FileError)],
)
def test_whatever_fails_is_typed_and_leaves_no_stage(
    stack: ExitStack,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    number: int,
    error: type[Exception],
) -> None:
    files = {"a": "1\n", "gone": "1\n", "old/x": "1\n"}
    root = write(tmp_path / "x", files)
    plan, tree = planned(stack, root, files, {"a": "2\n", "new/b": "3\n"})
    before = descriptors()

    module: Any = tempfile if "mkdtemp" == step else os
    original = getattr(module, step)

    with monkeypatch.context() as patch:

        def fail(*_args: object, **_options: object) -> Any:
            patch.setattr(module, step, original)  # clearing up takes the same calls
            raise OSError(number, "fails")

        patch.setattr(module, step, fail)
        with pytest.raises(error) as caught:
            HostWriter(plan, tree).write()
        if error is StorageFull:
            done = {
                "mkdtemp": 0,
                "fchmod": 0,
                "unlink": 0,
                "rmdir": 1,
                "rename": 3,
                "mkdir": 0,
            }.get(step)
            assert done is None or f"; {done} changes are in place" in str(caught.value)
    assert before == descriptors()
    assert [] == [each for each in os.listdir(root) if each.startswith(".ringfence")]
    if step in ("mkdtemp", "fchmod"):
        assert files == read(root)


def test_what_is_written_before_a_full_disk_is_counted(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write(tmp_path / "x", {})
    new = dict.fromkeys("abc", "1\n")
    plan, tree = planned(stack, root, {}, new)
    rename, calls = os.rename, list[int]()

    def fails(*arguments: Any, **options: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "full")
        rename(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fails)
        with pytest.raises(StorageFull, match="; 2 changes are in place"):
            HostWriter(plan, tree).write()
    assert {"a": "1\n", "b": "1\n"} == read(root)
    plan, tree = planned(stack, root, {}, new)
    HostWriter(plan, tree).write()
    assert new == read(root)


def test_it_is_staged_before_anything_is_changed_and_as_planned(
    stack: ExitStack, tmp_path: Path
) -> None:
    files = {"a": "1\n", "gone": "1\n"}
    root = write(tmp_path / "x", files)
    for change, wanted in (
        (lambda: (root / "a").write_text("edited\n"), "a was changed"),
        (lambda: (root / "gone").write_text("edited\n"), "gone was changed"),
        (lambda: (root / "new").write_text("there\n"), "new was changed"),
        (lambda: (root / "a").chmod(0o600), "a was changed"),
    ):
        write(root, files)
        (root / "new").unlink(missing_ok=True)
        plan, tree = planned(stack, root, files, {"a": "2\n", "new": "3\n"})
        change()
        with pytest.raises(FileError, match=wanted):
            HostWriter(plan, tree).write()
        assert "2\n" != (root / "a").read_text() or wanted.startswith("new")
    (root / "new").unlink(missing_ok=True)
    write(root, files)
    plan, tree = planned(stack, root, files, {"a": "2\n", "new": "3\n"})
    before = descriptors()
    HostWriter(plan, tree).write()
    assert {"a": "2\n", "new": "3\n"} == read(root)
    plan, tree = planned(stack, root, {}, {"d/b": "1\n"})
    HostWriter(plan, tree).write()
    assert before == descriptors() - 3, "the new sides and their directory"


def test_what_replaces_a_directory_or_is_replaced_by_one(tmp_path: Path) -> None:
    root = write(tmp_path / "x", {"d/a": "1\n", "f": "1\n"})
    base = {"d/a": "1\n", "f": "1\n"}
    assert merge(root, base, {"d": "now a file\n", "f/x": "2\n"}).is_applied
    assert {"d": "now a file\n", "f/x": "2\n"} == read(root)
    assert 0o755 == stat.S_IMODE((root / "f").stat().st_mode)


def test_changes_reach_a_sandbox_in_one_stream_and_removals_from_below(stack: ExitStack) -> None:
    before = descriptors()
    base = {"old/x": "1\n", "old/y": "1\n", "a": "1\n", "gone": "1\n"}
    sides = [stream(each) for each in (base, base, {"a": "2\n", "new/b": "3\n"})]
    plan = Plan(sides[0], sides[1], sides[2])
    files = Files()
    files.fails["/t/gone"] = FileNotFound("gone", path="/t/gone")
    files.fails["/t/old"] = DirectoryNotEmpty("old", path="/t/old")
    write_to_sandbox(plan, files, "/t")
    removed = [each[1] for each in files.asked if "remove" == each[0]]
    assert ["/t/old/y", "/t/old/x", "/t/old", "/t/gone"] == removed
    assert [("in", "/t", ""), ("finish", "/t")] == files.asked[-2:]
    with tarfile.open(fileobj=io.BytesIO(files.taken)) as tar:
        found = {each.name: (each.mode, each.isdir()) for each in tar}
        content = tar.extractfile("./new/b")
        assert content is not None
        assert b"3\n" == content.read()
    assert {"./a": (0o644, False), "./new": (0o755, True), "./new/b": (0o644, False)} == found

    deaf = Files()
    deaf.is_deaf = True
    deaf.fails["finish"] = StorageFull("the disk inside is full")
    with pytest.raises(StorageFull, match="inside"):
        write_to_sandbox(plan, deaf, "/t")
    refusing = Files()
    refusing.fails["/t/old/x"] = IoError("no")
    with pytest.raises(IoError):
        write_to_sandbox(plan, refusing, "/t")
    assert "in" not in {each[0] for each in refusing.asked}

    for side in sides:
        side.close()
    same = [stream({"a": "1\n"}) for _ in range(3)]
    nothing = Files()
    write_to_sandbox(Plan(same[0], same[1], same[2]), nothing, "/t")
    assert [] == nothing.asked
    for side in same:
        side.close()
    assert before == descriptors()


# -- what is protected, and what is asked -------------------------------------------------------


def merged(root: Path, path: str, **spec: Any) -> set[str]:
    found = merging.into_host(
        partial(merging.whole, partial(pack, {}), partial(pack, {path: "evil\n"})),
        str(root),
        SandboxSpec(**spec),
        prefer=None,
        dry_run=True,
    )
    return {each.path for each in found.conflicts}


@pytest.mark.parametrize("path", [".git/config", ".git/hooks/pre-commit", ".git/x/.git/hooks/y"])
@pytest.mark.parametrize("above", ["", "sub/", "sub/below/"])
def test_what_git_acts_on_is_protected_at_any_depth_unless_it_is_named(
    tmp_path: Path, path: str, above: str
) -> None:
    assert above + path in merged(tmp_path, above + path)
    assert set() == merged(tmp_path, above + path, unprotect=("*",))
    is_nested = bool(above) or path.count(".git") > 1
    assert is_nested == (set() == merged(tmp_path, above + path, unprotect=("nested",)))
    assert set() == merged(tmp_path, above + path.replace(".git", "git"))
    assert set() == merged(
        tmp_path, above + path.replace("config", "configs").replace("hooks", "h")
    )


def test_what_a_spec_protects_is_protected_in_a_merge(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    assert {"kept/x"} <= merged(tmp_path, "kept/x", protect=("kept",))
    assert set() == merged(tmp_path, "keptx", protect=("kept",))
    assert set() == merged(tmp_path, "kept/x")


def test_what_was_protected_is_not_removed_either(tmp_path: Path) -> None:
    root = write(tmp_path / "x", {".git/hooks/x": "1\n", "b": "1\n"})
    found = merge(root, {".git/hooks/x": "1\n", "b": "1\n"}, {"b": "1\n"})
    assert ".git/hooks/x" in {each.path for each in found.conflicts}
    assert {".git/hooks/x": "1\n", "b": "1\n"} == read(root)


def test_a_directory_that_is_nowhere_is_not_found(tmp_path: Path) -> None:
    def nothing(_file: BinaryIO) -> None:
        """No directory."""

    for sides, fine in (
        ((nothing, nothing), False),
        ((partial(pack, {}), nothing), True),
        ((nothing, partial(pack, {})), True),
    ):
        ask = partial(
            merging.into_host,
            partial(merging.whole, *sides),
            str(tmp_path),
            SandboxSpec(),
            "gone",
            prefer=None,
            dry_run=False,
        )
        before = descriptors()
        if fine:
            assert ask().is_applied
        else:
            with pytest.raises(FileNotFound, match="gone: no such directory"):
                ask()
        assert before == descriptors()


def test_a_snapshot_is_read_in_a_sandbox_that_has_nothing_of_the_host_and_ends() -> None:
    given: list[SandboxSpec] = []

    class Restored:
        def __init__(self) -> None:
            self.files = Files(d=FILE)
            self.is_over = False

        def terminate(self) -> None:
            self.is_over = True

    made = Restored()

    def restore(snapshot_id: str, spec: SandboxSpec) -> Restored:
        assert "snap-1" == snapshot_id
        given.append(spec)
        return made

    spec = SandboxSpec(
        id="sbx-1",
        mounts=(Mount("/host", "/host", READ_WRITE),),
        memory_dir="/memory",
        ttl_s=5.0,
        network=NetworkPolicy(allowed_hosts=("example.com",)),
        secrets={"KEY": "value"},
    )
    with pytest.raises(NotADirectory):
        merging.before(restore, spec, "snap-1", "/d")(io.BytesIO())
    assert made.is_over
    bare = given[0]
    assert (None, (), None, None, {}) == (
        bare.id,
        bare.mounts,
        bare.memory_dir,
        bare.ttl_s,
        dict(bare.secrets),
    )
    assert bare.network.is_none


@pytest.mark.parametrize(("path", "prefer"), [("a", "mine"), (7, None), ("a\0b", None), ("a", 1)])
def test_a_malformed_merge_is_refused(path: object, prefer: object) -> None:
    with pytest.raises(InvalidRequest):
        merging.check(path, prefer)
    assert [".", "a", "a"] == [merging.check(each, None) for each in ("", "a", Path("a"))]
    assert "a" == merging.check("a", "ours") == merging.check("a", "theirs")


# -- texts --------------------------------------------------------------------------------------


def test_a_text_that_is_not_merged_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    merger = TextMerger()
    one, two = b"1\n", b"2\n"
    for texts in ((None, one, two), (one, None, two), (one, two, None)):
        assert merger.merge(*texts) is None
        assert "larger than" in merger.reason
    for texts_ in ((b"\0", one, two), (one, b"\0", two), (one, two, b"\0")):
        assert merger.merge(*texts_) is None
        assert "not text" in merger.reason
    assert merger.merge(b"0\n", one, two) is None
    assert "the same lines" in merger.reason
    assert one == merger.merge(b"0\n", one, b"0\n")
    monkeypatch.setattr(merger, "_git", "/bin/false")
    assert merger.merge(b"0\n", one, two) is None
    monkeypatch.setattr(merger, "_git", None)
    assert merger.merge(b"0\n", one, b"0\n") is None
    assert "git is not installed" in merger.reason


def test_an_error_of_git_is_no_conflict_of_lines() -> None:
    before = descriptors()
    for code, reason in ((127, "same lines"), (128, "could not merge"), (255, "could not merge")):
        merger = TextMerger()
        merger._git = "/bin/sh"
        done = subprocess.CompletedProcess([], code, b"", b"")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(text, "_run", lambda *_args, done=done: done)
            assert merger.merge(b"0\n", b"1\n", b"2\n") is None
        assert reason in merger.reason
    assert before == descriptors()


def test_each_text_takes_of_the_time_of_all() -> None:
    merger = TextMerger()
    for _ in range(2):
        before = merger._left_s
        assert b"one\n2\n3\nfour\n" == merger.merge(
            b"1\n2\n3\n4\n", b"one\n2\n3\n4\n", b"1\n2\n3\nfour\n"
        )
        assert before > merger._left_s
    assert None is merger.merge(b"1\n", b"2\n", b"3\n")
    assert before > merger._left_s
