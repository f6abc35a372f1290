"""Three-way merges of trees, against a simple model and against git."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence import Merged, SandboxSpec
from ringfence.errors import FileError, FileNotFound, IoError, ResourceExhausted
from ringfence.fork import merging, targets, three_way, trees
from ringfence.fork import text as text_merging
from ringfence.fork.text import TextMerger
from ringfence.fork.three_way import Plan
from ringfence.fork.trees import HostTree, StreamTree

if TYPE_CHECKING:
    from ringfence.fork.trees import Pack

pytestmark = pytest.mark.anyone

Files = dict[str, str]
NAMES = ("a", "b", "d/a", "d/b", "d/e/c")
TEXTS = st.sampled_from(["", "one\n", "two\n", "one\ntwo\nthree\nfour\nfive\n"])
TREES = st.dictionaries(st.sampled_from(NAMES), TEXTS, max_size=len(NAMES))


class Whole(StreamTree):
    """A tree of which all is read, also as the side that a merge changes."""

    def __init__(self, pack: Pack) -> None:
        super().__init__()
        try:
            self.add(pack)
        except BaseException:
            self.close()
            raise

    def look_at(self, paths: set[str]) -> None:
        """Do nothing."""

    def names(self, path: str) -> set[str]:
        return {each.rpartition("/")[2] for each in self.entries if each.rpartition("/")[0] == path}


def stream(files: Files) -> Whole:
    return Whole(lambda file: pack(files, file))


def pack(files: Files, file: BinaryIO) -> None:
    with tarfile.open(fileobj=file, mode="w") as tar:
        tar.addfile(member(".", tarfile.DIRTYPE, 0o755))
        done: set[str] = set()
        for name, text in sorted(files.items()):
            above = name.split("/")[:-1]
            for depth in range(1, len(above) + 1):
                directory = "/".join(above[:depth])
                if directory not in done:
                    done.add(directory)
                    tar.addfile(member(f"./{directory}", tarfile.DIRTYPE, 0o755))
            each = member(f"./{name}", tarfile.REGTYPE, 0o644)
            each.size = len(text.encode())
            tar.addfile(each, io.BytesIO(text.encode()))


def member(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.mode = kind, mode
    return made


def write(root: Path, files: Files) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
        (root / name).chmod(0o644)
    return root


def read(root: Path) -> Files:
    return {
        str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()
    }


def merge(root: Path, base: Files, theirs: Files, prefer: str | None = None) -> Merged:
    return merging.into_host(
        partial(merging.whole, lambda file: pack(base, file), lambda file: pack(theirs, file)),
        str(root),
        SandboxSpec(),
        prefer=prefer,
        dry_run=False,
    )


@settings(max_examples=60, deadline=None)
@given(base=TREES, ours=TREES, theirs=TREES)
def test_what_one_side_changed_is_taken_and_what_both_changed_is_a_conflict(
    base: Files, ours: Files, theirs: Files
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = write(Path(directory) / "target", ours)
        found = merge(root, base, theirs)
        after = read(root)
        again = merge(root, base, theirs) if found.is_applied else found

    if found.conflicts:
        assert after == ours
        return
    moved = {text for name, text in base.items() if name not in theirs}
    for name in NAMES:
        was, mine, new = base.get(name), ours.get(name), theirs.get(name)
        if new in (was, mine):
            expected = mine
        elif mine == was:
            expected = new
        else:
            continue  # merged by lines, or moved
        if expected != after.get(name):
            assert (new or was) in moved | {mine}, name
    assert again.is_applied
    assert () == again.changes


@settings(max_examples=60, deadline=None)
@given(base=TREES, ours=TREES, theirs=TREES, prefer=st.sampled_from(["ours", "theirs"]))
def test_a_preferred_side_wins_conflicts_and_nothing_else(
    base: Files, ours: Files, theirs: Files, prefer: str
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        plain, chosen = (write(Path(directory) / name, ours) for name in ("plain", "chosen"))
        found, taken = merge(plain, base, theirs), merge(chosen, base, theirs, prefer)
        after, after_choice = read(plain), read(chosen)

    if found.is_applied:
        assert after == after_choice
    assert taken.is_applied or prefer == "theirs"  # which removes nothing that it does not know


def test_a_preferred_side_keeps_lines_that_only_the_other_changed(tmp_path: Path) -> None:
    base, ours, theirs = "1\n2\n3\n4\n5\n", "1\n2\n3\n4\nfive\n", "one\n2\n3\n4\n5\n"
    for prefer in ("ours", "theirs"):
        root = write(tmp_path / prefer, {"a": ours})
        (root / "a").chmod(0o755)
        assert merge(root, {"a": base}, {"a": theirs}, prefer).is_applied
        assert {"a": "one\n2\n3\n4\nfive\n"} == read(root)
        assert 0o755 == (root / "a").stat().st_mode & 0o777


@settings(max_examples=40, deadline=None)
@given(sides=st.tuples(*[st.lists(st.sampled_from("abcde"), max_size=12)] * 3))
def test_texts_are_merged_as_git_merges_them(sides: tuple[list[str], ...]) -> None:
    base, ours, theirs = ("".join(f"{line}\n" for line in side).encode() for side in sides)
    merged = TextMerger().merge(base, ours, theirs)
    with tempfile.TemporaryDirectory() as directory:
        for name, text in (("base", base), ("ours", ours), ("theirs", theirs)):
            (Path(directory) / name).write_bytes(text)
        command = ["git", "merge-file", "-p", "ours", "base", "theirs"]
        done = subprocess.run(command, cwd=directory, capture_output=True, check=False)

    assert merged == (None if done.returncode else done.stdout)


def test_without_git_a_text_that_both_changed_is_a_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = {"a": "1\n2\n3\n4\n5\n"}
    sides = {"a": "one\n2\n3\n4\n5\n"}, {"a": "1\n2\n3\n4\nfive\n"}
    assert merge(write(tmp_path / "with", sides[0]), base, sides[1]).is_applied
    monkeypatch.setattr(shutil, "which", lambda _name: None)

    found = merge(write(tmp_path / "without", sides[0]), base, sides[1])

    assert ["a"] == [each.path for each in found.conflicts]
    assert "git is not installed" in found.conflicts[0].reason
    assert sides[0] == read(tmp_path / "without")


def test_a_conflict_has_all_three_texts_and_nothing_is_written(tmp_path: Path) -> None:
    root = write(tmp_path / "x", {"a": "ours\n", "b": "1\n"})
    found = merge(root, {"a": "base\n", "b": "1\n"}, {"a": "theirs\n", "b": "2\n"})

    (conflict,) = found.conflicts
    assert ("a", "base\n", "ours\n", "theirs\n") == (
        conflict.path,
        conflict.base,
        conflict.ours,
        conflict.theirs,
    )
    assert not found.is_applied
    assert {"a": "ours\n", "b": "1\n"} == read(root)
    assert Merged.from_json(found.to_json()).to_json() == found.to_json()

    merge(root, {"a": "base\n", "b": "1\n"}, {"a": "theirs\n", "b": "2\n"}, "ours")
    assert {"a": "ours\n", "b": "2\n"} == read(root)
    merge(root, {"a": "base\n", "b": "1\n"}, {"a": "theirs\n", "b": "2\n"}, "theirs")
    assert {"a": "theirs\n", "b": "2\n"} == read(root)


def test_a_file_that_was_only_moved_keeps_the_target_s_change(tmp_path: Path) -> None:
    root = write(tmp_path / "x", {"old": "text\nmine\n"})
    found = merge(root, {"old": "text\n"}, {"d/new": "text\n"})

    assert found.is_applied
    assert {"d/new": "text\nmine\n"} == read(root)


def test_a_removed_file_that_was_changed_is_a_conflict_both_ways(tmp_path: Path) -> None:
    there = merge(write(tmp_path / "x", {"b": ""}), {"a": "1\n", "b": ""}, {"a": "2\n", "b": ""})
    here = merge(write(tmp_path / "y", {"a": "2\n"}), {"a": "1\n"}, {})

    assert ["a"] == [each.path for each in there.conflicts]
    assert ["a"] == [each.path for each in here.conflicts]


def test_a_directory_with_the_target_s_own_files_stays(tmp_path: Path) -> None:
    root = write(tmp_path / "x", {"d/a": "1\n", "d/mine": "2\n"})
    assert merge(root, {"d/a": "1\n"}, {}).is_applied
    assert {"d/mine": "2\n"} == read(root)


def test_no_symlink_of_the_target_is_followed(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", {"a": "1\n"})
    root = write(tmp_path / "x", {"b": ""})
    (root / "d").symlink_to(outside)

    found = merge(root, {"d/a": "1\n", "b": ""}, {"d/a": "2\n", "d/new": "", "b": ""})

    assert {"d/a", "d/new"} == {each.path for each in found.conflicts}
    assert {"a": "1\n"} == read(outside)
    (root / "d").unlink()
    write(root, {"d/a": "1\n"})
    assert merge(root, {"d/a": "1\n", "b": ""}, {"d/a": "2\n", "d/new": "", "b": ""}).is_applied


@pytest.mark.parametrize(
    "path", [".git/hooks/pre-commit", "sub/.git/hooks/x", ".vscode/tasks.json", "sub/.git"]
)
def test_what_a_writable_mount_protects_is_not_changed(tmp_path: Path, path: str) -> None:
    root = write(tmp_path / "x", {"a": "1\n"})
    found = merge(root, {"a": "1\n"}, {"a": "2\n", path: "evil\n"})

    assert path in {each.path for each in found.conflicts}
    assert {"a": "1\n"} == read(root)
    assert merge(root, {"a": "1\n"}, {"a": "2\n", "sub/git/hooks/x": ""}).is_applied


def test_a_file_that_changes_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    root = write(tmp_path / "x", {"a": "1\n", "b": "1\n"})
    with ExitStack() as stack:
        sides = [stream({"a": text, "b": text}) for text in ("1\n", "2\n")]
        tree = HostTree(str(root))
        stack.callback(tree.close)
        for side in sides:
            stack.callback(side.close)
        plan = Plan(sides[0], tree, sides[1])
        (root / "b").write_text("edited\n")

        with pytest.raises(FileError, match="was changed while it was merged"):
            targets.HostWriter(plan, tree).write()

    assert {"a": "1\n", "b": "edited\n"} == read(root)


def test_modes_and_symlinks_are_merged_and_set_user_id_is_dropped(tmp_path: Path) -> None:
    root = write(tmp_path / "x", {"a": "1\n"})

    def theirs(file: BinaryIO) -> None:
        with tarfile.open(fileobj=file, mode="w") as tar:
            tar.addfile(member(".", tarfile.DIRTYPE, 0o755))
            script = member("./a", tarfile.REGTYPE, 0o4755)
            script.size = 2
            tar.addfile(script, io.BytesIO(b"1\n"))
            # Of a set-group-id without execution, and of a sticky bit, no change of the owner takes it away.
            odd = member("./b", tarfile.REGTYPE, 0o3644)
            odd.size = 2
            tar.addfile(odd, io.BytesIO(b"1\n"))
            tar.addfile(member("./d", tarfile.DIRTYPE, 0o7755))
            link = member("./l", tarfile.SYMTYPE, 0o777)
            link.linkname = "/etc/passwd"
            tar.addfile(link)

    def before(file: BinaryIO) -> None:
        pack({"a": "1\n"}, file)

    found = merging.into_host(
        partial(merging.whole, before, theirs), str(root), SandboxSpec(), prefer=None, dry_run=False
    )

    assert found.is_applied
    modes = [(root / name).stat().st_mode & 0o7777 for name in ("a", "b", "d")]
    assert [0o755, 0o644, 0o755] == modes
    assert "/etc/passwd" == os.readlink(root / "l")
    assert sorted(os.listdir(root)) == ["a", "b", "d", "l"], "nothing else is left"


def test_a_target_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFound):
        merge(tmp_path / "none", {}, {})


def test_a_file_of_the_target_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("control")
    with closing(HostTree(str(tmp_path))) as tree:
        control = tree.get("file")
        file.chmod(0)
        if os.access(file, os.R_OK):
            pytest.skip("this user may read every file")
        with pytest.raises(FileError, match="file"):
            tree.get("file")

    assert control is not None


def test_a_sparse_file_is_refused_before_it_fills_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "MOST_ENTRIES", 0)
    monkeypatch.setattr(trees, "MOST_BYTES", 1 << 20)
    written = []

    def sparse(file: BinaryIO) -> None:
        for _ in range(100):
            written.append(file.write(bytes(1 << 16)))

    with pytest.raises(ResourceExhausted, match="sparse"):
        merging.into_host(
            partial(merging.whole, sparse, sparse),
            str(tmp_path),
            SandboxSpec(),
            prefer=None,
            dry_run=False,
        )
    assert 1 << 20 == sum(written)


def test_names_of_one_file_count_as_much_as_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def linked(file: BinaryIO) -> None:
        with tarfile.open(fileobj=file, mode="w") as tar:
            first = member("./0", tarfile.REGTYPE, 0o644)
            first.size = 1000
            tar.addfile(first, io.BytesIO(bytes(1000)))
            for number in range(1, 10):
                each = member(f"./{number}", tarfile.LNKTYPE, 0o644)
                each.linkname = "./0"
                tar.addfile(each)

    def merged() -> Merged:
        return merging.into_host(
            partial(merging.whole, lambda file: pack({}, file), linked),
            str(tmp_path),
            SandboxSpec(),
            prefer=None,
            dry_run=True,
        )

    assert 10 == len(merged().changes)
    monkeypatch.setattr(three_way, "MOST_BYTES", 9999)
    with pytest.raises(ResourceExhausted):
        merged()


def test_long_paths_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {f"{'d' * 200}/{number}": "" for number in range(50)}
    with closing(stream(names)) as whole:
        assert 52 == len(whole.entries)
    monkeypatch.setattr(trees, "MOST_NAMES", 10_000)
    with pytest.raises(ResourceExhausted, match="characters in their paths"):
        stream(names)


def test_conflicts_and_their_texts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = "old", "ours", "theirs"
    with ExitStack() as stack:
        base, ours, theirs = (
            stack.enter_context(closing(stream({f"{n:03}": f"{kind}\n" * 9 for n in range(20)})))
            for kind in kinds
        )
        shown = 9 * sum(len(kind) + 1 for kind in kinds)
        monkeypatch.setattr(three_way, "_MOST_SHOWN_BYTES", 3 * shown)

        found = [*Plan(base, ours, theirs).conflicts.values()]
        assert [True] * 3 + [False] * 17 == [each.ours is not None for each in found]
        monkeypatch.setattr(three_way, "_MOST_CONFLICTS", 19)
        with pytest.raises(ResourceExhausted, match="prefer"):
            Plan(base, ours, theirs)


def test_all_texts_of_a_merge_share_its_time_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = b"1\n2\n3\n", b"one\n2\n3\n", b"1\n2\nthree\n"
    merged = b"one\n2\nthree\n"
    monkeypatch.setattr(text_merging, "_MOST_MERGED_BYTES", len(merged))
    merger = TextMerger()
    assert merged == merger.merge(*sides)
    assert merger.merge(*sides) is None
    assert "merged already" in merger.reason
    monkeypatch.setattr(text_merging, "_S", 0.0)
    late = TextMerger()
    assert late.merge(*sides) is None
    assert "within 0 s" in late.reason


@pytest.mark.parametrize(
    ("base", "ours", "theirs", "conflicts", "after"),
    [
        pytest.param({}, {"a": "1"}, {"a": "2"}, {"a"}, None, id="both-added"),
        pytest.param({"a": ""}, {"a": "x"}, {"b": ""}, {"a"}, None, id="empty-is-not-moved"),
        pytest.param(
            {"a": "1", "b": "2"}, {"a": "x", "b": "2"}, {"b": "1"}, {"a"}, None, id="changed-to-it"
        ),
        pytest.param({"a": "1"}, {"b": "x"}, {"b": "1"}, set(), {"b": "x"}, id="moved-before"),
        pytest.param({"a": "1"}, {"a": "x"}, {"b": "1"}, set(), {"b": "x"}, id="moved-with-change"),
        pytest.param({}, {"d": "x"}, {"d/a": "1"}, {"d", "d/a"}, None, id="file-in-the-way"),
        pytest.param({"d/a": "1"}, {"d/a": "1"}, {"d": "2"}, set(), {"d": "2"}, id="other-kind"),
        pytest.param(
            {"d/a": "1"}, {"d/a": "1", "d/b": "2"}, {"d": "3"}, {"d"}, None, id="other-kind-in-use"
        ),
    ],
)
def test_what_becomes_of_each_case(
    tmp_path: Path,
    base: Files,
    ours: Files,
    theirs: Files,
    conflicts: set[str],
    after: Files | None,
) -> None:
    root = write(tmp_path / "root", ours)

    found = merge(root, base, theirs)

    assert conflicts == {each.path for each in found.conflicts}
    assert (ours if after is None else after) == read(root)
    if after is not None and after != ours:
        assert {*after, *ours} == {each.path for each in found.changes if "." not in each.path} | {
            name for name in ours if ours[name] == after.get(name)
        }


@pytest.mark.parametrize(
    "name", ["./../b", "./d/../.vscode/tasks.json", "./d/./a", "./d//a", "b", "./d/.."]
)
def test_a_path_that_climbs_is_refused(tmp_path: Path, name: str) -> None:
    """A guest may have sent it; so spelled, it would not be known as protected."""

    def loose(file: BinaryIO) -> None:
        with tarfile.open(fileobj=file, mode="w") as tar:
            tar.addfile(member("./d", tarfile.DIRTYPE, 0o755))
            tar.addfile(member(name, tarfile.REGTYPE, 0o644))

    root = write(tmp_path / "root", {})
    with pytest.raises(IoError, match="no path in a tree"):
        merging.into_host(
            partial(merging.whole, lambda file: pack({}, file), loose),
            str(root),
            SandboxSpec(),
            prefer=None,
            dry_run=False,
        )
    assert not [*root.iterdir()]


def test_a_stream_without_its_directories_is_a_conflict(tmp_path: Path) -> None:
    def loose(file: BinaryIO) -> None:
        with tarfile.open(fileobj=file, mode="w") as tar:
            for name in ("./d/a", "/etc/ringfence-x"):
                tar.addfile(member(name, tarfile.REGTYPE, 0o644))

    root = write(tmp_path / "root", {})
    found = merging.into_host(
        partial(merging.whole, lambda file: pack({}, file), loose),
        str(root),
        SandboxSpec(),
        prefer=None,
        dry_run=False,
    )

    assert {"d/a", "etc/ringfence-x"} == {each.path for each in found.conflicts}
    assert not [*root.iterdir()]


def with_mode(content: bytes, mode: int) -> Whole:
    def write_one(file: BinaryIO) -> None:
        with tarfile.open(fileobj=file, mode="w") as tar:
            tar.addfile(member(".", tarfile.DIRTYPE, 0o755))
            one = member("./a", tarfile.REGTYPE, mode)
            one.size = len(content)
            tar.addfile(one, io.BytesIO(content))

    return Whole(write_one)


_TEXT, _ENDED, _BEGUN = b"1\n2\n3\n4\n5\n", b"1\n2\n3\n4\nfive\n", b"one\n2\n3\n4\n5\n"


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        pytest.param((_TEXT, 0o600), (_TEXT, 0o644), None, id="ours-alone"),
        pytest.param((_TEXT, 0o644), (_TEXT, 0o600), (_TEXT, 0o600), id="theirs-alone"),
        pytest.param((_TEXT, 0o600), (_TEXT, 0o600), None, id="both-alike"),
        pytest.param((_TEXT, 0o600), (_ENDED, 0o644), (_ENDED, 0o600), id="mode-and-content"),
        pytest.param((_ENDED, 0o644), (_TEXT, 0o600), (_ENDED, 0o600), id="content-and-mode"),
        pytest.param(
            (_BEGUN, 0o644), (_ENDED, 0o600), (b"one\n2\n3\n4\nfive\n", 0o600), id="merged"
        ),
    ],
)
def test_modes_are_merged_beside_contents(
    ours: tuple[bytes, int], theirs: tuple[bytes, int], expected: tuple[bytes, int] | None
) -> None:
    with (
        closing(with_mode(_TEXT, 0o644)) as base,
        closing(with_mode(*ours)) as mine,
        closing(with_mode(*theirs)) as new,
    ):
        plan = Plan(base, mine, new)

        assert not plan.conflicts
        if expected is None:
            assert not plan.writes
            return
        ((path, write_of),) = plan.writes.items()
        (change,) = plan.outcome(is_applied=True).changes
        assert expected == (b"".join(write_of.pieces()), write_of.entry[2])
        assert ("/a", len(expected[0])) == (path, write_of.entry[1])
        assert write_of.before == mine.entries["/a"]
        digests = {each.entries["/a"][3] for each in (mine, new)}
        assert write_of.entry[3] in (digests if write_of.source else {b""})
        assert ("a", "changed", "file") == (change.path, change.change, change.kind)


def test_modes_that_both_changed_and_bytes_that_are_no_text_are_conflicts() -> None:
    with (
        closing(with_mode(b"\xff1", 0o644)) as base,
        closing(with_mode(b"\xff1", 0o600)) as ours,
        closing(with_mode(b"\xff1", 0o755)) as theirs,
    ):
        (conflict,) = Plan(base, ours, theirs).conflicts.values()

        assert "both sides changed its mode" in conflict.reason
        assert (None, None, None) == (conflict.base, conflict.ours, conflict.theirs)


def test_a_file_that_is_new_is_told_as_added() -> None:
    with (
        closing(stream({})) as base,
        closing(stream({})) as ours,
        closing(stream({"a": "1"})) as new,
    ):
        (change,) = Plan(base, ours, new).outcome(is_applied=True).changes

        assert ("a", "added") == (change.path, change.change)


# -- each decision of a plan -----------------------------------------------------------------------

Member = str | tuple[str, int] | tuple[str, str]
"""Text of a file, a file or (text "/") directory with a mode, or a kind: link or pipe with its target."""


def tree_of(members: dict[str, Member]) -> Whole:
    """A tree of these, in which directories that are not named have the mode 755."""
    whole: dict[str, Member] = {}
    for name, each in members.items():
        above = name.split("/")
        for depth in range(1, len(above)):
            whole.setdefault("/".join(above[:depth]), ("/", 0o755))
        whole[name] = each

    def write_all(file: BinaryIO) -> None:
        with tarfile.open(fileobj=file, mode="w") as tar:
            tar.addfile(member(".", tarfile.DIRTYPE, 0o755))
            for name, each in whole.items():
                content, more = each if isinstance(each, tuple) else (each, 0o644)
                one = member(f"./{name}", tarfile.REGTYPE, more if isinstance(more, int) else 0o644)
                if isinstance(more, str):
                    one.type = tarfile.SYMTYPE if content == "link" else tarfile.FIFOTYPE
                    one.linkname, content = more, ""
                elif content == "/":
                    one.type, content = tarfile.DIRTYPE, ""
                one.size = len(content)
                tar.addfile(one, io.BytesIO(content.encode()))

    return Whole(write_all)


def shown(plan: Plan) -> dict[str, str]:
    """What becomes of each path of a plan: `-` removed, `?` a conflict, a kind, or a text and its mode."""
    found = {path[1:]: "-" for path in plan.removals} | {path[1:]: "?" for path in plan.conflicts}
    for path, each in plan.writes.items():
        kind, _size, mode, link = each.entry
        text = str(kind)
        if kind == "file":
            text = b"".join(each.pieces()).decode()
        elif kind == "symlink":
            text = f"to {link.decode()}"
        found[path[1:]] = text if mode in (0o644, 0) else f"{text} {mode:o}"
    return found


DIR = "directory 755"
CASES: dict[str, tuple[dict[str, Member], dict[str, Member], dict[str, Member], dict[str, str]]] = {
    "one of two alike was moved: nobody knows which": (
        {"a": "1", "b": "1"}, {"a": "x", "b": "1"}, {"c": "1"}, {"a": "?", "b": "-", "c": "1"},
    ),
    "one of two alike was moved, and both were changed": (
        {"a": "1", "b": "1"}, {"a": "x", "b": "y"}, {"c": "1"}, {"a": "?", "b": "?", "c": "1"},
    ),
    "moved to two places: nobody knows where": (
        {"a": "1"}, {"a": "x"}, {"b": "1", "c": "1"}, {"a": "?", "b": "1", "c": "1"},
    ),
    "a directory of another mode is removed all the same": (
        {"d/a": "1"}, {"d": ("/", 0o700), "d/a": "1"}, {}, {"d": "-", "d/a": "-"},
    ),
    "a directory with a file of the target's stays": (
        {"d/a": "1"}, {"d/a": "1", "d/b": "2"}, {}, {"d/a": "-"},
    ),
    "what was moved is a link here": (
        {"a": "1"}, {"a": ("link", "x")}, {"b": "1"}, {"a": "?", "b": "1"},
    ),
    "what was moved is a directory here": (
        {"a": "1"}, {"a": ("/", 0o755)}, {"b": "1"}, {"a": "?", "b": "1"},
    ),
    "what was moved is gone here": ({"a": "1"}, {}, {"b": "1"}, {"b": "1"}),
    "what was moved is unchanged here": ({"a": "1"}, {"a": "1"}, {"b": "1"}, {"a": "-", "b": "1"}),
    "what was moved has another mode here": (
        {"a": "1"}, {"a": ("1", 0o600)}, {"b": "1"}, {"a": "-", "b": "1"},
    ),
    "a change and a mode go along": (
        {"a": "1"}, {"a": ("x", 0o600)}, {"b": "1"}, {"a": "-", "b": "x 600"},
    ),
    "a change goes along, and the mode of the move": (
        {"a": "1"}, {"a": "x"}, {"b": ("1", 0o755)}, {"a": "-", "b": "x 755"},
    ),
    "a change goes along with the target's mode where both have one": (
        {"a": "1"}, {"a": ("x", 0o600)}, {"b": ("1", 0o755)}, {"a": "-", "b": "x 600"},
    ),
    "a change goes into a new directory": (
        {"a": "1"}, {"a": "x"}, {"d/e/b": "1"}, {"a": "-", "d": DIR, "d/e": DIR, "d/e/b": "x"},
    ),
    "a move onto what is there": ({"a": "1"}, {"a": "x", "b": "y"}, {"b": "1"}, {"a": "-", "b": "?"}),
    "a pipe": ({}, {}, {"p": ("pipe", "")}, {"p": "?"}),
    "a pipe in place of a file": ({"p": "1"}, {"p": "1"}, {"p": ("pipe", "")}, {"p": "?"}),
    "a pipe on both sides": ({}, {"p": ("pipe", "")}, {"p": ("pipe", "")}, {}),
    "a file in place of a directory": (
        {"d/a": "1"}, {"d/a": "1"}, {"d": "2"}, {"d": "2", "d/a": "-"},
    ),
    "a file in place of a directory that is in use": (
        {"d/a": "1"}, {"d/a": "1", "d/b": "2"}, {"d": "3"}, {"d": "?", "d/a": "-"},
    ),
    "a directory in place of a file": (
        {"d": "1"}, {"d": "1"}, {"d/a": "2"}, {"d": DIR, "d/a": "2"},
    ),
    "a directory in place of a file that was changed": (
        {"d": "1"}, {"d": "x"}, {"d/a": "2"}, {"d": "?", "d/a": "?"},
    ),
    "a link in place of a file": ({"a": "1"}, {"a": "1"}, {"a": ("link", "b")}, {"a": "to b"}),
    "a link that both changed": (
        {"a": ("link", "1")}, {"a": ("link", "2")}, {"a": ("link", "3")}, {"a": "?"},
    ),
    "a link that both changed alike": (
        {"a": ("link", "1")}, {"a": ("link", "2")}, {"a": ("link", "2")}, {},
    ),
    "a mode of a directory": (
        {"d": ("/", 0o755)}, {"d": ("/", 0o755)}, {"d": ("/", 0o700)}, {"d": "directory 700"},
    ),
    "a mode of a directory that both changed": (
        {"d": ("/", 0o755)}, {"d": ("/", 0o750)}, {"d": ("/", 0o700)}, {},
    ),
    "all lines of the branch are here already, and its mode is not": (
        {"a": "1\n2\n3\n4\n5\n"}, {"a": "one\n2\n3\n4\nfive\n"}, {"a": ("one\n2\n3\n4\n5\n", 0o600)},
        {"a": "one\n2\n3\n4\nfive\n 600"},
    ),
    "all of the branch is here already": (
        {"a": "1\n2\n3\n4\n5\n"}, {"a": "one\n2\n3\n4\nfive\n"}, {"a": "one\n2\n3\n4\n5\n"}, {},
    ),
    "removed on both sides": ({"a": "1"}, {}, {}, {}),
    "removed here, unchanged there": ({"a": "1"}, {}, {"a": "1"}, {}),
    "removed here, changed there": ({"a": "1"}, {}, {"a": "2"}, {"a": "?"}),
    "below what is a link here": (
        {}, {"d": ("link", "x")}, {"d/a": "1"}, {"d": "?", "d/a": "?"},
    ),
    "a directory that is gone here is made for what is new in it": (
        {"d/a": "1"}, {}, {"d/a": "1", "d/b": "2"}, {"d": DIR, "d/b": "2"},
    ),
    "two new files share their new directory": (
        {}, {}, {"d/a": "1", "d/b": "2"}, {"d": DIR, "d/a": "1", "d/b": "2"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_decision(case: str) -> None:
    *sides, wanted = CASES[case]
    with ExitStack() as stack:
        base, ours, theirs = (stack.enter_context(closing(tree_of(each))) for each in sides)
        plan = Plan(base, ours, theirs)

        assert wanted == shown(plan)
        paths = [each.path for each in plan.outcome(is_applied=True).changes]
        assert sorted(set(paths)) == paths, "each is told once"
        told = {each.path: each.change for each in plan.outcome(is_applied=True).changes}
        there = {path[1:] for path in ours.entries}
        for path, becomes in wanted.items():
            if becomes != "?":
                change = "removed" if becomes == "-" else "changed" if path in there else "added"
                assert change == told[path], path
        for path, each in plan.writes.items():
            assert each.before == ours.entries.get(path), path
        assert all(ours.entries[path] == each for path, each in plan.removals.items())
        for prefer in ("ours", "theirs"):
            preferred = Plan(base, ours, theirs, prefer)
            lost = {path for path, becomes in shown(preferred).items() if becomes == "?"}
            assert prefer == "theirs" or set() == lost
