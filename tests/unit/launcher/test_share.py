"""What a hostile kernel could say to who serves it the host's files."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.launcher import wire
from ringfence.launcher.fuse.serving import serve
from ringfence.launcher.fuse.share import Share
from ringfence.launcher.fuse.shared_mounts import SharedMounts
from ringfence.launcher.fuse.view import View
from ringfence.linux import fuse

OWNER = 1000


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A root with one mount `0`, beside what nobody is to reach."""
    (tmp_path / "secret").write_text("secret")
    inside = tmp_path / "root/0/directory"
    inside.mkdir(parents=True)
    (inside / "file").write_text("content")
    (inside / "link").symlink_to(tmp_path)
    os.mkfifo(inside / "fifo")
    return tmp_path / "root"


def serving(kind: type[Share], place: Path) -> Share:
    root = os.open(place, os.O_PATH | os.O_DIRECTORY)
    return View(root) if kind is View else kind(root, OWNER)


def say(share: Share, operation: int, node: int, body: bytes) -> tuple[int, bytes]:
    """Errno, and what else it says."""
    head = fuse.HEADER.pack(fuse.HEADER.size + len(body), operation, 7, node, 0, 0, 1, 0)
    said = share.answer(memoryview(head + body))
    length, problem, unique = fuse.ANSWER.unpack_from(said)
    assert (length, unique) == (len(said), 7)
    return -problem, said[fuse.ANSWER.size :]


def walk(share: Share, *names: str) -> int:
    node = fuse.ROOT
    for name in names:
        problem, said = say(share, fuse.LOOKUP, node, name.encode() + b"\0")
        assert not problem
        node = struct.unpack_from("=Q", said)[0]
    return node


def read(share: Share, node: int, handle: int = 0) -> tuple[int, bytes]:
    return say(share, fuse.READ, node, fuse.IO_IN.pack(handle, 0, 100, 0, 0, 0, 0))


@pytest.mark.parametrize("kind", [Share, SharedMounts, View])
def test_no_name_leads_out(kind: type[Share], place: Path) -> None:
    """The control: what is there is found."""
    share = serving(kind, place)
    directory = walk(share, "0", "directory")

    for name in (b"..", b".", b"", b"../secret", b"/etc/passwd", b"directory/file"):
        assert (errno.EINVAL, b"") == say(share, fuse.LOOKUP, directory, name + b"\0")
    link = walk(share, "0", "directory", "link")
    # To the guest's kernel it is a link; who asks for what is behind it gets nothing.
    assert say(share, fuse.LOOKUP, link, b"secret\0")[0] in (errno.ENOTDIR, errno.ELOOP)
    assert not say(share, fuse.LOOKUP, directory, b"file\0")[0]


def test_a_directory_that_becomes_a_link_is_not_gone_through(place: Path) -> None:
    share = serving(SharedMounts, place)
    file = walk(share, "0", "directory", "file")
    say_open = fuse.OPEN_IN.pack(os.O_RDONLY, 0)
    assert not say(share, fuse.OPEN, file, say_open)[0]

    (place / "0/directory").rename(place / "0/other")
    (place / "0/directory").symlink_to("other")

    assert errno.ELOOP == say(share, fuse.OPEN, file, say_open)[0]


def test_only_regular_files_are_opened(place: Path) -> None:
    shown, mounted = serving(Share, place), serving(SharedMounts, place)
    assert (0, b"content") == read(shown, walk(shown, "0", "directory", "file"))
    before = len(os.listdir("/proc/self/fd"))

    assert errno.EACCES == read(shown, walk(shown, "0", "directory", "fifo"))[0]
    node = walk(mounted, "0", "directory", "fifo")
    assert errno.EACCES == say(mounted, fuse.OPEN, node, fuse.OPEN_IN.pack(os.O_RDWR, 0))[0]
    assert before == len(os.listdir("/proc/self/fd"))


def test_what_is_shown_cannot_be_changed(place: Path) -> None:
    share = serving(Share, place)
    directory = walk(share, "0", "directory")

    for operation in (fuse.UNLINK, fuse.MKDIR, fuse.CREATE, fuse.SETATTR, fuse.WRITE, fuse.RENAME):
        assert errno.ENOSYS == say(share, operation, directory, bytes(100))[0]
    # A mount can: the control.
    mounted = serving(SharedMounts, place)
    directory = walk(mounted, "0", "directory")
    assert not say(mounted, fuse.UNLINK, directory, b"file\0")[0]
    assert not (place / "0/directory/file").exists()


