"""Open files of a process that is copied: what its kernel tells of each, or why no copy can have it."""

from __future__ import annotations

import _struct as struct
import fcntl
import posix as os
import select
import stat

from ...linux import files, libc, on_behalf
from . import sockets
from .sockets import CannotCopy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_DESCRIPTORS = 1024
_MOST_PIPE_BYTES, _MOST_IN_PIPES = 1 << 16, 1 << 20
_O_PATH = 0o10000000
VOLATILE = "/dev/shm/"  # snapshots leave it out
_BY_NAME = 0o20000000 | os.O_DIRECTORY | os.O_NOFOLLOW  # O_TMPFILE; see `OpenFiles`
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_CLOEXEC = os.O_CLOEXEC
RESOLVE = 0x04 | 0x02 | 0x10  # openat2(2): NO_SYMLINKS, NO_MAGICLINKS, IN_ROOT
_FIONREAD = 0x541B


class Lock:
    """A lock of a file, or of bytes in it.

    Attributes:
        kind: `FLOCK` or `POSIX`: flock(2), and F_SETLK of fcntl(2).
        length: 0: to the end.
    """

    def __init__(self, words: list[str]) -> None:
        # lock: 1: POSIX  ADVISORY  WRITE 4217 00:2d:1234 0 EOF
        self.kind, self.is_exclusive, start, end = words[2], words[4] == "WRITE", *words[7:9]
        self.start = int(start)
        self.length = 0 if end == "EOF" else int(end) - self.start + 1


class Timer:
    """Time that a timerfd is set to.

    Attributes:
        ticks: How often it has run out, and nobody has read that.
        value, interval: Seconds and nanoseconds; the first is what is left.
    """

    def __init__(self, rows: list[list[str]]) -> None:
        texts = {row[0]: [word.strip("(,)") for word in row[1:]] for row in rows}
        self.clock, self.ticks = int(texts["clockid:"][0]), int(texts["ticks:"][0])
        self.value, self.interval = (
            (int(texts[name][0]), int(texts[name][1])) for name in ("it_value:", "it_interval:")
        )


class Descriptor:
    """An open file of the process.

    Attributes:
        kind: `given`, `pipe`, `socket`, `server`, `file`, `removed`, `event`, `timer` or `epoll`.
        pipe: Inode, of a pipe or socket.
        flags: Of open(2), with O_CLOEXEC.
        same_as: A lower descriptor of the same open file; -1: there is none.
        shared: Number of the open file among those that several processes have; -1: only this one has it.
    """

    def __init__(self, kind: str, flags: int) -> None:
        self.kind, self.flags, self.same_as, self.shared = kind, flags, -1, -1
        self.path, self.position = "", 0
        self.pipe = 0  # inode
        self.given = 0  # which of the streams
        self.server: sockets.Server | None = None
        self.count, self.is_semaphore = 0, False
        self.locks: list[Lock] = []
        self.timer: Timer | None = None
        self.removed: tuple[int, int] | None = None  # device and inode of a file without a name
        self.made: tuple[int, int] | None = None  # of a file that a fork does not have yet
        self.size = 0
        self.watched: list[tuple[int, int, int]] = []  # descriptor, events, data

    @property
    def key(self) -> tuple[str, str, int] | None:
        """Equal for descriptors that may be of one open file; None: that does not matter."""
        if self.kind in ("given", "pipe", "socket"):
            return None
        return self.kind, self.path, self.count


def read(pid: int, root: int, streams: list[int]) -> dict[int, Descriptor]:
    """Describe all of a process.

    Args:
        root: Descriptor of its root directory.
        streams: Inodes of the pipes that its copies get others for.

    Raises:
        CannotCopy: It has one that no copy can have.
    """
    names = sorted(map(int, os.listdir(f"/proc/{pid}/fd")))
    if len(names) > MOST_DESCRIPTORS:
        raise CannotCopy(f"it has more than {MOST_DESCRIPTORS} open files")
    found = {number: _descriptor(pid, root, number, streams) for number in names}
    _find_shared(pid, found)
    return found


