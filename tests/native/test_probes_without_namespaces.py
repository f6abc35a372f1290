"""Attempts to reach the host from a sandbox without namespaces, each with the host as its control.

They are written apart from `ringfence doctor --attack`. Each runs in a process of its own, and succeeds where
it has the effect that it names.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ringfence import Mount, Sandbox
from ringfence.policy.seccomp import MACHINES
from tests.features import require
from tests.strangers import let_others_in

PYTHON = "/usr/bin/python3"
LEAST_ROOT, LEAST_USER = 75, 55

ATTEMPTS = r"""
import ctypes, fcntl, json, os, resource, signal, socket, stat, struct, sys
given = json.load(sys.stdin)
D, PID, PORT, SHOWN, NAME, NUMBERS = (given[k] for k in ("dir", "pid", "port", "shown", "name", "numbers"))
FILE, SOCKET = D + "/file", D + "/stream"
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
CWD = -100
def call(name, *args):
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    result = libc.syscall(ctypes.c_long(NUMBERS[name]), *words)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result
URG = int(signal.SIGURG)
def packed(form, *words, size):
    return ctypes.create_string_buffer(struct.pack(form, *words), size)
def own(name="own"):
    open(name, "w").close()
    return name
def opened(path, flags, mode=0o644):
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, mode)
def write(path, flags=os.O_WRONLY):
    os.write(opened(path, flags), b"x")
def reopened(flags):
    return opened("/proc/self/fd/%d" % os.open(FILE, os.O_PATH), flags)
def in_directory():
    os.fchdir(os.open(D, os.O_PATH)); opened("file", os.O_RDONLY)
def unnamed_out():
    fd = os.open(".", os.O_TMPFILE | os.O_RDWR)
    os.link("/proc/self/fd/%d" % fd, D + "/unnamed", follow_symlinks=True)
def talk(kind, address, family=socket.AF_UNIX):
    sock = socket.socket(family, kind); sock.settimeout(5); sock.connect(address)
    return sock
def bind(address):
    socket.socket(socket.AF_UNIX).bind(address)
def made(*kind):
    socket.socket(*kind)
def iovec():
    buffer = ctypes.create_string_buffer(8)
    own_side = ctypes.create_string_buffer(struct.pack("QQ", ctypes.addressof(buffer), 8), 16)
    far = ctypes.create_string_buffer(struct.pack("QQ", given["address"], 8), 16)
    return own_side, far
def getfd():
    call("pidfd_getfd", os.pidfd_open(PID), 0, 0)
def attach():
    call("ptrace", 16, PID, 0, 0); os.waitpid(PID, 0); call("ptrace", 17, PID, 0, 0)
def segment():
    if libc.shmget(given["key"], 0, 0) < 0: raise OSError(ctypes.get_errno(), "shmget")
def handle():
    buffer = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128), 136)
    call("name_to_handle_at", CWD, FILE.encode(), buffer, ctypes.create_string_buffer(8), 0)
def exchange():
    call("renameat2", CWD, own().encode(), CWD, (D + "/doomed").encode(), 2)
def open_how():
    how = ctypes.create_string_buffer(struct.pack("QQQ", os.O_RDONLY, 0, 0), 24)
    call("openat2", CWD, FILE.encode(), how, 24)
def watch():
    if libc.inotify_add_watch(libc.inotify_init(), D.encode(), 2) < 0: raise OSError(ctypes.get_errno(), "")
def execs_memory():
    fd = os.memfd_create("m"); os.write(fd, open("/bin/cat", "rb").read())
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open("/dev/null", os.O_WRONLY), 2); os.dup2(2, 1)
        os.execve(fd, ["cat", FILE], {})
    if os.waitpid(pid, 0)[1]: raise OSError(1, "it could not read")
def link_followed():
    os.symlink(D, "way"); opened("way/file", os.O_RDONLY)
def dup_sent():
    sock = talk(socket.SOCK_STREAM, SOCKET); socket.send_fds(sock, [b"x"], [0])
def priority(which):
    if which == "nice": os.setpriority(os.PRIO_PROCESS, PID, 1)
    elif which == "io": call("ioprio_set", 1, PID, (2 << 13) | 4)
    else: os.sched_setaffinity(PID, os.sched_getaffinity(0))
