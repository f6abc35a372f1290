"""Bounded bombs: each stops by itself at a size that hurts nobody, whatever the limits do."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
import struct
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_PAUSE_S = 20
_PIECE = 4 << 20
PIECES = 40  # 160 MiB in all
_F_SETPIPE_SZ = 1031
_LOCK_BYTES = 192  # fs/locks.c, struct file_lock
_SO_MEMINFO = (
    55  # asm-generic/socket.h; its first number: bytes that wait to be read, as they are counted
)
_keep: list[object] = []


def processes() -> None:
    """Make 200 processes; print how many there were."""
    count = 0
    for _ in range(200):
        try:
            pid = os.fork()
        except OSError:
            break
        if pid == 0:
            time.sleep(_PAUSE_S)
            os._exit(0)
        count += 1
    print(count)


def threads() -> None:
    """Make 200 threads; print how many there were."""
    count = 0
    for _ in range(200):
        try:
            threading.Thread(target=time.sleep, args=(_PAUSE_S,), daemon=True).start()
        except RuntimeError:
            break
        count += 1
    print(count, flush=True)
    os._exit(0)


# -- memory ----------------------------------------------------------------------------------


def private() -> None:
    """Memory of its own"""
    _keep.append(bytearray(os.urandom(4096)) * (_PIECE // 4096))


def _mapped() -> mmap.mmap:
    memory = mmap.mmap(-1, _PIECE)
    memory[:] = b"x" * _PIECE
    _keep.append(memory)
    return memory


def shared() -> None:
    """Shared memory"""
    _mapped()


def dropped() -> None:
    """Shared memory that is mapped, but no longer in its page tables"""
    _mapped().madvise(mmap.MADV_DONTNEED)


def unmapped() -> None:
    """A file in memory that is mapped nowhere"""
    fd = os.memfd_create("bomb")
    os.write(fd, b"x" * _PIECE)
    _keep.append(fd)


def system_v() -> None:
    """System V shared memory that nobody has attached"""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    libc.shmat.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
    libc.shmdt.argtypes = (ctypes.c_void_p,)
    address = libc.shmat(libc.shmget(0, _PIECE, 0o1600), None, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise MemoryError("no segment")
    ctypes.memset(address, 120, _PIECE)
    libc.shmdt(address)


def tmpfs() -> None:
    """A file in /dev/shm"""
    fd = os.open(f"/dev/shm/{len(_keep)}", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"x" * _PIECE)
    _keep.append(fd)


def pipes() -> None:
    """The buffers of pipes"""
    for _ in range(4):
        ends = os.pipe()
        fcntl.fcntl(ends[1], _F_SETPIPE_SZ, 1 << 20)
        os.set_blocking(ends[1], False)
        try:
            while os.write(ends[1], b"x" * 65536):
                pass
        except BlockingIOError:
            _keep.append(ends)


def tcp() -> None:
    """Unread data of a TCP connection"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = _PIECE
        for _ in range(4):  # one takes some 4 MiB where nothing bounds it
            ends = [socket.create_connection(server.getsockname()), server.accept()[0]]
            ends[0].setblocking(False)
            _keep.append(ends)
            try:
                while left > 0:
                    left -= ends[0].send(bytes(min(left, 65536)))
            except BlockingIOError:
                continue
            return
    raise MemoryError("the kernel takes no more")


def udp() -> None:
    """Unread data of UDP"""
    held = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(64):  # one takes some 200 KiB
            receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            receiver.bind(("127.0.0.1", 0))
            _keep.append(receiver)
            for _ in range(8):  # what there is no room for is dropped without a word
                sender.sendto(bytes(32768), receiver.getsockname())
            held += int.from_bytes(receiver.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 4), "little")
            if held >= _PIECE:
                return
    raise MemoryError("the kernel takes no more")


def netlink() -> None:
    """Unread answers of the kernel about the network"""
    # nlmsghdr, and ifinfomsg of interface 1: RTM_GETLINK; what has no room is dropped without a word
    question = struct.pack("=IHHII", 32, 18, 1, 1, 0) + struct.pack("=BxHiII", 0, 0, 1, 0, 0)
    held = 0
    while held < _PIECE:
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
        _keep.append(sock)
        before, now = -1, 0
        while now > before:
            sock.send(question)
            before = now
            now = int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 4), "little")
        if not now:
            raise MemoryError("the kernel does not answer")
        held += now


def locks() -> None:
    """The kernel's memory for locked parts of files"""
    size = 1000  # in one file: to add one, the kernel goes through all of it
    lock = [struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 2 * i, 1, 0) for i in range(size)]
    for _ in range(_PIECE // _LOCK_BYTES // size):
        fd = os.open(f"/tmp/locks.{len(_keep)}", os.O_RDWR | os.O_CREAT)
        _keep.append(fd)
        for each in lock:
            fcntl.fcntl(fd, fcntl.F_SETLK, each)


MEMORY = (private, shared, dropped, unmapped, system_v, tmpfs, pipes, tcp, udp, netlink, locks)


def memory(kind: str) -> None:
    """Take 160 MiB piece by piece, saying how far it got; "done" at the end."""
    take: Callable[[], None] = globals()[kind]
    for count in range(PIECES):
        take()
        print(count + 1, flush=True)
    time.sleep(0.3)
    print("done", flush=True)


# -- files, output, processor ---------------------------------------------------------------------

PLACES = (
    *("/tmp", "/home/sandbox", "/dev/shm", "/var/tmp", "/mnt/memory", "/mnt/session/outputs"),
)


def disk() -> None:
    """Write 6 MiB to each place; print how many MiB there were in all."""
    total = 0
    for place in PLACES:
        try:
            with open(f"{place}/filler", "wb", buffering=0) as file:
                for _ in range(6):
                    total += file.write(b"x" * (1 << 20))
        except OSError:
            continue
    print(total >> 20)


def inodes() -> None:
    """Make 2000 files; print how many there were."""
    count = 0
    for number in range(2000):
        try:
            os.close(os.open(f"/tmp/{number}", os.O_CREAT | os.O_WRONLY))
        except OSError:
            break
        count += 1
    print(count)


def open_files() -> None:
    """Open 300 files; print how many there were."""
    count = 0
    for _ in range(300):
        try:
            os.open("/dev/null", os.O_RDONLY)
        except OSError:
            break
        count += 1
    print(count)


def output() -> None:
    """Write 64 MiB to standard output."""
    for _ in range(1024):
        os.write(1, b"x" * 65536)


def spin(seconds: str = "0.5") -> None:
    """Two processes compute for some time, and half a second if not told; print what they got of it."""
    end = time.monotonic() + float(seconds)
    pids = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            while time.monotonic() < end:
                pass
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    times = os.times()
    print(times.children_user + times.children_system)


def everything() -> None:
    """Many processes that compute, take memory and make files, for four seconds."""
    for _ in range(60):
        try:
            if os.fork() == 0:
                break
        except OSError:
            break
    count, end = 0, time.monotonic() + 4
    while time.monotonic() < end:
        count += 1
        try:
            os.close(os.open(f"/tmp/{os.getpid()}.{count}", os.O_CREAT | os.O_WRONLY))
            _keep.append(bytearray(1 << 16))
        except (OSError, MemoryError):
            continue
