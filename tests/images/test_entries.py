"""The reader of layers sees what Python's own general reader sees, however the bytes come."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.images.entries import DamagedError, Entries, Entry

FORMATS = [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT]
KINDS = {
    tarfile.REGTYPE: stat.S_IFREG,
    tarfile.DIRTYPE: stat.S_IFDIR,
    tarfile.SYMTYPE: stat.S_IFLNK,
    tarfile.LNKTYPE: 0,
    tarfile.FIFOTYPE: stat.S_IFIFO,
    tarfile.CHRTYPE: stat.S_IFCHR,
    tarfile.BLKTYPE: stat.S_IFBLK,
}
NAMES = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), min_size=1, max_size=140
).filter(lambda name: name not in (".", ".."))
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)


class Pieces:
    """The bytes, in pieces of the given sizes over and over."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self._file, self._sizes, self._turn = io.BytesIO(data), sizes, 0

    def read(self) -> bytes:
        self._turn += 1
        return self._file.read(self._sizes[self._turn % len(self._sizes)])


@st.composite
def members(draw: st.DrawFn) -> tuple[tarfile.TarInfo, bytes]:
    made = tarfile.TarInfo(draw(PATHS))
    made.type = draw(st.sampled_from(sorted(KINDS)))
    made.mode = draw(st.integers(0, 0o7777))
    made.mtime = draw(st.integers(0, 8**11 - 1))
    made.uid = draw(st.integers(0, 1 << 31))
    content = draw(st.binary(max_size=1500)) if made.type == tarfile.REGTYPE else b""
    made.size = len(content)
    if made.type in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        made.linkname = draw(PATHS)
    return made, content


def archive(wanted: list[tuple[tarfile.TarInfo, bytes]], form: int) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=form, encoding="utf-8") as tar:
        for info, content in wanted:
            try:
                tar.addfile(info, io.BytesIO(content))
            except ValueError:
                continue  # this dialect has no room for such a name or number
    return made.getvalue()


def as_general(data: bytes) -> list[tuple[Entry, bytes]]:
    found = []
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8") as tar:
        for info in tar:
            file = tar.extractfile(info) if info.isreg() else None
            content = file.read() if file is not None else b""
            target = info.linkname if info.issym() or info.islnk() else ""
            size = info.size if info.isreg() else 0
            when = int(info.mtime) * 10**9
            kind = KINDS[info.type]
            found.append((Entry(info.name, kind, info.mode & 0o7777, size, when, target), content))
    return found


@pytest.mark.full
@given(st.lists(members(), max_size=6), st.sampled_from(FORMATS), st.data())
def test_it_reads_what_the_general_reader_reads(
    tmp_path_factory: pytest.TempPathFactory,
    wanted: list[tuple[tarfile.TarInfo, bytes]],
    form: int,
    data: st.DataObject,
) -> None:
    written = archive(wanted, form)
    sizes = data.draw(st.lists(st.integers(1, 3000), min_size=1, max_size=4), label="pieces")
    entries = Entries(Pieces(written, sizes))
    found: list[tuple[Entry, bytes | None]] = []
    place = tmp_path_factory.getbasetemp() / "content"
    while (entry := entries.next()) is not None:
        skipped = data.draw(st.booleans(), label="skipped")
        found.append((entry, None if skipped else _content(entries, place)))

    expected = as_general(written)
    assert [_plain(entry) for entry, _ in expected] == [_plain(entry) for entry, _ in found]
    for (entry, content), (_, read) in zip(expected, found, strict=True):
        assert read is None or content == read, entry


@given(st.lists(members(), min_size=1, max_size=3), st.data())
def test_what_is_cut_off_or_damaged_is_refused(
    wanted: list[tuple[tarfile.TarInfo, bytes]], data: st.DataObject
) -> None:
    """Never an entry that was not there: the reader ends, or says that the stream is damaged."""
    written = archive(wanted, tarfile.GNU_FORMAT)
    whole = [_plain(entry) for entry, _ in as_general(written)]
    cut = data.draw(st.integers(0, len(written) - 1), label="cut")
    entries, ended = Entries(Pieces(written[:cut], [700])), False
    found: list[tuple[object, ...]] = []
    try:
        while (entry := entries.next()) is not None:
            found.append(_plain(entry))
        ended = True
    except DamagedError:
        pass

    assert whole[: len(found)] == found
    assert not ended or whole == found


