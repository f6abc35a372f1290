"""Unix sockets in a sandbox that shows directories of the host: the guest's own work, no other is reached."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence import Limits, Mount, Sandbox, SandboxLost
from ringfence.backends.local.host.facts import host as local_host
from ringfence.backends.native import connecting
from ringfence.backends.native.backend import NativeBackend
from ringfence.model.mount import READ_WRITE
from tests.features import require
from tests.native.conftest import MakeSandbox
from tests.native.outside import init_pid


@pytest.fixture(autouse=True)
def _landlock() -> None:
    require("landlock")
    if connecting.why_not():
        pytest.skip(f"needs {connecting.why_not()}")


@pytest.fixture
def host(private_dir: Path) -> Iterator[socket.socket]:
    """A socket of the host's in a directory to mount."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(private_dir / "s"))
        os.chmod(private_dir / "s", 0o777)
        server.listen(4096)
        yield server


def run(sandbox: Sandbox, code: str, *arguments: str, timeout_s: float = 60.0) -> str:
    result = sandbox.exec(["python3", "-c", code, *arguments], timeout_s=timeout_s)
    assert result.ok, result.stderr_text[-2000:]
    return result.stdout_text.strip()


_WORKS = """
import array, asyncio, errno, multiprocessing, os, socket, struct, subprocess, sys, tempfile
for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
    for name in (f"/tmp/{int(kind)}", f"/dev/shm/{int(kind)}", f"/home/sandbox/{int(kind)}", f"\\0{int(kind)}"):
        with socket.socket(socket.AF_UNIX, kind) as server, socket.socket(socket.AF_UNIX, kind) as client:
            server.bind(name)
            server.listen()
            client.connect(name)
            assert client.getpeername() in (name, name.encode()), client.getpeername()
            taken = server.accept()[0]
            assert struct.unpack("3i", taken.getsockopt(1, 17, 12))[1:] == (os.getuid(), os.getgid())
            read, write = os.pipe()
            socket.send_fds(client, [b"fd"], [write])
            os.write(socket.recv_fds(taken, 2, 1)[1][0], b"x")
            assert os.read(read, 1) == b"x"
    a, b = socket.socketpair(socket.AF_UNIX, kind)
    a.send(b"pair")
    assert b.recv(9) == b"pair"
os.chdir("/tmp")
with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
    server.bind("relative")
    server.listen()
    os.symlink("/tmp/relative", "/var/tmp/link")
    client.connect("relative")
    for name in ("/var/tmp/link", "/proc/self/cwd/relative", "/proc/thread-self/root/tmp/relative"):
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(name)
def fails(number, family, address):
    with socket.socket(family) as made:
        assert made.connect_ex(address) == number, (address, made.connect_ex(address))
fails(errno.ENOENT, socket.AF_UNIX, "/tmp/none")
fails(errno.ECONNREFUSED, socket.AF_UNIX, "/tmp/relative")
open("/tmp/file", "w").close()
fails(errno.ECONNREFUSED, socket.AF_UNIX, "/tmp/file")
fails(errno.ECONNREFUSED, socket.AF_UNIX, "\\0nobody")
fails(errno.ECONNREFUSED, socket.AF_INET, ("127.0.0.1", 1))
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for path in ("/dev/null", "/tmp"):
    fd = os.open(path, os.O_RDONLY)
    assert libc.connect(fd, b"\\1\\0/tmp/relative\\0", 16) == -1
    assert ctypes.get_errno() == errno.ENOTSOCK, path
for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
    with socket.create_server((address, 0), family=family) as server:
        socket.create_connection(server.getsockname()[:2]).close()
        with socket.socket(family, socket.SOCK_DGRAM) as udp:
            udp.connect(server.getsockname()[:2])
async def serve():
    async def echo(reader, writer):
        writer.write(await reader.read(4))
        writer.close()
    async with await asyncio.start_unix_server(echo, "/tmp/asyncio"):
        reader, writer = await asyncio.open_unix_connection("/tmp/asyncio")
        writer.write(b"echo")
        assert await reader.read() == b"echo"
        writer.close()
asyncio.run(serve())
with multiprocessing.Manager() as manager:
    shared = manager.dict(a=1)
    assert shared["a"] == 1
assert libc.prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE
with socket.create_server(("127.0.0.1", 0)) as server:
    socket.create_connection(server.getsockname()).close()
for make in (socket.socket, socket.socketpair):
    try: make(socket.AF_UNIX, socket.SOCK_DGRAM)
    except OSError as exc: assert exc.errno == errno.ESOCKTNOSUPPORT
    else: raise AssertionError
print("all")
"""