def test_nothing_gets_a_set_id_bit_or_is_a_device_or_a_socket(place: Path) -> None:
    share = serving(SharedMounts, place)
    directory = walk(share, "0", "directory")
    made = fuse.CREATE_IN.pack(os.O_WRONLY | os.O_CREAT, 0o6755, 0, 0) + b"new\0"
    device = fuse.MKNOD_IN.pack(0o060666, 0x0801, 0, 0) + b"disk\0"

    assert not say(share, fuse.CREATE, directory, made)[0]
    assert 0o755 == (place / "0/directory/new").stat().st_mode & 0o7777
    assert errno.EPERM == say(share, fuse.MKNOD, directory, device)[0]
    for kind, refused in ((stat.S_IFSOCK, errno.EPERM), (stat.S_IFIFO, 0), (stat.S_IFREG, 0)):
        node = fuse.MKNOD_IN.pack(kind | 0o666, 0, 0, 0) + b"%o\0" % kind
        assert refused == say(share, fuse.MKNOD, directory, node)[0], oct(kind)
    for kind in (stat.S_IFIFO, stat.S_IFREG):
        node = fuse.MKNOD_IN.pack(kind | 0o6755, 0, 0, 0) + b"id-%o\0" % kind
        assert not say(share, fuse.MKNOD, directory, node)[0]
        assert kind | 0o755 == (place / f"0/directory/id-{kind:o}").stat().st_mode


@given(operation=st.integers(0, 60), node=st.integers(0, 9), body=st.binary(max_size=120))
def test_nonsense_is_answered_and_harms_nobody(
    tmp_path_factory: pytest.TempPathFactory, operation: int, node: int, body: bytes
) -> None:
    if operation in (fuse.FORGET, fuse.BATCH_FORGET):
        return
    share = serving(SharedMounts, tmp_path_factory.getbasetemp())
    say(share, operation, node, body)
    for fd in [each.fd for each in share.handles.values() if each.fd >= 0] + [share.nodes.root]:  # type: ignore[attr-defined]
        os.close(fd)


@pytest.mark.parametrize("kind", [Share, SharedMounts])
def test_another_goes_on_with_what_one_has_written(kind: type[Share], place: Path) -> None:
    first = serving(kind, place)
    file, handle = walk(first, "0", "directory", "file"), 0
    if kind is SharedMounts:
        said = say(first, fuse.OPEN, file, fuse.OPEN_IN.pack(os.O_RDONLY, 0))[1]
        handle = fuse.OPENED.unpack_from(said)[0]

    second = serving(kind, place)
    assert read(second, file, handle)[0]
    second.read_back(first.written())

    assert (0, b"content") == read(second, file, handle)


def test_a_file_that_is_replaced_is_another(place: Path) -> None:
    """What a kernel has cached of one is never completed with the other."""
    view = serving(View, place)
    file = place / "0/directory/file"
    node = walk(view, "0", "directory", "file")
    assert (0, b"content") == read(view, node)

    (place / "new").write_text("another")
    (place / "new").rename(file)

    assert (0, b"content") == read(view, node), "who has it, has it"
    again = walk(view, "0", "directory", "file")
    assert node != again
    assert (0, b"another") == read(view, again)


@pytest.mark.parametrize("how", ["longer", "later", "another"])
def test_a_file_that_changed_before_it_was_read_is_stale(place: Path, how: str) -> None:
    """The control: who keeps what it was told for ever reads what is there now."""
    file, new = place / "0/directory/file", place / "new"
    view, share = serving(View, place), serving(Share, place)
    nodes = {each: walk(each, "0", "directory", "file") for each in (view, share)}
    before = file.stat()

    text = "content that is longer" if how == "longer" else "CONTENT"
    if how == "another":
        new.write_text(text)
        new.rename(file)
    else:
        file.write_text(text)
    time_ns = before.st_mtime_ns + (how == "later")
    os.utime(file, ns=(time_ns, time_ns))

    held = len(os.listdir("/proc/self/fd"))
    assert (errno.ESTALE, b"") == read(view, nodes[view])
    assert held == len(os.listdir("/proc/self/fd")), "what it opened to find out is closed"
    getattr_in = fuse.GETATTR_IN.pack(0, 0, 0)
    assert (errno.ESTALE, b"") == say(view, fuse.GETATTR, nodes[view], getattr_in)
    assert (0, text.encode()) == read(share, nodes[share])
    assert (0, text.encode()) == read(view, walk(view, "0", "directory", "file"))


def test_what_a_view_forgets_it_closes(place: Path) -> None:
    view = serving(View, place)
    node = walk(view, "0", "directory", "file")
    read(view, node)
    before = len(os.listdir("/proc/self/fd"))

    say_forget = fuse.HEADER.pack(fuse.HEADER.size + 8, fuse.FORGET, 7, node, 0, 0, 1, 0)
    assert b"" == view.answer(memoryview(say_forget + fuse.FORGET_IN.pack(1)))

    assert before - 1 == len(os.listdir("/proc/self/fd"))
    assert errno.ESTALE == read(view, node)[0]


