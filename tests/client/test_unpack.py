"""Tar streams out of a sandbox, unpacked on this host: what each member may do, and what it may not."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from pathlib import Path

import pytest

from ringfence.client.unpack import _stamp, created, parts, unpack
from ringfence.errors import FileError, FileExists, IoError, IsADirectory

pytestmark = pytest.mark.anyone

SECRET = "of the host"


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mtime = kind, link, 1_600_000_000
    made.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    return made


def directory(name: str, mode: int = 0o755) -> tarfile.TarInfo:
    made = member(name, tarfile.DIRTYPE)
    made.mode = mode
    return made


def symlink(name: str, target: str) -> tarfile.TarInfo:
    return member(name, tarfile.SYMTYPE, target)


def hard_link(name: str, target: str) -> tarfile.TarInfo:
    return member(name, tarfile.LNKTYPE, target)


def stream_of(*members: tarfile.TarInfo, content: bytes = b"data") -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for each in members:
            each.size = len(content) if each.isreg() else 0
            tar.addfile(each, io.BytesIO(content))
    return made.getvalue()


class Place:
    """A destination with a secret beside it."""

    def __init__(self, top: Path) -> None:
        self.top, self.target = top, top / "target"
        (top / "beside").mkdir()
        (top / "beside" / "secret").write_text(SECRET)
        self.target.mkdir()

    def unpack(self, data: bytes, **options: object) -> None:
        """Unpack, and check that every descriptor is given back."""
        file = self.top / "stream"
        file.write_bytes(data)
        fd = os.open(file, os.O_RDONLY)
        before = len(os.listdir("/proc/self/fd"))
        try:
            unpack(fd, str(self.target), **options)  # type: ignore[arg-type]
        finally:
            assert before == len(os.listdir("/proc/self/fd"))
            os.close(fd)

    def is_untouched(self) -> bool:
        """Tell whether everything beside the destination is as it was."""
        secret = self.top / "beside" / "secret"
        names = {path.name for path in self.top.iterdir()} - {"stream"}
        return (
            names == {"beside", "target"}
            and ["secret"] == os.listdir(self.top / "beside")
            and secret.read_text() == SECRET
            and secret.stat().st_nlink == 1
        )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize(
    "members",
    [
        [member("../x")],
        [member("a/../../x")],
        [member("a/../x")],
        [directory("../x")],
        [symlink("../x", "y")],
        [symlink("up", "../beside"), member("up/x")],
        [symlink("up", "../beside"), directory("up/x")],
        [symlink("up", "../beside"), directory("up")],
        [symlink("up", "../beside"), symlink("up/x", "y")],
        [symlink("up", "../beside"), hard_link("mine", "up/secret")],
        [directory("in"), symlink("in/up", "../../beside"), member("in/up/x")],
        [hard_link("mine", "../beside/secret")],
        [hard_link("mine", "/etc/passwd")],
        [hard_link("mine", "")],
        [hard_link("mine", ".")],
        [member("file"), member("file/x")],
        [member(".")],
        [symlink("./", "../beside")],
    ],
    ids=lambda members: " ".join(f"{each.name}:{each.linkname}" for each in members),
)
def test_no_member_leads_outside(place: Place, members: list[tarfile.TarInfo]) -> None:
    with pytest.raises(FileError):
        place.unpack(stream_of(*members))
    assert place.is_untouched()
    assert "mine" not in os.listdir(place.target)


def test_an_absolute_name_is_refused(place: Place) -> None:
    with pytest.raises(FileError, match="outside"):
        place.unpack(stream_of(member(str(place.top / "beside" / "x"))))
    assert place.is_untouched()


def test_names_are_taken_apart() -> None:
    assert ("a", "b") == parts("./a//b/.")
    assert () == parts("./")
    assert ("..a", "b..") == parts("..a/b..")
    for wrong in ("/a", "..", "a/..", "a\0b"):
        with pytest.raises(FileError):
            parts(wrong)


def test_a_hard_link_to_a_symlink_is_the_symlink(place: Place) -> None:
    secret = str(place.top / "beside" / "secret")
    place.unpack(stream_of(symlink("link", secret), hard_link("again", "link")))

    assert (place.target / "again").is_symlink()
    assert secret == os.readlink(place.target / "again")
    assert place.is_untouched()


def test_a_hard_link_within_the_tree_is_one(place: Place) -> None:
    place.unpack(stream_of(directory("d"), member("d/file"), hard_link("also", "d/file")))

    assert (place.target / "also").samefile(place.target / "d" / "file")


def test_a_hard_link_to_what_is_not_there_is_an_error(place: Place) -> None:
    for target in ("none", "none/file"):
        with pytest.raises(IoError):
            place.unpack(stream_of(hard_link("mine", target)))
    assert [] == os.listdir(place.target)


def test_modes_have_no_special_bits_and_times_are_kept(place: Place) -> None:
    tool = member("shut/tool")
    tool.mode = 0o6755
    place.target.chmod(0o700)
    place.unpack(
        stream_of(directory(".", 0o777), directory("shut", 0o7455), tool, directory("shut/in"))
    )

    shut = place.target / "shut"
    assert 0o455 == stat.S_IMODE(shut.stat().st_mode), "set last: its content came after it"
    shut.chmod(0o755)
    assert 0o755 == stat.S_IMODE((shut / "tool").stat().st_mode)
    assert 0o700 == stat.S_IMODE(place.target.stat().st_mode), "the destination keeps its mode"
    for path in (shut, shut / "tool", shut / "in"):
        assert 1_600_000_000 == path.stat().st_mtime


def test_devices_and_pipes_are_left_out(place: Place) -> None:
    kinds = (tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE)
    place.unpack(stream_of(*(member(f"x{kind!r}", kind) for kind in kinds), member("file")))

    assert ["file"] == os.listdir(place.target)


@pytest.mark.parametrize("kind", ["file", "symlink", "hard link"])
def test_what_is_there_is_replaced_only_where_that_was_asked_for(place: Place, kind: str) -> None:
    news = {
        "file": member("x"),
        "symlink": symlink("x", "new"),
        "hard link": hard_link("x", "other"),
    }
    stream = stream_of(member("other"), news[kind])
    (place.target / "x").write_text("old")

    made: set[tuple[str, ...]] = set()
    for options in ({"overwrite": False}, {"overwrite": False, "made": made}):
        with pytest.raises(FileExists) as refused:
            place.unpack(stream, **options)
        assert "x" == refused.value.path
        assert "old" == (place.target / "x").read_text()
        os.unlink(place.target / "other")
    assert {("other",)} == made
    made.add(("x",))
    place.unpack(stream, overwrite=False, made=made)
    assert not (place.target / "x").is_file() or "data" == (place.target / "x").read_text()
    assert {("other",), ("x",)} == made
    place.unpack(stream)


def test_a_link_in_the_way_is_replaced_and_not_followed(place: Place) -> None:
    (place.target / "x").symlink_to(place.top / "beside" / "secret")
    (place.target / "y").symlink_to(place.top / "beside" / "made")

    place.unpack(stream_of(member("x"), member("y")))

    assert ["data", "data"] == [(place.target / name).read_text() for name in "xy"]
    assert not any((place.target / name).is_symlink() for name in "xy")
    assert place.is_untouched()


def test_a_directory_in_the_way_of_a_file_stays(place: Place) -> None:
    (place.target / "x").mkdir()
    (place.target / "x" / "kept").write_text("kept")

    with pytest.raises(IoError):
        place.unpack(stream_of(member("x")))
    assert "kept" == (place.target / "x" / "kept").read_text()


def test_a_destination_is_made_with_the_directories_above(place: Place) -> None:
    place.target = place.target / "deep" / "down"
    before = os.umask(0)
    try:
        place.unpack(stream_of(member("far/away/file"), member("near")))
    finally:
        os.umask(before)
    for path in (place.target / "far", place.target / "far" / "away"):
        assert 0o755 == stat.S_IMODE(path.stat().st_mode)

    assert "data" == (place.target / "far" / "away" / "file").read_text()
    assert "data" == (place.target / "near").read_text()


def test_a_directory_that_another_program_makes_meanwhile_is_taken(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.mkdir

    def both(name: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None:
            real(name, 0o700, dir_fd=dir_fd)
        real(name, mode, dir_fd=dir_fd)

    monkeypatch.setattr("ringfence.client.unpack.os.mkdir", both)
    place.unpack(stream_of(member("a/b/x"), directory("c")))
    assert "data" == (place.target / "a" / "b" / "x").read_text()
    assert (place.target / "c").is_dir()


def test_each_file_is_in_its_own_directory_in_whatever_order_they_come(place: Place) -> None:
    names = ("a/1", "b/2", "a/c/3", "b/c/4", "5", "a/6", "b/c/d/7", "a/c/8", "9")
    place.unpack(stream_of(*map(member, names)))
    found = (path.relative_to(place.target) for path in place.target.rglob("*") if path.is_file())
    assert sorted(names) == sorted(map(str, found))


def test_a_stream_that_ends_too_early_may_be_asked_for_again(place: Place) -> None:
    whole = stream_of(member("x"), content=b"x" * 5000)
    for end in (0, 100, 600, 4000):
        with pytest.raises(IoError) as refused:
            place.unpack(whole[:end])
        assert refused.value.retryable, end


def test_a_file_in_which_the_stream_broke_off_is_replaced_by_the_next_attempt(place: Place) -> None:
    whole, made = stream_of(member("x"), content=b"x" * 5000), set[tuple[str, ...]]()
    with pytest.raises(IoError):
        place.unpack(whole[:4000], overwrite=False, made=made)
    with pytest.raises(FileExists):
        place.unpack(whole, overwrite=False, made=set())
    place.unpack(whole, overwrite=False, made=made)

    assert b"x" * 5000 == (place.target / "x").read_bytes()
    assert {("x",)} == made


def test_a_file_is_its_owners_alone_until_it_is_whole(place: Place) -> None:
    """Its own mode may have been meant for a directory that nobody else enters."""
    whole = stream_of(member("x"), content=b"x" * 5000)
    before = os.umask(0)
    try:
        with pytest.raises(IoError):
            place.unpack(whole[:4000])
        assert 0o600 == stat.S_IMODE((place.target / "x").stat().st_mode)
        place.unpack(whole)
    finally:
        os.umask(before)
    assert 0o644 == stat.S_IMODE((place.target / "x").stat().st_mode)


def test_a_directory_that_is_no_more_one_has_its_mode_set_nowhere_else(place: Place) -> None:
    """Another program of this host may change what is being unpacked."""
    beside = place.top / "beside"
    beside.chmod(0o711)

    def replace(_count: int, _name: str) -> None:
        (place.target / "d").rmdir()
        (place.target / "d").symlink_to(beside)

    with pytest.raises(IoError):
        place.unpack(stream_of(directory("d", 0o777), member("x")), progress=replace)
    assert 0o711 == stat.S_IMODE(beside.stat().st_mode)
    assert place.is_untouched()


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE])
def test_a_time_that_no_file_can_have_is_an_error_of_the_stream(place: Place, kind: bytes) -> None:
    late = member("x", kind)
    late.mtime = 1e30
    with pytest.raises(IoError, match="time"):
        place.unpack(stream_of(late))
    late.mtime, late.pax_headers = 0, {"mtime": "nan"}
    with pytest.raises(IoError, match="time"):
        place.unpack(stream_of(late))


@pytest.mark.parametrize("late", [1e30, -1e30, float("nan")])
def test_a_time_that_the_system_does_not_take_is_one_of_the_stream(
    tmp_path: Path, late: float
) -> None:
    """Whatever has read the stream, and whatever it lets through."""
    with (tmp_path / "x").open("wb") as file:
        wrong = member("x")
        wrong.mtime = late
        with pytest.raises(tarfile.ReadError, match="time"):
            _stamp(file.fileno(), wrong)
        _stamp(file.fileno(), member("x"))
    assert 1_600_000_000 == (tmp_path / "x").stat().st_mtime


def test_the_stream_is_read_to_its_end(place: Place) -> None:
    """Its writer would otherwise be told that nobody reads, and take that for a failure."""
    file = place.top / "stream"
    file.write_bytes(stream_of(member("x")) + bytes(8 << 20))
    with file.open("rb", buffering=0) as stream:
        unpack(stream.fileno(), str(place.target))
        assert b"" == stream.read()


def test_progress_counts_the_bytes_of_all_files(place: Place) -> None:
    seen: list[tuple[int, str]] = []
    place.unpack(
        stream_of(directory("d"), member("d/a"), symlink("l", "x"), member("b")),
        progress=lambda count, name: seen.append((count, name)),
    )

    assert [(4, "d/a"), (4, "l"), (8, "b")] == seen


def test_a_download_that_breaks_off_leaves_no_new_file(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def break_off(*, overwrite: bool) -> None:
        with created(str(path), overwrite=overwrite) as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        break_off(overwrite=False)
    assert not path.exists()
    with created(str(path), overwrite=False) as file:
        file.write(b"whole")
    with pytest.raises(FileExists), created(str(path), overwrite=False):
        pass
    assert b"whole" == path.read_bytes()
    with pytest.raises(KeyError):
        break_off(overwrite=True)
    assert path.exists(), "what was there is not removed"
    with pytest.raises(IsADirectory), created(str(tmp_path), overwrite=True):
        pass
    path.write_bytes(b"what was there before")
    with created(str(path), overwrite=True) as file:
        file.write(b"new")
    assert b"new" == path.read_bytes()


def test_a_download_that_its_user_interrupts_leaves_no_new_file(tmp_path: Path) -> None:
    def interrupt() -> None:
        with created(str(tmp_path / "file"), overwrite=False) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert [] == os.listdir(tmp_path)


def test_a_download_for_which_the_disk_has_no_room_leaves_no_new_file(tmp_path: Path) -> None:
    """What is little is written at the end alone."""

    def fill() -> None:
        with created(str(tmp_path / "file"), overwrite=False) as file:
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, file.fileno())
            os.close(full)
            file.write(b"little")

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left"):
        fill()
    assert [] == os.listdir(tmp_path)
    assert before == len(os.listdir("/proc/self/fd"))