def test_those_of_its_own_work(
    make: MakeSandbox, host: socket.socket, private_dir: Path, tmp_path: Path
) -> None:
    """Beside a writable, a read-only and a single mounted file, and one that is mounted later."""
    (tmp_path / "later").mkdir()
    sandbox = make(
        mounts=[
            Mount("/work", str(private_dir), READ_WRITE),
            Mount("/data", str(private_dir)),
            Mount("/data.s", str(private_dir / "s")),
        ]
    )
    sandbox.mount(Mount("/tmp/later", str(tmp_path / "later"), READ_WRITE))

    assert "all" == run(sandbox, _WORKS)
    found = {each.name: each for each in sandbox.protections()}["unix_sockets"]
    assert ("enforced", True) == (found.status, "PID 1" in found.why)
    # A socket in a directory of the host is one that the host's programs may take for another.
    bind = "import socket, sys; print(socket.socket(socket.AF_UNIX).bind(sys.argv[1]))"
    for path in ("/work/own", "/tmp/later/own", "/mnt/attached/own"):
        assert not sandbox.exec(["python3", "-c", bind, path]).ok
    assert "None" == run(sandbox, bind, "/tmp/own")


# Prints those of its arguments that it could connect to.
_REACHED = """
import ctypes, os, socket, sys
a, b = socket.socketpair()
os.symlink("/data/s", "/tmp/to-socket")
os.symlink("/data", "/tmp/to-directory")
socket.send_fds(a, [b"x"], [os.open("/data", os.O_PATH), os.open("/data/s", os.O_PATH)])
directory, pinned = socket.recv_fds(b, 1, 2)[1]
os.chdir("/data")
names = ["/data/s", "/data/later", "/data/moved", "s", "../data/./s", "/one", "/tmp/to-socket",
    "/tmp/to-directory/s", f"/proc/self/fd/{directory}/s", f"/proc/self/fd/{pinned}",
    f"/dev/fd/{pinned}", f"/proc/{os.getpid()}/fd/{pinned}", "/proc/self/cwd/s",
    "/proc/self/root/data/s", f"/proc/1/root/data/s", "/proc/thread-self/root/data/s"]
for name in names:
    with socket.socket(socket.AF_UNIX) as made:
        if made.connect_ex(name) == 0: print(name)
for size in (107, 108):  # of a name that fills the address, with a byte to end it and without
    name = b"\\1\\0/data" + b"/" * (size - 6) + b"s"
    with socket.socket(socket.AF_UNIX) as made:
        if ctypes.CDLL(None).connect(made.fileno(), name, size + 2) == 0: print(size)
"""
_PLACES = 18


def test_no_socket_of_the_host_is_reached_by_any_name(
    make: MakeSandbox, with_controls: NativeBackend, host: socket.socket, private_dir: Path
) -> None:
    mounts = [
        Mount("/data", str(private_dir), READ_WRITE),
        Mount("/one", str(private_dir / "s")),
    ]
    sandbox = make(mounts=mounts)
    control = make(mounts=mounts, backend=with_controls, profile="unix-sockets")
    with socket.socket(socket.AF_UNIX) as later, socket.socket(socket.AF_UNIX) as moved:
        later.bind(str(private_dir / "later"))
        moved.bind(str(private_dir.parent / "elsewhere"))
        os.rename(private_dir.parent / "elsewhere", private_dir / "moved")
        for each in (later, moved):
            each.listen(64)
        for name in ("later", "moved"):
            os.chmod(private_dir / name, 0o777)

        assert "" == run(sandbox, _REACHED)
        reached = run(control, _REACHED).splitlines()

    assert _PLACES - 1 <= len(reached), reached  # PID 1's own /proc is nobody's


