"""What a machine's kernel is told of the host's files that it is shown, and what it may do with mounts."""

from __future__ import annotations

import errno
import os
import resource
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringfence.launcher import wire
from ringfence.launcher.fuse.serving import _Line, serve
from ringfence.launcher.fuse.share import Share
from ringfence.launcher.fuse.shared_mounts import SharedMounts
from ringfence.launcher.fuse.view import Server, View
from ringfence.linux import fuse

from .test_share import OWNER, place, say, serving, walk

__all__ = ["place"]


@pytest.fixture
def mounted(place: Path) -> Iterator[SharedMounts]:
    share = serving(SharedMounts, place)
    assert isinstance(share, SharedMounts)
    yield share
    for each in share.handles.values():
        if each.fd >= 0:
            os.close(each.fd)
    os.close(share.nodes.root)


def opened(share: Share, node: int, flags: int) -> int:
    problem, said = say(share, fuse.OPEN, node, fuse.OPEN_IN.pack(flags, 0))
    assert not problem
    return int(fuse.OPENED.unpack(said)[0])


def read(
    share: Share, node: int, handle: int = 0, at: int = 0, size: int = 99
) -> tuple[int, bytes]:
    return say(share, fuse.READ, node, fuse.IO_IN.pack(handle, at, size, 0, 0, 0, 0))


def write(share: Share, handle: int, at: int, data: bytes) -> tuple[int, bytes]:
    return say(share, fuse.WRITE, 9, fuse.IO_IN.pack(handle, at, len(data), 0, 0, 0, 0) + data)


def change(share: Share, node: int, which: int, **values: int) -> tuple[int, bytes]:
    names = "handle size owner atime mtime ctime atime_ns mtime_ns ctime_ns mode _ uid gid _"
    words = [values.get(name, 0) for name in names.split()]
    return say(share, fuse.SETATTR, node, fuse.SETATTR_IN.pack(which, 0, *words))


def attributes(said: bytes) -> tuple[int, ...]:
    return tuple(fuse.ATTRIBUTES.unpack(said[-fuse.ATTRIBUTES.size :]))


def names_in(share: Share, node: int, handle: int, size: int) -> dict[str, int]:
    """Names and types, in as many parts as it takes."""
    found: dict[str, int] = {}
    at = 0
    while said := say(share, fuse.READDIR, node, fuse.IO_IN.pack(handle, at, size, 0, 0, 0, 0))[1]:
        assert len(said) <= size
        while said:
            _inode, at, length, kind = fuse.DIRENT.unpack_from(said)
            end = fuse.DIRENT.size + length
            assert found.setdefault(said[fuse.DIRENT.size : end].decode(), kind) == kind
            said = said[end + -end % 8 :]
    return found


