"""Connections that PID 1 makes for the programs of a sandbox that shows directories of the host.

A Unix socket of the host in such a directory must not be reached, and a filter sees neither the path
nor what a descriptor is. So each connect(2) waits for PID 1, which takes the caller's socket and a
copy of the address, opens the path, sees that it lies on a file system of the sandbox's own, and
connects to just that inode. Nothing is left to the caller's own call: another thread could swap the
address or the descriptor in the meantime.
"""

from __future__ import annotations

import _signal as signal
import _socket as socket
import _struct as struct
import errno
import fcntl
import posix as os
import time

from ...linux import on_behalf, seccomp
from .. import wire
from . import processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_WAITING = 1024  # callers whose connection is under way; more are told EAGAIN
_LONGEST_ADDRESS = 128  # struct sockaddr_storage
_LONGEST_UNIX = 110  # struct sockaddr_un
_SO_DOMAIN, _SO_SNDTIMEO = 39, 21  # include/uapi/asm-generic/socket.h
UNIX = struct.pack("=H", socket.AF_UNIX)
# Between two looks at one connection. With many of them longer, so that PID 1 has time for others.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _PAUSE_EACH_S = 0.0005, 0.05, 0.001
_AT_ONCE = 16
# A call of PID 1's for another process ends after this time, whatever that process does to the socket.
_GUARD_S = 0.02
UNDER_WAY = (errno.EINPROGRESS, errno.EALREADY)
_NOT_HANDLED_STOPS = 1 << 18 | 1 << 19 | 1 << 20 | 1 << 21  # SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU


class UnderWayError(Exception):
    """The caller is to wait.

    Args:
        number: Its errno should it have waited too long.
        patience_s: How long it waits at most, SO_SNDTIMEO; 0: for ever.
    """

    def __init__(self, number: int, patience_s: float) -> None:
        super().__init__(number)
        self.number, self.patience_s = number, patience_s


class _Waiting:
    """A caller whose connection is under way."""

    def __init__(self, asked: seccomp.Notification, now: float, patience_s: float) -> None:
        self.asked = asked
        self.pause_s = _FIRST_PAUSE_S
        self.again_at = now + self.pause_s
        self.until = now + patience_s if patience_s else 0.0


class Connects:
    """Answers who asks to connect.

    Args:
        listener_fd, key: Of `notifications.guard`.
    """

    def __init__(self, listener_fd: int, key: int) -> None:
        self._listener_fd, self._key = listener_fd, key
        self._waiting: list[_Waiting] = []
        self._root_device = os.stat("/").st_dev

    def answer(self, asked: seccomp.Notification) -> None:
        """Connect, refuse, or have the caller wait without waiting here."""
        try:
            number = self._attempt(asked)
        except UnderWayError as exc:
            if len(self._waiting) < MOST_WAITING:
                self._waiting.append(_Waiting(asked, time.monotonic(), exc.patience_s))
                return
            number = errno.EAGAIN
        seccomp.answer(self._listener_fd, asked, number)

    def wait_s(self) -> float | None:
        """Seconds until `look` has something to do; None: nothing."""
        if not self._waiting:
            return None
        return max(0.0, min(each.again_at for each in self._waiting) - time.monotonic())

    def look(self, *, is_asked: bool = False) -> None:
        """Go on with some connections that are under way; with one where another caller has just asked.

        A thousand callers at once would else each wait for 16 looks at those before it: for 20 s.
        """
        now = time.monotonic()
        due = [each for each in self._waiting if each.again_at <= now]
        del due[1 if is_asked else _AT_ONCE :]
        for each in due:
            if self._is_over(each, now):
                self._waiting.remove(each)

    def _is_over(self, each: _Waiting, now: float) -> bool:
        if not seccomp.is_waiting(self._listener_fd, each.asked):
            return True
        try:
            number = self._attempt(each.asked)
        except UnderWayError as exc:
            is_late = bool(each.until) and now >= each.until
            if not is_late and not has_signal(each.asked.pid):
                longest = max(_LONGEST_PAUSE_S, _PAUSE_EACH_S * len(self._waiting))
                each.pause_s = min(2 * each.pause_s, longest)
                each.again_at = now + each.pause_s
                return False
            number = exc.number if is_late else errno.EINTR
        seccomp.answer(self._listener_fd, each.asked, number)
        return True

    def _attempt(self, asked: seccomp.Notification) -> int:
        """Connect, without waiting; returns an errno, 0 when connected.

        Raises:
            UnderWayError: It is not decided yet.
        """
        try:
            sock = take(asked.pid, signed(asked.arguments[0]), self._key)
        except OSError as exc:
            return number_of(exc)
        place = -1
        start_guard()
        try:
            family = sock.getsockopt(socket.SOL_SOCKET, _SO_DOMAIN)
            address = read_address(asked)
            if family == socket.AF_UNIX and has_path(address):
                place = self._open(asked.pid, address[2:].partition(b"\0")[0])
                address = UNIX + b"/proc/self/fd/%d\0" % place
            if not seccomp.is_waiting(self._listener_fd, asked):
                return errno.EINTR  # its number may be another thread's by now; nobody hears this
            return self._connect(sock, family, address)
        except OSError as exc:
            return number_of(exc)
        finally:
            if place >= 0:
                os.close(place)
            sock.close()
            end_guard()

    def _open(self, thread: int, path: bytes) -> int:
        """The inode at a path of the caller's; no socket but those of the sandbox's own file systems.

        Raises:
            OSError: EACCES for a socket of the host.
        """
        fd = os.open(as_seen_here(thread, path), os.O_PATH | os.O_CLOEXEC)
        info = os.fstat(fd)
        is_socket = (info.st_mode & 0o170000) == 0o140000
        # The kernel refuses other files itself, with its own errno.
        if is_socket and info.st_dev != self._root_device and not _is_on_root(fd):
            os.close(fd)
            raise PermissionError(errno.EACCES, "a socket of the host")
        return fd

    def _connect(self, sock: wire.Socket, family: int, address: bytes) -> int:
        fd = sock.fileno()
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        is_stream = sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) != socket.SOCK_DGRAM
        waits = is_stream and not flags & os.O_NONBLOCK
        if waits:  # for both of us, as the open file is shared, and for some microseconds
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_NONBLOCK)
        try:
            number = on_behalf.connect(fd, address, self._key)
            if waits and number == errno.EINPROGRESS:
                # Over the loopback it is done as soon as the first call has let go of the socket.
                number = on_behalf.connect(fd, address, self._key)
        finally:
            if waits:
                fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        is_full = number == errno.EAGAIN and family == socket.AF_UNIX
        if number == errno.EINTR or (waits and (is_full or number in UNDER_WAY)):
            seconds, microseconds = struct.unpack(
                "=qq", sock.getsockopt(socket.SOL_SOCKET, _SO_SNDTIMEO, 16)
            )
            late = errno.EAGAIN if family == socket.AF_UNIX else errno.EINPROGRESS
            raise UnderWayError(late, seconds + microseconds / 1e6)
        return number


