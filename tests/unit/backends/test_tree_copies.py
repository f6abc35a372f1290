"""Copies of trees as the host makes them, and what lies below a restored root: whole, or told why not."""

from __future__ import annotations

import io
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.native.outside import same_descriptors

from ringfence.backends.local.agents.copies import download, upload
from ringfence.backends.local.agents.fileinfo import absolute, describe
from ringfence.backends.local.mounts import layered
from ringfence.backends.local.mounts.layered import Layered
from ringfence.errors import FileError, FileExists, FileNotFound, IoError, SnapshotNotFound
from ringfence.launcher.helpers.trees import pack
from ringfence.model.files import FILE
from ringfence.snapshots import layers

pytestmark = pytest.mark.anyone


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    with same_descriptors():
        yield


class Kept(io.BytesIO):
    """A file inside, whose content is known after it was closed."""

    content = b""

    def close(self) -> None:
        if not self.closed:
            self.content = self.getvalue()
        super().close()


class Files:
    """Files inside, and a helper at the other end of a pipe."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.refusal: Exception | None = None
        self.file, self.kind = Kept(b"in"), "directory"

    def make_dir(self, path: str) -> None:
        self.done.append(("make", path))

    def open_write(self, path: str) -> Any:
        self.done.append(("write", path))
        return self.file

    def open_read(self, _path: str) -> Any:
        return self.file

    def stat(self, _path: str) -> Any:
        return SimpleNamespace(kind=self.kind)

    def start_helper(self, what: str, path: str, options: str = "") -> Any:
        self.done.append((what, path, options))
        read, write = os.pipe2(os.O_CLOEXEC)
        self.inner, stream = (read, write) if "in" == what else (write, read)
        return SimpleNamespace(stream=stream, finish=self.finish, abandon=self.abandon)

    def finish(self, path: str) -> None:
        self.done.append(("finish", path))
        self.abandon(False)
        if self.refusal is not None:
            raise self.refusal

    def abandon(self, told: bool = True) -> None:
        self.done += ["abandoned"] if told else []
        os.close(self.helper.stream)
        if self.inner >= 0:
            os.close(self.inner)

    helper: Any


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Files()
    start = made.start_helper

    def started(*args: Any) -> Any:
        made.helper = start(*args)
        return made.helper

    monkeypatch.setattr(made, "start_helper", started)
    return made


class TestUploads:
    def test_a_file_is_written_where_its_directory_is_made(
        self, files: Any, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_bytes(b"content")
        upload(files, str(tmp_path / "file"), "/deep/target", None)
        assert [("make", "/deep"), ("write", "/deep/target")] == files.done
        assert b"content" == files.file.content

    def test_what_is_not_there_is_told_before_anything_begins(self, files: Any) -> None:
        with pytest.raises(FileNotFound, match="on this host"):
            upload(files, "/none/such", "/x", None)
        assert [] == files.done

    def test_the_helpers_word_counts_unless_we_broke_off(self, files: Any, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        upload(files, str(tmp_path), "/x", None)
        assert [("in", "/x", ""), ("finish", "/x")] == files.done
        files.refusal = FileError("/x: no room")
        with pytest.raises(FileError, match="no room"):
            upload(files, str(tmp_path), "/x", None)

        def interrupt(_count: int, _name: str) -> None:
            raise RuntimeError("enough")

        with pytest.raises(IoError, match="enough"):
            upload(files, str(tmp_path), "/x", interrupt)

    def test_a_reader_that_stops_says_why_itself(self, files: Any, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"x" * (1 << 18))
        files.refusal = FileError("/x: is a file")
        start = files.start_helper

        def closes(*args: Any) -> Any:
            found = start(*args)
            os.close(files.inner)
            files.inner = -1
            return found

        files.start_helper = closes
        with pytest.raises(FileError, match="is a file"):
            upload(files, str(tmp_path), "/x", None)

    def test_what_cannot_be_copied_is_named(self, files: Any, tmp_path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as service:
            service.bind(str(tmp_path / "service"))
            with pytest.raises(FileError, match="service"):
                upload(files, str(tmp_path), "/x", None)
        assert ("finish", "/x") == files.done[-1]


class TestDownloads:
    def test_a_file_is_made_and_replaced_only_where_it_may_be(
        self, files: Any, tmp_path: Path
    ) -> None:
        files.kind = FILE
        target = tmp_path / "target"
        download(files, "/x", str(target), None, overwrite=False)
        assert b"in" == target.read_bytes()
        files.file = Kept(b"newer")
        with pytest.raises(FileExists):
            download(files, "/x", str(target), None, overwrite=False)
        assert b"in" == target.read_bytes()
        files.file = Kept(b"newer")
        download(files, "/x", str(target), None, overwrite=True)
        assert b"newer" == target.read_bytes()

    def tree(self, files: Any, tmp_path: Path) -> None:
        (tmp_path / "source").mkdir()
        (tmp_path / "source/file").write_bytes(b"content")
        start = files.start_helper

        def run(inner: int) -> None:
            pack(inner, str(tmp_path / "source"), one_file_system=False)
            os.close(inner)

        def packs(*args: Any) -> Any:
            found = start(*args)
            inner, files.inner = files.inner, -1
            self.thread = threading.Thread(target=run, args=(inner,))
            self.thread.start()
            return found

        files.start_helper = packs

    def test_a_tree_is_whole_when_the_helper_says_so(self, files: Any, tmp_path: Path) -> None:
        self.tree(files, tmp_path)
        download(files, "/x", str(tmp_path / "here"), None, overwrite=False)
        self.thread.join()
        assert b"content" == (tmp_path / "here/file").read_bytes()
        assert [("out", "/x", "ours"), ("finish", "/x")] == files.done
        with pytest.raises(FileExists):
            download(files, "/x", str(tmp_path / "here"), None, overwrite=False)
        self.thread.join()
        assert "abandoned" == files.done[-1], "nobody waits for the rest"

    def test_of_a_stream_that_broke_off_the_helper_knows_why(
        self, files: Any, tmp_path: Path
    ) -> None:
        start = files.start_helper

        def ends(*args: Any) -> Any:
            found = start(*args)
            os.close(files.inner)
            files.inner = -1
            return found

        files.start_helper = ends
        files.refusal = FileNotFound("/x: not there")
        with pytest.raises(FileNotFound):
            download(files, "/x", str(tmp_path / "here"), None, overwrite=False)
        assert ("finish", "/x") == files.done[-1]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("x", "/root/x"), ("./x", "/root/x"), (".//./x", "/root/x"), ("/x", "/x"), (".", "/root"),
        ("./", "/root"), ("../x", "/root/../x"), (".hidden", "/root/.hidden"),
    ],
)  # fmt: skip
def test_a_relative_path_starts_at_the_root_of_the_session(path: str, expected: str) -> None:
    assert expected == absolute("/root", path)


def test_only_a_link_has_a_target() -> None:
    link, other = (
        describe("/l", "l", 0o120777, 3, 0, "to"),
        describe("/s", "s", 0o140755, 0, 0, "x"),
    )
    assert ("symlink", "to") == (link.kind, link.link_target)
    assert ("other", None, 0o755) == (other.kind, other.link_target, other.mode)


class Catalogue:
    """Places of snapshots; what was let go."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.gone: list[Any] = []

    def place(self, snapshot_id: str) -> str:
        path = self.top / snapshot_id
        (path / "tree").mkdir(parents=True, exist_ok=True)
        return str(path)

    def let_go(self, ids: tuple[str, ...]) -> None:
        self.gone.append(ids)