def _descriptor(pid: int, root: int, number: int, streams: list[int]) -> Descriptor:
    target = os.readlink(f"/proc/{pid}/fd/{number}")
    with open(f"/proc/{pid}/fdinfo/{number}", "rb") as file:
        info = file.read().decode("utf-8", "replace")
    rows = [line.split() for line in info.splitlines()]
    facts = {row[0]: row[1] for row in rows if len(row) > 1}
    flags = int(facts["flags:"], 8)
    locks = [Lock(row) for row in rows if row[0] == "lock:" and len(row) == 9]
    if any(each.kind not in ("FLOCK", "POSIX") for each in locks):
        raise CannotCopy(f"descriptor {number} holds a lease or an OFD lock")
    if target.startswith("pipe:["):
        found = Descriptor("pipe", flags)
        found.pipe = int(target[6:-1])
        if found.pipe in streams:
            found.kind, found.given = "given", streams.index(found.pipe)
        return found
    if target.startswith("socket:["):
        found = Descriptor("socket", flags)
        found.pipe = int(target[8:-1])
        found.server = sockets.server_of(pid, number)
        if found.server is not None:
            found.kind = "server"
        return found
    if target == "anon_inode:[eventfd]":
        found = Descriptor("event", flags)
        found.count = int(facts["eventfd-count:"], 16)
        found.is_semaphore = facts.get("eventfd-semaphore:") == "1"
        return found
    if target == "anon_inode:[timerfd]":
        found = Descriptor("timer", flags)
        found.timer = Timer([row for row in rows if len(row) > 1])
        return found
    if target == "anon_inode:[eventpoll]":
        found = Descriptor("epoll", flags)
        for row in rows:
            if row[0] == "tfd:":
                found.watched.append((int(row[1]), int(row[3], 16), int(row[5], 16)))
        return found
    if not target.startswith("/"):
        raise CannotCopy(f"descriptor {number} is {target.partition(':')[0]}: {target}")
    found = Descriptor("file", flags)
    found.path, found.position, found.locks = target, int(facts["pos:"]), locks
    _look_at_file(pid, root, number, found)
    return found


def _look_at_file(pid: int, root: int, number: int, found: Descriptor) -> None:
    """Refuse what is no file that a copy can open by its path, or get the content of."""
    status = os.stat(f"/proc/{pid}/fd/{number}")
    kind = stat.S_IFMT(status.st_mode)
    is_device = kind == stat.S_IFCHR and found.path in _DEVICES
    if not is_device and kind not in (stat.S_IFREG, stat.S_IFDIR):
        raise CannotCopy(f"descriptor {number} is {shown(found.path)}, a device or a pipe")
    if found.flags & _O_PATH:
        raise CannotCopy(f"descriptor {number} is a place, and no open file")
    if is_device:
        found.position = 0
    if kind == stat.S_IFREG and not status.st_nlink:
        found.kind, found.removed = "removed", (status.st_dev, status.st_ino)
        found.size = status.st_size
        found.flags &= ~_BY_NAME
    elif not status.st_nlink:
        raise CannotCopy(f"descriptor {number} is a directory that was removed")
    else:
        require_file(root, found.path, status, f"descriptor {number}")
        if kind == stat.S_IFREG and found.path.startswith(VOLATILE):
            found.made, found.size = (status.st_dev, status.st_ino), status.st_size


def require_file(root: int, path: str, wanted: os.stat_result, what: str) -> None:
    """Refuse a file that is not where the kernel says: a copy opens it by its path."""
    try:
        fd = files.openat2(root, path, os.O_PATH | _CLOEXEC, resolve=RESOLVE)
    except PermissionError:
        return  # of another user inside: the copy finds out
    except OSError as exc:
        raise CannotCopy(f"{what} is not at {shown(path)}: {exc.strerror}") from None
    try:
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) != (wanted.st_dev, wanted.st_ino):
            raise CannotCopy(f"{what} is not the file at {shown(path)}")
    finally:
        os.close(fd)