def test_of_several_numbers_a_view_closes_those_that_it_forgets(place: Path) -> None:
    for name in ("one", "two", "three"):
        (place / "0/directory" / name).write_text(name)
    view = serving(View, place)
    nodes = [walk(view, "0", "directory", name) for name in ("one", "two", "three")]
    walk(view, "0", "directory", "three")  # which the kernel knows twice
    for node in nodes:
        read(view, node)
    before = len(os.listdir("/proc/self/fd"))

    counts = [fuse.FORGET_ONE.pack(node, 1) for node in (nodes[0], nodes[2], nodes[1])]
    body = fuse.BATCH_FORGET_IN.pack(3, 0) + b"".join(counts)
    head = fuse.HEADER.pack(fuse.HEADER.size + len(body), fuse.BATCH_FORGET, 7, 0, 0, 0, 1, 0)
    assert b"" == view.answer(memoryview(head + body))

    assert before - 2 == len(os.listdir("/proc/self/fd"))
    assert [nodes[2]] == list(view._open)
    assert (0, b"three") == read(view, nodes[2])
    assert errno.ESTALE == read(view, nodes[1])[0]


def test_a_listing_with_attributes_looks_all_up(place: Path) -> None:
    view = serving(View, place)
    directory = walk(view, "0", "directory")
    names, at = {}, 0
    size = 2 * (fuse.ENTRY.size + fuse.ATTRIBUTES.size + fuse.DIRENT.size + 16)
    while said := say(view, fuse.READDIRPLUS, directory, fuse.IO_IN.pack(0, at, size, 0, 0, 0, 0))[
        1
    ]:
        assert len(said) <= size
        while said:
            node = fuse.ENTRY.unpack_from(said)[0]
            said = said[fuse.ENTRY.size + fuse.ATTRIBUTES.size :]
            _inode, at, length, _kind = fuse.DIRENT.unpack_from(said)
            end = fuse.DIRENT.size + length
            names[said[fuse.DIRENT.size : end].decode()] = node
            said = said[end + -end % 8 :]

    assert {".": 0, "..": 0} == {name: names.pop(name) for name in (".", "..")}
    assert {name: walk(view, "0", "directory", name) for name in ("file", "link", "fifo")} == names


def test_a_new_file_has_the_permissions_that_the_guest_s_kernel_says(place: Path) -> None:
    """It has taken off the program's own umask; ours, whatever it was, takes off no more."""
    (ours, _unused), (guest, theirs), (host, control) = (socket.socketpair() for _ in range(3))
    shown, adopted = str(place), wire.adopt(control.detach())
    before = os.umask(0o022)
    try:
        server = threading.Thread(
            target=serve,
            args=(
                {"shown": shown, "mounts": shown, "whose": OWNER},
                [ours.fileno(), theirs.fileno()],
                adopted,
            ),
        )
        server.start()
        node = fuse.ROOT
        for name in (b"0", b"directory"):
            node = struct.unpack_from("=Q", _ask(guest, fuse.LOOKUP, node, name + b"\0"))[0]
        _ask(guest, fuse.CREATE, node, fuse.CREATE_IN.pack(os.O_WRONLY, 0o666, 0, 0) + b"new\0")
        _ask(guest, fuse.MKDIR, node, fuse.MKDIR_IN.pack(0o777, 0) + b"within\0")
        host.close()
        server.join(30)
    finally:
        os.umask(before)
        for each in (ours, _unused, guest, theirs, host, adopted):
            each.close()

    inside = place / "0/directory"
    assert 0o666 == stat.S_IMODE((inside / "new").stat().st_mode)
    assert 0o777 == stat.S_IMODE((inside / "within").stat().st_mode)


def _ask(guest: socket.socket, operation: int, node: int, body: bytes) -> bytes:
    guest.sendall(
        fuse.HEADER.pack(fuse.HEADER.size + len(body), operation, 7, node, 0, 0, 1, 0) + body
    )
    said = guest.recv(1 << 16)
    assert not fuse.ANSWER.unpack_from(said)[1]
    return said[fuse.ANSWER.size :]


def test_the_number_of_a_file_that_was_renamed_over_leads_to_no_other(place: Path) -> None:
    """A program that has the old file open would else read and write the new one."""
    share = serving(SharedMounts, place)
    directory = place / "0/directory"
    (directory / "new").write_text("new")
    above = walk(share, "0", "directory")
    old, new = (walk(share, "0", "directory", name) for name in ("file", "new"))

    body = fuse.RENAME_IN.pack(above) + b"new\0file\0"
    assert 0 == say(share, fuse.RENAME, above, body)[0]

    getattr_in = fuse.GETATTR_IN.pack(0, 0, 0)
    assert errno.ESTALE == say(share, fuse.GETATTR, old, getattr_in)[0]
    assert 0 == say(share, fuse.GETATTR, new, getattr_in)[0]
    assert new == walk(share, "0", "directory", "file")
    assert "new" == (directory / "file").read_text()
