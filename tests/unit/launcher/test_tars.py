"""Tar streams of our own against those of the standard library, both ways."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.launcher.helpers import tars, trees

NAMES = st.text(
    st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=120
).filter(lambda name: name not in (".", ".."))
FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


@st.composite
def members(draw: st.DrawFn) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo("/".join(draw(st.lists(NAMES, min_size=1, max_size=3))))
    member.type = draw(
        st.sampled_from((tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE))
    )
    member.mode = draw(st.integers(0, 0o7777))
    member.uid, member.gid = draw(st.integers(0, 2**31)), draw(st.integers(0, 2**31))
    member.mtime = draw(st.integers(0, 2**33) | st.floats(-(2.0**33), 2.0**33))
    content = b""
    if member.isreg():
        content = draw(st.binary(max_size=1500) | st.just(bytes(1 << 17)))
        member.size = len(content)
    elif not member.isdir():
        member.linkname = draw(NAMES)
    return member, content


def read(stream: bytes) -> list[tuple[Any, ...]]:
    """What our reader finds."""
    fd, copy = os.memfd_create("stream"), os.memfd_create("copy")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(stream)
        os.lseek(fd, 0, os.SEEK_SET)
        found = []
        with tars.Reader(fd) as tar:
            for member in tar:
                os.ftruncate(copy, 0)
                os.lseek(copy, 0, os.SEEK_SET)
                size = tar.copy(copy) if member.isreg() else 0
                assert size == os.fstat(copy).st_size
                found.append((*facts(member), os.pread(copy, size, 0)))
        return found
    finally:
        os.close(fd)
        os.close(copy)


def facts(member: tarfile.TarInfo) -> tuple[Any, ...]:
    return (
        *(member.name.rstrip("/"), member.type, member.mode & 0o7777, member.uid, member.gid),
        *(member.mtime, member.linkname, member.size),
    )


@pytest.mark.full
@given(st.lists(members(), min_size=1, max_size=5))
def test_what_we_write_the_standard_library_reads(
    wanted: list[tuple[tarfile.TarInfo, bytes]],
) -> None:
    fd, content = os.memfd_create("stream"), os.memfd_create("content")
    try:
        with tars.Writer(fd) as tar:
            for member, data in wanted:
                os.pwrite(content, data, 0)
                os.ftruncate(content, len(data))
                os.lseek(content, 0, os.SEEK_SET)
                tar.add(member, content if member.isreg() else -1)
        assert tar.offset == os.fstat(fd).st_size
        stream = os.pread(fd, tar.offset, 0)
    finally:
        os.close(fd)
        os.close(content)
    expected = [(*facts(member), data) for member, data in wanted]

    with tarfile.open(fileobj=io.BytesIO(stream)) as again:
        found = []
        for member in again:
            file = again.extractfile(member) if member.isreg() else None
            found.append((*facts(member), file.read() if file else b""))
    assert expected == found
    assert expected == read(stream)


@given(st.integers(0, 2**33 - 2), st.integers(0, 999_999_999))
def test_ours_have_times_to_the_nanosecond_and_no_further_header(whole: int, ns: int) -> None:
    member = tarfile.TarInfo("name")
    member.mtime = whole + ns / 1e9
    fd = os.memfd_create("stream")
    try:
        with tars.Writer(fd, is_ours=True) as tar:
            tar.add(member)
        stream = os.pread(fd, tar.offset, 0)
    finally:
        os.close(fd)
    ((_name, _type, _mode, _uid, _gid, mtime, *_rest),) = read(stream)
    assert abs(mtime - member.mtime) < 2e-9 + member.mtime * 2**-52
    with tarfile.open(fileobj=io.BytesIO(stream)) as again:
        assert [int(member.mtime)] == [each.mtime for each in again]
    assert 3 * 512 == len(stream)


@pytest.mark.full
@pytest.mark.parametrize("kind", FORMATS)
@given(members=st.lists(members(), min_size=1, max_size=3))
def test_what_the_standard_library_writes_we_read(
    kind: int, members: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    file, wanted = io.BytesIO(), []
    with tarfile.open(fileobj=file, mode="w", format=kind) as tar:
        for member, data in members:
            if kind != tarfile.PAX_FORMAT:
                member.mtime = int(member.mtime)
            try:
                tar.addfile(member, io.BytesIO(data))
            except ValueError:
                continue  # ustar has no room for it
            wanted.append((*facts(member), data))
    file.seek(0)
    with tarfile.open(fileobj=file) as again:
        theirs = [facts(each) for each in again]
    found = read(file.getvalue()) if wanted else []

    assert theirs == [each[:-1] for each in found]
    assert [each[-1] for each in wanted] == [each[-1] for each in found]


def header(**fields: Any) -> bytes:
    member = tarfile.TarInfo("file")
    for name, value in fields.items():
        setattr(member, name, value)
    return member.tobuf(tarfile.GNU_FORMAT)


def pax(text: bytes, size: int | None = None) -> bytes:
    length = len(text) if size is None else size
    return header(type=tarfile.XHDTYPE, size=length) + text.ljust(-(-len(text) // 512) * 512, b"\0")


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        b"no tar at all" * 50,
        header()[:300],
        header(size=1000) + b"x" * 999,
        header(size=-5),
        header(type=tarfile.GNUTYPE_SPARSE),
        header()[:100] + b"9" + header()[101:],
        header() + b"x" * 512,
        pax(b"20 GNU.sparse.map=1\n") + header(),
        pax(b"12 mtime=nan\n") + header(),
        pax(b"13 mtime=inf\n") + header(),
        pax(b"12 uid=-1\n12") + header(),
        pax(b"99 path=x\n") + header(),
        pax(b"x", size=1 << 20) + header(),
        pax(b"11 uid=2e9\n") * 20 + header(),
        pax(b"14 linkpath=\0\n") + header(type=tarfile.SYMTYPE),
    ],
)
def test_what_is_no_stream_of_ours_is_refused(stream: bytes) -> None:
    with pytest.raises(tarfile.TarError):
        read(stream)


def test_holes_stay_holes() -> None:
    source, target = os.memfd_create("source"), os.memfd_create("target")
    stream = os.memfd_create("stream")
    try:
        os.pwrite(source, b"end", 64 << 20)
        member = tarfile.TarInfo("sparse")
        member.size = os.fstat(source).st_size
        with tars.Writer(stream) as tar:
            tar.add(member, source)
        os.lseek(stream, 0, os.SEEK_SET)
        with tars.Reader(stream) as reader:
            for _ in reader:
                reader.copy(target)
        assert member.size == os.fstat(target).st_size
        assert os.fstat(target).st_blocks * 512 < 1 << 20
        assert b"end" == os.pread(target, 3, 64 << 20)
    finally:
        for fd in (source, target, stream):
            os.close(fd)


@pytest.mark.parametrize(
    "content",
    [
        b"x" + bytes((2 << 16) - 1),
        bytes(1 << 16) + b"x" * 5 + bytes((1 << 16) - 5) + b"y",
        bytes(3),
    ],
)
def test_content_with_a_hole_has_its_size_and_digest(content: bytes) -> None:
    stream, target = os.memfd_create("stream"), os.memfd_create("target")
    try:
        member = tarfile.TarInfo("file")
        member.size = len(content)
        os.write(stream, member.tobuf() + content + bytes(-len(content) % 512 + 1024))
        os.lseek(stream, 0, os.SEEK_SET)
        digest, wanted = tars.new_digest(), tars.new_digest()
        with tars.Reader(stream) as reader:
            next(iter(reader))
            assert 512 == reader.offset
            assert len(content) == reader.copy(target, digest)
        wanted.update(content)
        assert wanted.digest() == digest.digest()
        assert content == os.pread(target, len(content) + 1, 0)
        assert os.fstat(target).st_blocks * 512 < len(content)
    finally:
        os.close(stream)
        os.close(target)


@pytest.mark.parametrize(("there", "size"), [(b"abc", 5), (b"abcdef", 4), (b"", 2)])
def test_a_file_that_changed_since_has_the_size_that_was_said(there: bytes, size: int) -> None:
    stream, source = os.memfd_create("stream"), os.memfd_create("source")
    try:
        os.write(source, there)
        os.lseek(source, 0, os.SEEK_SET)
        with tars.Writer(stream) as tar:
            for name, fd in (("file", source), ("after", -1)):
                member = tarfile.TarInfo(name)
                member.size = size if fd >= 0 else 0
                tar.add(member, fd)
            assert 3 * 512 == tar.offset
        data = os.pread(stream, 1 << 16, 0)
    finally:
        os.close(stream)
        os.close(source)
    assert [there[:size].ljust(size, b"\0"), b""] == [each[-1] for each in read(data)]


def test_what_is_said_of_all_holds_until_it_is_said_otherwise() -> None:
    everywhere = pax(b"12 uid=1234\n")
    everywhere = header(type=tarfile.XGLTYPE, size=12) + everywhere[512:]
    own = pax(b"9 uid=77\n")
    stream = everywhere + header() + own + header() + header() + own + header()
    assert [1234, 77, 1234, 77] == [each[3] for each in read(stream)]


@pytest.mark.parametrize(
    ("uid", "is_one"), [(b"4294967295", True), (b"4294967296", False), (b"-1", False)]
)
def test_an_owner_is_one_that_a_file_can_have(uid: bytes, is_one: bool) -> None:
    record = b" uid=%s\n" % uid
    stream = pax(b"%d%s" % (len(record) + 2, record)) + header()
    if is_one:
        assert int(uid) == read(stream)[0][3]
        return
    with pytest.raises(tarfile.TarError, match="an owner"):
        read(stream)


def test_older_forms_of_names_and_directories_are_read() -> None:
    old = header(name="directory/", type=tarfile.AREGTYPE)
    ustar = tarfile.TarInfo("/".join(["long"] * 30))
    found = read(old + ustar.tobuf(tarfile.USTAR_FORMAT) + header())
    assert [("directory", tarfile.DIRTYPE), (ustar.name, tarfile.REGTYPE)] == [
        each[:2] for each in found[:2]
    ]


def test_content_that_nobody_reads_is_passed_over() -> None:
    stream = os.memfd_create("stream")
    try:
        for name, size in (("large", (1 << 20) + 700), ("small", 5)):
            os.write(stream, header(name=name, size=size) + b"x" * size + bytes(-size % 512))
        os.lseek(stream, 0, os.SEEK_SET)
        with tars.Reader(stream) as reader:
            assert ["large", "small"] == [each.name for each in reader]
            reader.drain()
        assert os.lseek(stream, 0, os.SEEK_CUR) == os.fstat(stream).st_size
    finally:
        os.close(stream)


@pytest.mark.parametrize("kind", FORMATS[1:])
@pytest.mark.parametrize("is_swapped", [False, True])
def test_a_long_name_and_a_long_target_of_one_member_are_both_read(
    kind: int, is_swapped: bool
) -> None:
    """Of GNU's each has a header of its own, in either order."""
    member = tarfile.TarInfo("n" * 300)
    member.type, member.linkname = tarfile.SYMTYPE, "t" * 400
    stream = member.tobuf(kind)  # type: ignore[arg-type]
    if is_swapped and kind == tarfile.GNU_FORMAT:
        stream = stream[1024:2048] + stream[:1024] + stream[2048:]
    with tarfile.open(fileobj=io.BytesIO(stream + bytes(1024))) as theirs:
        assert [facts(member)] == [facts(each) for each in theirs]
    assert [facts(member)] == [each[:-1] for each in read(stream + header() + bytes(1024))[:1]]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