A = {
 "rename out": lambda: os.rename(own(), D + "/out"),
 "rename in": lambda: os.rename(D + "/moved", "in"),
 "rename there": lambda: os.rename(D + "/doomed", D + "/renamed"),
 "exchange": exchange,
 "link out": lambda: os.link(own(), D + "/linked"),
 "link in": lambda: os.link(FILE, "hard"),
 "symlink there": lambda: os.symlink("x", D + "/symlink"),
 "unnamed file there": lambda: os.open(D, os.O_TMPFILE | os.O_RDWR),
 "unnamed file linked out": unnamed_out,
 "create": lambda: opened(D + "/created", os.O_CREAT | os.O_WRONLY),
 "read": lambda: opened(FILE, os.O_RDONLY),
 "write": lambda: write(FILE),
 "append": lambda: write(FILE, os.O_WRONLY | os.O_APPEND),
 "reopen to read": lambda: reopened(os.O_RDONLY),
 "reopen to write": lambda: reopened(os.O_WRONLY),
 "through a directory descriptor": in_directory,
 "through a link": link_followed,
 "openat2": open_how,
 "through the root of a process": lambda: opened("/proc/%d/root%s" % (PID, FILE), os.O_RDONLY),
 "through the directory of a process": lambda: os.listdir("/proc/%d/cwd" % PID),
 "list": lambda: os.listdir(D),
 "truncate": lambda: os.truncate(FILE, 1),
 "chmod": lambda: os.chmod(FILE, 0o600),
 "chmod a directory": lambda: os.chmod(D, 0o700),
 "chown": lambda: os.chown(FILE, os.getuid(), os.getgid()),
 "utime": lambda: os.utime(FILE, (1, 1)),
 "set an attribute": lambda: os.setxattr(FILE, "user.own", b"x"),
 "read an attribute": lambda: os.getxattr(FILE, "user.theirs"),
 "list attributes": lambda: os.listxattr(FILE),
 "remove an attribute": lambda: os.removexattr(FILE, "user.gone"),
 "fifo there": lambda: os.mkfifo(D + "/fifo"),
 "device inside": lambda: os.mknod("null", stat.S_IFCHR | 0o600, os.makedev(1, 3)),
 "make a directory": lambda: os.mkdir(D + "/made"),
 "remove a directory": lambda: os.rmdir(D + "/empty"),
 "remove": lambda: os.unlink(D + "/removed"),
 "bind there": lambda: bind(D + "/bound"),
 "connect to a path": lambda: talk(socket.SOCK_STREAM, SOCKET),
 "connect to a datagram path": lambda: talk(socket.SOCK_DGRAM, D + "/datagram"),
 "pass a descriptor": dup_sent,
 "abstract connect": lambda: talk(socket.SOCK_STREAM, "\0" + NAME),
 "abstract bind": lambda: bind("\0" + NAME + "-own"),
 "tcp": lambda: talk(socket.SOCK_STREAM, ("127.0.0.1", PORT), socket.AF_INET),
 "tcp on IPv6": lambda: talk(socket.SOCK_STREAM, ("::ffff:127.0.0.1", PORT), socket.AF_INET6),
 "udp": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", PORT)),
 "netlink": lambda: made(socket.AF_NETLINK, socket.SOCK_RAW, 0),
 "packet": lambda: made(socket.AF_PACKET, socket.SOCK_RAW, 0),
 "raw": lambda: made(socket.AF_INET, socket.SOCK_RAW, 1),
 "vsock": lambda: made(socket.AF_VSOCK, socket.SOCK_STREAM, 0),
 "alg": lambda: made(38, socket.SOCK_SEQPACKET, 0),
 "io_uring": lambda: call("io_uring_setup", 1, ctypes.create_string_buffer(120)),
 "bpf": lambda: call("bpf", 0, ctypes.create_string_buffer(struct.pack("IIII", 2, 4, 4, 1), 72), 72),
 "perf": lambda: call("perf_event_open", packed("II", 1, 112, size=112), 0, -1, -1, 0),
 "userfaultfd": lambda: call("userfaultfd", 1),
 "add a key": lambda: call("add_key", b"user", b"ringfence-probe", b"x", 1, -2),
 "ptrace": attach,
 "read memory": lambda: call("process_vm_readv", PID, *[x for b in iovec() for x in (b, 1)], 0),
 "open memory": lambda: opened("/proc/%d/mem" % PID, os.O_RDWR),
 "environment": lambda: opened("/proc/%d/environ" % PID, os.O_RDONLY) and open("/proc/%d/environ" % PID).read(),
 "descriptors": lambda: os.listdir("/proc/%d/fd" % PID),
 "maps": lambda: open("/proc/%d/maps" % PID).read(),
 "pidfd": lambda: os.pidfd_open(PID),
 "take a descriptor": getfd,
 "kill": lambda: os.kill(PID, 0),
 "kill the group": lambda: os.killpg(PID, signal.SIGURG),
 "tgkill": lambda: call("tgkill", PID, PID, signal.SIGURG),
 "sigqueue": lambda: call("rt_sigqueueinfo", PID, URG, packed("iii", URG, 0, -1, size=128)),
 "priority": lambda: priority("nice"),
 "io priority": lambda: priority("io"),
 "affinity": lambda: priority("cpu"),
 "limits": lambda: resource.prlimit(PID, resource.RLIMIT_NOFILE),
 "own a signal": lambda: fcntl.fcntl(socket.socketpair()[0], 8, PID),
 "own a signal, by ioctl": lambda: fcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack("i", PID)),
 "own a signal, by kind": lambda: fcntl.fcntl(socket.socketpair()[0], 15, struct.pack("ii", 1, PID)),
 "kcmp": lambda: call("kcmp", os.getpid(), PID, 0, 0, 0),
 "shared memory": segment,
 "message queue": lambda: call("mq_open", NAME.encode(), os.O_RDONLY, 0, 0),
 "shm file": lambda: opened("/dev/shm/" + NAME, os.O_RDONLY | os.O_NOFOLLOW),
 "inotify": watch,
 "lease": lambda: fcntl.fcntl(os.open(SHOWN, os.O_RDONLY), 1024, fcntl.F_RDLCK),
 "write a shown file": lambda: write(SHOWN),
 "truncate a shown file": lambda: os.truncate(SHOWN, 1),
 "chmod a shown file": lambda: os.chmod(SHOWN, 0o600),
 "handle": handle,
 "user namespace": lambda: call("unshare", 0x10000000),
 "mount namespace": lambda: call("unshare", 0x00020000),
 "chroot": lambda: os.chroot("/usr"),
 "kernel log": lambda: opened("/dev/kmsg", os.O_WRONLY),
 "memory device": lambda: opened("/dev/mem", os.O_RDONLY),
 "pseudo terminals": lambda: opened("/dev/ptmx", os.O_RDWR),
 "sysctl": lambda: opened("/proc/sys/kernel/core_pattern", os.O_WRONLY),
 "own adjustment": lambda: write("/proc/self/oom_score_adj"),
 "shadow": lambda: opened("/etc/shadow", os.O_RDONLY),
 "run a memory file that reads": execs_memory,
 "become another user": lambda: os.setresuid(1, 1, 1),
 "host name": lambda: socket.sethostname(socket.gethostname()),
}
found = {}
for name, attempt in A.items():
    pid = os.fork()
    if pid == 0:
        code = 1
        try: attempt(); code = 0
        except OSError: pass
        finally: os._exit(code)
    found[name] = os.waitpid(pid, 0)[1] == 0