# Reaches for the host's socket while threads change what is judged; prints how often it came through.
_RACE = """
import ctypes, os, socket, sys, threading, time
libc = ctypes.CDLL(None)
own, host, work = b"/tmp/own", b"/data/s", b"/data/renamed"
server = socket.socket(socket.AF_UNIX)
server.bind(own); server.listen(8); server.setblocking(False)
link = "/tmp/link"
os.symlink(own, link)
what = sys.argv[1]
names = [b"\\1\\0" + name.ljust(20, b"\\0") for name in (own, host)]
by_link = b"\\1\\0" + link.encode().ljust(20, b"\\0")
address = ctypes.create_string_buffer(by_link if what == "link" else names[0], 22)
inet = socket.socket()
target = os.dup(inet.fileno()) if what == "descriptor" else -1
end = time.monotonic() + 1.5
def swap():
    while time.monotonic() < end:
        if what == "address":
            ctypes.memmove(address, names[1], 22); ctypes.memmove(address, names[0], 22)
        elif what == "link":
            for to in (host, own):
                os.symlink(to, "/tmp/new"); os.rename("/tmp/new", link)
        elif what == "rename":
            for one, other in ((host, work), (work, host)):
                os.rename(one, other)
        else:
            with socket.socket(socket.AF_UNIX) as made: os.dup2(made.fileno(), target)
            os.dup2(inet.fileno(), target)
if what == "descriptor": ctypes.memmove(address, names[1], 22)
if what == "rename": ctypes.memmove(address, names[1], 22)
thread = threading.Thread(target=swap)
thread.start()
reached = calls = 0
while time.monotonic() < end:
    made = socket.socket(socket.AF_UNIX)
    calls += 1
    if libc.connect(made.fileno() if target < 0 else target, address, 22) == 0:
        try: server.accept()[0].close()
        except BlockingIOError: reached += 1
    made.close()
thread.join()
print(reached, calls > 20)
"""


@pytest.mark.full
@pytest.mark.parametrize("what", ["address", "descriptor", "link", "rename"])
def test_nor_while_threads_change_what_is_judged(
    make: MakeSandbox,
    with_controls: NativeBackend,
    host: socket.socket,
    private_dir: Path,
    what: str,
) -> None:
    mounts = [Mount("/data", str(private_dir), READ_WRITE)]
    stop = threading.Event()

    def take() -> None:
        host.settimeout(0.2)
        while not stop.is_set():
            try:
                host.accept()[0].close()
            except TimeoutError:
                pass

    taker = threading.Thread(target=take)
    taker.start()
    try:
        assert "0 True" == run(make(mounts=mounts), _RACE, what)
        control = make(mounts=mounts, backend=with_controls, profile="unix-sockets")
        assert "0" != run(control, _RACE, what).split()[0]
    finally:
        stop.set()
        taker.join()