def take(thread: int, number: int, key: int) -> wire.Socket:
    """A socket of ours for the one that `thread` has as `number`, of whatever family and type.

    Raises:
        OSError: As `on_behalf.descriptor`; ENOTSOCK, which Python finds out, for other files.
    """
    fd = on_behalf.descriptor(thread, number, key)
    try:
        return wire.Socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fd)
    except BaseException:
        os.close(fd)
        raise


def start_guard() -> None:
    """From now on a signal of our own interrupts what blocks: a guest may make its socket do that.

    It may clear O_NONBLOCK, or set SO_LINGER and close its own descriptor, at any time.
    """
    signal.signal(signal.SIGALRM, _nothing)
    signal.setitimer(signal.ITIMER_REAL, _GUARD_S, _GUARD_S)


def end_guard() -> None:
    """Stop the timer, so that no program inside can have that signal sent to us."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _nothing(_signum: int, _frame: object) -> None:
    pass


def read_address(asked: seccomp.Notification) -> bytes:
    """A copy of the address that the call names."""
    length = signed(asked.arguments[2])
    if not 0 <= length <= _LONGEST_ADDRESS:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return on_behalf.memory(asked.pid, asked.arguments[1], length) if length else b""


def has_path(address: bytes) -> bool:
    """Return whether the kernel would look for a file; else it refuses, or takes an abstract name."""
    return 2 < len(address) <= _LONGEST_UNIX and address[:2] == UNIX and address[2] != 0


def as_seen_here(thread: int, path: bytes) -> bytes:
    """A path for us that means what `path` means to a thread.

    What it then leads to is judged by itself: nothing depends on these names.
    """
    own = b"/proc/%d/" % thread
    for name in (b"/proc/self/", b"/proc/thread-self/"):
        if path.startswith(name):
            return own + path[len(name) :]
    return path if path.startswith(b"/") else own + b"cwd/" + path


def _is_on_root(fd: int) -> bool:
    """Return whether a file is on our root's file system: over an image, stat(2) may report another."""
    mount = processes.read(f"/proc/self/fdinfo/{fd}").partition(b"mnt_id:")[2].split(None, 1)[0]
    devices = dict(_devices())
    return devices.get(mount, b"") == devices.get(b"/", b"another")


def _devices() -> Iterator[tuple[bytes, bytes]]:
    """The device of each mount by its number, and of the root by `/`: proc(5), mountinfo."""
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            number, _parent, device, _root, target, _rest = line.split(None, 5)
            yield number, device
            if target == b"/":
                yield target, device


def has_signal(thread: int) -> bool:
    """Return whether a pending signal would interrupt a call of that thread."""
    found = processes.read(f"/proc/{thread}/status").split(b"\n")
    masks = {
        name: int(value, 16)
        for name, _, value in (line.partition(b":") for line in found)
        if name in (b"SigPnd", b"ShdPnd", b"SigBlk", b"SigIgn")
    }
    if len(masks) < 4:
        return False
    pending = masks[b"SigPnd"] | masks[b"ShdPnd"]
    return bool(pending & ~(masks[b"SigBlk"] | masks[b"SigIgn"] | _NOT_HANDLED_STOPS))


def signed(word: int) -> int:
    """A C int in the lower half of a register."""
    low = word & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low


def number_of(exc: OSError) -> int:
    # A process that made itself undumpable cannot be helped: connect(2) has no EPERM for Unix sockets.
    return errno.EACCES if exc.errno == errno.EPERM else exc.errno or errno.EIO
