"""Makes system calls, each in a child of its own, with or without a filter; prints what came back.

Run as a script: JSON on stdin, `{"filter": hex or null, "key": int}`; JSON on
stdout, for each probe an errno's name, "ok", or the signal that ended it. Standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from ringfence.policy.seccomp import MACHINES

NR = MACHINES[os.uname().machine].numbers
DIRTY = 0xDEADBEEF << 32  # what the kernel ignores in an int argument
_libc = ctypes.CDLL(None, use_errno=True)
_BUFFER = ctypes.create_string_buffer(4096)
ADDRESS = ctypes.addressof(_BUFFER)


def call(name: str | int, *args: int) -> int:
    number = NR[name] if isinstance(name, str) else name
    result: int = _libc.syscall(ctypes.c_long(number), *map(ctypes.c_ulong, args))
    if result == -1:
        raise OSError(ctypes.get_errno(), str(name))
    return result


def install(program: bytes) -> None:
    class Fprog(ctypes.Structure):
        _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    _libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    fprog = Fprog(len(program) // 8, program)
    call("seccomp", 1, 0, ctypes.addressof(fprog))


def at(data: bytes) -> int:
    """The address of `data`, NUL-terminated."""
    ctypes.memmove(ADDRESS, data + b"\0", len(data) + 1)
    return ADDRESS


def path(name: str) -> int:
    return at(name.encode())


AT_FDCWD = (1 << 64) - 100
PROBES: dict[str, Callable[[], object]] = {}


def probe(function: Callable[[], object]) -> Callable[[], object]:
    PROBES[function.__name__] = function
    return function


def simple(label: str, name: str | int, *args: int) -> None:
    PROBES[label] = lambda: call(name, *args)


simple("getpid", "getpid")
simple("a number no kernel has", 5000)
simple("the number -1", (1 << 32) - 1)
simple("keyctl", "keyctl", 0, (1 << 64) - 3, 0)
simple("userfaultfd", "userfaultfd", 1)  # UFFD_USER_MODE_ONLY: for everybody since 5.11
simple("kcmp", "kcmp", os.getpid(), os.getpid(), 0, 0, 0)
simple("clone3", "clone3", 0, 0)
simple("io_uring_setup", "io_uring_setup", 0, 0)
simple("openat2", "openat2", AT_FDCWD, 0, 0, 0)
simple("statmount", "statmount", 0, 0, 0, 1 << 20)
simple("unshare files", "unshare", 0x400)
simple("unshare a user namespace", "unshare", 0x10000000)
simple("unshare an empty mount namespace", "unshare", 0x100000)
# With a descriptor of it nowhere (CLONE_PIDFD): EFAULT.
simple("clone a user namespace", "clone", 0x10000000 | 0x1000)
simple("clone a user namespace, dirty", "clone", DIRTY | 0x10000000 | 0x1000)
simple("setns", "setns", 99, 0)
simple("personality query", "personality", 0xFFFFFFFF)
simple("personality no randomisation", "personality", 0x40000)
simple("ptrace", "ptrace", 0, 0, 0, 0)  # PTRACE_TRACEME
simple("subreaper", "prctl", 36, 1, 0, 0, 0)
simple("subreaper, dirty", "prctl", DIRTY | 36, 1, 0, 0, 0)
simple("set the name", "prctl", 15, ADDRESS, 0, 0, 0)
simple("merge memory", "madvise", 0, 0, 12)
simple("advise memory", "madvise", 0, 0, 4)
simple("affinity of PID 1", "sched_setaffinity", 1, 8, 0)  # no mask: EFAULT before anything happens
simple("affinity of PID 1, dirty", "sched_setaffinity", DIRTY | 1, 8, 0)
simple("I/O priority of PID 1", "ioprio_set", 1, 1, 7 << 13)  # no such class: EINVAL
simple("priority of a user", "setpriority", 2, 54321, 0)  # one without processes: ESRCH
simple("I/O priority of a user", "ioprio_set", 3, 54321, 0)
simple("limits of PID 1", "prlimit64", 1, 7, 8, 0)  # a bad pointer: EFAULT
simple("limits of PID 1, read", "prlimit64", 1, 7, 0, 0)


for family, label in [(1, "unix"), (2, "inet"), (10, "inet6"), (16, "netlink"), (38, "alg")]:
    for kind, kind_label in [(1, "stream"), (2, "datagram"), (3, "raw"), (0x80802, "flagged")]:
        simple(f"{label} {kind_label}", "socket", family, kind, 0)
simple("tcp by number", "socket", 2, 1, 6)
simple("mptcp", "socket", 2, 1, 262)
simple("uevents", "socket", 16, 2, 15)  # NETLINK_KOBJECT_UEVENT
simple("unix, dirty", "socket", DIRTY | 1, DIRTY | 1, DIRTY)
simple("stream pair", "socketpair", 1, 1, 0, ADDRESS)
simple("seqpacket pair", "socketpair", 1, 0x80005, 0, ADDRESS)
simple("datagram pair", "socketpair", 1, 2, 0, ADDRESS)
simple("raw pair", "socketpair", 1, 3, 0, ADDRESS)
simple("tipc pair", "socketpair", 30, 1, 0, ADDRESS)


# What Linux itself refuses, by arguments that the filter looks at: the filter may not answer otherwise.
ALL = (1 << 32) - 1
_INVALID: dict[str, tuple[Any, ...]] = {
    "memfd of all flags": ("memfd_create", path("all"), ALL),
    "huge memfd of an unknown flag": ("memfd_create", path("new"), 0x24),
    "huge memfd, to be run and not": ("memfd_create", path("new"), 0x1C),
    "huge pages of no file": ("mmap", 0, 1 << 21, 3, 0x40002, ALL, 0),
    "huge segment that is not there": ("shmget", 0x7EA5, 1 << 21, 0o4600),
    "clone with a user namespace and the directories": ("clone", 0x10000200),
    "clone a thread in a PID namespace": ("clone", 0x20010000 | 0x900),
    "unshare all": ("unshare", (1 << 64) - 1),
    "unshare a signal": ("unshare", 17),
    "socket of unknown flags": ("socket", 1, 0x101, 0),
    "raw socket of unknown flags": ("socket", 2, 0x103, 0),
    "socket of no type": ("socket", 1, 15, 0),
    "vsock of no type": ("socket", 40, 11, 0),
    "no family": ("socket", 46, 1, 0),
    "inet of type 0": ("socket", 2, 0, 0),
    "inet, reliably delivered": ("socket", 2, 4, 0),
    "inet of no protocol": ("socket", 2, 1, ALL),
    "inet6 of no protocol": ("socket", 10, 3, 1 << 20),
    "inet pair": ("socketpair", 2, 1, 0, ADDRESS),
    "netlink pair": ("socketpair", 16, 2, 0, ADDRESS),
    "pair of unknown flags": ("socketpair", 2, 0x41, 0, ADDRESS),
    "priority of what is none": ("setpriority", 3, 1, 0),
    "I/O priority of what is none": ("ioprio_set", 0, 1, 0),
    "prctl of no option": ("prctl", 0x7FFF, 0, 0, 0, 0),
}
for label, request in _INVALID.items():
    simple(f"invalid: {label}", *request)


HOST_SOCKET = os.environ.get("PROBE_SOCKET", "")  # plus .stream, .seqpacket, .datagram: listening


@probe
def datagram_pair_reaches_a_socket_by_path() -> None:
    """Why a datagram pair is as good as a unix socket."""
    one, _other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.sendto(b"in", HOST_SOCKET + ".datagram")


def connected_pair(kind: socket.SocketKind, name: str) -> None:
    """Every way to make one end of a connected pair go elsewhere; ends in EISCONN."""
    one, other = socket.socketpair(socket.AF_UNIX, kind)
    steps: list[Callable[[], None]] = [lambda: None, other.close, lambda: one.shutdown(2)]
    for step in steps:
        step()
        unspecified = at(struct.pack("=H14x", socket.AF_UNSPEC))
        if _libc.connect(one.fileno(), ctypes.c_void_p(unspecified), 16) == 0:
            raise AssertionError("disconnected")
        try:
            one.sendto(b"in", HOST_SOCKET + name)
        except OSError:
            pass
        try:
            one.connect(HOST_SOCKET + name)
        except OSError as exc:
            if exc.errno != errno.EISCONN:
                raise
        else:
            raise AssertionError("connected elsewhere")
    raise OSError(errno.EISCONN, "as it should")


PROBES["stream pair goes elsewhere"] = lambda: connected_pair(socket.SOCK_STREAM, ".stream")
PROBES["seqpacket pair goes elsewhere"] = lambda: connected_pair(
    socket.SOCK_SEQPACKET, ".seqpacket"
)


def rlimit(limits: int = 1 << 40) -> int:
    return at(struct.pack("=QQ", limits, limits))


simple("tag read", "prlimit64", 0, 15, 0, ADDRESS)
PROBES["tag by setrlimit"] = lambda: call("setrlimit", 15, rlimit())
PROBES["tag by prlimit64"] = lambda: call("prlimit64", 0, 15, rlimit(), 0)
PROBES["tag by prlimit64, dirty"] = lambda: call("prlimit64", 0, DIRTY | 15, rlimit(), 0)
PROBES["tag of oneself by number"] = lambda: call("prlimit64", os.getpid(), 15, rlimit(), 0)
PROBES["another limit"] = lambda: call("prlimit64", 0, 7, at(struct.pack("=QQ", 64, 64)), 0)


def new_listener(flags: int) -> None:
    """A filter that allows everything, with a descriptor that keeps it."""
    program = struct.pack("=H6xQ", 1, ADDRESS + 16) + struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)
    call("seccomp", 1, flags, at(program))


PROBES["filter with a listener"] = lambda: new_listener(8)
PROBES["filter with a listener, dirty"] = lambda: new_listener(DIRTY | 8)
PROBES["filter without a listener"] = lambda: new_listener(0)


@probe
def udp_encapsulation() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.setsockopt(socket.IPPROTO_UDP, 100, 3)  # UDP_ENCAP, L2TP


def buffer(option: int, dirty: int = 0) -> Callable[[], None]:
    """Ask for another size of a socket's buffers; fails with ENOBUFS where that changed nothing."""

    def run() -> None:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as made:
            told = (socket.SO_SNDBUF, socket.SO_RCVBUF)
            before = [made.getsockopt(socket.SOL_SOCKET, name) for name in told]
            size = at(struct.pack("=i", 50_000))
            call("setsockopt", made.fileno(), dirty | 1, dirty | option, size, 4)
            if before == [made.getsockopt(socket.SOL_SOCKET, name) for name in told]:
                raise OSError(errno.ENOBUFS, "pretended")

    return run