# Datagrams by all four calls, from sockets and pairs; prints the kinds that could be made.
_DATAGRAMS = """
import ctypes, os, socket
for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW, 0x80802):
    for make in (socket.socket, lambda *a: socket.socketpair(*a)[0]):
        try: made = make(socket.AF_UNIX, kind)
        except OSError: continue
        try:
            made.sendto(b"sendto", "/data/d")
            made.sendmsg([b"sendmsg"], [], 0, "/data/d")
        except BlockingIOError: pass  # its queue is full
        print(kind)
for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
    for made in (socket.socket(socket.AF_UNIX, kind), socket.socketpair(socket.AF_UNIX, kind)[0]):
        for send in (lambda: made.sendto(b"x", "/data/d"), lambda: made.sendmsg([b"x"], [], 0, "/data/d")):
            try: send()
            except OSError: pass
name = ctypes.create_string_buffer(b"\\1\\0/data/d\\0")
part = (ctypes.c_uint64 * 2)(ctypes.addressof(name), 1)
head = (ctypes.c_uint64 * 8)(ctypes.addressof(name), 10, ctypes.addressof(part), 1)
for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
    made = socket.socket(socket.AF_UNIX, kind)
    ctypes.CDLL(None).sendmmsg(made.fileno(), head, 1, 0)
"""


def test_no_datagram_goes_to_the_host(
    make: MakeSandbox, with_controls: NativeBackend, private_dir: Path
) -> None:
    mounts = [Mount("/data", str(private_dir), READ_WRITE)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(private_dir / "d"))
        os.chmod(private_dir / "d", 0o777)
        server.setblocking(False)

        assert "" == run(make(mounts=mounts), _DATAGRAMS)
        with pytest.raises(BlockingIOError):
            server.recv(9)

        run(make(mounts=mounts, backend=with_controls, profile="unix-sockets"), _DATAGRAMS)
        assert b"sendto" == server.recv(9)


def test_abstract_names_of_the_host_stay_out_of_reach_in_its_network(
    make: MakeSandbox, with_controls: NativeBackend, private_dir: Path
) -> None:
    """PID 1 connects under the same Landlock rules as the programs."""
    if 6 > local_host().landlock_abi:
        pytest.skip("this machine lacks: landlock 6")
    options = {"mounts": [Mount("/data", str(private_dir))], "network": "unrestricted"}
    connect = (
        "import socket, sys; print(socket.socket(socket.AF_UNIX).connect_ex('\\0' + sys.argv[1]))"
    )
    with socket.socket(socket.AF_UNIX) as server:
        name = f"ringfence-{os.urandom(4).hex()}"
        server.bind("\0" + name)
        server.listen()
        loose = {"backend": with_controls, "profile": "no-landlock"}

        assert "0" != run(make(**options), connect, name)
        # The control has no mounts, for without Landlock there are no Unix sockets beside one.
        with socket.socket(socket.AF_UNIX) as own:
            assert 0 == own.connect_ex("\0" + name)
        assert not make(**options, **loose).exec(["python3", "-c", connect, name]).ok


# A thousand callers wait for a listener that takes nobody; one has a timeout, one is interrupted.
_CROWD = """
import os, signal, socket, struct, sys, time
server = socket.socket(socket.AF_UNIX)
server.bind("/tmp/full"); server.listen(0)
held = []
while True:
    made = socket.socket(socket.AF_UNIX); made.setblocking(False)
    try: made.connect("/tmp/full")
    except BlockingIOError: break
    held.append(made)
timed = socket.socket(socket.AF_UNIX)
timed.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("=qq", 0, 100_000))
try: timed.connect("/tmp/full")
except BlockingIOError: print("timed")
def alarm(*_): raise InterruptedError
signal.signal(signal.SIGALRM, alarm)
signal.setitimer(signal.ITIMER_REAL, 0.1)
try: socket.socket(socket.AF_UNIX).connect("/tmp/full")
except InterruptedError: print("interrupted")
count = int(sys.argv[1])
read, write = os.pipe()
for _ in range(count):
    if os.fork() == 0:
        os.write(write, b"x")
        made = socket.socket(socket.AF_UNIX); made.connect("/tmp/full")
        os._exit(0)
for _ in range(count): os.read(read, 1)
print("full", flush=True)
sys.stdin.read(1)
while count:
    server.accept()[0].close()
    while count and os.waitpid(-1, os.WNOHANG)[0]: count -= 1
print("let in")
"""