def _content(entries: Entries, place: Path) -> bytes:
    fd = os.open(place, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        entries.copy(fd)
    finally:
        os.close(fd)
    return place.read_bytes()


def _plain(entry: Entry) -> tuple[object, ...]:
    """Slashes at the end say that it is a directory, and no more."""
    name = entry.name.rstrip("/")
    return name, entry.kind, entry.mode, entry.size, entry.modified_ns, entry.target


def header(kind: bytes = b"0", size: bytes = b"%011o\0" % 0, *, wrong: int = 0) -> bytes:
    """One, with a sum that fits it but for `wrong`."""
    plain = b"name".ljust(100, b"\0") + b"0000644\0" * 3 + size + b"%011o\0" % 0
    plain += b" " * 8 + kind
    plain = plain.ljust(512, b"\0")
    return plain[:148] + b"%06o\0 " % (sum(plain) + wrong) + plain[156:]


def first(data: bytes) -> Entry | None:
    return Entries(Pieces(data + bytes(1024), [700])).next()


@pytest.mark.parametrize("wrong", [1, -1, 256])
def test_a_header_whose_sum_is_wrong_is_refused(wrong: int) -> None:
    assert first(header()) is not None
    with pytest.raises(DamagedError, match="damaged"):
        first(header(wrong=wrong))


def test_a_file_is_never_of_less_than_no_bytes() -> None:
    def binary(size: int) -> bytes:
        return (size & ((1 << 96) - 1) | 1 << 95).to_bytes(12, "big")

    found = first(header(size=binary(7)))
    assert found is not None
    assert 7 == found.size
    with pytest.raises(DamagedError, match="negative size"):
        first(header(size=binary(-1)))
    with pytest.raises(DamagedError, match="header of -1 bytes"):
        first(header(b"x", binary(-1)))


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K"])
def test_what_is_said_of_an_entry_is_bounded(kind: bytes) -> None:
    """It is held in memory: a mebibyte, and not a byte more."""
    most = 1 << 20
    record = b"%d comment=" % most
    content = record.ljust(most - 1, b"x") + b"\n"
    found = first(header(kind, b"%011o\0" % most) + content + header())

    assert found is not None
    assert 0 == found.size
    with pytest.raises(DamagedError, match=f"header of {most + 1} bytes"):
        first(header(kind, b"%011o\0" % (most + 1)) + content + bytes(512) + header())


def head(
    name: bytes = b"name",
    kind: bytes = b"0",
    *,
    size: bytes = b"%011o\0" % 0,
    mode: bytes = b"0000644\0",
    link: bytes = b"",
    magic: bytes = b"",
    prefix: bytes = b"",
) -> bytes:
    """A header with these fields and the sum that fits them."""
    plain = name.ljust(100, b"\0") + mode + b"0000000\0" * 2 + size + b"%011o\0" % 0
    plain += b" " * 8 + kind + link.ljust(100, b"\0") + magic.ljust(88, b"\0") + prefix
    plain = plain.ljust(512, b"\0")
    return plain[:148] + b"%06o\0 " % sum(plain) + plain[156:]


def extended(*records: bytes, kind: bytes = b"x") -> bytes:
    """An extended header of `NAME=VALUE` records, each with its length."""
    lines = []
    for each in records:
        size = len(each) + 3
        size += size > 9
        size += size > 99
        lines.append(b"%d %s\n" % (size, each))
    return raw(b"".join(lines), kind)


def raw(content: bytes, kind: bytes) -> bytes:
    return head(kind=kind, size=b"%011o\0" % len(content)) + content + bytes(-len(content) % 512)


def every(data: bytes) -> list[Entry]:
    entries, found = Entries(Pieces(data + bytes(1024), [700])), []
    while (entry := entries.next()) is not None:
        found.append(entry)
    return found


def test_what_is_said_of_one_entry_wins_over_what_is_said_of_all(tmp_path: Path) -> None:
    """A global header is of every entry after it; one of an entry is of no other."""
    data = (
        extended(b"path=of-all", b"mtime=7", kind=b"g")
        + head()
        + extended(b"path=own", b"mtime=8.5")
        + head()
        + head()
        + extended(b"mtime=9", kind=b"g")
        + head()
    )
    assert [
        ("of-all", 7 * 10**9),
        ("own", 8_500_000_000),
        ("of-all", 7 * 10**9),
        ("of-all", 9 * 10**9),
    ] == [(each.name, each.modified_ns) for each in every(data)]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_name_of_an_extended_header_wins_over_gnus(is_first: bool) -> None:
    own = extended(b"path=own", b"linkpath=there")
    gnus = raw(b"long\0", b"L") + raw(b"far\0", b"K")
    data = (own + gnus if is_first else gnus + own) + head(kind=b"2", link=b"short")
    data += head(b"short") + gnus + head(kind=b"2", link=b"short")
    assert [("own", "there"), ("short", ""), ("long", "far")] == [
        (each.name, each.target) for each in every(data)
    ]


def test_only_a_file_has_content_whatever_its_header_says() -> None:
    big = b"%011o\0" % 700
    for kind in (b"1", b"2", b"3", b"4", b"5", b"6"):
        found = every(head(kind=kind, size=big, link=b"x") + head(b"next"))
        assert [("name", 0), ("next", 0)] == [(each.name, each.size) for each in found], kind
    (file, after) = every(head(size=big) + b"c" * 700 + bytes(324) + head(b"next"))
    assert (700, "next") == (file.size, after.name)
    (file, after) = every(extended(b"size=3") + head() + b"abc" + bytes(509) + head(b"next"))
    assert (3, "next") == (file.size, after.name)
    with pytest.raises(DamagedError, match="negative size"):
        every(extended(b"size=-1") + head())


def test_a_name_has_a_prefix_in_one_dialect_only() -> None:
    """Where it is, GNU's has times."""
    for magic, name in ((b"ustar\x0000", "before/name"), (b"ustar  \0", "name"), (b"", "name")):
        (found,) = every(head(magic=magic, prefix=b"before"))
        assert name == found.name, magic


@pytest.mark.parametrize("kind", [b"S", b"D", b"V", b"M", b"N", b"A", b"8", b"\xff"])
def test_an_entry_of_another_type_is_refused(kind: bytes) -> None:
    with pytest.raises(DamagedError, match="not allowed in a layer"):
        every(head(kind=kind))


@pytest.mark.parametrize(
    "content",
    [b"x path=a\n", b"0 path=a\n", b"10 path=ab", b"9 path=ab\n", b"8 path-a\n", b"99 path=a\n", b"path=a\n",
     b" path=a\n", b"-9 path=a\n", b"9 path=a", b"000000000000000000000009 path=a\n"],
)  # fmt: skip
def test_an_extended_header_that_is_damaged_is_refused(content: bytes) -> None:
    assert "a" == every(raw(b"9 path=a\n", b"x") + head())[0].name, "the control"
    assert "a" == every(raw(b"9 path=a\n\0\0", b"x") + head())[0].name, "zeros may follow"
    with pytest.raises(DamagedError, match="damaged"):
        every(raw(content, b"x") + head())


@pytest.mark.parametrize(
    ("field", "mode"),
    [(b"0000644\0", 0o644), (b"    644 ", 0o644), (b"644\0\0\0\0\0", 0o644), (bytes(8), 0),
     (b"00106755", 0o6755), (b"\x80" + bytes(5) + b"\x01\xed", 0o755), (b"x000644\0", None),
     (b"0000648\0", None)],
)  # fmt: skip
def test_numbers_are_octal_or_binary(field: bytes, mode: int | None) -> None:
    data = head(mode=field)
    if mode is None:
        with pytest.raises(DamagedError, match="is not a number"):
            every(data)
    else:
        assert [mode] == [each.mode for each in every(data)]