PROBES["receive buffer"] = buffer(socket.SO_RCVBUF)
PROBES["receive buffer, dirty"] = buffer(socket.SO_RCVBUF, DIRTY)
PROBES["send buffer"] = buffer(socket.SO_SNDBUF)
PROBES["receive buffer by force"] = buffer(33)
PROBES["send buffer by force"] = buffer(32)


@probe
def tag_with_the_key() -> None:
    high, low = divmod(REQUEST["key"], 1 << 32)
    call("prlimit64", high << 32, low << 32 | 15, rlimit(), 0)


def on_file(action: Callable[[int], object]) -> Callable[[], None]:
    def run() -> None:
        with tempfile.TemporaryFile() as file:
            action(file.fileno())

    return run


PROBES["fchmod 0755"] = on_file(lambda fd: call("fchmod", fd, 0o755))
PROBES["fchmod 4755"] = on_file(lambda fd: call("fchmod", fd, 0o4755))
PROBES["fchmod 2755, dirty"] = on_file(lambda fd: call("fchmod", fd, DIRTY | 0o2755))
PROBES["flock"] = on_file(lambda fd: call("flock", fd, 2))
PROBES["fcntl lock"] = on_file(
    lambda fd: call("fcntl", fd, 6, at(struct.pack("=hhqqi", 1, 0, 0, 0, 0)))
)
PROBES["fcntl lock of an open file"] = on_file(
    lambda fd: call("fcntl", fd, 37, at(struct.pack("=hhqqi", 1, 0, 0, 0, 0)))
)
PROBES["fcntl duplicate"] = on_file(lambda fd: call("fcntl", fd, 0, 0))
PROBES["lease"] = on_file(lambda fd: call("fcntl", fd, 1024, 1))  # F_SETLEASE, F_WRLCK