def _find_shared(pid: int, descriptors: dict[int, Descriptor]) -> None:
    """Find descriptors of one open file, which share their position: kcmp(2), KCMP_FILE."""
    seen: dict[tuple[str, str, int], list[int]] = {}
    for number, each in descriptors.items():
        if each.key is None:
            continue
        others = seen.setdefault(each.key, [])
        for other in others:
            if libc.same_file(pid, other, pid, number):
                each.same_as = other
                break
        else:
            others.append(number)


def pipes_of(holders: Iterable[tuple[int, dict[int, Descriptor]]]) -> dict[int, bytes]:
    """Copy what is in the pipes that processes hold both ends of, or of which the other end is closed.

    Args:
        holders: Pid and descriptors of each process.
    """
    ends: dict[int, dict[int, tuple[int, int]]] = {}
    for pid, descriptors in holders:
        for number, each in descriptors.items():
            if each.kind == "pipe":
                ends.setdefault(each.pipe, {})[each.flags & 3] = pid, number
            elif each.kind == "given" and os.O_RDONLY == each.flags & 3:
                _check_is_read(pid, number)
    contents: dict[int, bytes] = {}
    for inode, found in ends.items():
        contents[inode] = _content(found)
        if sum(map(len, contents.values())) > _MOST_IN_PIPES:
            raise CannotCopy(f"it has pipes with more than {_MOST_IN_PIPES >> 20} MiB in them")
    return contents


def _check_is_read(pid: int, number: int) -> None:
    """Refuse input that waits: a copy gets a pipe of its own, without what is in this one."""
    fd = on_behalf.descriptor(pid, number, 0)
    try:
        (waiting,) = struct.unpack("=i", fcntl.ioctl(fd, _FIONREAD, bytes(4)))
    finally:
        os.close(fd)
    if waiting:
        raise CannotCopy(
            f"descriptor {number}, its input, has {waiting} bytes that it has not read"
        )


def _content(ends: dict[int, tuple[int, int]]) -> bytes:
    pid, number = ends.get(os.O_RDONLY) or next(iter(ends.values()))
    fd = on_behalf.descriptor(pid, number, 0)
    read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if set(ends) != {os.O_RDONLY, os.O_WRONLY}:
            poll = select.poll()
            poll.register(fd, 0)
            if not poll.poll(0):  # neither POLLHUP nor POLLERR: somebody has the other end
                raise CannotCopy(f"descriptor {number} is a pipe to another process")
            if os.O_RDONLY not in ends:
                return b""
        (waiting,) = struct.unpack("=i", fcntl.ioctl(fd, _FIONREAD, bytes(4)))
        if waiting > _MOST_PIPE_BYTES:
            raise CannotCopy(f"descriptor {number} is a pipe with {waiting} bytes in it")
        if not waiting:
            return b""
        copied = libc.tee(fd, write_end, waiting)
        return os.read(read_end, copied)
    finally:
        for each in (fd, read_end, write_end):
            os.close(each)


def pairs_of(
    root: int, holders: Iterable[tuple[int, dict[int, Descriptor]]]
) -> list[tuple[int, int, int]]:
    """Find which of their sockets are pairs of socketpair(2), with nothing in them: kind, both inodes.

    Args:
        root: Pid of a process in their network namespace.
    """
    ours = {
        each.pipe: number
        for _pid, descriptors in holders
        for number, each in descriptors.items()
        if each.kind == "socket"
    }
    found = []
    known = sockets.unix_sockets(root) if ours else {}
    for inode, number in ours.items():
        kind, peer, waiting = known.get(inode, (0, 0, 0))
        if peer not in ours:
            raise CannotCopy(
                f"descriptor {number} is a socket that has a connection, or leads to another process"
            )
        if waiting:
            raise CannotCopy(f"descriptor {number} is a socket with {waiting} bytes in it")
        if inode < peer:
            found.append((kind, inode, peer))
    return found


def shown(name: str | bytes) -> str:
    data = name if isinstance(name, bytes) else name.encode("utf-8", "surrogateescape")
    return data.decode("utf-8", "replace")[:200] or "memory without a name"