class TestLayers:
    def open(self) -> int:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def of(self, tmp_path: Path, *ids: str, image: Any = None) -> tuple[Layered, Catalogue]:
        catalogue: Any = Catalogue(tmp_path)
        return Layered(ids, catalogue, self.open(), image), catalogue

    def test_the_uppermost_is_first_and_an_image_last(self, tmp_path: Path) -> None:
        closed: list[str] = []
        given: list[Any] = []
        image: Any = SimpleNamespace(
            trees=[{"source": "image"}], locks=[77], close=lambda: closed.append("image"),
            directories=lambda: ["/srv"], appear_to=lambda *args, **_: given.append(args),
        )  # fmt: skip
        made, catalogue = self.of(tmp_path, "upper", "lower", image=image)
        made.appear_to(70_000, 1000, is_trusted_root=True)
        sources = [Path(each["source"]).parent.name for each in made.trees]
        assert ["upper", "lower", ""] == sources
        assert made.trees[0]["idmap"].startswith("0 70000 ")
        assert made.trees[1]["idmap_gid"] == made.trees[0]["idmap"]
        assert ([(70_000, 1000)], ["/srv"]) == (given, made.directories())
        assert 77 == made.locks[1]
        assert ("upper", "lower") == made.lower
        made.close()
        made.close()
        assert (["image"], [("upper", "lower")]) == (closed, catalogue.gone)

    def test_a_high_pile_is_not_piled_on(self, tmp_path: Path) -> None:
        ids = tuple(f"s{at}" for at in range(layers.MOST))
        made, _ = self.of(tmp_path, *ids)
        less, _ = self.of(tmp_path, *ids[1:])
        assert ((), ids[1:]) == (made.lower, less.lower)
        made.appear_to(70_000, 1000, is_trusted_root=False)
        assert ("", []) == (made.trees[0]["idmap"], made.directories())
        made.close()
        less.close()

    def test_it_is_held_again_unless_it_was_deleted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made, catalogue = self.of(tmp_path, "upper", "lower")
        held: list[str] = []

        def hold(place: str) -> int:
            held.append(os.path.basename(place))
            return self.open()

        monkeypatch.setattr(layers, "hold", hold)
        again = made.held_again()
        assert (["upper"], made.ids) == (held, again.ids)
        again.close()
        monkeypatch.setattr(layers, "hold", lambda _: -1)
        with pytest.raises(SnapshotNotFound):
            made.held_again()
        made.close()
        assert 2 == len(catalogue.gone)

    @pytest.mark.parametrize(
        ("unpacked", "below", "inside"),
        [
            ({"a", "b", "c"}, ("a", "b", "c"), ()),
            ({"b", "c"}, ("b", "c"), ("a",)),
            ({"a", "c"}, ("c",), ("a", "b")),
            ({"a", "b"}, None, ("a", "b", "c")),
        ],
    )
    def test_as_many_are_mounted_as_lie_on_the_lowest(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unpacked: set[str],
        below: tuple[str, ...] | None, inside: tuple[str, ...],
    ) -> None:  # fmt: skip
        catalogue: Any = Catalogue(tmp_path)
        monkeypatch.setattr(layered, "_is_unpacked", lambda _c, each: each in unpacked)
        monkeypatch.setattr(layers, "hold", lambda _: self.open())
        found, rest = layered.hold(catalogue, ("a", "b", "c"), None)
        assert (below, inside) == (found and found.ids, rest)
        if found is not None:
            found.close()

    def test_only_a_large_one_is_unpacked_and_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        catalogue: Any = Catalogue(tmp_path)
        catalogue.content, catalogue.is_layer = lambda _: self.open(), lambda _: True
        done: list[str] = []
        content = Path(catalogue.place("a")) / "content.tar"
        monkeypatch.setattr(layers, "LEAST_BYTES", 10)
        monkeypatch.setattr(layers, "hold", lambda _: self.open() if done else -1)

        def unpack(place: str, _content: int, *, is_layer: bool) -> bool:
            done.append(place)
            return is_layer

        monkeypatch.setattr(layers, "unpack", unpack)
        layered.unpack_large(catalogue, "a")
        content.write_bytes(b"x" * 9)
        assert not layered._is_unpacked(catalogue, "a")
        content.write_bytes(b"x" * 10)
        monkeypatch.setattr(layers, "has_failed", lambda _: True)
        assert not layered._is_unpacked(catalogue, "a")
        assert [] == done
        monkeypatch.setattr(layers, "has_failed", lambda _: False)
        for _ in range(2):
            assert layered._is_unpacked(catalogue, "a")
        assert [catalogue.place("a")] == done