@pytest.mark.full
def test_a_thousand_that_wait_are_in_nobodys_way(make: MakeSandbox, private_dir: Path) -> None:
    mounts = [Mount("/data", str(private_dir))]
    sandbox = make(mounts=mounts, limits=Limits(pids=1200), allow_degraded=["*"])
    crowd = sandbox.start(["python3", "-c", _CROWD, "1000"], stream_stdin=True, timeout_s=200)
    try:
        lines = iter(crowd.stdout)
        seen = b""
        while b"full" not in seen:
            seen += next(lines)
        assert [b"timed", b"interrupted", b"full"] == seen.split(b"\n")[:3]
        assert "still" == sandbox.shell("echo still", timeout_s=60).stdout_text.strip()
    finally:
        crowd.kill()
    assert "after" == sandbox.shell("echo after").stdout_text.strip()


# Connects, when told to, to a socket of its own and to the host's; prints how that went.
_ASKS = """
import socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind("/tmp/own"); server.listen(9)
print("ready", flush=True)
while sys.stdin.readline():
    print("asking", flush=True)
    made = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    print(*(each.connect_ex(name) for each, name in zip(made, ("/tmp/own", "/data/s"))), flush=True)
"""


def test_a_stopped_pid_1_lets_callers_wait_and_a_killed_one_ends_them(
    make: MakeSandbox, host: socket.socket, private_dir: Path
) -> None:
    sandbox = make(mounts=[Mount("/data", str(private_dir), READ_WRITE)])
    host.setblocking(False)
    pidfd = os.pidfd_open(init_pid(sandbox))
    try:
        process = sandbox.start(["python3", "-c", _ASKS], stream_stdin=True, timeout_s=120)
        assert process.stdin is not None
        output = iter(process.stdout)
        seen = b""

        def see(text: bytes) -> None:
            nonlocal seen
            while text not in seen:
                seen += next(output)
            seen = b""

        assert process.stdin is not None
        see(b"ready\n")
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        process.stdin.write(b"\n")
        see(b"asking\n")
        signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        see(f"0 {errno.EACCES}\n".encode())

        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        process.stdin.write(b"\n")
        see(b"asking\n")
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        with pytest.raises(SandboxLost):
            process.wait(60)
        with pytest.raises(BlockingIOError):
            host.accept()
    finally:
        os.close(pidfd)


# Sixteen threads connect to its own socket and to the host's, for ever; prints how often.
_ALWAYS = """
import socket, threading, time
server = socket.socket(socket.AF_UNIX); server.bind("/tmp/own"); server.listen(512)
threading.Thread(target=lambda: [server.accept()[0].close() for _ in iter(int, 1)], daemon=True).start()
count = 0
def ask(name):
    global count
    while True:
        with socket.socket(socket.AF_UNIX) as made: made.connect_ex(name)
        count += 1
names = ("/tmp/own", "/data/s", "/proc/self/root/data/s", "/data/../data/s")
for name in names * 4: threading.Thread(target=ask, args=(name,), daemon=True).start()
while count < 500: time.sleep(0.01)
print("many", flush=True)
time.sleep(100)
"""


@pytest.mark.full
@pytest.mark.parametrize("how", ["killed", "stopped and killed", "stopped and terminated"])
def test_pid_1_goes_away_in_the_middle_of_connects(
    make: MakeSandbox, host: socket.socket, private_dir: Path, how: str
) -> None:
    sandbox = make(mounts=[Mount("/data", str(private_dir), READ_WRITE)])
    host.setblocking(False)
    process = sandbox.start(["python3", "-c", _ALWAYS], timeout_s=120)
    assert b"many\n" == next(iter(process.stdout))
    pidfd = os.pidfd_open(init_pid(sandbox))
    try:
        if how.startswith("stopped"):
            signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        if how.endswith("killed"):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            with pytest.raises(SandboxLost):
                process.wait(60)
        else:
            sandbox.terminate()
        with pytest.raises(BlockingIOError):
            host.accept()
    finally:
        os.close(pidfd)