print(json.dumps(found))
"""


@contextmanager
def planted(place: Path) -> Iterator[dict[str, Any]]:
    """What the attempts are about, as their input."""
    place.mkdir()
    shown = place.parent / f"{place.name}-shown"
    for name in ("file", "doomed", "moved", "removed"):
        (place / name).write_text("canary of the host")
        (place / name).chmod(0o666)
    shown.write_text("shown")
    shown.chmod(0o666)
    (place / "empty").mkdir()
    for attribute in ("user.theirs", "user.gone"):
        os.setxattr(place / "file", attribute, b"x")
    place.chmod(0o777)
    name = f"ringfence-probes-{os.getpid()}-{place.name}"
    with ExitStack() as stack:
        for kind, address in (
            (socket.SOCK_STREAM, str(place / "stream")),
            (socket.SOCK_DGRAM, str(place / "datagram")),
            (socket.SOCK_STREAM, f"\0{name}"),
        ):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            sock.bind(address)
            if kind == socket.SOCK_STREAM:
                sock.listen()
            if address[0] == "/":
                os.chmod(address, 0o777)
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        victim = subprocess.Popen(["sleep", "600"], start_new_session=True, cwd=place)
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        shm = Path("/dev/shm") / name
        shm.write_text("x")
        stack.callback(shm.unlink)
        maps = Path(f"/proc/{victim.pid}/maps")
        yield {
            "dir": str(place),
            "pid": victim.pid,
            "port": server.getsockname()[1],
            "shown": str(shown),
            "name": name,
            "key": 0,
            "address": int(maps.read_text().split("-")[0], 16),
            "numbers": dict(MACHINES[os.uname().machine].numbers),
        }


def state(place: Path) -> list[tuple[object, ...]]:
    found = [place, *sorted(place.rglob("*")), place.parent / f"{place.name}-shown"]
    stats = ((path, path.lstat()) for path in found)
    return [(str(p), s.st_mode, s.st_size, s.st_mtime_ns, s.st_uid, s.st_nlink) for p, s in stats]


def test_nothing_of_the_host_is_reached(tmp_path: Path) -> None:
    require("landlock")
    let_others_in(tmp_path)
    with planted(tmp_path / "control") as given:
        control = subprocess.run(
            [PYTHON, "-c", ATTEMPTS],
            input=json.dumps(given),
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
            start_new_session=True,
        )
    with planted(tmp_path / "host") as given:
        before = state(tmp_path / "host")
        shown = Mount(given["shown"], given["shown"])
        with Sandbox.create(backend="landlock", mounts=[shown]) as sandbox:
            ran = sandbox.exec([PYTHON, "-c", ATTEMPTS], stdin=json.dumps(given), timeout_s=100)
        after = state(tmp_path / "host")
    works = json.loads(control.stdout)
    reached = [name for name, worked in json.loads(ran.text).items() if worked]

    # The numbers of open descriptors of a process of the same user, and nothing that is behind them.
    assert {*reached} <= ({"descriptors"} if os.geteuid() else set())
    assert before == after
    assert sum(works.values()) >= (LEAST_ROOT if 0 == os.geteuid() else LEAST_USER), works