@pytest.mark.parametrize("kind", [Share, SharedMounts])
def test_attributes_are_the_files_and_ours_become_the_guest_users(
    kind: type[Share], place: Path
) -> None:
    share = serving(kind, place)
    file = place / "0/directory/file"
    os.utime(file, ns=(3_000_000_004, 5_000_000_006))
    info = file.stat()
    node = walk(share, "0", "directory", "file")
    told = attributes(say(share, fuse.GETATTR, node, fuse.GETATTR_IN.pack(0, 0, 0))[1])

    assert (info.st_ino, 7, info.st_blocks, 3, 5, info.st_ctime_ns // 10**9) == told[:6]
    assert (4, 6, info.st_ctime_ns % 10**9, info.st_mode, 1) == told[6:11]
    assert (info.st_uid or OWNER, info.st_gid or OWNER) == told[11:13]
    assert (info.st_blksize) == told[14]
    link = walk(share, "0", "directory", "link")
    assert (0, bytes(place.parent)) == say(share, fuse.READLINK, link, b"")
    assert stat.S_ISLNK(
        attributes(say(share, fuse.GETATTR, link, fuse.GETATTR_IN.pack(0, 0, 0))[1])[9]
    )
    about = os.statvfs(place)
    said = fuse.STATFS_OUT.unpack(say(share, fuse.STATFS, node, b"")[1])
    assert (about.f_blocks, about.f_files, about.f_bsize) == (said[0], said[3], said[5])
    assert (about.f_namemax, about.f_frsize) == said[6:8]


def test_only_what_cannot_change_is_held_by_the_kernel(place: Path) -> None:
    """A name that is not there holds as well; in a mount it may be there the next time."""
    shown, mounted = serving(Share, place), serving(SharedMounts, place)
    directory = walk(shown, "0", "directory")
    problem, said = say(shown, fuse.LOOKUP, directory, b"none\0")
    assert (0, 0, True) == (
        problem,
        fuse.ENTRY.unpack_from(said)[0],
        fuse.ENTRY.unpack_from(said)[2] > 0,
    )
    directory = walk(mounted, "0", "directory")
    assert errno.ENOENT == say(mounted, fuse.LOOKUP, directory, b"none\0")[0]
    said = say(mounted, fuse.LOOKUP, directory, b"file\0")[1]
    assert (0, 0) == fuse.ENTRY.unpack_from(said)[2:4]


@pytest.mark.parametrize("kind", [Share, SharedMounts])
def test_a_listing_in_parts_has_each_name_once(kind: type[Share], place: Path) -> None:
    share = serving(kind, place)
    for number in range(20):
        (place / f"0/directory/name-{number}").touch()
    (place / "0/directory/below").mkdir()
    node, handle = walk(share, "0", "directory"), 0
    if kind is SharedMounts:
        handle = fuse.OPENED.unpack(say(share, fuse.OPENDIR, node, bytes(8))[1])[0]
    wanted = {f"name-{number}": 8 for number in range(20)}
    wanted |= {".": 4, "..": 4, "file": 8, "link": 10, "fifo": 0, "below": 4}
    assert wanted == names_in(share, node, handle, 100)
    (place / "0/directory/late").touch()
    assert wanted | {"late": 8} == names_in(share, node, handle, 4096), "as after a rewinddir(3)"


def test_a_second_directory_has_its_own_listing(place: Path) -> None:
    """Whose parts are asked for in turn."""
    share = serving(Share, place)
    above, node = walk(share, "0"), walk(share, "0", "directory")
    names_in(share, node, 0, 4096)
    said = say(share, fuse.READDIR, above, fuse.IO_IN.pack(0, 2, 4096, 0, 0, 0, 0))[1]
    assert b"directory" in said
    assert b"file" not in said


def test_few_files_are_held_open_and_those_read_last(place: Path) -> None:
    share = serving(Share, place)
    share.most_open = 2
    for name in ("one", "two", "three"):
        (place / "0/directory" / name).write_text(name)
    nodes = [walk(share, "0", "directory", name) for name in ("one", "two", "three")]
    before = len(os.listdir("/proc/self/fd"))
    assert b"one" == read(share, nodes[0])[1]
    assert b"two" == read(share, nodes[1])[1]
    assert b"one" == read(share, nodes[0])[1]
    assert b"three" == read(share, nodes[2])[1]
    assert before + 2 == len(os.listdir("/proc/self/fd"))
    assert [nodes[0], nodes[2]] == list(share._open)
    assert b"two" == read(share, nodes[1])[1]
    assert (0, b"wo") == read(share, nodes[1], at=1)
    assert (0, b"w") == read(share, nodes[1], at=1, size=1)


@pytest.mark.parametrize("kind", [Share, SharedMounts])
def test_so_much_of_a_file_is_read_at_once_and_no_more(kind: type[Share], place: Path) -> None:
    """However much a guest's kernel asks for: the answer is in our memory."""
    with (place / "0/directory/file").open("wb") as file:
        file.truncate(fuse.MOST_BYTES + 2)
    share = serving(kind, place)
    node = walk(share, "0", "directory", "file")
    handle = opened(share, node, os.O_RDONLY) if kind is SharedMounts else 0
    assert (0, bytes(fuse.MOST_BYTES)) == read(share, node, handle, size=0xFFFFFFFF)
    assert (0, bytes(2)) == read(share, node, handle, at=fuse.MOST_BYTES, size=0xFFFFFFFF)
    for fd in (share.fd_of(node, handle), share.nodes.root):
        os.close(fd)


def test_files_of_a_mount_are_read_and_written_at_their_places(
    mounted: SharedMounts, place: Path
) -> None:
    file = place / "0/directory/file"
    node = walk(mounted, "0", "directory", "file")
    handle = opened(mounted, node, os.O_RDWR)
    reader = opened(mounted, node, os.O_RDONLY)
    assert (0, fuse.WRITTEN.pack(2, 0)) == write(mounted, handle, 3, b"XY")
    assert "conXYnt" == file.read_text()
    assert (0, b"XY") == read(mounted, node, reader, 3, 2)
    assert errno.EBADF == write(mounted, reader, 0, b"x")[0]
    assert errno.EBADF == read(mounted, node, 77)[0]
    appending = opened(mounted, node, os.O_WRONLY | os.O_APPEND)
    assert 0 == write(mounted, appending, 0, b"!")[0]
    assert "conXYnt!" == file.read_text()
    assert 0 == say(mounted, fuse.FSYNC, node, fuse.FSYNC_IN.pack(handle, 0, 0))[0]
    room = fuse.FALLOCATE_IN.pack(handle, 0, 100, 0, 0)
    assert 0 == say(mounted, fuse.FALLOCATE, node, room)[0]
    assert 100 == file.stat().st_size
    for mode in (1, 2, 3):
        keeps = fuse.FALLOCATE_IN.pack(handle, 0, 200, mode, 0)
        assert errno.EOPNOTSUPP == say(mounted, fuse.FALLOCATE, node, keeps)[0]
    # Also one that has no name any more.
    assert 0 == change(mounted, node, fuse.FATTR_SIZE | fuse.FATTR_FH, handle=handle, size=3)[0]
    file.unlink()
    told = say(mounted, fuse.GETATTR, node, fuse.GETATTR_IN.pack(fuse.GETATTR_FH, 0, handle))[1]
    assert 3 == attributes(told)[1]
    assert 0 == change(mounted, node, fuse.FATTR_SIZE | fuse.FATTR_FH, handle=handle, size=1)[0]
    before = len(os.listdir("/proc/self/fd"))
    for each in (handle, reader, appending, handle):
        assert 0 == say(mounted, fuse.RELEASE, node, fuse.RELEASE_IN.pack(each, 0, 0, 0))[0]
    assert before - 3 == len(os.listdir("/proc/self/fd"))
    assert errno.EBADF == read(mounted, node, handle)[0]


def test_a_new_file_is_open_and_a_refused_one_leaves_nothing(
    mounted: SharedMounts, place: Path
) -> None:
    directory = walk(mounted, "0", "directory")
    body = fuse.CREATE_IN.pack(os.O_RDWR | os.O_EXCL, 0o640, 0, 0)
    problem, said = say(mounted, fuse.CREATE, directory, body + b"new\0")
    assert not problem
    node = fuse.ENTRY.unpack_from(said)[0]
    handle = fuse.OPENED.unpack(said[-fuse.OPENED.size :])[0]
    assert walk(mounted, "0", "directory", "new") == node
    assert 0 == write(mounted, handle, 0, b"text")[0]
    assert (0, b"text") == read(mounted, node, handle)
    assert "text" == (place / "0/directory/new").read_text()
    before = len(os.listdir("/proc/self/fd"))
    assert errno.EEXIST == say(mounted, fuse.CREATE, directory, body + b"file\0")[0]
    problem = say(mounted, fuse.CREATE, directory, fuse.CREATE_IN.pack(0, 0o600, 0, 0) + b"link\0")[
        0
    ]
    assert problem in (errno.ELOOP, errno.EISDIR)
    assert before == len(os.listdir("/proc/self/fd"))


def test_names_are_made_removed_and_moved(mounted: SharedMounts, place: Path) -> None:
    inside = place / "0/directory"
    above, directory = walk(mounted, "0"), walk(mounted, "0", "directory")
    file = walk(mounted, "0", "directory", "file")
    before = len(os.listdir("/proc/self/fd"))

    assert 0 == say(mounted, fuse.SYMLINK, directory, b"to\0../there\0")[0]
    assert "../there" == os.readlink(inside / "to")
    for name in (b"..\0x\0", b"a/b\0x\0"):
        assert errno.EINVAL == say(mounted, fuse.SYMLINK, directory, name)[0]
    assert 0 == say(mounted, fuse.LINK, directory, fuse.LINK_IN.pack(file) + b"again\0")[0]
    assert (inside / "again").samefile(inside / "file")
    link = fuse.LINK_IN.pack(walk(mounted, "0", "directory", "link"))
    assert 0 == say(mounted, fuse.LINK, above, link + b"link\0")[0]
    assert str(place.parent) == os.readlink(place / "0/link")
    made = fuse.MKDIR_IN.pack(0o6755, 0) + b"made\0"
    assert 0 == say(mounted, fuse.MKDIR, directory, made)[0]
    assert 0o755 == stat.S_IMODE((inside / "made").stat().st_mode)
    assert errno.EEXIST == say(mounted, fuse.MKDIR, directory, made)[0]

    # Between directories, with the number that the kernel has.
    moved = fuse.RENAME_IN.pack(above) + b"file\0moved\0"
    assert 0 == say(mounted, fuse.RENAME, directory, moved)[0]
    assert "content" == (place / "0/moved").read_text()
    assert file == walk(mounted, "0", "moved")
    assert not (inside / "file").exists()
    for flags, refused in ((1, 0), (2, errno.EINVAL), (4, errno.EINVAL)):
        body = fuse.RENAME2_IN.pack(directory, flags, 0) + b"moved\0back\0"
        assert refused == say(mounted, fuse.RENAME2, above, body)[0]
    assert file == walk(mounted, "0", "directory", "back")
    for old, new in ((b"..", b"x"), (b"back", b"../x"), (b"back", b"")):
        body = fuse.RENAME_IN.pack(above) + old + b"\0" + new + b"\0"
        assert errno.EINVAL == say(mounted, fuse.RENAME, directory, body)[0]

    assert errno.EISDIR == say(mounted, fuse.UNLINK, directory, b"made\0")[0]
    assert errno.ENOTDIR == say(mounted, fuse.RMDIR, directory, b"back\0")[0]
    assert 0 == say(mounted, fuse.RMDIR, directory, b"made\0")[0]
    assert 0 == say(mounted, fuse.UNLINK, directory, b"back\0")[0]
    getattr_in = fuse.GETATTR_IN.pack(0, 0, 0)
    assert errno.ESTALE == say(mounted, fuse.GETATTR, file, getattr_in)[0]
    assert ["again", "fifo", "link", "to"] == sorted(os.listdir(inside))
    assert before == len(os.listdir("/proc/self/fd"))


def test_attributes_change_but_for_owners_and_set_id_bits(
    mounted: SharedMounts, place: Path
) -> None:
    file = place / "0/directory/file"
    node = walk(mounted, "0", "directory", "file")
    link = walk(mounted, "0", "directory", "link")
    assert 0 == change(mounted, node, fuse.FATTR_MODE, mode=0o6751)[0]
    assert 0o751 == stat.S_IMODE(file.stat().st_mode)
    assert 0 == change(mounted, node, fuse.FATTR_SIZE, size=3)[0]
    assert "con" == file.read_text()
    both = fuse.FATTR_ATIME | fuse.FATTR_MTIME
    times = {"atime": 5, "atime_ns": 6, "mtime": 7, "mtime_ns": 8}
    told = attributes(change(mounted, node, both, **times)[1])
    assert (5, 7, 6, 8) == (told[3], told[4], told[6], told[7])
    assert (5 * 10**9 + 6, 7 * 10**9 + 8) == (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    assert 0 == change(mounted, node, fuse.FATTR_ATIME, atime=9)[0]
    assert (9 * 10**9, 7 * 10**9 + 8) == (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    began = time.time_ns()
    assert 0 == change(mounted, node, fuse.FATTR_MTIME | fuse.FATTR_MTIME_NOW, mtime=1)[0]
    assert (9 * 10**9, True) == (file.stat().st_atime_ns, file.stat().st_mtime_ns >= began - 10**7)
    # Of a link, not of what it leads to.
    before = place.parent.stat().st_mtime_ns
    assert 0 == change(mounted, link, both, mtime=3)[0]
    assert (3 * 10**9, before) == (
        (place / "0/directory/link").lstat().st_mtime_ns,
        place.parent.stat().st_mtime_ns,
    )

    info = file.stat()
    own = {"uid": info.st_uid or OWNER, "gid": info.st_gid or OWNER}
    assert 0 == change(mounted, node, fuse.FATTR_UID | fuse.FATTR_GID, **own)[0]
    for bit, name in ((fuse.FATTR_UID, "uid"), (fuse.FATTR_GID, "gid")):
        for other in (own[name] + 1, 0 if own[name] else 1):
            assert errno.EPERM == change(mounted, node, bit, **{name: other})[0]
        assert (
            errno.EPERM == change(mounted, node, bit | fuse.FATTR_MODE, **{name: 5}, mode=0o777)[0]
        )
    assert 0o751 == stat.S_IMODE(file.stat().st_mode)
    assert (info.st_uid, info.st_gid) == (file.stat().st_uid, file.stat().st_gid)


def test_a_number_is_forgotten_with_the_last_lookup(place: Path) -> None:
    share = serving(Share, place)
    node, *_again = (walk(share, "0", "directory", "file") for _ in range(3))
    other = walk(share, "0", "directory", "link")
    getattr_in = fuse.GETATTR_IN.pack(0, 0, 0)

    def forget(*those: tuple[int, int]) -> None:
        body = fuse.BATCH_FORGET_IN.pack(len(those), 0)
        body += b"".join(fuse.FORGET_ONE.pack(*each) for each in those)
        head = fuse.HEADER.pack(fuse.HEADER.size + len(body), fuse.BATCH_FORGET, 7, 0, 0, 0, 1, 0)
        assert b"" == share.answer(memoryview(head + body))

    forget((node, 2), (fuse.ROOT, 5))
    assert 0 == say(share, fuse.GETATTR, node, getattr_in)[0]
    forget((node, 1), (other, 1))
    assert errno.ESTALE == say(share, fuse.GETATTR, node, getattr_in)[0]
    assert errno.ESTALE == say(share, fuse.GETATTR, other, getattr_in)[0]
    assert 0 == say(share, fuse.GETATTR, fuse.ROOT, getattr_in)[0]
    assert walk(share, "0", "directory", "file") not in (node, other)


def test_who_goes_on_has_the_numbers_handles_and_lookups(place: Path) -> None:
    first, second = serving(SharedMounts, place), serving(SharedMounts, place)
    (place / "0/directory/gone").touch()
    node = walk(first, "0", "directory", "file")
    assert node == walk(first, "0", "directory", "file")
    gone = walk(first, "0", "directory", "gone")
    handles = opened(first, gone, os.O_RDONLY), opened(first, node, os.O_WRONLY | os.O_APPEND)
    directory = walk(first, "0", "directory")
    listing = fuse.OPENED.unpack(say(first, fuse.OPENDIR, directory, bytes(8))[1])[0]
    (place / "0/directory/gone").unlink()

    second.read_back(first.written())

    assert node == walk(second, "0", "directory", "file")
    assert errno.EBADF == read(second, gone, handles[0])[0]
    assert errno.EBADF == read(second, node, handles[1])[0], "it is open for writing only"
    assert 0 == write(second, handles[1], 0, b"!")[0]
    assert "content!" == (place / "0/directory/file").read_text()
    assert {".", "..", "file", "fifo", "link"} == set(names_in(second, directory, listing, 4096))
    assert opened(second, node, os.O_RDONLY) > max(*handles, listing)
    new = walk(second, "0", "directory", "fifo")
    assert new > max(node, gone, directory)
    say_forget = fuse.HEADER.pack(fuse.HEADER.size + 8, fuse.FORGET, 7, node, 0, 0, 1, 0)
    second.answer(memoryview(say_forget + fuse.FORGET_IN.pack(2)))
    assert node == walk(second, "0", "directory", "file"), "it was looked up once more"


def test_a_view_tells_the_ids_and_numbers_of_the_kernel_that_asks(place: Path) -> None:
    view = View(os.open(place, os.O_PATH | os.O_DIRECTORY), own=(300, 400))
    ours = SimpleNamespace(st_uid=0, st_gid=0)
    assert (300, 400) == view.owner(0, ours)
    assert (5, 6) == view.owner(0, SimpleNamespace(st_uid=5, st_gid=6))
    files = [SimpleNamespace(st_dev=device, st_ino=7) for device in (1, 2, 1)]
    one, other, again = (view.inode(each) for each in files)
    assert one == again == 7 != other
    assert 0 == say(view, fuse.GETATTR, fuse.ROOT, fuse.GETATTR_IN.pack(0, 0, 0))[0]
    before = len(os.listdir("/proc/self/fd"))
    node = walk(view, "0", "directory", "file")
    assert (0, b"content") == read(view, node)
    view.close()
    assert before - 1 == len(os.listdir("/proc/self/fd"))


def test_a_server_is_told_both_ids_and_never_waits_for_who_asks(place: Path) -> None:
    ours, theirs = wire.socketpair()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    server = Server(theirs)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    opened = len(os.listdir("/proc/self/fd"))
    device, kernel = socket.socketpair()  # a FUSE device to it
    root = os.open(place, os.O_PATH | os.O_DIRECTORY)
    wire.send_raw(ours, b"300 400", [device.fileno(), root])
    assert server._take()
    os.close(root)

    ((fd, view),) = server._views.items()
    assert (300, 400) == view.owner(0, SimpleNamespace(st_uid=0, st_gid=0))
    assert not os.get_blocking(fd)
    head = fuse.HEADER.pack(fuse.HEADER.size + 2, fuse.LOOKUP, 7, fuse.ROOT, 0, 0, 1, 0)
    kernel.sendall(head + b"0\0")
    server._serve(fd)
    assert 0 == fuse.ANSWER.unpack_from(kernel.recv(4096))[1]
    kernel.sendall(head + b"0\0")
    server._serve(fd)
    device.close()
    kernel.close()  # with an answer unread: an error to who asks next
    server._serve(fd)
    assert {} == server._views
    assert opened == len(os.listdir("/proc/self/fd")), "whose kernel is gone is let go of"
    ours.close()
    assert not server._take(), "the jailer has gone"
    theirs.close()


@pytest.fixture
def umask() -> Iterator[None]:
    """`serve` changes it, in a process of its own."""
    before = os.umask(0)
    yield
    os.umask(before)


class Served:
    """`serve` in a thread, with the kernel's ends of both lines, and the host's socket."""

    def __init__(self, place: Path) -> None:
        pairs = [socket.socketpair() for _ in range(3)]
        self.lines, (self.host, control) = [each[0] for each in pairs[:2]], pairs[2]
        self._theirs = [each[1] for each in pairs[:2]]
        self._control = wire.adopt(control.detach())
        plan = {"shown": str(place), "mounts": str(place), "whose": OWNER}
        fds = [each.fileno() for each in self._theirs]
        self.thread = threading.Thread(target=serve, args=(plan, fds, self._control))
        self.thread.start()
        self.host.settimeout(20)
        for each in self.lines:
            each.settimeout(20)

    def tell(self, word: bytes, fds: list[int]) -> bytes:
        socket.send_fds(self.host, [word], fds)
        return self.host.recv(100)

    def close(self) -> None:
        self.host.close()
        self.thread.join(20)
        for each in (*self.lines, *self._theirs, self._control):
            each.close()
        assert not self.thread.is_alive()


def message(operation: int, node: int, body: bytes) -> bytes:
    return fuse.HEADER.pack(fuse.HEADER.size + len(body), operation, 7, node, 0, 0, 1, 0) + body


@pytest.mark.usefixtures("umask")
def test_each_line_has_its_share_and_goes_on_where_another_left_off(place: Path) -> None:
    first, second = Served(place), Served(place)
    files = [os.memfd_create("written") for _ in range(2)]
    try:
        shown, mounts = first.lines
        # In pieces, and two at once.
        lookup = message(fuse.LOOKUP, fuse.ROOT, b"0\0")
        shown.sendall(lookup[:9])
        mounts.sendall(
            lookup + message(fuse.MKDIR, fuse.ROOT, fuse.MKDIR_IN.pack(0o700, 0) + b"1\0")
        )
        said = b""
        while len(said) < 2 * (fuse.ANSWER.size + fuse.ENTRY.size + fuse.ATTRIBUTES.size):
            said += mounts.recv(1 << 16)
        assert (place / "1").is_dir()
        shown.sendall(lookup[9:])
        node = struct.unpack_from("=Q", shown.recv(1 << 16), fuse.ANSWER.size)[0]
        shown.sendall(message(fuse.MKDIR, fuse.ROOT, fuse.MKDIR_IN.pack(0o700, 0) + b"2\0"))
        assert -errno.ENOSYS == fuse.ANSWER.unpack_from(shown.recv(1 << 16))[1]

        assert b"O" == first.tell(b"W", files)
        assert b"O" == second.tell(b"R", files)
        getattr_in = message(fuse.GETATTR, node, fuse.GETATTR_IN.pack(0, 0, 0))
        for line in second.lines:
            line.sendall(getattr_in)
            assert 0 == fuse.ANSWER.unpack_from(line.recv(1 << 16))[1]
        closed = os.open("/dev/null", os.O_RDONLY)
        assert b"E%d" % errno.EBADF == second.tell(b"W", [closed, files[1]])
        os.close(closed)
    finally:
        for fd in files:
            os.close(fd)
        first.close()
        second.close()


@pytest.mark.parametrize("length", [fuse.HEADER.size - 1, fuse.BUFFER + 1])
def test_a_message_of_a_length_that_none_has_is_refused(place: Path, length: int) -> None:
    ours, theirs = socket.socketpair()
    root = os.open(place, os.O_PATH | os.O_DIRECTORY)
    try:
        line = _Line(theirs.fileno(), Share(root))
        ours.sendall(message(fuse.STATFS, fuse.ROOT, b""))
        assert line.serve()
        assert ours.recv(1 << 16)
        ours.sendall(fuse.HEADER.pack(length, fuse.STATFS, 7, 1, 0, 0, 1, 0))
        with pytest.raises(OSError, match="a message of a wrong length"):
            line.serve()
    finally:
        for each in (ours, theirs):
            each.close()
        os.close(root)