def in_directory(action: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        with tempfile.TemporaryDirectory() as directory:
            os.chdir(directory)
            open("file", "w").close()
            os.umask(0)
            try:
                action()
            finally:
                os.chdir("/")

    return run


def creating(label: str, name: str, *args: int | str) -> None:
    """A call in a directory of its own; text is a path there."""
    PROBES[label] = in_directory(
        lambda: call(name, *[path(arg) if isinstance(arg, str) else arg for arg in args])
    )


CREATE, TMPFILE = os.O_CREAT | os.O_WRONLY, os.O_TMPFILE | os.O_WRONLY
creating("fchmodat 4755", "fchmodat", AT_FDCWD, "file", 0o4755)
creating("fchmodat2 4755", "fchmodat2", AT_FDCWD, "file", 0o4755, 0)
creating("openat, mode unused", "openat", AT_FDCWD, "file", os.O_RDONLY, 0o4755)
creating("openat new 0644", "openat", AT_FDCWD, "new", CREATE, 0o644)
creating("openat new 4755", "openat", AT_FDCWD, "new", CREATE, 0o4755)
creating("openat unnamed 4755", "openat", AT_FDCWD, ".", TMPFILE, 0o4755)
creating("openat unnamed 0600", "openat", AT_FDCWD, ".", TMPFILE, 0o600)
creating("mkdirat 2755", "mkdirat", AT_FDCWD, "new", 0o2755)
creating("mkdirat 1755", "mkdirat", AT_FDCWD, "new", 0o1755)
creating("mknodat file", "mknodat", AT_FDCWD, "new", 0o644, 0)
creating("mknodat fifo", "mknodat", AT_FDCWD, "new", 0o010644, 0)
creating("mknodat fifo 4755", "mknodat", AT_FDCWD, "new", 0o014755, 0)
creating("invalid: mknodat link", "mknodat", AT_FDCWD, "new", 0o120000, 0)
creating("invalid: mknodat of all types", "mknodat", AT_FDCWD, "new", 0o170000, 0)
creating("invalid: mknodat directory", "mknodat", AT_FDCWD, "new", 0o040000, 0)
creating("mknodat whiteout", "mknodat", AT_FDCWD, "new", 0o020000, 0)
if "open" in NR:
    creating("open new 4755", "open", "new", CREATE, 0o4755)
    creating("creat 4755", "creat", "new", 0o4755)
    creating("chmod 4755", "chmod", "file", 0o4755)
    creating("mkdir 2755", "mkdir", "new", 0o2755)
    creating("mknod 4755", "mknod", "new", 0o104755, 0)


def rename(flags: int) -> None:
    names = at(b"file\0new")
    call("renameat2", AT_FDCWD, names, AT_FDCWD, names + 5, flags)


PROBES["rename"] = in_directory(lambda: rename(1))
PROBES["invalid: rename by all flags"] = in_directory(lambda: rename(ALL))
PROBES["invalid: rename and leave a whiteout in exchange"] = in_directory(lambda: rename(6))
PROBES["rename leaving a whiteout"] = in_directory(lambda: rename(4))


def on_terminal(*args: int) -> Callable[[], None]:
    def run() -> None:
        _leader, follower = os.openpty()
        call("ioctl", follower, *args)

    return run


PROBES["terminal: size"] = on_terminal(0x5413, ADDRESS)
PROBES["terminal: size, dirty"] = on_terminal(DIRTY | 0x5413, ADDRESS)
PROBES["terminal: drain"] = on_terminal(0x5409, 1)
PROBES["terminal: line discipline"] = on_terminal(0x5423, ADDRESS)  # TIOCSETD 0: N_TTY
PROBES["terminal: line discipline, dirty"] = on_terminal(DIRTY | 0x5423, ADDRESS)
PROBES["terminal: exclusive"] = on_terminal(0x540C, 0)


@probe
def read_own_memory_as_another() -> None:
    word = struct.pack("=QQ", ADDRESS + 64, 8)
    call("process_vm_readv", os.getpid(), at(word), 1, ADDRESS, 1, 0)


@probe
def asynchronous_io() -> None:
    call("io_setup", 1, at(bytes(8)))


if os.uname().machine == "x86_64":
    simple("x32", 0x40000000 | 39)

    @probe
    def i386() -> None:
        """getpid through the 32-bit entry of the kernel."""
        code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        code.write(bytes.fromhex("b814000000 cd80 c3"))  # mov eax, 20; int 0x80; ret
        function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
        result = function()
        if result < 0:
            raise OSError(-result, "int 0x80")


REQUEST: dict[str, int] = {}


def outcome(name: str) -> str:
    """What became of one probe, run in a child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            PROBES[name]()
            said = "ok"
        except OSError as exc:
            said = errno.errorcode.get(exc.errno or 0, str(exc.errno))
        except BaseException as exc:  # noqa: BLE001 - the parent prints it
            said = repr(exc)
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    said = os.read(reader, 4096).decode()
    os.close(reader)
    _, status = os.waitpid(child, 0)
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else said


def main() -> None:
    request = json.load(sys.stdin)
    REQUEST["key"] = request["key"]
    if request["filter"]:
        install(bytes.fromhex(request["filter"]))
    json.dump({name: outcome(name) for name in PROBES}, sys.stdout)


if __name__ == "__main__":
    main()