@pytest.mark.parametrize("length", [99, 100, 101, 1000])
def test_each_length_of_a_name_and_of_a_link_is_read_back(kind: bytes, length: int) -> None:
    """A plain header has 100 bytes for each; what follows is read as well."""
    for name, link in (("n" * length, "target"), ("name", "t" * length)):
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, link
        plain = tarfile.TarInfo("after")
        stream = tars._header(member) + tars._header(plain) + bytes(1024)
        with tarfile.open(fileobj=io.BytesIO(stream)) as tar:
            assert [(name, link), ("after", "")] == [(each.name, each.linkname) for each in tar]


@pytest.mark.parametrize("one_file_system", [False, True])
def test_a_tree_whose_reader_is_gone_holds_no_directory(
    one_file_system: bool, tmp_path: Path
) -> None:
    """Packing is also done in processes that live on."""
    (tmp_path / "d" / "e").mkdir(parents=True)
    (tmp_path / "d" / "e" / "file").write_bytes(bytes(1 << 20))
    before = len(os.listdir("/proc/self/fd"))
    with open(os.devnull, "wb") as whole:
        trees.pack(whole.fileno(), str(tmp_path), one_file_system=one_file_system)
    assert before == len(os.listdir("/proc/self/fd"))
    reading, writing = os.pipe()
    os.close(reading)
    try:
        with pytest.raises(BrokenPipeError):
            trees.pack(writing, str(tmp_path), one_file_system=one_file_system)
    finally:
        os.close(writing)
    assert before == len(os.listdir("/proc/self/fd"))
